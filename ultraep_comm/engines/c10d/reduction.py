"""Reduction: slot gradients to main gradients."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch

from ultraep_comm import _core
from ultraep_comm.engines.c10d.channel import Channel
from ultraep_comm.engines.c10d.movement import Movement, Step

_Kind = _core.C10dStep
Part = tuple[int, int, int]  # gate, segment, offset


class Reduction(Movement):
    """The messages and sums of one reduction on one rank.

    Rule: a sum is r1 + r2 + ... + rn in the order of the replicas' ranks and in fp32, whichever of
    them arrives first, and is rounded once, when it is added to the main gradient. So the parts of
    a sum are kept until all are there.

    Args:
        steps, channel, digest: as for `Movement`.
        slots: by segment with gradients, ``[S, elements]`` of the call's bank.
        main: returns a main gradient, dense, given the segment's and the main's index.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        channel: Channel,
        digest: int,
        slots: Sequence[torch.Tensor],
        main: Callable[[int, int], torch.Tensor],
    ) -> None:
        super().__init__(steps, channel, digest)
        self._slots, self._main = slots, main
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
        main = self._main(step.segment, step.place)
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


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)
