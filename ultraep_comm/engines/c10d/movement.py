"""Movement: the rounds of one transfer or reduction on one rank, from the core's steps to messages.

A rank issues its rounds in order. Ahead of round t it waits for its messages of rounds up to
t - ``IN_FLIGHT``, and for those that bring what it sends on in t: for earlier rounds alone, at
both ends, so nothing can wait in a circle (`src/c10d/rounds.hpp`). Where messages find their
receive by a tag, receives are posted a few rounds ahead of that wait: with only one under way a
link would rest between chunks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import NamedTuple

import torch

from ultraep_comm import _core
from ultraep_comm.engines.c10d.channel import BrokenChannelError, Channel, Message, Pending

IN_FLIGHT = 3  # rounds
_TAGS = (1 << 30) - 1  # beyond are those of records
_KINDS = tuple(_core.C10dStep)
_Kind = _core.C10dStep
_SEND = frozenset((_Kind.SEND_MAIN, _Kind.SEND_SLOT, _Kind.SEND_GRAD, _Kind.SEND_SUM))
_RECEIVE = frozenset((_Kind.RECEIVE, _Kind.ADD_GRAD, _Kind.ADD_SUM))
Rows = Callable[[int, int], torch.Tensor]  # of local experts, by segment and their index
Part = tuple[int, int, int]  # gate, segment, offset


class Step(NamedTuple):
    """A row of the core's steps; see `Step` in src/c10d/ledger.hpp."""

    round: int
    kind: _core.C10dStep
    peer: int
    tag: int
    segment: int
    offset: int
    bytes: int
    place: int
    expert: int
    chunk: int
    gate: int
    behind: int
    replica: int


def read_steps(rows: Sequence[Sequence[int]]) -> list[Step]:
    """Return the core's rows as steps."""
    return [Step(row[0], _KINDS[row[1]], *row[2:]) for row in rows]


class Movement(ABC):
    """Sends and receives of one call on one rank.

    Args:
        steps: of this rank, by round.
        channel: what carries them.
        digest: of the call. It is in the tags: a message of another call, which a rank that
            disagrees makes, must not be received here, where gloo ends the process if it is longer.
    """

    def __init__(self, steps: Sequence[Step], channel: Channel, digest: int) -> None:
        self._rounds = [(t, list(own)) for t, own in groupby(steps, lambda step: step.round)]
        self._channel, self._mark = channel, digest & _TAGS
        self._next = self._posted = 0  # of the rounds: to be sent, and to be received
        self._leaving: deque[tuple[Step, Pending]] = deque()
        self._arriving: deque[tuple[Step, Pending]] = deque()
        self.bytes_sent = 0

    def begin(self) -> None:
        """Issue what waits for nothing."""
        for t, steps in self._rounds:
            if t >= IN_FLIGHT or _behind(steps) >= 0:
                break
            self._issue(steps)

    def finish(self, limit: float) -> None:
        """Issue the rest, and wait for all: at most ``limit`` seconds for each; 0: no limit.

        Raises:
            BrokenChannelError: a message did not arrive or leave.
        """
        for t, steps in self._rounds[self._next :]:
            if self._channel.matches_tags:
                self._receive_until(self._next + IN_FLIGHT)
            self._wait_until(self._arriving, max(t - IN_FLIGHT, _behind(steps)), limit)
            self._wait_until(self._leaving, t - IN_FLIGHT, limit)
            self._issue(steps)
        last = self._rounds[-1][0] if self._rounds else 0
        self._wait_until(self._arriving, last, limit)
        self._wait_until(self._leaving, last, limit)

    def _issue(self, steps: Sequence[Step]) -> None:
        """Post what a round sends, and what it receives unless that has been posted."""
        self._receive_until(self._next + 1, [step for step in steps if step.kind in _SEND])
        self._next += 1

    def _receive_until(self, end: int, sends: Sequence[Step] = ()) -> None:
        rounds = self._rounds[self._posted : end]
        self._posted = max(self._posted, end)
        receives = [s for _, steps in rounds for s in steps if s.kind in _RECEIVE]
        steps = [*receives, *sends]
        messages = [
            Message(s.peer, s.tag ^ self._mark, self.prepare(s), s.kind in _RECEIVE) for s in steps
        ]
        try:
            posted = self._channel.post(messages)
        except BrokenChannelError as error:
            refused = error.peer, error.receives
            found = (s for s in steps if (s.peer, s.kind in _RECEIVE) == refused)
            step = next(found, steps[0])
            error.chunk = step.expert, step.chunk
            raise
        for step, pending in zip(steps, posted, strict=True):
            if pending.message.receives:
                self._arriving.append((step, pending))
            else:
                self._leaving.append((step, pending))
                self.bytes_sent += pending.message.tensor.nbytes

    def _wait_until(self, pending: deque[tuple[Step, Pending]], last: int, limit: float) -> None:
        """Wait for the messages of rounds up to ``last``."""
        while pending and pending[0][0].round <= last:
            step, message = pending.popleft()
            try:
                message.wait(limit)
            except BrokenChannelError as error:
                error.chunk = step.expert, step.chunk
                raise
            if message.message.receives:
                self.arrived(step, message.message.tensor)

    @abstractmethod
    def prepare(self, step: Step) -> torch.Tensor:
        """Return the dense tensor that a step sends or receives."""

    @abstractmethod
    def arrived(self, step: Step, tensor: torch.Tensor) -> None:
        """Take note of a message that has arrived."""


