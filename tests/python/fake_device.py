"""Devices on the CPU: what they share, and one that logs its calls and runs no kernels.

And an NVSHMEM without a network.
"""
# ruff: noqa: N802, N815 (names of the driver's functions)

from __future__ import annotations

import ctypes
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import ultraep_comm as uec
from ultraep_comm import Segment, _core
from ultraep_comm.driver import Links
from ultraep_comm.engines.cuda import make
from ultraep_comm.errors import UnsupportedError
from ultraep_comm.fabrics.nvshmem import Heap

NOT_READY = 600


class CpuDevice:
    """A ``Device`` whose memory is the host's, over functions for those of the driver.

    Streams are numbers; ``stream`` is the current one.
    """

    torch_device = torch.device("cpu")
    compute_capability = (9, 0)
    num_sms = 132
    warp_size = 32
    max_shared_bytes = 227 << 10
    cuda_major = 13
    context = 0
    stream = 1
    known_links: Links | None = None

    def __init__(self, kernels: Any, functions: Mapping[str, Any]) -> None:
        self.kernels, self._functions = kernels, functions
        addresses = {n: ctypes.cast(f, ctypes.c_void_p).value or 0 for n, f in functions.items()}
        self.driver = _core.CudaDriver(addresses)
        self.memory: list[torch.Tensor] = []
        self._streams = self.stream
        # Of empty(): kept so that addresses are never reused.
        self._held: dict[int, torch.Tensor] = {}

    def allocate(self, num_bytes: int) -> torch.Tensor:
        self.memory.append(torch.zeros(num_bytes + 4096, dtype=torch.uint8, device="cpu"))
        address = self.memory[-1].data_ptr()
        # Like memory from a device: it begins a tensor's storage.
        return self.view(address + -address % 4096, max(1, num_bytes)).narrow(0, 0, num_bytes)

    pinned = allocate

    def view(self, address: int, num_bytes: int, owner: object = None) -> torch.Tensor:
        memory = (ctypes.c_uint8 * num_bytes).from_address(address)
        memory.owner = owner  # type: ignore[attr-defined]
        return torch.frombuffer(memory, dtype=torch.uint8)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        count = math.prod(shape)
        memory = torch.empty(max(1, count), dtype=dtype, device="cpu")[:count].view(tuple(shape))
        self._held[memory.untyped_storage().data_ptr()] = memory
        return memory

    def is_on_device(self, tensor: torch.Tensor) -> bool:
        at = tensor.data_ptr()
        return tensor.untyped_storage().data_ptr() in self._held or any(
            memory.data_ptr() <= at < memory.data_ptr() + memory.numel() for memory in self.memory
        )

    def links(self) -> Links | None:
        return self.known_links

    def current_stream(self) -> int:
        return self.stream

    def new_stream(self) -> tuple[int, object]:
        self._streams += 1
        return self._streams, None

    def load(self, cubin: Path) -> Any:
        return self.kernels


class FakeKernels:
    library = 1
    nvshmem = (3, 4)

    def __init__(self) -> None:
        self.names: list[str] = []
        self.shared_bytes: dict[str, int] = {}

    def handle(self, name: str, shared_bytes: int) -> int:
        self.names.append(name)
        self.shared_bytes[name] = shared_bytes
        return len(self.names)

    def name(self, handle: int) -> str:
        return self.names[handle - 1]


# Types of the driver's parameters that a stand-in reads; others are as wide as a pointer.
_TYPES = {
    "made": ctypes.POINTER(ctypes.c_uint64),
    "blocks": ctypes.POINTER(ctypes.c_int32),
    **dict.fromkeys(("value", "grid_x", "grid_y"), ctypes.c_uint),
}


def _c_function(function: Callable[..., int]) -> Any:
    """Return it for callers in C, which may pass more arguments than it takes."""
    types = (_TYPES.get(name, ctypes.c_uint64) for name in inspect.signature(function).parameters)
    return ctypes.CFUNCTYPE(ctypes.c_int32, *types)(function)


