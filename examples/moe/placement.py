"""Placement of a layer's experts: at home only, or also in slots of other ranks.

The forward pass runs the left column downwards, the backward pass the right column upwards:

    before_dispatch                     wait for the reduction of slot gradients
    dispatch                            exchange of the tokens' gradients
    before_experts: wait for replicas   start to reduce slot gradients
    experts                             the experts' gradients, from restored replicas
    after_experts                       wait for replicas
    combine                             exchange of the results' gradients
    after_combine                       start to replicate again

Each layer has a bank of slots. When the backward pass reaches a layer, its replicas are still
there, and to restore them moves nothing; with one bank for all layers, the slots would hold the
replicas of a later call. The slot gradients, which all layers share, have to be reduced before
another layer's backward pass accumulates into them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from experts import Instance

import ultraep_comm as uec
from ultraep_comm.nn import Replication

Tensors = Mapping[str, torch.Tensor]


class AtHome:
    """Every expert at home only; the four hooks return their input.

    Attributes:
        physical_ids: the instance of each of ``topk_ids``.
        instances: this rank's: main instances, then slots.
        instances_per_rank: P of physical ids ``rank * P + index``.
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
            local_experts = torch.from_numpy(topology.local_experts(rank)).long()
            instance_of[local_experts] = rank * topology.instances_per_rank + torch.arange(
                len(local_experts)
            )
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
    """Hot experts also in slots of other ranks, for one forward and backward pass of a layer."""

    def __init__(
        self,
        topk_ids: torch.Tensor,
        weights: Tensors,
        grads: Tensors,
        layer: int,
        *,
        layers: Sequence[Replication],
    ) -> None:
        self._run = layers[layer].begin(weights, topk_ids, main_grads=grads)
        assert self._run.topk_ids is not None
        self.physical_ids = self._run.topk_ids
        group = layers[layer].group
        bank = group.banks[layer]
        self.instances = [*_instances(weights, grads), *_instances(bank.slots, bank.slot_grads)]
        self.instances_per_rank = group.topology.instances_per_rank

    def before_dispatch(self, tokens: torch.Tensor) -> torch.Tensor:
        """Backward: wait for the reduction of slot gradients."""
        return self._run.before_dispatch(tokens)

    def before_experts(self, rows: torch.Tensor) -> torch.Tensor:
        """Forward: wait for the replicas. Backward: start to reduce slot gradients."""
        return self._run.before_experts(rows)[0]

    def after_experts(self, rows: torch.Tensor) -> torch.Tensor:
        """Backward: wait for the restored replicas."""
        return self._run.after_experts(rows)

    def after_combine(self, tokens: torch.Tensor) -> torch.Tensor:
        """Backward: start to restore the replicas, during the exchange of gradients."""
        return self._run.after_combine(tokens)


def replicate_layers(group: uec.Group) -> list[Replication]:
    """Return the calls of as many layers as the group has banks."""
    return [Replication(group, layer=i, bank=i, reuse=True) for i in range(len(group.banks))]


def _instances(weights: Tensors, grads: Tensors) -> list[Instance]:
    stacked = (weights["w13"], weights["w2"], grads["w13"], grads["w2"])
    return [Instance(*tensors) for tensors in zip(*stacked, strict=True)]
