"""Agreement: every rank's record of a call reaches all ranks, and the news of a failure too."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ultraep_comm import _core
from ultraep_comm.engines.c10d.channel import BrokenChannelError, Channel, Message, Pending
from ultraep_comm.plan.topology import IntArray

GRACE = 0.4  # seconds for the news of a failure to come from a peer
_HEAD = 3  # int64: kind, epoch, digest
_NEWS = 3  # int64: fault, peer, root
_FIRST_TAG = 1 << 30  # of records, beyond those of steps: they may share a channel


@dataclass(frozen=True)
class Record:
    """What a rank says of its call.

    Attributes:
        kind: of the record.
        epoch: the call's number.
        digest: of all its calls so far; the same on all ranks.
        counts: of a gather, int32 ``[E]``; None: of another call.
    """

    kind: _core.RecordKind
    epoch: int
    digest: int
    counts: IntArray | None = None


class Exchange:
    """One exchange of records, under way.

    In step i a rank sends all that it knows to the rank 2**i before it, and receives as much from
    the one 2**i after it: log2(G) messages each way, where all pairs would take G - 1.
    """

    def __init__(self, channel: Channel, rank: int, num_ranks: int, row: NDArray[np.int64]) -> None:
        self._channel, self._rank, self._num_ranks = channel, rank, num_ranks
        # Row i is that of rank (rank + i) % G.
        self._rows = torch.empty((num_ranks, len(row)), dtype=torch.int64)
        self._rows[0] = torch.from_numpy(row)
        self._steps = []
        known = 1
        while known < num_ranks:
            count = min(known, num_ranks - known)
            self._steps.append((known, count))
            known += count
        self._arriving = channel.post(
            [
                Message(
                    (rank + at) % num_ranks,
                    _FIRST_TAG + i,
                    self._rows[at : at + count],
                    receives=True,
                )
                for i, (at, count) in enumerate(self._steps)
            ]
        )
        self._leaving: list[Pending] = []
        self._send(0)

    def _send(self, i: int) -> None:
        if i < len(self._steps):
            at, count = self._steps[i]
            to = (self._rank - at) % self._num_ranks
            self._leaving += self._channel.post(
                [Message(to, _FIRST_TAG + i, self._rows[:count], receives=False)]
            )

    def finish(self, limit: float) -> NDArray[np.int64]:
        """Return the rows by rank.

        Args:
            limit: in seconds, for each wait; 0: none.

        Raises:
            BrokenChannelError: a rank did not take part in time, or is gone.
        """
        for i, pending in enumerate(self._arriving):
            pending.wait(limit)
            self._send(i + 1)
        for pending in self._leaving:
            pending.wait(limit)
        return np.roll(self._rows.numpy(), self._rank, axis=0)


@dataclass(frozen=True)
class News:
    """Why a rank's call failed: what happened, with which peer, and which rank was the first."""

    fault: _core.Fault
    peer: int
    root: int


class Agreement:
    """One rank's exchanges with all others.

    Args:
        calls: carries records.
        alarms: carries news of failures; nothing else, so that it works after a failure.
        rank, num_ranks: of the group.
        num_experts: E.
    """

    def __init__(
        self, calls: Channel, alarms: Channel, rank: int, num_ranks: int, num_experts: int
    ) -> None:
        self._calls, self._alarms = calls, alarms
        self._rank, self._num_ranks = rank, num_ranks
        self._num_experts = num_experts
        self._told: list[Pending] = []

    def begin(self, record: Record) -> Exchange:
        """Start to exchange a record; all have the same length, with or without counts."""
        row = np.zeros(_HEAD + -(-self._num_experts // 2), np.int64)
        row[0], row[1] = record.kind.value, record.epoch
        row[2:3].view(np.uint64)[0] = record.digest
        if record.counts is not None:
            row[_HEAD:].view(np.int32)[: self._num_experts] = record.counts
        return Exchange(self._calls, self._rank, self._num_ranks, row)

    def read(self, rows: NDArray[np.int64]) -> list[Record]:
        """Return the records of an exchange, by rank."""
        counts = rows[:, _HEAD:].view(np.int32)[:, : self._num_experts]
        return [
            Record(_core.RecordKind(int(row[0])), int(row[1]), int(digest), own)
            for row, digest, own in zip(
                rows, rows[:, 2].copy().view(np.uint64), counts, strict=True
            )
        ]

    def cut(self) -> None:
        """End all exchanges, here and at the peers."""
        self._calls.cut()

    # ---- after a failure --------------------------------------------------------------------

    def tell(self, news: News) -> None:
        """Tell all peers why this rank has failed, without waiting for them."""
        words = torch.tensor([news.fault.value, news.peer, news.root], dtype=torch.int64)
        for peer in range(self._num_ranks):
            if peer == self._rank:
                continue
            try:
                self._told += self._alarms.post([Message(peer, 0, words, receives=False)])
            except RuntimeError:  # it is gone
                continue

    def hear(self, peer: int) -> News | None:
        """Return what a peer tells of its failure within ``GRACE``; None: nothing."""
        words = torch.zeros(_NEWS, dtype=torch.int64)
        try:
            for pending in self._alarms.post([Message(peer, 0, words, receives=True)]):
                pending.wait(GRACE)
        except (BrokenChannelError, RuntimeError):
            return None
        fault, about, root = words.tolist()
        return News(_core.Fault(fault), about, root)

    def close(self) -> None:
        """Release the channels."""
        self._told.clear()
        self._calls.close()
        self._alarms.close()


def first_other(records: Sequence[Record], rank: int) -> int:
    """Return the first rank whose call is not this rank's; -1: all are."""
    own = records[rank]
    for other, record in enumerate(records):
        if (record.epoch, record.digest) != (own.epoch, own.digest):
            return other
    return -1


def deadline(limit: float) -> float:
    """Return when a limit in seconds ends, on the monotonic clock; 0 has no end."""
    return time.monotonic() + limit if limit else float("inf")