class FakeDevice(CpuDevice):
    """Memory moves at once, and kernels do nothing. Attributes can be given.

    ``log`` holds the names of kernels launched, and a "record" for each event.
    """

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)
        self.log: list[str] = []
        self.grids: list[tuple[int, int]] = []
        self.pending: set[int] = set()
        self.complete = True  # events complete as they are recorded
        self.launch_result = 0
        self.blocks_per_sm: dict[str, int] = {}  # by kernel, if not 1
        self.synchronized = 0  # waits for the whole device
        self._events = 0
        names = _core.cuda_driver_names()
        functions = {n: _c_function(getattr(self, n, lambda: 0)) for n in names}
        super().__init__(FakeKernels(), functions)

    def launches(self) -> list[str]:
        """Return the names of the kernels launched so far."""
        return [what for what in self.log if what != "record"]

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        pass

    def upload(self, to: torch.Tensor, values: torch.Tensor) -> None:
        to.copy_(values)

    def has_graph_pool(self) -> bool:
        return False

    def is_capturing(self) -> bool:
        return False

    def synchronize(self) -> None:
        self.synchronized += 1

    def synchronize_stream(self) -> None:
        pass

    # ---- the driver; what is not here succeeds

    def cuMemcpyHtoD(self, to: int, source: int, num_bytes: int) -> int:
        ctypes.memmove(to, source, num_bytes)
        return 0

    cuMemcpyHtoDAsync = cuMemcpyDtoHAsync = cuMemcpyHtoD

    def cuMemsetD32Async(self, to: int, value: int, count: int) -> int:
        (ctypes.c_uint32 * count).from_address(to)[:] = [value] * count
        return 0

    def cuEventCreate(self, made: Any) -> int:
        self._events += 1
        made[0] = self._events
        return 0

    def cuEventRecord(self, event: int) -> int:
        self.log.append("record")
        if not self.complete:
            self.pending.add(event)
        return 0

    def cuEventQuery(self, event: int) -> int:
        return NOT_READY if event in self.pending else 0

    def cuOccupancyMaxActiveBlocksPerMultiprocessor(
        self, blocks: Any, kernel: int, _threads: int, shared_bytes: int
    ) -> int:
        name = self.kernels.name(kernel)
        assert shared_bytes <= self.kernels.shared_bytes[name]
        blocks[0] = self.blocks_per_sm.get(name, 1)
        return 0

    def cuLaunchKernel(self, kernel: int, grid_x: int, grid_y: int) -> int:
        if self.launch_result == 0:
            self.log.append(self.kernels.name(kernel))
            self.grids.append((grid_x, grid_y))
        return self.launch_result

    cuLaunchCooperativeKernel = cuLaunchKernel


class FakeNvshmem:
    """One PE. Collective calls do not check that the other PEs make them too.

    Args:
        attributes: as below; ``reaches`` says by PE, None: all.
    """

    room = 1 << 30
    reaches: Sequence[int] | None = None
    library_version = (3, 4)
    init_error: Exception | None = None

    def __init__(self, *, pes: tuple[int, int] | None = None, **attributes: Any) -> None:
        vars(self).update(attributes)
        self.heap: Any = Heap(self)  # type: ignore[arg-type]
        self.initialized = pes is not None
        self._pes = pes or (-1, -1)
        self.uids: list[bytes] = []
        self.made: dict[int, Any] = {}
        self.freed: list[int] = []
        self.registered: list[int] = []

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


E, S = 6, 2
EXPERT = {"w": Segment((8, 4), torch.bfloat16), "s": Segment((3,), torch.uint8)}
PLAN = uec.Plan.from_slots([[3, -1], [0, 1]], num_experts=E)


def new_group(
    process_group: Any,
    device: Any = None,
    *,
    nvshmem: Any = None,
    memory: Any = None,
    **options: Any,
) -> uec.Group:
    """Create a group on this device; an error given in a fabric's place is raised."""
    device = device or FakeDevice()

    def found(what: Any) -> Any:
        if what is None or isinstance(what, Exception):
            raise what or UnsupportedError("not here")
        return device, what, device.kernels

    small = {"num_experts": E, "slots_per_rank": S, "expert": EXPERT, "timeout": 20.0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(make, "find_nvshmem_device", lambda: found(nvshmem))
        patch.setattr(make, "find_torch_device", lambda: found(memory))
        return uec.new_group(process_group, **small | options)
