"""A device that logs its calls and moves no experts, and an NVSHMEM without a network.

Memory is the host's; kernels do nothing but what a test hooks in.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from ultraep_comm import _core
from ultraep_comm.driver import Links
from ultraep_comm.fabrics.nvshmem import Heap

NOT_READY = 600
# Kernels whose blocks wait for each other.
TOGETHER = re.compile(r"ultraep_(replicate(_far)?|reduce)$")
_POINTER = ctypes.c_void_p
_RESULT = ctypes.c_int32
_ARGUMENTS = {
    "cuCtxPushCurrent": [_POINTER],
    "cuCtxPopCurrent": [_POINTER],
    "cuCtxSynchronize": [],
    "cuStreamSynchronize": [_POINTER],
    "cuMemcpyHtoD": [ctypes.c_uint64, _POINTER, ctypes.c_size_t],
    "cuMemcpyHtoDAsync": [ctypes.c_uint64, _POINTER, ctypes.c_size_t, _POINTER],
    "cuMemcpyDtoHAsync": [_POINTER, ctypes.c_uint64, ctypes.c_size_t, _POINTER],
    "cuMemsetD32Async": [ctypes.c_uint64, ctypes.c_uint, ctypes.c_size_t, _POINTER],
    "cuEventCreate": [ctypes.POINTER(_POINTER), ctypes.c_uint],
    "cuEventDestroy": [_POINTER],
    "cuEventRecord": [_POINTER, _POINTER],
    "cuEventQuery": [_POINTER],
    "cuStreamWaitEvent": [_POINTER, _POINTER, ctypes.c_uint],
    "cuStreamWaitValue64": [_POINTER, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint],
    "cuStreamGetCaptureInfo": [
        _POINTER,
        ctypes.POINTER(ctypes.c_int32),
        ctypes.POINTER(ctypes.c_uint64),
        *[_POINTER] * 3,
    ],
    "cuThreadExchangeStreamCaptureMode": [ctypes.POINTER(ctypes.c_int32)],
    "cuLaunchKernel": [
        _POINTER,
        *[ctypes.c_uint] * 7,
        _POINTER,
        ctypes.POINTER(_POINTER),
        _POINTER,
    ],
    "cuLaunchCooperativeKernel": [
        _POINTER,
        *[ctypes.c_uint] * 7,
        _POINTER,
        ctypes.POINTER(_POINTER),
    ],
    "cuOccupancyMaxActiveBlocksPerMultiprocessor": [
        ctypes.POINTER(ctypes.c_int32),
        _POINTER,
        ctypes.c_int32,
        ctypes.c_size_t,
    ],
    "cuGetErrorName": [_RESULT, ctypes.POINTER(ctypes.c_char_p)],
    "cuGetErrorString": [_RESULT, ctypes.POINTER(ctypes.c_char_p)],
}


def _method(name: str) -> str:
    """Of cuEventRecord: _driver_event_record."""
    return "_driver" + re.sub("([A-Z])", r"_\1", name[2:]).lower()


def _succeed(*_: object) -> int:
    return 0


class FakeKernels:
    library = 1
    nvshmem = (3, 4)

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        self.shared_bytes: dict[str, int] = {}

    def handle(self, name: str, shared_bytes: int) -> int:
        handle = 0xA00 + len(self.names)
        self.names[handle] = name
        self.shared_bytes[name] = shared_bytes
        return handle


class FakeDevice:
    """``log`` holds (what, handle, handle) of launches, records and waits."""

    def __init__(
        self,
        *,
        num_sms: int = 132,
        max_shared_bytes: int = 227 << 10,
        compute_capability: tuple[int, int] = (9, 0),
        links: Links | None = None,
    ) -> None:
        self.torch_device = torch.device("cpu")
        self.compute_capability = compute_capability
        self.known_links = links
        self.num_sms = num_sms
        self.warp_size = 32
        self.max_shared_bytes = max_shared_bytes
        self.cuda_major = 13
        self.context = 0
        self.stream = 7
        self.kernels = FakeKernels()
        self.log: list[tuple[str, int, int]] = []
        self.grids: list[tuple[int, int]] = []
        self.pending: set[int] = set()
        self.complete = True  # events complete as they are recorded
        self.capturing = 0
        self.launch_result = 0
        self.blocks_per_sm: dict[str, int] = {}  # by kernel, if not 1
        self.synchronized = 0  # waits for the whole device
        self.memory: list[torch.Tensor] = []
        self.tensors: list[torch.Tensor] = []  # of empty()
        self._events = 0
        self._functions = [
            ctypes.CFUNCTYPE(_RESULT, *arguments)(getattr(self, _method(name), _succeed))
            for name, arguments in _ARGUMENTS.items()
        ]
        addresses = (ctypes.cast(f, ctypes.c_void_p).value or 0 for f in self._functions)
        self.driver = _core.CudaDriver(dict(zip(_ARGUMENTS, addresses, strict=True)))

    # ---- Device

    def allocate(self, num_bytes: int) -> torch.Tensor:
        self.memory.append(torch.zeros(num_bytes, dtype=torch.uint8))
        return self.memory[-1]

    def pinned(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def view(self, address: int, num_bytes: int, owner: object = None) -> torch.Tensor:
        memory = (ctypes.c_uint8 * num_bytes).from_address(address)
        memory.owner = owner  # type: ignore[attr-defined]
        return torch.frombuffer(memory, dtype=torch.uint8)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        self.tensors.append(torch.empty(tuple(shape), dtype=dtype))
        return self.tensors[-1]

    def is_on_device(self, tensor: torch.Tensor) -> bool:
        return any(tensor.data_ptr() == t.data_ptr() for t in self.tensors)

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        pass

    def upload(self, to: torch.Tensor, values: torch.Tensor) -> None:
        to.copy_(values)

    def links(self) -> Links | None:
        return self.known_links

    def has_graph_pool(self) -> bool:
        return False

    def is_capturing(self) -> bool:
        return bool(self.capturing)

    def current_stream(self) -> int:
        return self.stream

    def new_stream(self) -> tuple[int, object]:
        return 0x51, None

    def synchronize(self) -> None:
        self.synchronized += 1

    def synchronize_stream(self) -> None:
        pass

    def load(self, cubin: Path) -> FakeKernels:
        return self.kernels

    # ---- what tests look at

    def launches(self) -> list[str]:
        """Return the names of the kernels launched so far."""
        return [self.kernels.names[h] for what, h, _ in self.log if what == "launch"]

    # ---- the driver

    def _driver_memcpy_hto_d(self, to: int, source: int, num_bytes: int) -> int:
        ctypes.memmove(to, source, num_bytes)
        return 0

    _driver_memcpy_dto_h = _driver_memcpy_hto_d

    def _driver_memcpy_hto_d_async(self, to: int, source: int, num_bytes: int, stream: int) -> int:
        return self._driver_memcpy_hto_d(to, source, num_bytes)

    def _driver_memset_d32_async(self, to: int, value: int, count: int, stream: int) -> int:
        (ctypes.c_uint32 * count).from_address(to)[:] = [value] * count
        return 0

    def _driver_stream_wait_value64(self, stream: int, at: int, value: int, flags: int) -> int:
        self.log.append(("wait for slot", at, stream))
        return 0

    def _driver_event_create(self, event: Any, flags: int) -> int:
        self._events += 1
        event[0] = self._events
        return 0

    def _driver_event_record(self, event: int, stream: int) -> int:
        self.log.append(("record", event, stream))
        if not self.complete:
            self.pending.add(event)
        return 0

    def _driver_event_query(self, event: int) -> int:
        return NOT_READY if event in self.pending else 0

    def _driver_stream_wait_event(self, stream: int, event: int, flags: int) -> int:
        self.log.append(("wait", event, stream))
        return 0

    def _driver_stream_get_capture_info(
        self, stream: int, status: Any, capture: Any, *_: object
    ) -> int:
        status[0] = self.capturing
        capture[0] = 9
        return 0

    def _driver_occupancy_max_active_blocks_per_multiprocessor(
        self, blocks: Any, kernel: int, threads: int, shared_bytes: int
    ) -> int:
        name = self.kernels.names[kernel]
        assert shared_bytes <= self.kernels.shared_bytes[name]
        blocks[0] = self.blocks_per_sm.get(name, 1)
        return 0

    def _driver_launch_cooperative_kernel(self, kernel: int, *rest: Any) -> int:
        return self._launch(kernel, *rest)

    def _driver_launch_kernel(self, kernel: int, *rest: Any) -> int:
        assert not TOGETHER.match(self.kernels.names[kernel])
        return self._launch(kernel, *rest[:-1])

    def _launch(self, kernel: int, *rest: Any) -> int:
        if self.launch_result:
            return self.launch_result
        grid_x, grid_y, stream = rest[0], rest[1], rest[7]
        self.log.append(("launch", kernel, stream))
        self.grids.append((grid_x, grid_y))
        return 0

    def _driver_get_error_name(self, result: int, name: Any) -> int:
        name[0] = b"CUDA_ERROR_OF_THE_TEST"
        return 0

    _driver_get_error_string = _driver_get_error_name


class FakeNvshmem:
    """One PE. Collective calls do not check that the other PEs make them too."""

    def __init__(
        self,
        *,
        pes: tuple[int, int] | None = None,
        room: int = 1 << 30,
        reaches: Sequence[int] | None = None,
        version: tuple[int, int] = (3, 4),
    ) -> None:
        self.heap = Heap(self)
        self.initialized = pes is not None
        self._pes = pes or (-1, -1)
        self.room = room
        self.reaches = reaches  # by PE; None: all
        self.library_version = version
        self.uids: list[bytes] = []
        self.made: dict[int, Any] = {}
        self.freed: list[int] = []
        self.registered: list[int] = []
        self.init_error: Exception | None = None

    def version(self) -> tuple[int, int]:
        return self.library_version

    def is_initialized(self) -> bool:
        return self.initialized

    def unique_id(self) -> bytes:
        return bytes(range(128))

    def init(self, device: int, uid: bytes, rank: int, num_ranks: int) -> None:
        if self.init_error is not None:
            raise self.init_error
        self.initialized = True
        self.uids.append(uid)
        self._pes = rank, num_ranks

    def pes(self) -> tuple[int, int]:
        return self._pes

    def malloc(self, num_bytes: int) -> int:
        if num_bytes > self.room:
            return 0
        self.room -= num_bytes
        buffer = ctypes.create_string_buffer(num_bytes + 4096)
        address = -(-ctypes.addressof(buffer) // 4096) * 4096
        self.made[address] = buffer
        return address

    def free(self, address: int) -> None:
        self.freed.append(address)
        del self.made[address]

    def peer_address(self, address: int, pe: int) -> int:
        return address if self.reaches is None or self.reaches[pe] else 0

    def register(self, library: int) -> None:
        self.registered.append(library)
