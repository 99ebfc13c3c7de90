"""Exchanging loads outside the engine: over the process group, or inside the process."""

from __future__ import annotations

import threading
import time
from typing import Protocol

import torch

from ultraep_comm.errors import (
    BootstrapError,
    PeerGoneError,
    PeerRejectedError,
    TransferTimeoutError,
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
                f"rank {self._meeting.rank}: gather_load over the process group failed; has a rank"
                " left it? Close the group and make a new one",
                rank=self._meeting.rank,
            ) from error

    def leave(self) -> None:
        """Nothing to give up: the process group is the caller's."""


class LoopbackTable:
    """The rows of ranks in one process, one round after the other."""

    def __init__(self, num_ranks: int, timeout: float) -> None:
        self.num_ranks = num_ranks
        self.timeout = timeout  # seconds; 0: no limit
        self.changed = threading.Condition()
        self.rounds: dict[int, list[torch.Tensor | None]] = {}
        self.left: set[int] = set()


class LoopbackLoads:
    """One rank's part of a :class:`LoopbackTable`."""

    def __init__(self, table: LoopbackTable, rank: int) -> None:
        self._table = table
        self._rank = rank
        self._round = 0

    def exchange(self, counts: torch.Tensor) -> torch.Tensor:
        """Put down this rank's row and wait for the others'."""
        table, rank = self._table, self._rank
        self._round += 1
        start = time.monotonic()
        with table.changed:
            rows = table.rounds.setdefault(self._round, [None] * table.num_ranks)
            rows[rank] = counts.clone()
            table.changed.notify_all()
            while any(row is None for row in rows):
                missing = next(r for r, row in enumerate(rows) if row is None)
                if missing in table.left:
                    raise PeerGoneError(
                        f"rank {rank}: gather_load needed the loads of rank {missing}, which has"
                        " closed or failed. Make the same calls on every rank",
                        rank=rank,
                        peer=missing,
                        root=missing,
                    )
                waited = time.monotonic() - start
                if table.timeout and waited > table.timeout:
                    raise TransferTimeoutError(
                        f"rank {rank}: gather_load waited {waited:.1f} s for rank {missing}. Ranks"
                        " in one process call it from a thread each; look at rank"
                        f" {missing} first",
                        rank=rank,
                        peer=missing,
                        root=missing,
                    )
                table.changed.wait(0.1)
            # Whoever is in the next round has taken these.
            table.rounds.pop(self._round - 1, None)
            return torch.stack([row for row in rows if row is not None])

    def leave(self) -> None:
        """Tell ranks that wait for this one."""
        with self._table.changed:
            self._table.left.add(self._rank)
            self._table.changed.notify_all()
