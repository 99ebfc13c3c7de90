"""Virtual memory of a device, on the CPU."""
# ruff: noqa: N802 (names of the driver's functions)

from __future__ import annotations

import ctypes
import mmap
import os
from types import SimpleNamespace
from typing import Any

from ultraep_comm.engines.cuda.virtual import PAGE_BYTES

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FIXED, _NONE, _BOTH = 0x10, 0, mmap.PROT_READ | mmap.PROT_WRITE


class FakeBindings:
    """``cuda.bindings.driver`` with virtual memory only: an allocation is a memfd.

    Attributes:
        room: allocations that can still be made.
    """

    CUmemLocation = CUmemAllocationProp = CUmemAccessDesc = SimpleNamespace
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=1)

    def __init__(self) -> None:
        self.room = 1000
        self.ranges: dict[int, int] = {}  # reserved
        self.mapped: dict[int, tuple[int, int]] = {}  # begin -> size, descriptor
        self.handles: set[int] = set()

    def cuMemAddressReserve(self, size: int, *_: int) -> tuple[int, int]:
        assert size % PAGE_BYTES == 0
        anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        start = _LIBC.mmap(None, size, _NONE, anonymous, -1, 0)
        self.ranges[start] = size
        return 0, start

    def cuMemAddressFree(self, start: int, size: int) -> tuple[int]:
        assert self.ranges.pop(start) == size
        assert not [at for at in self.mapped if start <= at < start + size]
        _LIBC.munmap(start, size)
        return (0,)

    def cuMemCreate(self, size: int, _properties: Any, _flags: int) -> tuple[int, int]:
        assert size % PAGE_BYTES == 0
        if self.room == 0:
            return 2, 0
        self.room -= 1
        handle = os.memfd_create("memory")
        os.pwrite(handle, b"\xa5" * size, 0)  # the driver does not zero it
        self.handles.add(handle)
        return 0, handle

    def cuMemRelease(self, handle: int) -> tuple[int]:
        self.handles.remove(handle)
        os.close(handle)
        return (0,)

    def cuMemMap(self, begin: int, size: int, at: int, handle: int, _flags: int) -> tuple[int]:
        if at:  # as the driver's header says
            return (1,)
        assert handle in self.handles
        assert any(start <= begin < start + held for start, held in self.ranges.items())
        assert _LIBC.mmap(begin, size, _BOTH, mmap.MAP_SHARED | _FIXED, handle, at) == begin
        self.mapped[begin] = size, os.dup(handle)
        return (0,)

    def cuMemUnmap(self, begin: int, size: int) -> tuple[int]:
        held, descriptor = self.mapped.pop(begin)
        assert held == size
        os.close(descriptor)
        return (0,)

    def cuMemSetAccess(self, start: int, size: int, access: list[Any], count: int) -> tuple[int]:
        assert (self.ranges[start], len(access)) == (size, count)
        assert sum(s for at, (s, _) in self.mapped.items() if start <= at < start + size) == size
        return (0,)

    def _of(self, address: int) -> tuple[int, int, int]:
        return next((at, s, fd) for at, (s, fd) in self.mapped.items() if at <= address < at + s)

    def cuMemGetAddressRange(self, address: int) -> tuple[int, int, int]:
        return 0, *self._of(address)[:2]

    def cuMemRetainAllocationHandle(self, address: int) -> tuple[int, int]:
        self.handles.add(handle := os.dup(self._of(address)[2]))
        return 0, handle
