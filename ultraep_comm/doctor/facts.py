"""The facts of this machine and its software, area by area."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import ultraep_comm
from ultraep_comm import env
from ultraep_comm.doctor.probes import ask
from ultraep_comm.driver import Links

CUDA_PACKAGES = ("cuda-bindings",)  # of the extras cuda12 and cuda13
NVSHMEM_PACKAGES = ("nvshmem4py-cu12", "nvshmem4py-cu13")  # alternatives
BINDINGS_NEED = "cuda-core"  # a dependency of nvshmem4py alone
_PCI, _NVIDIA, _DISPLAY = Path("/sys/bus/pci/devices"), "0x10de", "0x03"
Kind = TypeVar("Kind")


@dataclass(frozen=True, kw_only=True)
class System:
    """What is known without asking the driver."""

    version: str  # of ultraep_comm
    python: str
    platform: str
    pci_gpus: int  # NVIDIA GPUs on the PCI bus, with or without a driver
    packages: dict[str, str]  # installed versions
    variables: dict[str, str]  # environment variables that change what a GPU offers


@dataclass(frozen=True, kw_only=True)
class Device:
    """A GPU that CUDA sees; None where the driver does not report a value."""

    name: str
    pci: str  # address
    capability: tuple[int, int]
    memory_bytes: int
    num_sms: int | None = None
    compute_mode: int | None = None  # 0: default, 2: prohibited, 3: one process only
    cooperative: int | None = None  # 1: it supports cooperative launches
    mps: int | None = None  # 1: MPS shares its contexts


@dataclass(frozen=True, kw_only=True)
class Driver:
    """libcuda. Like other areas it has an ``error`` if its probe raised, hung or died."""

    missing: str = ""  # why there is no libcuda
    cuda: tuple[int, int] | None = None  # the newest version that it supports
    status: str = ""  # the error that cuInit returned
    devices: tuple[Device, ...] = ()
    reaches: tuple[tuple[bool, ...], ...] = ()  # [i][j]: i loads and stores in the memory of j
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Nvml:
    """NVML: all GPUs of the machine."""

    version: str = ""  # of the driver
    status: str = ""  # why it does not answer
    devices: tuple[Links, ...] = ()
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Way:
    """An engine over a fabric."""

    engine: str
    fabric: str
    missing: str  # why this process cannot use it; empty: it can


@dataclass(frozen=True, kw_only=True)
class Torch:
    """torch, and what ``probe_backends`` of `engines.cuda.make` finds for "auto"."""

    version: str = ""  # empty: it is not installed
    cuda: str | None = None  # that it was built with
    folder: str = ""
    ways: tuple[Way, ...] = ()  # in order of preference
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Nvshmem:
    """NVSHMEM's host library."""

    version: tuple[int, int, int] | None = None
    path: str = ""
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Cubin:
    """A file of device kernels."""

    name: str
    cuda: tuple[int, int] | None = None  # that it was built with
    nvshmem: tuple[int, int] | None = None  # likewise
    error: str = ""  # why it cannot be used here
    nvshmem_error: str = ""  # why not with the NVSHMEM here


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """The cubins."""

    folder: str = ""
    cubins: tuple[Cubin, ...] = ()
    missing: tuple[tuple[int, int], ...] = ()  # compute capabilities here without one
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Heap:
    """NVSHMEM's symmetric heap."""

    allocates: bool | None = None  # None: not tried
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """All areas."""

    system: System
    driver: Driver
    nvml: Nvml
    torch: Torch
    nvshmem: Nvshmem
    kernels: Kernels
    heap: Heap

    @property
    def taken(self) -> Way | None:
        """What ``auto`` takes if every rank is like this process; None: nothing can be used."""
        return next((way for way in self.torch.ways if not way.missing), None)

    @property
    def nvshmem_bindings(self) -> str:
        """The package with NVSHMEM's Python bindings; empty: there is none."""
        return next((name for name in NVSHMEM_PACKAGES if name in self.system.packages), "")

    def links(self, device: Device) -> Links:
        """Return what NVML knows of a device."""
        return next((x for x in self.nvml.devices if x.pci == device.pci), Links(pci=device.pci))


def collect(limit: float) -> Facts:
    """Find the facts. A probe has ``limit`` seconds."""
    system = _read_system()
    first = ask({"driver": {}, "nvml": {}, "torch": {}, "nvshmem": {}}, limit)
    driver = _make(Driver, first["driver"], devices=Device)
    torch = _make(Torch, first["torch"], ways=Way)
    nvshmem = _make(Nvshmem, first["nvshmem"])
    bindings = system.packages.get("cuda-bindings")
    second: dict[str, dict[str, Any]] = {
        "kernels": {
            "capabilities": sorted({device.capability for device in driver.devices}),
            "cuda_major": int(bindings.split(".")[0]) if bindings else None,
            "nvshmem": nvshmem.version,
        }
    }
    if any(way.fabric == "nvshmem" and not way.missing for way in torch.ways):
        second["heap"] = {}
    found = ask(second, limit)
    return Facts(
        system=system,
        driver=driver,
        nvml=_make(Nvml, first["nvml"], devices=Links),
        torch=torch,
        nvshmem=nvshmem,
        kernels=_make(Kernels, found["kernels"], cubins=Cubin),
        heap=_make(Heap, found.get("heap", {})),
    )


def _make(kind: type[Kind], fields: dict[str, Any], **items: type[Any]) -> Kind:
    """Make an area of the fields found; ``items``: what those fields are lists of."""
    tuples = {name: _frozen(value) for name, value in fields.items() if name not in items}
    lists = {name: fields.get(name, ()) for name in items}
    made = {name: tuple(_make(items[name], x) for x in found) for name, found in lists.items()}
    return kind(**tuples, **made)


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _read_system() -> System:
    packages = {}
    for name in ("torch", "numpy", *CUDA_PACKAGES, *NVSHMEM_PACKAGES, BINDINGS_NEED):
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return System(
        version=ultraep_comm.__version__,
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.release()} {platform.machine()}",
        pci_gpus=sum(map(_is_gpu, _PCI.glob("*"))),
        packages=packages,
        variables=env.of_the_driver(),
    )


def _is_gpu(device: Path) -> bool:
    try:
        vendor, kind = ((device / name).read_text() for name in ("vendor", "class"))
    except OSError:
        return False
    return vendor.startswith(_NVIDIA) and kind.startswith(_DISPLAY)
