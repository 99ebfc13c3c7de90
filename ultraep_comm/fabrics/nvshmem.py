"""Fabric ``nvshmem``: symmetric GPU memory, and puts to peers without load/store access.

NVSHMEM belongs to the process, not to a group: its first user initialises it, and this library
never finalises it, since other code may use it too. Allocating and freeing are collective over all
of NVSHMEM's PEs, so a group's memory is not freed when one rank closes it, but when the next group
is created and all ranks have closed theirs. ``close()`` waits for no rank, dead or alive.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

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
from ultraep_comm.fabrics.nvshmem_library import load_library
from ultraep_comm.fabrics.rendezvous import Rendezvous
from ultraep_comm.system import read_version, undocumented

UID_BYTES = 128
INITIALIZED = 2  # NVSHMEM_STATUS_IS_INITIALIZED; higher ones: several PEs on a GPU
INVALID = 32767  # NVSHMEM_STATUS_INVALID
MAX_FREED = 16  # allocations freed at a time


class OtherPesError(UnsupportedError):
    """NVSHMEM is initialised over other ranks than the group's."""


class Runtime:
    """NVSHMEM in this process, through nvshmem4py. Tests supply their own.

    Attributes:
        heap: the allocations of all groups of the process.
    """

    def __init__(self) -> None:
        import nvshmem.bindings
        import nvshmem.core

        load_library()
        self._core: Any = nvshmem.core
        self._bindings: Any = nvshmem.bindings
        self.heap = Heap(self)
        self._registered: set[int] = set()
        self._version = read_version(nvshmem.core.get_version().libnvshmem_version)

    def version(self) -> tuple[int, int]:
        """Return (major, minor) of the host library."""
        return self._version

    def is_initialized(self) -> bool:
        """Ask the host library: other code may have initialised it without nvshmem4py."""
        return bool(INITIALIZED <= self._bindings.init_status() < INVALID)

    def unique_id(self) -> bytes:
        """Return a new 128-byte id, to be sent to all PEs."""
        return bytes(undocumented(self._core.get_unique_id(), "_data").tobytes())

    def init(self, device: int, uid: bytes, rank: int, num_ranks: int) -> None:
        """Initialise NVSHMEM, without multicast. Collective. Without a GPU it may end the process.

        No kernel uses multicast, PEs that share a GPU do not support it, and it needs privileges
        that a container may lack.
        """
        from cuda.core import Device

        env.disable_multicast()
        self._registered.clear()
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
        """Return this PE and the number of PEs."""
        return int(self._bindings.my_pe()), int(self._bindings.n_pes())

    def malloc(self, num_bytes: int) -> int:
        """Allocate symmetric memory and return its address; 0: out of memory. Collective.

        Below nvshmem.core, whose buffers raise if garbage-collected late.
        """
        return int(self._bindings.malloc(num_bytes))

    def free(self, address: int) -> None:
        """Free symmetric memory. Collective."""
        self._bindings.free(address)

    def peer_address(self, address: int, pe: int) -> int:
        """Return where this device reaches a PE's part of an allocation; 0: out of reach."""
        return int(self._bindings.ptr(address, pe))

    def register(self, library: int) -> None:
        """Initialise NVSHMEM's device state in a loaded cubin, once: that waits for the device."""
        if library not in self._registered:
            self._core.library_init(self._core.NvshmemKernelObject.from_handle(library))
            self._registered.add(library)


@functools.cache
def find_runtime() -> Runtime:
    """Return NVSHMEM. Call only after a GPU has been found.

    Raises:
        UnsupportedError: nvshmem4py or NVSHMEM's host library is missing.
    """
    hint = "install the extra cuda12 or cuda13, as in pip install 'ultraep_comm[cuda13]'"
    try:
        return Runtime()
    except ImportError as error:
        raise UnsupportedError(
            f"fabric='nvshmem' needs {error.name or 'nvshmem4py'}; {hint}"
        ) from error
    except RuntimeError as error:  # also the base class of cuda.pathfinder's errors
        if isinstance(error, UltraEPError):
            raise
        raise UnsupportedError(
            f"NVSHMEM's host library cannot be loaded: {error}; {hint}"
        ) from error


