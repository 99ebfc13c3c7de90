"""Gradients of all ranks of a loopback group: filled, reduced, and every bit compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from ranks import start_all, synchronize_all
from reference.reduce_oracle import reduced, same_bits

import ultraep_comm as uec


class RankGrads:
    """``main_grads`` with a dtype per segment, and the groups' slot gradients."""

    def __init__(self, groups: Sequence[uec.Group], dtypes: Mapping[str, torch.dtype]) -> None:
        self.groups = groups
        self.main_grads = [
            {name: self._main(group, name, dtypes[name]) for name in group.slot_grads}
            for group in groups
        ]
        self._before: list[list[dict[str, torch.Tensor]]] = []

    def _main(self, group: uec.Group, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Return zeros in the layout of a segment."""
        like = group.segments[name]
        segment = uec.Segment(like.shape, dtype, like.layout)
        count = group.num_local_experts
        storage = torch.zeros(count * segment.nbytes, dtype=torch.uint8, device=group.device)
        return segment.view(storage, count)

    def fill(self, seed: int) -> None:
        """Fill all with values of very different sizes, so that the order of adding matters."""
        draw = torch.Generator().manual_seed(seed)
        for own in self._all():
            for tensor in own.values():
                exponent = torch.randint(-20, 20, tensor.shape, generator=draw)
                tensor.copy_(torch.randn(tensor.shape, generator=draw) * 2.0**exponent)
        self.remember()

    def remember(self) -> None:
        """Take the present values as the input of the next call."""
        given = [{name: t.detach().cpu().clone() for name, t in own.items()} for own in self._all()]
        self._before = [given[: len(self.groups)], given[len(self.groups) :]]

    def _all(self) -> list[dict[str, torch.Tensor]]:
        return [*self.main_grads, *(group.slot_grads for group in self.groups)]

    def check(self, plan: uec.Plan, *, zero: bool = True) -> None:
        """Check main + (r1 + ... + rn), and that slots are cleared or unchanged."""
        main_grads, slots = self._before
        rows = plan.slot_expert.tolist()
        for group, own, before in zip(self.groups, self.main_grads, main_grads, strict=True):
            for index, expert in enumerate(group.topology.local_experts(group.rank).tolist()):
                held = [
                    (r, s) for r, row in enumerate(rows) for s, e in enumerate(row) if e == expert
                ]
                for name, main in own.items():
                    wanted = reduced(before[name][index], [slots[r][name][s] for r, s in held])
                    assert same_bits(main[index].cpu(), wanted), (name, expert, held)
        for group, row, before in zip(self.groups, rows, slots, strict=True):
            for name, tensor in group.slot_grads.items():
                for s, expert in enumerate(row):
                    if expert < 0:
                        assert same_bits(tensor[s].cpu(), before[name][s])
                    elif zero:
                        assert not tensor[s].any()

    def start(self, plan: uec.Plan, given: Sequence[Any] = (), **options: Any) -> list[uec.Work]:
        """Start every rank's call, with ``given`` in place of ``main_grads`` if it is not empty."""
        grads = given or self.main_grads
        return start_all(self.groups, grads, plan, call=uec.reduce_expert_grads, **options)

    def reduce(self, plan: uec.Plan, seed: int, **options: Any) -> None:
        """Fill, call, wait and check."""
        self.fill(seed)
        synchronize_all(self.start(plan, **options))
        self.check(plan.cpu(), zero=options.get("zero", True))
