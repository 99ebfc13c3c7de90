"""What the rows of ``layer`` share: routing, weights, tokens, and the expected results."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from studies.layer import LayerSettings, Routing
from studies.workloads import route_tokens
from ultraep_comm.group.group import Group
from ultraep_comm.plan.plan import Plan

ROWS = ("plain", "replicated", "balanced")  # the last one is the ceiling
_TOLERANCE = 1e-4  # of the largest value: sums of fp32 products in different orders
_PERIOD = 1021  # epochs after which weights repeat
Tensor = torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What one step of a row left on this rank.

    Attributes:
        phases_ns: time in our calls, of each of `watch.PHASES`.
        compute_ns: CPU time of this thread.
        rows: that this rank's experts computed.
        out, tokens_grad: ``[T, H]``, of the forward and of the backward pass.
        plan: None: without replicas.
    """

    phases_ns: list[int]
    compute_ns: int
    rows: int
    out: Tensor
    tokens_grad: Tensor
    plan: Plan | None


class LayerData:
    """Weights, tokens and the expected results.

    Every rank has all experts' weights, so that it can check slots and results alone.

    Attributes:
        weights: of this rank's experts ``[M, *shape]``, "w13" (gate, then up) and "w2".
        tokens: ``[T, H]``.
        out_grad: ``[T, H]``, the gradient of the result.
        probs: ``[T, k]``.
        routing: of the steps that follow.
        ids: of the present step, by row.
    """

    def __init__(self, settings: LayerSettings, group: Group) -> None:
        """Draw weights and tokens."""
        self.settings, self.routing, self._group = settings, settings.routings[0], group
        generator = torch.Generator().manual_seed(settings.seed)
        self._base = {
            name: torch.randn((settings.experts, *shape), generator=generator) / shape[0] ** 0.5
            for name, shape in settings.shapes.items()
        }
        self.weights = {n: torch.nn.Parameter(w) for n, w in group.empty_weights().items()}
        for weight in self.weights.values():
            weight.grad = torch.zeros_like(weight)
        self._mains = group.topology.local_experts(group.rank).tolist()
        own = torch.Generator().manual_seed(settings.seed * 1000 + group.rank)
        shape = (settings.tokens, settings.hidden)
        self.tokens = torch.randn(shape, generator=own)
        self.out_grad = torch.randn(shape, generator=own)
        self.probs = torch.rand((settings.tokens, settings.topk), generator=own).softmax(dim=1)
        self.ids: dict[str, Tensor] = {}
        self._epoch = 0

    def weights_of(self, name: str, expert: int) -> Tensor:
        """Return an expert's weights in this epoch."""
        base: Tensor = self._base[name][expert]
        return base * (1 + self._epoch % _PERIOD / 4096)

    def fill(self, payload: object, epoch: int) -> None:
        """Change the weights as an optimizer does, clear gradients, and fill slots with NaN."""
        self._epoch = epoch
        drawn = draw_ids(self.settings, self.routing, (epoch - 1) // len(ROWS), self._group.rank)
        balanced = balanced_ids(self.settings, self._group.rank)
        self.ids = {"plain": drawn, "replicated": drawn, "balanced": balanced}
        for name, weight in self.weights.items():
            for main, expert in zip(weight.data, self._mains, strict=True):
                main.copy_(self.weights_of(name, expert))
            assert weight.grad is not None
            weight.grad.zero_()
        for slots in self._group.slots.values():
            slots.fill_(torch.nan)

    def count_wrong(self, row: str, found: Figures) -> int:
        """Return the wrong values of one step, against a plain computation for the same tokens.

        Collective.
        """
        ids = self.ids[row]
        tokens = self.tokens.clone().requires_grad_()
        total = torch.zeros_like(self.tokens)
        grads = {name: torch.zeros_like(base) for name, base in self._base.items()}
        for expert in np.unique(ids.numpy()).tolist():
            weights = {n: self.weights_of(n, expert).requires_grad_() for n in self._base}
            shares = (self.probs * (ids == expert)).sum(1)
            rows = (ids == expert).any(1).nonzero().squeeze(1)
            gate, up = (tokens[rows] @ weights["w13"]).chunk(2, dim=1)
            made = (torch.nn.functional.silu(gate) * up) @ weights["w2"]
            made = made * shares[rows].unsqueeze(1)
            made.backward(self.out_grad[rows])
            total.index_add_(0, rows, made.detach())
            for name, w in weights.items():
                assert w.grad is not None
                grads[name][expert] = w.grad
        assert tokens.grad is not None
        wrong = _count_far(found.out, total) + _count_far(found.tokens_grad, tokens.grad)
        for name, grad in grads.items():
            dist.all_reduce(grad)
            ours = self.weights[name].grad
            assert ours is not None
            wrong += _count_far(ours, grad[self._mains])
        return wrong + self._count_wrong_slots(found.plan)

    def _count_wrong_slots(self, plan: Plan | None) -> int:
        """Return the wrong values of slots, compared bitwise, and of their cleared gradients."""
        wrong = sum(int(grad.count_nonzero()) for grad in self._group.slot_grads.values())
        if plan is None:
            return wrong
        for slot, expert in enumerate(plan.slot_expert[self._group.rank].tolist()):
            for name, slots in self._group.slots.items():
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
