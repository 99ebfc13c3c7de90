"""Exchanging loads outside the engine: over the process group."""

from __future__ import annotations

from typing import Protocol

import torch

from ultraep_comm.errors import (
    BootstrapError,
    PeerGoneError,
    PeerRejectedError,
)
from ultraep_comm.fabrics.bootstrap import Meeting

REJECTED = -1  # fills the row of a rank whose ids were bad


class LoadExchange(Protocol):
    """One rank's part of the exchange. Collective."""

    def exchange(self, counts: torch.Tensor) -> torch.Tensor:
        """Give this rank's int32 ``[E]`` and return everybody's ``[G, E]``."""

    def leave(self) -> None:
        """Take part no more."""


def check_rows(table: torch.Tensor, rank: int, epoch: int) -> None:
    """Raise PeerRejectedError if a rank's ids were bad."""
    rejected = torch.nonzero(table[:, 0] == REJECTED).flatten().tolist()
    if rejected:
        peer = rejected[0]
        raise PeerRejectedError(
            f"rank {rank}: gather_load ended because rank {peer} rejected its own input; its error"
            " says why. Close the group and make a new one",
            rank=rank,
            peer=peer,
            root=peer,
            epoch=epoch,
        )


class ProcessGroupLoads:
    """Over the process group: for ranks that no fabric of the host reaches."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting

    def exchange(self, counts: torch.Tensor) -> torch.Tensor:
        """Gather the counts of all ranks."""
        try:
            return self._meeting.gather(counts)
        except BootstrapError as error:
            raise PeerGoneError(
                f"rank {self._meeting.rank}: gather_load over the process group failed ({error});"
                " close the group and make a new one",
                rank=self._meeting.rank,
                peer=error.failed_rank,
            ) from error

    def leave(self) -> None:
        """Nothing to give up: the process group is the caller's."""
