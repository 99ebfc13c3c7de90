"""The MoE layer of ``layer``: tokens go by all-to-all through SwiGLU experts, and back.

There is no router: ids and probabilities are given, and have no gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_to_all_single_autograd as exchange
from torch.nn.functional import silu

from ultraep_comm.group.group import Group
from ultraep_comm.nn.instances import grouped_mm
from ultraep_comm.nn.replication import Replication
from ultraep_comm.plan.plan import Plan

Tensor = torch.Tensor
Back = Callable[[Tensor], Tensor]


class Layer:
    """The layer on this rank.

    Attributes:
        rows: that this rank's experts computed in the last pass.
        plan: of the last pass; None: it had no replicas.
    """

    rows = 0
    plan: Plan | None = None

    def __init__(self, group: Group, weights: Mapping[str, Tensor]) -> None:
        """Create the layer; ``weights``: "w13" ``[M, H, 2 I]``, gate and up, and "w2"."""
        self._group, self._weights = group, weights
        self._replication = Replication(group)
        assert dist.group.WORLD is not None
        self._world = dist.group.WORLD
        topology = group.topology
        self._main_ids = torch.empty(topology.num_experts, dtype=torch.int64)
        for rank in range(topology.num_ranks):
            mains = topology.local_experts(rank)
            first = rank * topology.instances_per_rank
            self._main_ids[mains] = torch.arange(first, first + len(mains))

    def forward(self, tokens: Tensor, topk_ids: Tensor, probs: Tensor, replicated: bool) -> Tensor:
        """Return the layer's output ``[T, H]``. Collective."""
        if not replicated:
            self.plan = None
            rows, back = self._dispatch(tokens, self._main_ids[topk_ids])
            return self._combine(back(self._experts(rows, self._weights, self._group.slots)), probs)
        run = self._replication.begin(self._weights, topk_ids)
        self.plan = run.plan
        assert run.topk_ids is not None
        rows, back = self._dispatch(run.before_dispatch(tokens), run.topk_ids)
        rows = self._experts(*run.before_experts(rows))
        return run.after_combine(self._combine(back(run.after_experts(rows)), probs))

    def _dispatch(self, tokens: Tensor, physical_ids: Tensor) -> tuple[Tensor, Back]:
        """Return rows by instance, and the way of the experts' output back to the choices."""
        topology = self._group.topology
        ranks, instances = topology.num_ranks, topology.instances_per_rank
        self._topk = physical_ids.shape[1]
        ids = physical_ids.flatten().long()
        order = ids.argsort(stable=True)
        sent = ids.bincount(minlength=ranks * instances).view(ranks, instances)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        sends, receives = sent.sum(1).tolist(), received.sum(1).tolist()
        rows = exchange(tokens[order // self._topk], receives, sends, self._world)
        instance = torch.arange(instances).repeat(ranks).repeat_interleave(received.flatten())
        by_instance = instance.argsort(stable=True)
        self._ends = received.sum(0).cumsum(0, dtype=torch.int32)
        self.rows = len(rows)

        def back(out: Tensor) -> Tensor:
            out = out[by_instance.argsort()]
            return exchange(out, sends, receives, self._world)[order.argsort()]

        return rows[by_instance], back

    def _experts(
        self, rows: Tensor, weights: Mapping[str, Tensor], slots: Mapping[str, Tensor]
    ) -> Tensor:
        # A rank with fewer mains than others has fewer instances; nothing goes to the last ids.
        ends = self._ends[: len(weights["w2"]) + len(slots["w2"])]
        gate, up = grouped_mm(rows, weights["w13"], slots["w13"], ends).chunk(2, 1)
        return grouped_mm(silu(gate) * up, weights["w2"], slots["w2"], ends)

    def _combine(self, choices: Tensor, probs: Tensor) -> Tensor:
        return (choices.view(-1, self._topk, choices.shape[1]) * probs.unsqueeze(2)).sum(1)
