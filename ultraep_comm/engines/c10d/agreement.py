"""Agreement: every rank's record of a call reaches all ranks, and its notice of a failure too."""

from __future__ import annotations

import time
from contextlib import suppress

import numpy as np
import torch
from numpy.typing import NDArray

from ultraep_comm import _core
from ultraep_comm.engines.c10d.channel import BrokenChannelError, Channel, Message, Pending
from ultraep_comm.plan.topology import IntArray

_Fault = _core.Fault
_GRACE = 0.4  # seconds for a peer's notice of its failure to arrive
_POLL = 0.01
_HEAD = 3  # int64: kind, epoch, digest
_NOTICE = 3  # int64: fault, peer, root
_EMPTY = -2  # no peer and no root
_NOTICE_TAG, _PROBE_TAG = 0, 1
_FIRST_TAG = 1 << 30  # of records, beyond those of steps: they may share a channel


class Agreement:
    """One rank's exchanges with all others.

    Args:
        calls: carries records.
        alarms: carries notices of failures; nothing else, so that it works after a failure.
        rank, num_ranks: of the group.
        num_experts: E.
    """

    def __init__(
        self, calls: Channel, alarms: Channel, rank: int, num_ranks: int, num_experts: int
    ) -> None:
        self._calls, self._alarms = calls, alarms
        self._rank, self._num_ranks = rank, num_ranks
        self._num_experts = num_experts
        self._sent: list[Pending] = []
        # Posted from the start: a notice arrives at once, whatever this rank does then.
        self._notices = torch.full((num_ranks, _NOTICE), _EMPTY, dtype=torch.int64, device="cpu")
        self._receives = alarms.post(
            [
                Message(peer, _NOTICE_TAG, self._notices[peer], receives=True)
                for peer in range(num_ranks)
                if peer != rank
            ]
        )
        # Row i is that of rank (rank + i) % G. All rows have room for counts.
        length = _HEAD + -(-num_experts // 2)
        rows = torch.zeros((num_ranks, length), dtype=torch.int64, device="cpu")
        self._rows: NDArray[np.int64] = rows.numpy()
        self._leave: list[Message] = []
        self._arrive: list[Message] = []
        known = 1
        while known < num_ranks:
            count, tag = min(known, num_ranks - known), _FIRST_TAG + len(self._leave)
            after, before = (rank + known) % num_ranks, (rank - known) % num_ranks
            self._leave.append(Message(before, tag, rows[:count], receives=False))
            self._arrive.append(Message(after, tag, rows[known : known + count], receives=True))
            known += count
        self._arriving: list[Pending] = []

    def begin(
        self, kind: _core.RecordKind, epoch: int, digest: int, counts: IntArray | None = None
    ) -> None:
        """Start to exchange this rank's record of a call with those of all other ranks.

        ``digest``: of all calls so far; ``counts``: of a gather, int32 ``[E]``.

        In step i a rank sends all that it knows to the rank 2**i before it, and receives as much
        from the one 2**i after it: log2(G) messages each way, where all pairs would take G - 1.
        """
        own = self._rows[0]
        own[0], own[1] = kind.value, epoch
        own[2:3].view(np.uint64)[0] = digest
        if counts is not None:
            own[_HEAD:].view(np.int32)[: self._num_experts] = counts
        self._arriving = self._calls.post([*self._arrive, *self._leave[:1]])

    def finish(self, limit: float) -> None:
        """Wait for the records of all ranks: ``limit`` seconds in all; 0: no limit.

        Raises:
            BrokenChannelError: a rank did not take part in time, or is gone.
        """
        end = time.monotonic() + limit

        def wait(pending: Pending) -> None:
            pending.wait(max(end - time.monotonic(), 1e-3) if limit else 0)

        steps = len(self._arrive)
        leaving = self._arriving[steps:]
        for i, pending in enumerate(self._arriving[:steps]):
            wait(pending)
            leaving += self._calls.post(self._leave[i + 1 : i + 2])
        for pending in leaving:
            wait(pending)
        self._arriving = []

    def compare(self) -> tuple[_core.Fault, int] | None:
        """Return the first rank that rejects its call, or whose call is not this rank's, and which.

        None: all ranks make the same call.
        """
        rejecting = self._rows[:, 0] == _core.RecordKind.REJECTED.value
        differing = (self._rows[:, 1:3] != self._rows[0, 1:3]).any(axis=1)
        for fault, ranks in ((_Fault.REJECTED, rejecting), (_Fault.MISMATCH, differing)):
            if ranks.any():
                return fault, int(np.roll(ranks, self._rank).argmax())
        return None

    def counts(self) -> NDArray[np.int32]:
        """Return the counts of all ranks, ``[G, E]``."""
        rows = self._rows[:, _HEAD:].view(np.int32)[:, : self._num_experts]
        return np.roll(rows, self._rank, axis=0)

    def abort(self) -> None:
        """End all exchanges, here and at the peers."""
        self._calls.abort()

    # ---- after a failure --------------------------------------------------------------------

    def broadcast(self, fault: _core.Fault, peer: int, root: int) -> None:
        """Tell all peers how this rank has failed, without waiting for them.

        ``peer``: with which rank, -1: with none; ``root``: the rank that failed first.
        """
        words = torch.tensor([fault.value, peer, root], dtype=torch.int64, device="cpu")
        for to in range(self._num_ranks):
            if to == self._rank:
                continue
            with suppress(BrokenChannelError):  # it is gone
                self._sent += self._alarms.post([Message(to, _NOTICE_TAG, words, receives=False)])

    def poll(self, peer: int) -> tuple[int, _core.Fault, int, int] | None:
        """Return a failed rank, ``peer`` or (-1) any, and what it has told by :meth:`broadcast`.

        None: no notice has arrived within a grace period, or the rank is gone.
        """
        awaited = [p for p in self._receives if peer in (-1, p.message.peer)]
        end, open_ = time.monotonic() + _GRACE, True
        while open_ and time.monotonic() < end:
            open_ = peer < 0 or self._is_open(peer)
            for pending in awaited:
                sender = pending.message.peer
                if self._notices[sender, -1] == _EMPTY:  # a wait in gloo that times out aborts
                    continue
                with suppress(BrokenChannelError):
                    pending.wait(_GRACE)
                fault, about, root = self._notices[sender].tolist()
                return sender, _Fault(fault), about, root
            time.sleep(_POLL)
        return None

    def _is_open(self, peer: int) -> bool:
        """Return whether a connection is open, as far as is known."""
        never = torch.empty(1, dtype=torch.uint8, device="cpu")
        try:
            self._sent += self._alarms.post([Message(peer, _PROBE_TAG, never, receives=True)])
        except BrokenChannelError:
            return False
        return True

    def close(self) -> None:
        """Release the channels, once the peers have this rank's notice."""
        with suppress(BrokenChannelError):
            for pending in self._sent:
                if not pending.message.receives:
                    pending.wait(_GRACE)
        self._sent.clear()
        self._receives.clear()
        self._arriving.clear()
        self._calls.close()
        self._alarms.close()
