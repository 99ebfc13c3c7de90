"""Fabric ``nvshmem``: symmetric memory of GPUs, and peers beyond load/store access.

NVSHMEM belongs to the process, not to a group: whoever comes first initialises it, everybody uses
it, and this library never finalises it, since it cannot know who else does. Allocating and freeing
are collective over all of NVSHMEM's PEs, so a group's memory is not freed when one rank closes it,
but when the next group is made and all ranks have closed theirs. No rank waits for another in
``close()``, and a rank that died holds nobody up.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from ultraep_comm import env
from ultraep_comm.errors import (
    BootstrapError,
    OutOfSharedMemoryError,
    UltraEPError,
    UnsupportedError,
)
from ultraep_comm.fabrics import SharedRegion
from ultraep_comm.fabrics.meeting import Meeting
from ultraep_comm.system import undocumented

LIBRARY = "libnvshmem_host.so.3"
UID_BYTES = 128
INITIALIZED = 2  # NVSHMEM_STATUS_IS_INITIALIZED; higher ones: several PEs on a GPU
INVALID = 32767  # NVSHMEM_STATUS_INVALID
MAX_FREED = 16  # allocations that are given back at once


class OtherPesError(UnsupportedError):
    """NVSHMEM is initialised over other ranks than a group's."""


class Runtime(Protocol):
    """NVSHMEM in this process. Tests supply another.

    Attributes:
        heap: the allocations of all groups of the process.
    """

    heap: Heap

    def version(self) -> tuple[int, int]:
        """Return (major, minor) of the host library."""

    def is_initialized(self) -> bool:
        """Return whether anybody has initialised it."""

    def unique_id(self) -> bytes:
        """Make the 128 bytes that all PEs have to know."""

    def init(self, device: int, uid: bytes, rank: int, num_ranks: int) -> None:
        """Initialise. Collective. Only where there is a GPU: else it may end the process."""

    def pes(self) -> tuple[int, int]:
        """Return this PE's number, and how many there are."""

    def malloc(self, num_bytes: int) -> int:
        """Allocate symmetric memory; 0: there is not enough. Collective."""

    def free(self, address: int) -> None:
        """Free it. Collective."""

    def register(self, code: object) -> None:
        """Make a loaded cubin know NVSHMEM."""

    def unregister(self, code: object) -> None:
        """Undo one :meth:`register`."""


class Nvshmem:
    """The real one, by way of nvshmem4py. Made by :func:`find_runtime`."""

    def __init__(self) -> None:
        import nvshmem.bindings
        import nvshmem.core

        load_library()
        self._core: Any = nvshmem.core
        self._bindings: Any = nvshmem.bindings
        self.heap = Heap(self)
        self._version = parse_version(nvshmem.core.get_version().libnvshmem_version)

    def version(self) -> tuple[int, int]:
        """Return the host library's version."""
        return self._version

    def is_initialized(self) -> bool:
        """Ask the library itself: others may have initialised it without nvshmem4py."""
        return bool(INITIALIZED <= self._bindings.init_status() < INVALID)

    def unique_id(self) -> bytes:
        """Make a UID."""
        return bytes(undocumented(self._core.get_unique_id(), "_data").tobytes())

    def init(self, device: int, uid: bytes, rank: int, num_ranks: int) -> None:
        """Initialise with a UID, and without multicast.

        No kernel here uses it, PEs that share a GPU cannot have it, and it needs rights that a
        container may not have.
        """
        from cuda.core import Device

        env.disable_multicast()
        unique = self._core.get_unique_id(empty=True)
        undocumented(unique, "_data").view(np.uint8)[:] = np.frombuffer(uid, np.uint8)
        cuda_device = Device(device)
        cuda_device.set_current()
        self._core.init(
            device=cuda_device,
            uid=unique,
            rank=rank,
            nranks=num_ranks,
            initializer_method="uid",
        )

    def pes(self) -> tuple[int, int]:
        """Return this PE and their number."""
        return int(self._bindings.my_pe()), int(self._bindings.n_pes())

    def malloc(self, num_bytes: int) -> int:
        """Allocate below nvshmem.core, whose buffers raise when they are collected late."""
        return int(self._bindings.malloc(num_bytes))

    def free(self, address: int) -> None:
        """Free."""
        self._bindings.free(address)

    def register(self, code: object) -> None:
        """NVSHMEM counts how often."""
        self._core.library_init(self._core.NvshmemKernelObject.from_obj(code))

    def unregister(self, code: object) -> None:
        """Give one count back."""
        self._core.library_finalize(self._core.NvshmemKernelObject.from_obj(code))


