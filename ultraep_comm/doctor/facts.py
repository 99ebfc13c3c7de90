"""The facts of this machine and its software, area by area."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import ultraep_comm
from ultraep_comm.doctor.probes import ask

# Python packages that the library uses; the extras cuda12 and cuda13 bring all but the first two.
PACKAGES = ("torch", "numpy", "cuda-core", "cuda-bindings", "pyelftools")
NVSHMEM_PACKAGES = ("nvshmem4py-cu12", "nvshmem4py-cu13")
VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
    "NVSHMEM_SYMMETRIC_SIZE",
    "ULTRAEP_CUBINS",
)
_PCI, _NVIDIA, _DISPLAY = Path("/sys/bus/pci/devices"), "0x10de", "0x03"
Kind = TypeVar("Kind")


@dataclass(frozen=True, kw_only=True)
class System:
    """What is known without asking the driver.

    Attributes:
        version: of ultraep_comm.
        python: version.
        platform: kernel and architecture.
        pci_gpus: NVIDIA GPUs on the PCI bus, with or without a driver.
        packages: installed versions.
        variables: environment variables that are set.
    """

    version: str
    python: str
    platform: str
    pci_gpus: int
    packages: dict[str, str]
    variables: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Device:
    """A GPU that CUDA sees, None where the driver does not tell.

    Attributes:
        name: of the product.
        pci: address on the PCI bus.
        capability: compute capability, (major, minor).
        memory_bytes: of the device.
        num_sms: multiprocessors.
        compute_mode: 0: default, 2: prohibited, 3: one process only.
        cooperative: 1: it takes cooperative launches.
        fabric: 1: other machines of an NVLink rack can map its memory.
        mps: 1: contexts on it are shared through MPS.
    """

    name: str
    pci: str
    capability: tuple[int, int]
    memory_bytes: int
    num_sms: int | None = None
    compute_mode: int | None = None
    cooperative: int | None = None
    fabric: int | None = None
    mps: int | None = None


@dataclass(frozen=True, kw_only=True)
class Driver:
    """libcuda. Like every area, it has an ``error`` if the probe raised, hung or died.

    Attributes:
        missing: why there is no libcuda.
        cuda: the newest CUDA that it runs, (major, minor).
        status: name of the error with which it refuses to start.
        devices: in CUDA's order.
        reaches: ``[i][j]``: device i can load and store in the memory of device j.
    """

    missing: str = ""
    cuda: tuple[int, int] | None = None
    status: str = ""
    devices: tuple[Device, ...] = ()
    reaches: tuple[tuple[bool, ...], ...] = ()
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Links:
    """What NVML knows of a GPU.

    Attributes:
        pci: address on the PCI bus.
        mig: whether it is divided; None: it cannot be.
        links: for each NVLink, whether it is active.
        link_mbps: MB/s of an active link and direction; 0: unknown.
        fabric: how far it is registered with the fabric of an NVLink rack; empty: it has none.
        nvlink_to: PCI addresses of the GPUs that it reaches by NVLink.
    """

    pci: str
    mig: bool | None = None
    links: tuple[bool, ...] = ()
    link_mbps: int = 0
    fabric: str = ""
    nvlink_to: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Nvml:
    """NVML: the driver's version, why it does not answer, and links by GPU."""

    version: str = ""
    status: str = ""
    devices: tuple[Links, ...] = ()
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Way:
    """An engine over a fabric, and why this process cannot use it; empty: it can."""

    engine: str
    fabric: str
    missing: str


@dataclass(frozen=True, kw_only=True)
class Torch:
    """torch, and what a group with ``engine="auto"`` could take here, the preferred first.

    Attributes:
        version: empty: it is not installed.
        cuda: the CUDA that it was built with; None: without.
        folder: where it is.
        ways: of :func:`ultraep_comm.engines.cuda.make.find_ways`.
    """

    version: str = ""
    cuda: str | None = None
    folder: str = ""
    ways: tuple[Way, ...] = ()
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Nvshmem:
    """NVSHMEM's host library: (major, minor, patch), and its file."""

    version: tuple[int, int, int] | None = None
    path: str = ""
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Cubin:
    """A file of device kernels.

    Attributes:
        name: of the file.
        cuda: version that it was built with.
        nvshmem: version that it was built with.
        error: why it cannot be used here.
        nvshmem_error: why it cannot be used with the NVSHMEM here.
    """

    name: str
    cuda: tuple[int, int] | None = None
    nvshmem: tuple[int, int] | None = None
    error: str = ""
    nvshmem_error: str = ""


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """The cubins, and the compute capabilities of devices here that have none."""

    folder: str = ""
    cubins: tuple[Cubin, ...] = ()
    missing: tuple[tuple[int, int], ...] = ()
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Heap:
    """NVSHMEM's symmetric heap: whether allocating worked; None: not tried."""

    allocates: bool | None = None
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
    for name in (*PACKAGES, *NVSHMEM_PACKAGES):
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
        variables={name: os.environ[name] for name in VARIABLES if name in os.environ},
    )


def _is_gpu(device: Path) -> bool:
    try:
        vendor, kind = ((device / name).read_text() for name in ("vendor", "class"))
    except OSError:
        return False
    return vendor.startswith(_NVIDIA) and kind.startswith(_DISPLAY)
