"""ReplicatedExperts: a layer's experts on one rank, main instances and replicas."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

import ultraep_comm as uec
from ultraep_comm.errors import InvalidArgumentError
from ultraep_comm.group.group import session_of
from ultraep_comm.nn import traced
from ultraep_comm.nn.replication import Replication
from ultraep_comm.nn.weights import check_trained
from ultraep_comm.weights.segments import Weights, plain_mapping

Tensor = torch.Tensor
Experts = Callable[..., Tensor]  # (x, weights, slots, *args) -> y


class ReplicatedExperts(torch.nn.Module):
    """Runs a function over this rank's main instances and a plan's replicas.

    The forward pass saves the plan and replicates its experts; the backward pass restores the
    replicas, reduces their gradients, and returns complete gradients of the main weights. All of it
    is collective: every rank runs the same layers and microbatches in the same order. Layers whose
    experts have the same shape can share a group and its slots; they run one after the other. With
    plans of a bank for each layer, what the forward pass has filled is still there in the backward
    pass; invalidate the banks after each optimizer step.

    The input is already dispatched, so nothing overlaps the transfers and the reduction. A layer
    that dispatches by itself hides them: see :class:`Replication`, of which this is the short form.

    Without gradients nothing is saved. If a graph is dropped without a backward pass, its plan is
    released; so is the plan of a graph that torch.utils.checkpoint builds only to recompute.

    Copies (copy.deepcopy, AveragedModel) share the group.

    Attributes:
        weights: the main weights, a ParameterDict.
    """

    def __init__(
        self,
        group: uec.Group,
        experts: Experts,
        weights: Mapping[str, torch.nn.Parameter],
        *,
        layer: int = 0,
        mode: str = "auto",
        backward_segments: Sequence[str] | None = None,
    ) -> None:
        """Create the module.

        Args:
            group: created with ``grads=`` for the weights that need gradients.
            experts: ``experts(x, weights, slots, *args) -> y``, differentiable in the three, with
                ``weights`` as ``{name: [M, *shape]}``, ``slots`` as ``{name: [S, *shape]}``, both
                in the order of the group's segments.
            weights: ``{name: [M, *shape]}``, for all segments of the group.
            layer: the layer's number, the same on every rank.
            mode: of the transfers.
            backward_segments: segments that the backward pass needs; None: all.

        Raises:
            InvalidArgumentError: the weights are not the group's segments.
            UnsupportedError: weights with slot gradients are neither float32 nor bfloat16.
        """
        super().__init__()
        _check(weights, group)
        self.weights = torch.nn.ParameterDict(weights)
        self.experts = experts
        self.layer = layer
        self._mode = mode
        self._segments = backward_segments
        self._calls = Replication(
            group, layer=layer, mode=mode, backward_segments=backward_segments
        )

    @property
    def group(self) -> uec.Group:
        """Return the group. Set it after loading: it is not saved with the module."""
        return self._calls.group

    @group.setter
    def group(self, group: uec.Group) -> None:
        _check(dict(self.weights.items()), group)
        self._calls.group = group

    def forward(
        self, x: Tensor, plan: uec.Plan, *args: Any, microbatch: int | None = None
    ) -> Tensor:
        """Run the experts.

        Args:
            x: the tokens of this rank's instances, in whatever order ``experts`` expects.
            plan: the plan by which the tokens were dispatched.
            args: more arguments of ``experts``, such as the number of tokens of each instance.
            microbatch: as for ``group.save``.

        Returns:
            What ``experts`` returns.
        """
        group = self.group
        weights = {name: self.weights[name] for name in group.segments}  # in the order of slots
        if torch.compiler.is_dynamo_compiling():
            return traced.run_experts(
                x,
                plan,
                args,
                experts=self.experts,
                weights=weights,
                group=group,
                mode=self._mode,
                segments=self._segments,
                layer=self.layer,
            )
        run = self._calls.begin(weights, plan=plan, microbatch=microbatch)
        x, weights, slots = run.before_experts(run.before_dispatch(x))
        return run.after_experts(self.experts(x, weights, slots, *args))


def _check(weights: Weights, group: uec.Group) -> None:
    session_of(group)
    weights = plain_mapping(weights)
    is_mapping = isinstance(weights, Mapping)
    found = {n: type(w).__name__ for n, w in weights.items()} if is_mapping else weights
    if (
        not is_mapping
        or set(weights) != set(group.segments)
        or not all(isinstance(weight, Tensor) for weight in weights.values())
    ):
        raise InvalidArgumentError(
            f"rank {group.rank}: ReplicatedExperts was given weights {found}; expected a Parameter"
            f" for each of the group's segments, {sorted(group.segments)}"
        )
    check_trained({name: weights[name] for name in group.slot_grads}, group.rank)
