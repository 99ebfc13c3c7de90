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


class LoopbackFabric:
    """One rank's fabric, of those that :func:`make_loopback_fabrics` returns."""

    def __init__(self, rank: int, allocate: Callable[[int, int], list[torch.Tensor]]) -> None:
        self._rank = rank
        self._allocate = allocate
        self._next = 0

    def allocate(self, num_bytes: int) -> SharedRegion:
        """Return this rank's next allocation."""
        tensors = self._allocate(self._next, num_bytes)
        self._next += 1
        return SharedRegion(
            bases=[t.data_ptr() for t in tensors], local=tensors[self._rank], keep=tuple(tensors)
        )

    def close(self) -> None:
        """Do nothing: there are no connections."""


def make_loopback_fabrics(
    num_ranks: int, allocate: Callable[[int], torch.Tensor] = host_memory
) -> list[LoopbackFabric]:
    """Return the fabrics of all ranks. The first rank to ask allocates for all.

    ``allocate`` takes a number of bytes and returns zeroed uint8 memory.
    """
    lock = threading.Lock()
    made: list[list[torch.Tensor]] = []

    def allocate_for_all(index: int, num_bytes: int) -> list[torch.Tensor]:
        with lock:
            if index == len(made):
                made.append([allocate(num_bytes) for _ in range(num_ranks)])
        size = made[index][0].numel()
        if size != num_bytes:
            raise ValueError(
                f"allocation {index} has {num_bytes} bytes here, but {size} on another rank"
            )
        return made[index]

    return [LoopbackFabric(rank, allocate_for_all) for rank in range(num_ranks)]
