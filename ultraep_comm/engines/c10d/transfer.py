"""Transfer: main weights to slots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch

from ultraep_comm import _core
from ultraep_comm.engines.c10d.channel import Channel
from ultraep_comm.engines.c10d.movement import Movement, Step

_Kind = _core.C10dStep


class Transfer(Movement):
    """The messages of one transfer on one rank.

    Args:
        steps, channel, digest: as for `Movement`.
        slots: by segment, uint8 ``[S, bytes]`` of the call's bank.
        main: returns the bytes of a main's segment, given the segment's and the main's index.
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
        main: Callable[[int, int], torch.Tensor],
        on_slot: Callable[[], None],
    ) -> None:
        super().__init__(steps, channel, digest)
        self._slots, self._main, self._on_slot = slots, main, on_slot
        self.missing = Counter(step.place for step in steps if step.kind is _Kind.RECEIVE)

    def prepare(self, step: Step) -> torch.Tensor:
        """Return bytes of a main or of a slot."""
        if step.kind is _Kind.SEND_MAIN:
            whole = self._main(step.segment, step.place)
        else:
            whole = self._slots[step.segment][step.place]
        return whole.narrow(0, step.offset, step.bytes)

    def arrived(self, step: Step, tensor: torch.Tensor) -> None:
        """Count down what a slot lacks."""
        self.missing[step.place] -= 1
        if self.missing[step.place] == 0:
            del self.missing[step.place]
            self._on_slot()
