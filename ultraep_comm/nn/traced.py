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
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ultraep_comm.calls import traced

F = TypeVar("F", bound=Callable[..., Any])
Tensor = torch.Tensor
Grads = tuple[Any, ...]


def breaks_graph(function: F) -> F:
    """Run a layer's calls outside of the graphs of torch.compile; ``fullgraph=True`` raises."""
    why = "a layer with replicas calls its peers by what a pass routes; leave out fullgraph=True"
    known = inspect.signature(torch.compiler.disable).parameters  # the oldest torch has no reason
    given: Any = {"reason": why} if "reason" in known else {}
    disabled: F = torch.compiler.disable(function, **given)  # type: ignore[no-untyped-call]
    return disabled


class _Hook(torch.autograd.Function):
    """Identity on tensors; ``at_backward(how, saved, grads)`` returns their gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        at_backward: Callable[..., Grads],
        how: tuple[Any, ...],
        num_outputs: int,
        *tensors: Any,
    ) -> tuple[Tensor, ...]:
        ctx.at_backward, ctx.how, ctx.num_saved = at_backward, how, len(tensors) - num_outputs
        ctx.save_for_backward(*tensors[num_outputs:])
        return tuple(tensor.view_as(tensor) for tensor in tensors[:num_outputs])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Grads:
        found = ctx.at_backward(ctx.how, ctx.saved_tensors, grads)
        return None, None, None, *found, *(None for _ in range(ctx.num_saved))


def hook(
    at_backward: Callable[..., Grads], how: tuple[Any, ...], tensors: Grads, saved: Grads
) -> Any:
    """Return the tensors; ``at_backward(how, saved, grads)`` maps their gradients."""
    return _Hook.apply(at_backward, how, len(tensors), *tensors, *saved)  # type: ignore[no-untyped-call]


def restore_replicas(how: tuple[Any, ...], saved: Grads, grads: Grads) -> Grads:
    """Fill the slots again; return the gradients of the experts' output and input."""
    group, where, mode, segments, layer, names = how
    slot_expert, home, *weights = saved
    given: dict[str, Any] = dict(zip(names, weights, strict=True))
    plan = traced.plan_of_fields(slot_expert, home, **where)
    grad = grads[0].clone()
    traced.replicate_experts(given, plan, group, False, mode, segments, layer=layer, order=grad)
    return grad, None


def reduce_grads(how: tuple[Any, ...], saved: Grads, grads: Grads) -> Grads:
    """Reduce; return the gradients of the experts' input, of main weights and of slots."""
    group, where, names = how
    grad_x = grads[0].clone()
    own = {name: grads[1 + i].clone() for i, name in enumerate(names)}
    for i, name in enumerate(names):
        slot_grads = traced.bank_of(where["bank"], group).slot_grads[name]
        slot_grads.copy_(grads[1 + len(names) + i])
    plan = traced.plan_of_fields(*saved, **where)
    traced.reduce_expert_grads(own, plan, group, False, "auto", True, order=grad_x)
    return grad_x, *own.values(), *(None for _ in names)
