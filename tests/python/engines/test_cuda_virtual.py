"""Slots that appear behind other mains in a device's virtual memory: over a driver of memfds."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import sys
import types
from typing import Any

import pytest
import torch
from emulated_device import EmulatedDevice
from ranks import close_all, expert_bytes, fill_weights, raw, start_all, synchronize_all

import ultraep_comm as uec
from ultraep_comm import Segment, errors

E, S = 4, 2
EXPERT = {"w": Segment((300, 7), torch.bfloat16), "s": Segment((3,), torch.uint8)}
PLAN = uec.Plan.from_slots([[2, 3], [0, -1]], num_experts=E)
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FIXED, _NONE, _BOTH = 0x10, 0, mmap.PROT_READ | mmap.PROT_WRITE
_PAGE = 2 << 20


class FakeDriver(types.ModuleType):
    """``cuda.bindings.driver`` with virtual memory only: a piece of memory is a memfd.

    Attributes:
        room: pieces that can still be made.
        needs_beginning: a piece is mapped from its beginning only.
    """

    def __init__(self) -> None:
        super().__init__("cuda.bindings.driver")
        self.room, self.needs_beginning = 100, False
        self.ranges: dict[int, int] = {}  # reserved
        self.mapped: dict[int, tuple[int, int]] = {}  # begin -> size, descriptor
        self.handles: set[int] = set()
        for name in ("CUmemLocation", "CUmemAllocationProp", "CUmemAccessDesc"):
            setattr(self, name, types.SimpleNamespace)
        for name, member in (
            ("CUmemLocationType", "CU_MEM_LOCATION_TYPE_DEVICE"),
            ("CUmemAllocationType", "CU_MEM_ALLOCATION_TYPE_PINNED"),
            ("CUmemAccess_flags", "CU_MEM_ACCESS_FLAGS_PROT_READWRITE"),
        ):
            setattr(self, name, types.SimpleNamespace(**{member: 1}))

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Return memory as torch's symmetric memory has it."""
        size = max(1, -(-num_bytes // _PAGE)) * _PAGE
        start = self.cuMemAddressReserve(size, 0, 0, 0)[1]
        handle = self.cuMemCreate(size, None, 0)[1]
        self.cuMemMap(start, size, 0, handle, 0)
        self.cuMemRelease(handle)
        kind = (ctypes.c_uint8 * num_bytes).from_address(start)
        return torch.frombuffer(kind, dtype=torch.uint8)

    def cuMemAddressReserve(self, size: int, *_: int) -> tuple[int, int]:  # noqa: N802
        anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        start = _LIBC.mmap(None, size, _NONE, anonymous, -1, 0)
        self.ranges[start] = size
        return 0, start

    def cuMemAddressFree(self, start: int, size: int) -> tuple[int]:  # noqa: N802
        assert self.ranges.pop(start) == size
        assert not [at for at in self.mapped if start <= at < start + size]
        _LIBC.munmap(start, size)
        return (0,)

    def cuMemCreate(self, size: int, _properties: Any, _flags: int) -> tuple[int, int]:  # noqa: N802
        if self.room == 0:
            return 2, 0
        self.room -= 1
        handle = os.memfd_create("memory")
        os.ftruncate(handle, size)
        self.handles.add(handle)
        return 0, handle

    def cuMemRelease(self, handle: int) -> tuple[int]:  # noqa: N802
        self.handles.remove(handle)
        os.close(handle)
        return (0,)

    def cuMemMap(  # noqa: N802
        self, begin: int, size: int, at: int, handle: int, _flags: int
    ) -> tuple[int]:
        if self.needs_beginning and at:
            return (1,)
        assert handle in self.handles
        assert any(start <= begin < start + held for start, held in self.ranges.items())
        assert _LIBC.mmap(begin, size, _BOTH, mmap.MAP_SHARED | _FIXED, handle, at) == begin
        self.mapped[begin] = size, os.dup(handle)
        return (0,)

    def cuMemUnmap(self, begin: int, size: int) -> tuple[int]:  # noqa: N802
        held, descriptor = self.mapped.pop(begin)
        assert held == size
        os.close(descriptor)
        return (0,)

    def cuMemSetAccess(self, start: int, size: int, access: list[Any], count: int) -> tuple[int]:  # noqa: N802
        assert (self.ranges[start], len(access)) == (size, count)
        assert sum(s for at, (s, _) in self.mapped.items() if start <= at < start + size) == size
        return (0,)

    def _of(self, address: int) -> tuple[int, int, int]:
        return next((at, s, fd) for at, (s, fd) in self.mapped.items() if at <= address < at + s)

    def cuMemGetAddressRange(self, address: int) -> tuple[int, int, int]:  # noqa: N802
        return 0, *self._of(address)[:2]

    def cuMemRetainAllocationHandle(self, address: int) -> tuple[int, int]:  # noqa: N802
        self.handles.add(handle := os.dup(self._of(address)[2]))
        return 0, handle


@pytest.fixture
def driver(emulated: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake, bindings = FakeDriver(), types.ModuleType("cuda.bindings")
    monkeypatch.setattr(bindings, "driver", fake, raising=False)
    for module in (types.ModuleType("cuda"), bindings, fake):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return fake


def _groups(monkeypatch: pytest.MonkeyPatch, emulated: EmulatedDevice, driver: FakeDriver) -> Any:
    with monkeypatch.context() as patched:  # the slots' memory, and no more
        patched.setattr(emulated, "allocate", driver.allocate)
        return uec.new_loopback_groups(
            2,
            num_experts=E,
            slots_per_rank=S,
            expert=EXPERT,
            grads=torch.float32,
            instances=True,
            engine="cuda",
            num_sms=4,
            timeout=30.0,
        )


def test_layers_share_the_slots_of_a_bank(
    monkeypatch: pytest.MonkeyPatch, emulated: EmulatedDevice, driver: FakeDriver
) -> None:
    groups = _groups(monkeypatch, emulated, driver)
    layers = [[group.empty_instances() for group in groups] for _ in range(3)]
    taken = len(driver.ranges)
    count = E // 2
    for epoch, layer in enumerate(layers):
        mains = [{name: t[:count] for name, t in own.items()} for own in layer]
        assert not any(t.any() for own in mains for t in own.values())
        for group, own in zip(groups, mains, strict=True):
            fill_weights(group, own, epoch)
        regions = [group.bind(own).region for group, own in zip(groups, mains, strict=True)]
        assert regions == [0 if epoch == 0 else -1] * 2  # others are pushed
        synchronize_all(start_all(groups, mains, PLAN))
        for group in groups:
            for index, (name, segment) in enumerate(EXPERT.items()):
                for slot, expert in enumerate(PLAN.slot_expert[group.rank].tolist()):
                    for shown in layers:
                        found = raw(shown[group.rank][name][count + slot], segment)
                        if expert >= 0:
                            assert torch.equal(found, expert_bytes(epoch, expert, index, segment))
    grads = [groups[0].empty_instance_grads()["w"] for _ in range(2)]
    grads[1].fill_(1)
    assert not grads[0][:count].any()
    assert bool((grads[0][count:] == 1).all())
    assert not driver.handles
    close_all(groups)
    del layers, layer, mains, own, shown, found, grads, groups, group
    gc.collect()
    assert len(driver.ranges) == taken - 4


def test_refusals_are_typed(
    monkeypatch: pytest.MonkeyPatch, emulated: EmulatedDevice, driver: FakeDriver
) -> None:
    groups = _groups(monkeypatch, emulated, driver)
    layer = [group.empty_instances() for group in groups]
    driver.needs_beginning = True
    for group in groups:
        with pytest.raises(errors.UnsupportedError, match="a bank for each layer"):
            group.empty_instances()
    mains = [{name: t[: E // 2] for name, t in own.items()} for own in layer]
    synchronize_all(start_all(groups, mains, PLAN))  # the group goes on
    driver.needs_beginning, driver.room = False, 1
    with pytest.raises(errors.OutOfSharedMemoryError, match="main weights"):
        groups[0].empty_instances()
    for group in groups:
        group.abort()
        group.close()
