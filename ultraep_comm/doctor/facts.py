"""The facts of this machine and its software, area by area."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ultraep_comm
from ultraep_comm import env
from ultraep_comm.doctor.probes import ask
from ultraep_comm.driver import Links

CUDA_PACKAGES = ("cuda-bindings",)  # of the extras cuda12 and cuda13
NVSHMEM_PACKAGES = ("nvshmem4py-cu12", "nvshmem4py-cu13")  # alternatives
BINDINGS_NEED = "cuda-core"  # a dependency of nvshmem4py alone
_PCI, _NVIDIA, _DISPLAY = Path("/sys/bus/pci/devices"), "0x10de", "0x03"


# Each area's fields, and what they are until its probe has found them. Each also has an
# ``error``: how its probe failed.
AREAS: dict[str, dict[str, Any]] = {
    "driver": {  # libcuda
        "missing": "",  # why there is no libcuda
        "cuda": None,  # (major, minor): the newest version that it supports
        "status": "",  # the error that cuInit returned
        "devices": (),  # of `Device`
        "reaches": (),  # bool [i][j]: i loads and stores in the memory of j
    },
    "nvml": {  # all GPUs of the machine
        "version": "",  # of the driver
        "status": "",  # why it does not answer
        "devices": (),  # of `Links`
    },
    "torch": {  # and what ``probe_backends`` of `engines.cuda.make` finds for "auto"
        "version": "",  # empty: it is not installed
        "cuda": None,  # that it was built with
        "folder": "",
        "candidates": (),  # of `Candidate`, in order of preference
    },
    "nvshmem": {"version": None, "path": ""},  # the host library: (major, minor, patch)
    "kernels": {
        "folder": "",
        "cubins": (),  # of `Cubin`
        "missing": (),  # (major, minor): compute capabilities here without one
    },
    "heap": {"allocates": None},  # NVSHMEM's symmetric heap; None: not tried
}


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
class Candidate:
    """An engine over a fabric."""

    engine: str
    fabric: str
    missing: str  # why this process cannot use it; empty: it can


@dataclass(frozen=True, kw_only=True)
class Cubin:
    """A file of device kernels."""

    name: str
    cuda: tuple[int, int] | None = None  # that it was built with
    nvshmem: tuple[int, int] | None = None  # likewise
    error: str = ""  # why it cannot be used here
    nvshmem_error: str = ""  # why not with the NVSHMEM here


_ITEMS: dict[tuple[str, str], type[Any]] = {
    ("driver", "devices"): Device,
    ("nvml", "devices"): Links,
    ("torch", "candidates"): Candidate,
    ("kernels", "cubins"): Cubin,
}


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The areas, with the fields of `AREAS`.

    ``system`` is what is known without a probe: the ``version`` of ultraep_comm, ``python``,
    ``platform``, ``pci_gpus`` (NVIDIA GPUs on the PCI bus, with or without a driver), ``packages``
    (installed versions), and ``variables`` of the environment that change what a GPU offers.
    """

    system: SimpleNamespace
    driver: SimpleNamespace
    nvml: SimpleNamespace
    torch: SimpleNamespace
    nvshmem: SimpleNamespace
    kernels: SimpleNamespace
    heap: SimpleNamespace

    @property
    def taken(self) -> Candidate | None:
        """What ``auto`` takes if every rank is like this process; None: nothing can be used."""
        candidates: tuple[Candidate, ...] = self.torch.candidates
        return next((found for found in candidates if not found.missing), None)

    @property
    def nvshmem_bindings(self) -> str:
        """The package with NVSHMEM's Python bindings; empty: there is none."""
        return next((name for name in NVSHMEM_PACKAGES if name in self.system.packages), "")

    def links(self, device: Device) -> Links:
        """Return what NVML knows of a device."""
        known: tuple[Links, ...] = self.nvml.devices
        return next((found for found in known if found.pci == device.pci), Links(pci=device.pci))


def collect(limit: float) -> Facts:
    """Find the facts. A probe has ``limit`` seconds."""
    system = _read_system()
    found = ask({"driver": {}, "nvml": {}, "torch": {}, "nvshmem": {}}, limit)
    areas = {name: make_area(name, fields) for name, fields in found.items()}
    bindings = system.packages.get("cuda-bindings")
    second: dict[str, dict[str, Any]] = {
        "kernels": {
            "capabilities": sorted({device.capability for device in areas["driver"].devices}),
            "cuda_major": int(bindings.split(".")[0]) if bindings else None,
            "nvshmem": areas["nvshmem"].version,
        }
    }
    if any(c.fabric == "nvshmem" and not c.missing for c in areas["torch"].candidates):
        second["heap"] = {}
    found = {"heap": {}, **ask(second, limit)}
    areas |= {name: make_area(name, fields) for name, fields in found.items()}
    return Facts(system=system, **areas)


def make_area(name: str, found: dict[str, Any]) -> SimpleNamespace:
    """Return an area with the fields that its probe found."""
    fields = {**AREAS[name], "error": ""}
    for field, value in found.items():
        kind = _ITEMS.get((name, field))
        if kind is None:
            fields[field] = _frozen(value)
        else:
            fields[field] = tuple(kind(**{k: _frozen(v) for k, v in x.items()}) for x in value)
    return SimpleNamespace(**fields)


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _read_system() -> SimpleNamespace:
    packages = {}
    for name in ("torch", "numpy", *CUDA_PACKAGES, *NVSHMEM_PACKAGES, BINDINGS_NEED):
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return SimpleNamespace(
        version=ultraep_comm.__version__,
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.release()} {platform.machine()}",
        pci_gpus=sum(map(_is_gpu, _PCI.glob("*"))),
        packages=packages,
        variables=env.driver_variables(),
    )


def _is_gpu(device: Path) -> bool:
    try:
        vendor, kind = ((device / name).read_text() for name in ("vendor", "class"))
    except OSError:
        return False
    return vendor.startswith(_NVIDIA) and kind.startswith(_DISPLAY)
