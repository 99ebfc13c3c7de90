"""What the NVIDIA driver reports, through libcuda and NVML. Either may hang or crash."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any
from uuid import UUID

OUT = object()  # stands for the address of the result in a call's arguments
_LENGTH = 96  # bytes of a text
# Values of CUdevice_attribute.
_MAJOR, _MINOR = 75, 76
_ATTRIBUTES = {"num_sms": 16, "compute_mode": 20, "cooperative": 95, "mps": 133}
_LINK_SPEED = 90  # NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON
_MAX_LINKS = 36
_BY_NVLINK = 2  # NVML_P2P_CAPS_INDEX_NVLINK
REGISTERED = "completed"
_FABRIC_STATES = ("", "not started", "in progress", REGISTERED)  # by nvmlGpuFabricState_t


@dataclass(frozen=True, kw_only=True)
class Links:
    """What NVML knows of a GPU."""

    pci: str  # address
    mig: bool | None = None  # whether it is partitioned; None: it cannot be
    links: tuple[bool, ...] = ()  # whether each NVLink is active
    link_mbps: int = 0  # MB/s of an active link in a direction; 0: unknown
    fabric_state: str = ""  # state of its registration in an NVLink fabric; empty: no fabric
    clique: str = ""  # cluster UUID and clique id in it; empty: the fabric is one machine
    nvlink_to: tuple[str, ...] = ()  # addresses of the GPUs that it reaches by NVLink


class _Library:
    """A library of the driver, whose functions return 0 or an error."""

    def __init__(self, name: str, name_of: Callable[[ctypes.CDLL, int], str]) -> None:
        self._library = ctypes.CDLL(name)
        self._name_of = name_of

    def read(self, name: str, *arguments: Any, kind: Any = ctypes.c_int) -> Any:
        """Call a function; return the ``kind`` that it wrote to ``OUT``.

        Raises:
            OSError: it failed, and the text is the error's name, or this driver does not have it.
        """
        result = kind()
        try:
            function = getattr(self._library, name)
        except AttributeError:
            raise OSError(f"there is no {name}") from None
        error = function(*(ctypes.byref(result) if a is OUT else a for a in arguments))
        if error != 0:
            raise OSError(self._name_of(self._library, error))
        return result

    def text(self, name: str, *arguments: Any) -> str:
        """Call a function that writes at most ``_LENGTH`` bytes of text to ``OUT``."""
        value = self.read(name, *arguments, kind=ctypes.c_char * _LENGTH).value
        return str(value.decode(errors="replace"))


def _short(pci: str) -> str:
    """Return a PCI address as the kernel writes it, which libcuda and NVML do not."""
    return pci.lower()[-len("0000:00:00.0") :]


# ---- libcuda ------------------------------------------------------------------------------------


def _cuda_error(library: ctypes.CDLL, error: int) -> str:
    name = ctypes.c_char_p()
    library.cuGetErrorName(error, ctypes.byref(name))
    return name.value.decode() if name.value else f"error {error}"


def read_cuda() -> Iterator[dict[str, Any]]:
    """Yield the fields of `Driver` as they become known."""
    try:
        cuda = _Library("libcuda.so.1", _cuda_error)
    except OSError as error:
        yield {"missing": str(error)}
        return
    try:
        version = cuda.read("cuDriverGetVersion", OUT).value
        yield {"cuda": (version // 1000, version % 1000 // 10)}
        cuda.read("cuInit", 0)
        indices = range(cuda.read("cuDeviceGetCount", OUT).value)
        yield {"devices": [_read_device(cuda, index) for index in indices]}
        yield {
            "reaches": [
                [
                    i == j or bool(cuda.read("cuDeviceCanAccessPeer", OUT, i, j).value)
                    for j in indices
                ]
                for i in indices
            ]
        }
    except OSError as error:
        yield {"status": str(error)}


def _read_device(cuda: _Library, index: int) -> dict[str, Any]:
    device = cuda.read("cuDeviceGet", OUT, index)

    def attribute(number: int) -> int:
        return int(cuda.read("cuDeviceGetAttribute", OUT, number, device).value)

    found: dict[str, Any] = {
        "name": cuda.text("cuDeviceGetName", OUT, _LENGTH, device),
        "pci": _short(cuda.text("cuDeviceGetPCIBusId", OUT, _LENGTH, device)),
        "memory_bytes": cuda.read("cuDeviceTotalMem_v2", OUT, device, kind=ctypes.c_size_t).value,
        "capability": (attribute(_MAJOR), attribute(_MINOR)),
    }
    for name, number in _ATTRIBUTES.items():
        with contextlib.suppress(OSError):  # older drivers lack the newer ones
            found[name] = attribute(number)
    return found


# ---- NVML ---------------------------------------------------------------------------------------


class _PciInfo(ctypes.Structure):
    _fields_ = (
        ("legacy", ctypes.c_char * 16),
        ("numbers", ctypes.c_uint * 5),
        ("id", ctypes.c_char * 32),
    )


class _FieldValue(ctypes.Structure):
    _fields_ = (
        ("field", ctypes.c_uint),
        ("scope", ctypes.c_uint),
        ("timestamp", ctypes.c_longlong),
        ("latency_us", ctypes.c_longlong),
        ("type", ctypes.c_int),
        ("error", ctypes.c_int),
        ("value", ctypes.c_uint),  # of a union of 8 bytes
        ("rest", ctypes.c_uint),
    )


class _FabricInfo(ctypes.Structure):  # version 2
    _fields_ = (
        ("version", ctypes.c_uint),
        ("cluster", ctypes.c_ubyte * 16),
        ("status", ctypes.c_int),
        ("clique", ctypes.c_uint),
        ("state", ctypes.c_ubyte),
        ("health", ctypes.c_uint),
    )


def _nvml_error(library: ctypes.CDLL, error: int) -> str:
    library.nvmlErrorString.restype = ctypes.c_char_p
    text = library.nvmlErrorString(error)
    return text.decode() if text else f"error {error}"


def read_nvml() -> Iterator[dict[str, Any]]:
    """Yield the fields of `Nvml` as they become known: of all GPUs, also those hidden from CUDA."""
    try:
        nvml = _open_nvml()
        yield {"version": nvml.text("nvmlSystemGetDriverVersion", OUT, _LENGTH)}
        handles = {}
        for index in range(nvml.read("nvmlDeviceGetCount_v2", OUT).value):
            handle = nvml.read("nvmlDeviceGetHandleByIndex_v2", index, OUT, kind=ctypes.c_void_p)
            info = nvml.read("nvmlDeviceGetPciInfo_v3", handle, OUT, kind=_PciInfo)
            handles[_short(info.id.decode())] = handle
        found = [
            {**asdict(_read_links(nvml, pci, handle)), "nvlink_to": _reached(nvml, pci, handles)}
            for pci, handle in handles.items()
        ]
        yield {"devices": found}
    except OSError as error:
        yield {"status": str(error)}


def read_links(pci: str) -> Links | None:
    """Return what NVML knows of the GPU with a PCI address; None: NVML does not answer.

    Without ``nvlink_to``.
    """
    try:
        nvml = _open_nvml()
        address = ctypes.c_char_p(pci.encode())
        name = "nvmlDeviceGetHandleByPciBusId_v2"
        return _read_links(nvml, _short(pci), nvml.read(name, address, OUT, kind=ctypes.c_void_p))
    except OSError:
        return None


def _open_nvml() -> _Library:
    nvml = _Library("libnvidia-ml.so.1", _nvml_error)
    nvml.read("nvmlInit_v2")
    return nvml


def _read_links(nvml: _Library, pci: str, handle: ctypes.c_void_p) -> Links:
    found: dict[str, Any] = {}
    # A GPU without this property answers with an error.
    with contextlib.suppress(OSError):
        pending = ctypes.byref(ctypes.c_int())
        found["mig"] = bool(nvml.read("nvmlDeviceGetMigMode", handle, OUT, pending).value)
    active = []
    with contextlib.suppress(OSError):
        for link in range(_MAX_LINKS):
            active.append(bool(nvml.read("nvmlDeviceGetNvLinkState", handle, link, OUT).value))
    with contextlib.suppress(OSError):
        field = _FieldValue(field=_LINK_SPEED)
        nvml.read("nvmlDeviceGetFieldValues", handle, 1, ctypes.byref(field))
        found["link_mbps"] = field.value if field.error == 0 else 0
    with contextlib.suppress(OSError):
        info = _FabricInfo(version=ctypes.sizeof(_FabricInfo) | 2 << 24)
        nvml.read("nvmlDeviceGetGpuFabricInfoV", handle, ctypes.byref(info))
        found |= _read_fabric(info)
    return Links(pci=pci, links=tuple(active), **found)


def _read_fabric(info: _FabricInfo) -> dict[str, str]:
    state = _FABRIC_STATES[info.state] if info.state < len(_FABRIC_STATES) else "?"
    if state != REGISTERED:
        return {"fabric_state": state}
    if info.status != 0:
        return {"fabric_state": f"failed (NVML error {info.status})"}
    cluster = bytes(info.cluster)
    # A machine whose NVSwitches connect to no other machine has a cluster of zeros.
    clique = f"{UUID(bytes=cluster)} {info.clique}" if any(cluster) else ""
    return {"fabric_state": state, "clique": clique}


def _reached(nvml: _Library, pci: str, handles: dict[str, ctypes.c_void_p]) -> list[str]:
    """Return the addresses of the GPUs that one reaches by NVLink."""
    reached = []
    for other, peer in handles.items():
        with contextlib.suppress(OSError):
            status = nvml.read("nvmlDeviceGetP2PStatus", handles[pci], peer, _BY_NVLINK, OUT)
            if other != pci and status.value == 0:
                reached.append(other)
    return reached
