"""ReplicatedExperts: a layer's experts on one rank, main instances and replicas."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

import ultraep_comm as uec
from ultraep_comm.calls.traced import bank_of, fields_of
from ultraep_comm.errors import InvalidWeightsError
from ultraep_comm.group.group import session_of
from ultraep_comm.nn import traced
from ultraep_comm.nn.hooks import find_trained
from ultraep_comm.nn.replication import Replication
from ultraep_comm.nn.weights import check_trained, local_weights
from ultraep_comm.weights.segments import Weights

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
            InvalidWeightsError: the weights are not the group's segments.
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
        # In the order of the group's segments, and so of its slots.
        weights = {name: self.weights[name] for name in self.group.segments}
        if torch.compiler.is_dynamo_compiling():
            return self._trace(x, plan, weights, args)
        run = self._calls.begin(weights, plan=plan, microbatch=microbatch)
        x, weights, slots = run.before_experts(run.before_dispatch(x))
        return run.after_experts(self.experts(x, weights, slots, *args))

    def _trace(
        self, x: Tensor, plan: uec.Plan, weights: dict[str, Tensor], args: Sequence[Any]
    ) -> Tensor:
        """Do the same in a compiled function."""
        group, mode = self.group, self._mode
        where = {"bank": plan.bank, "reuse": plan.reuse}
        local, slots = dict(weights), dict(bank_of(plan.bank, group).slots)
        trained = find_trained(weights, group) if torch.is_grad_enabled() else []
        uec.replicate_experts(weights, plan, group=group, mode=mode, layer=self.layer)
        if not torch.is_grad_enabled():
            return self.experts(x, weights, slots, *args)
        if names := [name for name in group.slot_grads if name in trained]:
            passed = (x, *(local[name] for name in names), *(slots[name] for name in names))
            fields = fields_of(plan)[:-1]
            x, *rest = traced.hook(traced.reduce_grads, (group, where, names), passed, fields)
            local.update(zip(names, rest[: len(names)], strict=True))
            slots.update(zip(names, rest[len(names) :], strict=True))
        segments = self._segments
        restored = list(weights) if segments is None else list(segments)
        saved = (plan.slot_expert, plan.home, *(weights[name].detach() for name in restored))
        how = (group, where, mode, segments, self.layer, restored)
        y = self.experts(x, local, slots, *args)
        # With the input, on which the output does not depend where a rank has no tokens.
        found: Tensor = traced.hook(traced.restore_replicas, how, (y, x), saved)[0]
        return found


def _check(weights: Weights, group: uec.Group) -> None:
    session_of(group)
    for name, weight in local_weights(weights, group).items():
        if not isinstance(weight, Tensor):
            raise InvalidWeightsError(
                f"rank {group.rank}: ReplicatedExperts was given {len(weight)} tensors for"
                f" {name!r}; expected one Parameter [M, *shape]"
            )
    check_trained({name: weights[name] for name in group.slot_grads}, group.rank)