class Transfer(Movement):
    """A transfer: main weights to slots.

    Args:
        steps, channel, digest: as for `Movement`.
        slots: by segment, uint8 ``[S, bytes]`` of the call's bank.
        rows: finds main weights, uint8.
        on_slot: called once a slot is complete.

    Attributes:
        missing: messages that it has yet to receive, by slot; complete slots are not in it.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        channel: Channel,
        digest: int,
        slots: Sequence[torch.Tensor],
        rows: Rows,
        on_slot: Callable[[], None],
    ) -> None:
        super().__init__(steps, channel, digest)
        self._slots, self._rows, self._on_slot = slots, rows, on_slot
        self.missing = Counter(step.place for step in steps if step.kind is _Kind.RECEIVE)

    def prepare(self, step: Step) -> torch.Tensor:
        """Return bytes of main weights or of a slot."""
        if step.kind is _Kind.SEND_MAIN:
            whole = self._rows(step.segment, step.place)
        else:
            whole = self._slots[step.segment][step.place]
        return whole.narrow(0, step.offset, step.bytes)

    def arrived(self, step: Step, tensor: torch.Tensor) -> None:
        """Count down what a slot lacks."""
        self.missing[step.place] -= 1
        if self.missing[step.place] == 0:
            del self.missing[step.place]
            self._on_slot()


class Reduction(Movement):
    """A reduction: slot gradients to main gradients.

    Rule: a sum is r1 + r2 + ... + rn in the order of the replicas' ranks and in fp32, whichever of
    them arrives first, and is rounded once, when it is added to the main gradient. So the parts of
    a sum are kept until all are there.

    Args:
        steps, channel, digest: as for `Movement`.
        slots: by segment with gradients, ``[S, elements]`` of the call's bank.
        rows: finds main gradients.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        channel: Channel,
        digest: int,
        slots: Sequence[torch.Tensor],
        rows: Rows,
    ) -> None:
        super().__init__(steps, channel, digest)
        self._slots, self._rows = slots, rows
        self._parts: dict[Part, dict[int, torch.Tensor]] = defaultdict(dict)
        self._missing: dict[Part, int] = defaultdict(int)
        for step in steps:
            part = step.gate, step.segment, step.offset
            if step.kind is _Kind.KEEP_GRAD:
                self._parts[part][step.replica] = self._slot(step)
            elif step.kind is _Kind.ADD_GRAD:
                self._missing[part] += 1

    def _slot(self, step: Step) -> torch.Tensor:
        slot = self._slots[step.segment][step.place]
        size = slot.element_size()
        return slot.narrow(0, step.offset // size, step.bytes // size)

    def _add_to_main(self, step: Step, found: torch.Tensor) -> None:
        main = self._rows(step.segment, step.place)
        size = self._slots[step.segment].element_size()
        own = main.narrow(0, step.offset // size, len(found))
        if own.dtype is torch.float32:
            own.add_(found)
        else:
            own.copy_(own.float().add_(found))

    def _sum(self, part: Part) -> torch.Tensor:
        parts = self._parts.pop(part)
        first, *others = (parts[replica] for replica in sorted(parts))
        found = first.to(torch.float32, copy=True)
        for other in others:
            found.add_(other)
        return found

    def prepare(self, step: Step) -> torch.Tensor:
        """Return part of a slot's gradient, a sum, or memory for either."""
        part = step.gate, step.segment, step.offset
        if step.kind is _Kind.SEND_GRAD:
            return _bytes(self._slot(step))
        if step.kind is _Kind.SEND_SUM:
            return _bytes(self._sum(part))
        slot = self._slots[step.segment]
        count = step.bytes // slot.element_size()
        dtype = torch.float32 if step.kind is _Kind.ADD_SUM else slot.dtype
        return _bytes(torch.empty(count, dtype=dtype, device=slot.device))

    def arrived(self, step: Step, tensor: torch.Tensor) -> None:
        """Add what has arrived once it is complete."""
        if step.kind is _Kind.ADD_SUM:
            self._add_to_main(step, tensor.view(torch.float32))
            return
        part = step.gate, step.segment, step.offset
        self._parts[part][step.replica] = tensor.view(self._slots[step.segment].dtype)
        self._missing[part] -= 1
        if self._missing[part] == 0 and step.place >= 0:  # this rank is the home
            self._add_to_main(step, self._sum(part))


def _behind(steps: Sequence[Step]) -> int:
    """Return the last round that brings what these steps send on; -1: none."""
    return max((step.behind for step in steps), default=-1)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)
