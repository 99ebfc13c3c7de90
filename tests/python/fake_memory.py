"""torch's symmetric memory on the CPU: files mapped by the ranks' processes.

Memory is really shared, so kernels of an emulated device move bytes between processes over it.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

POSIX, FABRIC = 1, 8  # handle types
PAGE = 4096


class FakeMemory:
    """One rank's symmetric memory. ``log`` holds the names of the steps taken.

    Args:
        folder: the same on every rank, empty.
        offset: bytes of the allocation before the tensor.
        types: of the handles of this rank's allocations.
        unreachable: ranks that this one does not map.
        counts_in_process: as torch up to 2.13 does.
    """

    def __init__(
        self,
        folder: Path,
        *,
        offset: int = 0,
        types: int = POSIX,
        unreachable: tuple[int, ...] = (),
        counts_in_process: bool = True,
    ) -> None:
        self.met = 0
        self.counts_in_process = counts_in_process
        self.log: list[str] = []
        self.on_step: Callable[[str], None] = lambda step: None
        self.handles: list[weakref.ref[Handle]] = []
        self._folder = folder
        self._offset = offset
        self._types = types
        self._unreachable = unreachable
        self._made: dict[int, tuple[torch.Tensor, int]] = {}

    def _step(self, step: str) -> None:
        self.log.append(step)
        self.on_step(step)

    def prepare(self, device: torch.device) -> None:
        self._step("prepare")

    def allocate(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        self._step("allocate")
        size = -(-(num_bytes + self._offset) // PAGE) * PAGE
        path = self._folder / f"{len(self._made)}-{dist.get_rank()}"
        path.write_bytes(b"\xa5" * size)  # zeros are not guaranteed
        memory = self._map(path)
        tensor = memory[self._offset : self._offset + num_bytes]
        self._made[tensor.data_ptr()] = memory, len(self._made)
        return tensor

    @staticmethod
    def _map(path: Path) -> torch.Tensor:
        with path.open("r+b") as file:
            return torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)

    def handle_types(self, tensor: torch.Tensor) -> int:
        self._step("handle_types")
        return self._types

    def rendezvous(
        self, tensor: torch.Tensor, group: dist.ProcessGroup
    ) -> tuple[list[int], object]:
        self.met += 1
        self._step("rendezvous")
        own, number = self._made[tensor.data_ptr()]
        ranks = dist.get_process_group_ranks(group)
        maps: list[Any] = []
        for peer, name in enumerate(ranks):
            if peer == group.rank():
                maps.append(own)
            elif peer in self._unreachable:
                maps.append(None)
            else:
                maps.append(self._map(self._folder / f"{number}-{name}"))
        handle = Handle(maps)
        self.handles.append(weakref.ref(handle))
        return [0 if one is None else one.data_ptr() for one in maps], handle


class Handle:
    """Holds the mappings."""

    def __init__(self, maps: list[Any]) -> None:
        self.maps = maps