def join(rendezvous: Rendezvous, runtime: Runtime, device: int) -> list[int]:
    """Initialise NVSHMEM over exactly these ranks, unless it is, and return their PEs. Collective.

    Raises:
        BootstrapError: only some ranks have initialised it, or initialising it failed.
        OtherPesError: it is initialised over other ranks; raised on every rank.
    """
    ready = rendezvous.exchange(runtime.is_initialized())
    if any(ready) and not all(ready):
        raise BootstrapError(
            f"rank {rendezvous.rank}: NVSHMEM is initialised on rank {ready.index(True)} but not on"
            f" rank {ready.index(False)}; initialise it on every rank before new_group, or on none"
        )
    if not any(ready):
        _init(rendezvous, runtime, device)
    mine, num_pes = runtime.pes()
    rows = rendezvous.exchange([mine, num_pes])
    pes = [row[0] for row in rows]
    if sorted(pes) != list(range(num_pes)) or any(row[1] != num_pes for row in rows):
        raise OtherPesError(
            f"rank {rendezvous.rank}: the process group has {rendezvous.num_ranks} ranks, which are"
            f" PEs {pes} of {num_pes}, but all PEs have to allocate symmetric memory together."
            " Create the group over a process group of exactly the ranks that NVSHMEM was"
            " initialised with, or use fabric='torch'"
        )
    return pes


def _init(rendezvous: Rendezvous, runtime: Runtime, device: int) -> None:
    runtime.heap.forget()
    rank, num_ranks = rendezvous.rank, rendezvous.num_ranks
    try:
        uid = runtime.unique_id() if rank == 0 else b""
        first: str = rendezvous.exchange(uid.hex())[0]
        runtime.init(device, bytes.fromhex(first), rank, num_ranks)
    except UltraEPError:
        raise
    except Exception as error:  # nvshmem4py has no common base class
        text = getattr(error, "msg", None) or str(error)
        raise BootstrapError(
            f"rank {rank}: NVSHMEM could not be initialised: {text}. Run with NVSHMEM_DEBUG=INFO to"
            " see why"
        ) from error
    rendezvous.raise_if_any_failed()


class Heap:
    """Symmetric allocations of this process, numbered in their order, the same on every PE."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._made = 0
        self._bytes: dict[int, int] = {}  # number -> size
        self._retired: dict[int, int] = {}  # number -> address

    def allocate(self, rendezvous: Rendezvous, num_bytes: int) -> tuple[int, int]:
        """Allocate; return the allocation's number and address. Collective.

        Raises:
            OutOfSharedMemoryError: the symmetric heap is too small.
        """
        self._free_retired(rendezvous)
        address = self._runtime.malloc(num_bytes)
        if address == 0:
            held = sum(self._bytes.values())
            raise OutOfSharedMemoryError(
                f"rank {rendezvous.rank}: NVSHMEM's heap has no {num_bytes} bytes left for slots"
                f" and flags, beside {held} of this process's groups; set NVSHMEM_SYMMETRIC_SIZE to"
                f" at least {-(-(held + num_bytes) >> 20)}M before the process starts. Or use fewer"
                " slots_per_rank, or close groups; where NVSHMEM grows its heap, leave more device"
                " memory free"
            )
        rendezvous.raise_if_any_failed()
        self._made += 1
        self._bytes[self._made] = num_bytes
        return self._made, address

    def retire(self, number: int, address: int) -> None:
        """Mark an allocation to be freed once every rank has retired it. Not collective."""
        self._retired[number] = address

    def forget(self) -> None:
        """Drop all retired memory, after other code finalised NVSHMEM and freed it."""
        self._retired.clear()
        self._bytes.clear()

    def _free_retired(self, rendezvous: Rendezvous) -> None:
        oldest = sorted(self._retired)[:MAX_FREED]
        rows = rendezvous.exchange(oldest)
        for number in sorted(set.intersection(*map(set, rows))):
            self._runtime.free(self._retired.pop(number))
            self._bytes.pop(number, None)


class NvshmemFabric:
    """One rank's symmetric memory.

    Args:
        rendezvous: exchanges records with the peers.
        runtime: NVSHMEM in this process.
        pes: the ranks' PEs ``[G]``.
        view: takes an address and a size, zeroes that memory and returns it as a uint8 tensor.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        runtime: Runtime,
        pes: Sequence[int],
        view: Callable[[int, int], torch.Tensor],
    ) -> None:
        self._rendezvous = rendezvous
        self._runtime = runtime
        self._pes = pes
        self._view = view
        self._made: list[tuple[int, int]] = []

    def allocate(self, num_bytes: int) -> SharedRegion:
        """Allocate on every rank; all memory is zeroed before any rank returns.

        Raises:
            OutOfSharedMemoryError: the symmetric heap is too small.
            BootstrapError: another rank failed.
        """
        with self._rendezvous.failure_scope():
            number, address = self._runtime.heap.allocate(self._rendezvous, num_bytes)
            self._made.append((number, address))
            local = self._view(address, num_bytes)
            self._rendezvous.raise_if_any_failed()
        bases = [self._runtime.peer_address(address, pe) for pe in self._pes]
        return SharedRegion(bases=bases, local=local)

    def close(self) -> None:
        """Retire this group's memory; its tensors stay valid until the next group is created."""
        for number, address in self._made:
            self._runtime.heap.retire(number, address)
        self._made.clear()
        self._rendezvous.leave()
