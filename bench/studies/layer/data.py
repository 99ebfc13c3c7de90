"""What all rows of ``layer`` share: routing, weights, tokens, and the expected results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist

from studies.layer import LayerSettings, Routing
from studies.moe import Passed
from studies.workloads import route_tokens
from ultraep_comm.bench.measure import Transfer
from ultraep_comm.plan.plan import Plan

ROWS = ("plain", "replicated", "balanced")  # the last one is the ceiling
_TOLERANCE = 1e-4  # of the largest value: sums of fp32 products in different orders
_PERIOD = 1021  # epochs after which weights repeat
Tensor = torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What one step of a row left on this rank.

    Attributes:
        phases_ns: time of each of the row's phases.
        passed: the results.
        plan: None: without replicas.
    """

    phases_ns: Sequence[int]
    passed: Passed
    plan: Plan | None


class LayerRow(Transfer, Protocol):
    """A layer with one kind of routing."""

    found: list[Figures]  # of each step so far


class LayerData:
    """Weights, tokens and the expected results.

    Every rank has all experts' weights, so that it can check slots and results alone.

    Attributes:
        mains: this rank's experts.
        weights: their weights ``[M, *shape]``, "w13" (gate, then up) and "w2".
        grads: of the same shapes, where a step adds gradients.
        tokens: ``[T, H]``.
        out_grad: ``[T, H]``, the gradient of the result.
        probs: ``[T, k]``.
        routing: of the steps that follow.
        ids: of the present step, by row.
        slots, slot_grads: of the group that serves the row ``replicated``, by the same names.
    """

    def __init__(
        self,
        settings: LayerSettings,
        rank: int,
        mains: Sequence[int],
        weights: dict[str, Tensor],
    ) -> None:
        """Draw weights and tokens."""
        self.settings, self.routing, self._rank = settings, settings.routings[0], rank
        generator = torch.Generator().manual_seed(settings.seed)
        self._base = {
            name: torch.randn((settings.experts, *shape), generator=generator) / shape[1] ** 0.5
            for name, shape in settings.shapes.items()
        }
        self.mains, self.weights = list(mains), weights
        self.grads = {name: torch.zeros_like(w) for name, w in weights.items()}
        own = torch.Generator().manual_seed(settings.seed * 1000 + rank)
        shape = (settings.tokens, settings.hidden)
        self.tokens = torch.randn(shape, generator=own)
        self.out_grad = torch.randn(shape, generator=own)
        self.probs = torch.rand((settings.tokens, settings.topk), generator=own).softmax(dim=1)
        self.slots: Mapping[str, Tensor] = {}
        self.slot_grads: Mapping[str, Tensor] = {}
        self.ids: dict[str, Tensor] = {}
        self._epoch = 0

    def weights_of(self, name: str, expert: int) -> Tensor:
        """Return an expert's weights in this epoch."""
        base: Tensor = self._base[name][expert]
        return base * (1 + self._epoch % _PERIOD / 4096)

    def fill(self, payload: object, epoch: int) -> None:
        """Change the weights as an optimizer does, clear gradients, and fill slots with NaN."""
        self._epoch = epoch
        drawn = draw_ids(self.settings, self.routing, (epoch - 1) // len(ROWS), self._rank)
        balanced = balanced_ids(self.settings, self._rank)
        self.ids = {"plain": drawn, "replicated": drawn, "balanced": balanced}
        for name, stacked in self.weights.items():
            for i, expert in enumerate(self.mains):
                stacked[i].copy_(self.weights_of(name, expert))
            self.grads[name].zero_()
        for slots in self.slots.values():
            slots.fill_(torch.nan)

    def count_wrong(self, row: str, found: Figures) -> int:
        """Return the wrong values of one step, against a plain computation for the same tokens.

        Collective.
        """
        ids, passed = self.ids[row], found.passed
        tokens = self.tokens.clone().requires_grad_()
        total = torch.zeros_like(self.tokens)
        grads = {name: torch.zeros_like(base) for name, base in self._base.items()}
        for expert in np.unique(ids.numpy()).tolist():
            weights = {n: self.weights_of(n, expert).requires_grad_() for n in self._base}
            shares = (self.probs * (ids == expert)).sum(1)
            rows = (ids == expert).any(1).nonzero().squeeze(1)
            gate, up = (tokens[rows] @ weights["w13"].T).chunk(2, dim=1)
            made = (torch.nn.functional.silu(gate) * up) @ weights["w2"].T
            made = made * shares[rows].unsqueeze(1)
            made.backward(self.out_grad[rows])
            total.index_add_(0, rows, made.detach())
            for name, w in weights.items():
                assert w.grad is not None
                grads[name][expert] = w.grad
        assert tokens.grad is not None
        wrong = _count_far(passed.out, total) + _count_far(passed.tokens_grad, tokens.grad)
        for name, grad in grads.items():
            dist.all_reduce(grad)
            wrong += _count_far(self.grads[name], grad[self.mains])
        return wrong + self._count_wrong_slots(found.plan)

    def _count_wrong_slots(self, plan: Plan | None) -> int:
        """Return the wrong values of slots, compared bitwise, and of their cleared gradients."""
        wrong = sum(int(grad.count_nonzero()) for grad in self.slot_grads.values())
        if plan is None:
            return wrong
        for slot, expert in enumerate(plan.slot_expert[self._rank].tolist()):
            for name, slots in self.slots.items():
                if expert >= 0:
                    wrong += int((slots[slot] != self.weights_of(name, expert)).sum())
                else:
                    wrong += int((~slots[slot].isnan()).sum())
        return wrong


def _count_far(found: Tensor, wanted: Tensor) -> int:
    far = (found - wanted).abs() > _TOLERANCE * wanted.abs().max()
    return int((far | found.isnan()).sum())


def draw_ids(settings: LayerSettings, routing: Routing, iteration: int, rank: int) -> Tensor:
    """Return int64 ids ``[T, k]``: of the workload, alike on all ranks, or drawn independently.

    A token may draw an expert twice.
    """
    if routing.workload:
        ids = route_tokens(
            routing.workload,
            num_experts=settings.experts,
            topk=settings.topk,
            num_tokens=settings.tokens,
            step=iteration,
        )
        return torch.from_numpy(ids)
    rng = np.random.default_rng([settings.seed, iteration, rank])
    shape = (settings.tokens, settings.topk)
    return torch.from_numpy(rng.choice(settings.experts, size=shape, p=routing.shares))


def balanced_ids(settings: LayerSettings, rank: int) -> Tensor:
    """Return int64 ids ``[T, k]`` that give all experts the same number of tokens, to within 1."""
    first = rank * settings.tokens * settings.topk
    ids = torch.arange(first, first + settings.tokens * settings.topk) % settings.experts
    return ids.view(settings.tokens, settings.topk)
