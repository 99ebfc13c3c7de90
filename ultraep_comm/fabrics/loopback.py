"""Fabric ``loopback``: several ranks in one process."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Sequence

import torch

from ultraep_comm import _core
from ultraep_comm.errors import OutOfSharedMemoryError
from ultraep_comm.fabrics import Place, SharedRegion


def host_memory(num_bytes: int) -> torch.Tensor:
    """Return zeroed host memory, uint8."""
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)


def map_alias(region: SharedRegion, places: Sequence[Place]) -> SharedRegion:
    """Map host memory at places of a region of host memory too; return the region.

    The region's own pages there are freed. Both have to be shared mappings, as those of every
    fabric are.

    Raises:
        OutOfSharedMemoryError: the process has too many mappings.
    """
    for place in places:
        try:
            _core.map_again(region.local.data_ptr() + place.offset, place.address, place.num_bytes)
        except OSError as error:
            raise OutOfSharedMemoryError(
                f"{place.num_bytes} bytes of slots could not be mapped twice"
                f" ({error.strerror}); raise vm.max_map_count, or create the group with more banks"
            ) from error
    return region


class LoopbackMemory:
    """The allocations of all ranks. The first rank to ask allocates for all.

    Args:
        num_ranks: G.
        allocate: takes a number of bytes and returns zeroed uint8 memory; None: host memory.
    """

    def __init__(
        self, num_ranks: int, allocate: Callable[[int], torch.Tensor] | None = None
    ) -> None:
        self.num_ranks = num_ranks
        self._allocate = allocate or host_memory
        self._lock = threading.Lock()
        self._regions: list[tuple[int, list[torch.Tensor]]] = []

    def region(self, index: int, num_bytes: int) -> list[torch.Tensor]:
        """Return the ``index``-th allocation of every rank."""
        with self._lock:
            if index == len(self._regions):
                made = [self._allocate(num_bytes) for _ in range(self.num_ranks)]
                self._regions.append((num_bytes, made))
            size, tensors = self._regions[index]
        if size != num_bytes:
            raise ValueError(
                f"allocation {index} has {num_bytes} bytes here, but {size} on another rank"
            )
        return tensors


class LoopbackFabric:
    """One rank's view of a :class:`LoopbackMemory`."""

    def __init__(self, memory: LoopbackMemory, rank: int) -> None:
        self._memory = memory
        self._rank = rank
        self._next = 0

    @property
    def can_pull(self) -> bool:
        """True: all ranks share one address space."""
        return True

    def allocate(self, num_bytes: int) -> SharedRegion:
        """Return this rank's next allocation."""
        tensors = self._memory.region(self._next, num_bytes)
        self._next += 1
        return SharedRegion(
            bases=[t.data_ptr() for t in tensors], local=tensors[self._rank], keep=tuple(tensors)
        )

    def close(self) -> None:
        """Do nothing: there are no connections."""
