"""No fabric: memory that no peer reaches, for engines that send messages."""

from __future__ import annotations

import torch

from ultraep_comm.errors import OutOfSharedMemoryError
from ultraep_comm.fabrics import SharedRegion
from ultraep_comm.fabrics.loopback import host_memory
from ultraep_comm.fabrics.memory import HINT, require_memory


class PrivateFabric:
    """One rank's own memory.

    Args:
        rank, num_ranks: of the group.
        device: of the memory.
    """

    def __init__(self, rank: int, num_ranks: int, device: torch.device) -> None:
        self._rank, self._num_ranks, self._device = rank, num_ranks, device

    def allocate(self, num_bytes: int) -> SharedRegion:
        """Allocate zeroed memory on this rank.

        Raises:
            OutOfSharedMemoryError: there is not enough.
        """
        on_cpu = self._device.type == "cpu"
        if on_cpu:
            require_memory(num_bytes, self._rank)
        try:
            if on_cpu:
                local = host_memory(num_bytes)
            else:
                local = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
        except (OSError, RuntimeError) as error:
            raise OutOfSharedMemoryError(
                f"rank {self._rank}: {num_bytes} bytes of memory could not be allocated ({error});"
                f" {HINT}",
                failed_rank=self._rank,
            ) from error
        bases = [0] * self._num_ranks
        bases[self._rank] = local.data_ptr()
        return SharedRegion(bases=bases, local=local)

    def close(self) -> None:
        """Do nothing: there are no connections."""
