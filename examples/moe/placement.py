"""Where a layer's experts are: at home only, or in slots of other ranks too.

A layer takes the left steps downwards in its forward pass; in the backward pass autograd goes up:

    before_dispatch                     wait until slot gradients are home
    dispatch                            exchange of the tokens' gradients
    before_experts: wait for replicas   start to reduce slot gradients
    experts                             the experts' gradients, from restored replicas
    after_experts                       wait for replicas
    combine                             exchange of the results' gradients
    after_combine                       start to replicate again

Slots belong to all layers. When the backward pass comes to a layer, they hold the replicas of some
later call, so that the layer's own have to be brought back before its experts read them. Then the
slots' gradients have to be home before another layer's backward pass adds its own there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from experts import Instance

import ultraep_comm as uec

Tensors = Mapping[str, torch.Tensor]


class _InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, action: Callable[[], None]) -> torch.Tensor:
        ctx.action = action
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.action()
        return gradients[0], None


def in_backward(x: torch.Tensor, action: Callable[[], None]) -> torch.Tensor:
    """Return ``x``; in the backward pass do ``action`` before its gradient goes on."""
    result: torch.Tensor = _InBackward.apply(x, action)
    return result


class AtHome:
    """Every expert at home and nowhere else; none of the steps around dispatch does anything.

    Attributes:
        physical_ids: as ``topk_ids``, the instances that tokens go to.
        instances: those of this rank: mains, then slots.
        instances_per_rank: what physical ids count with.
    """

    physical_ids: torch.Tensor
    instances: list[Instance]
    instances_per_rank: int

    def __init__(
        self,
        topk_ids: torch.Tensor,
        weights: Tensors,
        grads: Tensors,
        layer: int,
        *,
        group: uec.Group,
    ) -> None:
        del layer  # nothing here differs by layer
        topology = group.topology
        instance_of = torch.empty(topology.num_experts, dtype=topk_ids.dtype)
        for rank in range(topology.num_ranks):
            mains = torch.from_numpy(topology.mains(rank)).long()
            instance_of[mains] = rank * topology.instances_per_rank + torch.arange(len(mains))
        self.physical_ids = instance_of[topk_ids]
        self.instances = _instances(weights, grads)
        self.instances_per_rank = topology.instances_per_rank

    def before_dispatch(self, tokens: torch.Tensor) -> torch.Tensor:
        """Take the layer's tokens ``[T, H]``."""
        return tokens

    def before_experts(self, rows: torch.Tensor) -> torch.Tensor:
        """Take the rows ``[R, H]`` that this rank's experts compute."""
        return rows

    def after_experts(self, rows: torch.Tensor) -> torch.Tensor:
        """Take the experts' results ``[R, H]``."""
        return rows

    def after_combine(self, tokens: torch.Tensor) -> torch.Tensor:
        """Take the layer's results ``[T, H]``."""
        return tokens


class Replicated(AtHome):
    """Hot experts in slots of cool ranks, for one pass of one layer, forward and backward."""

    def __init__(
        self,
        topk_ids: torch.Tensor,
        weights: Tensors,
        grads: Tensors,
        layer: int,
        *,
        group: uec.Group,
        reduce: Callable[..., Any] = uec.reduce_expert_grads,
    ) -> None:
        self._group, self._weights, self._grads, self._reduce = group, weights, grads, reduce
        plan = uec.gather_and_plan(topk_ids, group=group)
        self._handle = group.save(plan, layer=layer)  # the reduction ends it
        self._transfer = self._replicate()
        self.physical_ids = uec.reroute(topk_ids, self._handle, group=group)
        self.instances = [*_instances(weights, grads), *_instances(group.slots, group.slot_grads)]
        self.instances_per_rank = group.topology.instances_per_rank
        self._reduction: Any = None

    def before_dispatch(self, tokens: torch.Tensor) -> torch.Tensor:
        """Backward: wait until the slots' gradients are home."""
        return in_backward(tokens, self._wait_reduced)

    def before_experts(self, rows: torch.Tensor) -> torch.Tensor:
        """Forward: wait for the replicas. Backward: send the slots' gradients home."""
        self._transfer.wait()
        return in_backward(rows, self._start_reducing)

    def after_experts(self, rows: torch.Tensor) -> torch.Tensor:
        """Backward: wait until the replicas are here again."""
        return in_backward(rows, self._wait_restored)

    def after_combine(self, tokens: torch.Tensor) -> torch.Tensor:
        """Backward: replicate again, behind the exchange of the results' gradients."""
        return in_backward(tokens, self._start_restoring)

    def _replicate(self) -> uec.Work:
        work = uec.replicate_experts(self._weights, self._handle, group=self._group, async_op=True)
        assert work is not None
        return work

    def _start_restoring(self) -> None:
        self._transfer = self._replicate()

    def _wait_restored(self) -> None:
        self._transfer.wait()

    def _start_reducing(self) -> None:
        self._reduction = self._reduce(self._grads, self._handle, group=self._group, async_op=True)

    def _wait_reduced(self) -> None:
        self._reduction.wait()


def _instances(weights: Tensors, grads: Tensors) -> list[Instance]:
    stacked = (weights["w13"], weights["w2"], grads["w13"], grads["w2"])
    return [Instance(*tensors) for tensors in zip(*stacked, strict=True)]
