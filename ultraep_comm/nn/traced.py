"""The hooks as torch.compile traces them: autograd saves the plan's tensors, not a handle.

The calls become operators (``ultraep_comm.ops``) in the graphs of the forward and the backward
pass. The reduction completes in place, so there is nothing to join.

Operators of a backward pass declare a write to the gradient that passes through: that keeps them in
the backward pass, before everything that uses this gradient. ``ORDER``, which the other operators
write to, cannot be used: a backward pass must not write to a tensor that was modified since its
forward pass.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

import ultraep_comm as uec
from ultraep_comm.calls import traced
from ultraep_comm.nn.hooks import find_trained

F = TypeVar("F", bound=Callable[..., Any])
Tensor = torch.Tensor
Tensors = dict[str, Tensor]


def breaks_graph(function: F) -> F:
    """Run a layer's calls outside of the graphs of torch.compile; ``fullgraph=True`` raises."""
    why = "a layer with replicas calls its peers by what a pass routes; leave out fullgraph=True"
    known = inspect.signature(torch.compiler.disable).parameters  # the oldest torch has no reason
    given: Any = {"reason": why} if "reason" in known else {}
    disabled: F = torch.compiler.disable(function, **given)  # type: ignore[no-untyped-call]
    return disabled


class _Restore(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, how: tuple[Any, ...], y: Tensor, _anchor: Tensor, *saved: Tensor
    ) -> Tensor:
        ctx.how = how
        ctx.save_for_backward(*saved)
        return y.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        group, where, mode, segments, layer, names = ctx.how
        slot_expert, home, *weights = ctx.saved_tensors
        given = dict(zip(names, weights, strict=True))
        plan = uec.Plan(slot_expert=slot_expert, home=home, **where)
        grad = grad.clone()
        how = (group, False, mode, segments)
        traced.replicate_experts(given, plan, *how, layer=layer, order=grad)
        return None, grad, *(None for _ in range(len(weights) + 3))


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        how: tuple[Any, ...],
        slot_expert: Tensor,
        home: Tensor,
        slot_quota: Tensor | None,
        home_quota: Tensor | None,
        x: Tensor,
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.how = how
        ctx.save_for_backward(slot_expert, home, slot_quota, home_quota)
        return tuple(tensor.view_as(tensor) for tensor in (x, *weights))

    @staticmethod
    def backward(ctx: Any, grad_x: Tensor, *grads: Tensor) -> tuple[Any, ...]:
        group, where, names = ctx.how
        slot_expert, home, slot_quota, home_quota = ctx.saved_tensors
        own = {name: grads[i].clone() for i, name in enumerate(names)}
        for i, name in enumerate(names):
            traced.bank_of(where["bank"], group).slot_grads[name].copy_(grads[len(names) + i])
        plan = uec.Plan(
            slot_expert=slot_expert,
            home=home,
            slot_quota=slot_quota,
            home_quota=home_quota,
            **where,
        )
        grad_x = grad_x.clone()
        traced.reduce_expert_grads(own, plan, group, False, "auto", True, order=grad_x)
        return *(None for _ in range(5)), grad_x, *own.values(), *(None for _ in names)


def run_experts(
    x: Tensor,
    plan: uec.Plan,
    args: Sequence[Any],
    *,
    experts: Callable[..., Tensor],
    weights: Tensors,
    group: uec.Group,
    mode: str,
    segments: Sequence[str] | None,
    layer: int,
) -> Tensor:
    """Trace :class:`ReplicatedExperts`."""
    where = {"bank": plan.bank, "reuse": plan.reuse}
    slots = dict(traced.bank_of(plan.bank, group).slots)
    trained = find_trained(weights, group) if torch.is_grad_enabled() else []
    uec.replicate_experts(weights, plan, group=group, mode=mode, layer=layer)
    if not torch.is_grad_enabled():
        return experts(x, weights, slots, *args)
    names = [name for name in group.slot_grads if name in trained]
    local = dict(weights)
    if names:
        tensors = (*(local[name] for name in names), *(slots[name] for name in names))
        fields = (plan.slot_expert, plan.home, plan.slot_quota, plan.home_quota)
        x, *rest = _Start.apply((group, where, names), *fields, x, *tensors)  # type: ignore[no-untyped-call]
        local.update(zip(names, rest[: len(names)], strict=True))
        slots.update(zip(names, rest[len(names) :], strict=True))
    restored = list(weights) if segments is None else list(segments)
    saved = (plan.slot_expert, plan.home, *(weights[name].detach() for name in restored))
    y = experts(x, local, slots, *args)
    how = (group, where, mode, segments, layer, restored)
    result: Tensor = _Restore.apply(how, y, x, *saved)  # type: ignore[no-untyped-call]
    return result