def load_library() -> None:
    """Load the host library of the wheel, wherever Python imports it from.

    nvshmem4py looks into the folders of site-packages only, and not at all of ``sys.path``. What is
    not found here, or cannot be loaded, is its to find, or to say.
    """
    with contextlib.suppress(OSError):
        ctypes.CDLL(LIBRARY, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        return  # torch has it, say: a second one would have a state of its own
    for folder in sys.path:
        path = Path(folder) / "nvidia" / "nvshmem" / "lib" / LIBRARY
        if path.is_file():
            with contextlib.suppress(OSError):
                ctypes.CDLL(str(path), mode=os.RTLD_GLOBAL | os.RTLD_LAZY)
            return


def parse_version(text: str) -> tuple[int, int]:
    """Return (major, minor) of a version such as 3.4.5."""
    found = re.match(r"(\d+)\.(\d+)", text)
    if found is None:
        raise UnsupportedError(f"NVSHMEM's version is {text!r}; expected one such as 3.4.5")
    return int(found[1]), int(found[2])


@functools.cache
def find_runtime() -> Runtime:
    """Return NVSHMEM. To be called only where a GPU has been found.

    Raises:
        UnsupportedError: nvshmem4py or NVSHMEM's host library is missing.
    """
    hint = "install the extra cuda12 or cuda13, as in pip install 'ultraep_comm[cuda13]'"
    try:
        return Nvshmem()
    except ImportError as error:
        raise UnsupportedError(
            f"fabric='nvshmem' needs {error.name or 'nvshmem4py'}; {hint}"
        ) from error
    except RuntimeError as error:  # cuda.pathfinder's, too
        if isinstance(error, UltraEPError):
            raise
        raise UnsupportedError(
            f"NVSHMEM's host library cannot be loaded: {error}; {hint}"
        ) from error


def join(meeting: Meeting, runtime: Runtime, device: int) -> list[int]:
    """Have NVSHMEM initialised over exactly these ranks, and return their PEs. Collective.

    Raises:
        BootstrapError: ranks differ in whether it is initialised, or one could not initialise it.
        OtherPesError: it is initialised over other ranks than these; on every rank.
    """
    ready = [row[0] for row in meeting.gather_ints(runtime.is_initialized(), most=1)]
    if any(ready) and not all(ready):
        raise BootstrapError(
            f"rank {meeting.rank}: NVSHMEM is initialised on rank {ready.index(1)} but not on rank"
            f" {ready.index(0)}; initialise it on every rank before new_group, or on none"
        )
    if not any(ready):
        _init(meeting, runtime, device)
    mine, num_pes = runtime.pes()
    rows = meeting.gather_ints(mine, num_pes)
    pes = [row[0] for row in rows]
    if sorted(pes) != list(range(num_pes)) or any(row[1] != num_pes for row in rows):
        raise OtherPesError(
            f"rank {meeting.rank}: the process group has {meeting.num_ranks} ranks, which are PEs"
            f" {pes} of {num_pes}; symmetric memory is allocated by all PEs together. Make the"
            " group over a process group of exactly the ranks that NVSHMEM was initialised with, or"
            " use fabric='torch'"
        )
    return pes


def _init(meeting: Meeting, runtime: Runtime, device: int) -> None:
    runtime.heap.forget()
    uid, error = bytes(UID_BYTES), None
    if meeting.rank == 0:
        uid, error = _attempt(meeting.rank, runtime.unique_id, uid)
    meeting.agree(error)
    words = struct.unpack(f"<{UID_BYTES // 8}q", uid)
    first = meeting.gather_ints(*words, least=-(2**63), most=2**63 - 1)[0]
    _, error = _attempt(
        meeting.rank,
        lambda: runtime.init(
            device, struct.pack(f"<{len(first)}q", *first), meeting.rank, meeting.num_ranks
        ),
        None,
    )
    meeting.agree(error)


def _attempt(rank: int, action: Callable[[], Any], default: Any) -> tuple[Any, Exception | None]:
    try:
        return action(), None
    except Exception as error:  # nvshmem4py has no common base class
        text = getattr(error, "msg", None) or str(error)
        return default, BootstrapError(
            f"rank {rank}: NVSHMEM could not be initialised: {text}. Run with NVSHMEM_DEBUG=INFO to"
            " see why"
        )


class Heap:
    """Symmetric allocations of this process, in the order of their making: the same on every PE."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._made = 0
        self._retired: dict[int, int] = {}  # number -> address

    def allocate(self, meeting: Meeting, num_bytes: int) -> tuple[int, int]:
        """Return number and address of new memory. Collective.

        Raises:
            OutOfSharedMemoryError: the symmetric heap is too small.
        """
        self._free_retired(meeting)
        address = self._runtime.malloc(num_bytes)
        error = None
        if address == 0:
            error = OutOfSharedMemoryError(
                f"rank {meeting.rank}: NVSHMEM's symmetric heap has no {num_bytes} bytes left for"
                " slots and flags; set NVSHMEM_SYMMETRIC_SIZE to at least that much more before"
                " the process starts, or use fewer slots_per_rank"
            )
        meeting.agree(error)
        self._made += 1
        return self._made, address

    def retire(self, number: int, address: int) -> None:
        """Have memory freed once every rank has retired it. Not collective."""
        self._retired[number] = address

    def forget(self) -> None:
        """NVSHMEM was finalised, and all memory with it."""
        self._retired.clear()

    def _free_retired(self, meeting: Meeting) -> None:
        oldest = sorted(self._retired)[:MAX_FREED]
        rows = meeting.gather_ints(*oldest, *[-1] * (MAX_FREED - len(oldest)), least=-1)
        for number in sorted(set.intersection(*(set(row) for row in rows)) - {-1}):
            self._runtime.free(self._retired.pop(number))


class NvshmemFabric:
    """One rank's symmetric memory.

    Args:
        meeting: the process group.
        heap: of the process.
        view: takes an address and a size, and returns a uint8 tensor over that memory, zeroed.
        find_peers: takes this rank's address and returns those at which it reaches the peers.
    """

    def __init__(
        self,
        meeting: Meeting,
        heap: Heap,
        view: Callable[[int, int], torch.Tensor],
        find_peers: Callable[[int], list[int]],
    ) -> None:
        self._meeting = meeting
        self._heap = heap
        self._view = view
        self._find_peers = find_peers
        self._made: list[tuple[int, int]] = []
        self.can_pull = True
        self.on_close: Callable[[], None] | None = None

    @property
    def peer_sockets(self) -> list[int]:
        """A device cannot look at sockets."""
        return [-1] * self._meeting.num_ranks

    @property
    def peer_processes(self) -> list[int]:
        """Nor at processes."""
        return [-1] * self._meeting.num_ranks

    def allocate(self, num_bytes: int) -> SharedRegion:
        """Allocate on every rank, zeroed before any rank goes on.

        Raises:
            OutOfSharedMemoryError: the symmetric heap is too small.
            BootstrapError: another rank failed.
        """
        with self._meeting.making():
            return self._allocate(num_bytes)

    def _allocate(self, num_bytes: int) -> SharedRegion:
        number, address = self._heap.allocate(self._meeting, num_bytes)
        self._made.append((number, address))
        local, bases, error = torch.empty(0, device="cpu"), [0], None
        try:
            local = self._view(address, num_bytes)
            bases = self._find_peers(address)
        except UltraEPError as failure:
            error = failure
        self._meeting.agree(error)
        return SharedRegion(bases=bases, local=local)

    def close(self) -> None:
        """Retire this group's memory: its tensors are valid until the next group is made."""
        for number, address in self._made:
            self._heap.retire(number, address)
        self._made.clear()
        if self.on_close is not None:
            self.on_close()
            self.on_close = None
        self._meeting.leave()
