"""Identities on a layer's tensors whose backward passes make the layer's calls.

In the order of a forward pass::

    x, mains = join_reduction(x, pass_, mains)                  # on the layer's input
    x, mains, slots = start_reduction(x, pass_, mains, group.slots)   # on the experts' input
    y = restore_replicas(experts(x, mains, slots), pass_, anchor=x)   # on the experts' output

A backward pass meets them from the bottom: replica weights come back before the experts need them,
the gradient reduction starts when the experts are done, and it is joined before the gradient of the
layer's input leaves. Data decides the order: what a hook returns is what the next one gets.

Without ``mains`` and ``slots`` the hooks pass activations alone, for frameworks whose experts add
to gradients by themselves; the pass is then given ``main_grads``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.autograd.function import once_differentiable

import ultraep_comm as uec
from ultraep_comm.errors import InvalidArgumentError
from ultraep_comm.system import undocumented
from ultraep_comm.weights.binding import BoundGrads
from ultraep_comm.weights.segments import BoundWeights, Weights

Tensor = torch.Tensor
Tensors = Mapping[str, Tensor]
Grads = tuple[Tensor | None, ...]


@dataclass
class PassCalls:
    """The calls that a pass's hooks have under way, and whether one has restored replicas."""

    restoring: uec.Work | None = None
    reducing: uec.Work | None = None
    has_restored: bool = False


class ExpertPass:
    """One forward and backward pass of one layer's experts: what its hooks share.

    It ends its handle: by the reduction or, where nothing is reduced or the graph is dropped, by
    releasing it. A handle that was saved in a capture into a CUDA graph belongs to that graph, and
    is not released because the pass is dropped.

    Attributes:
        handle: of the plan that the forward pass runs by.
        weights: main weights, which replicas are restored from.
        main_grads: where the experts add the gradients of main weights, and replicas' are added;
            None: autograd passes them through :func:`start_reduction`.
        calls: of the hooks.
    """

    def __init__(
        self,
        handle: uec.PlanHandle,
        weights: Weights | BoundWeights | Tensor,
        *,
        main_grads: Weights | BoundGrads | None = None,
        mode: str = "auto",
        reduce_mode: str = "auto",
        segments: Sequence[str] | None = None,
    ) -> None:
        """Describe a pass.

        Args:
            handle: its last use is this pass's.
            weights: as for ``replicate_experts``; their addresses are asked for in the backward.
            main_grads: as for ``reduce_expert_grads``: ``{name: tensor [M, *shape] or sequence of
                M}``, or what ``group.bind_grads`` returned for them.
            mode: of the transfers.
            reduce_mode: of the reduction.
            segments: those that the backward pass needs; None: all.
        """
        self.handle = handle  # not the group: graphs hold passes, and errors of groups hold graphs
        self.weights = weights
        self.main_grads = main_grads
        self.mode = mode
        self.reduce_mode = reduce_mode
        self.segments = segments
        self.calls = PassCalls()
        weakref.finalize(self, handle.saved.let_go).atexit = False


# ---- what the backward pass calls ----------------------------------------------------------------


def _prefetch(run: ExpertPass, grads: Grads) -> Grads:
    run.calls.restoring = _replicate(run)
    return grads


def _restore(run: ExpertPass, grads: Grads) -> Grads:
    work, run.calls.restoring = run.calls.restoring or _replicate(run), None
    work.wait()
    return grads[0], None


def _replicate(run: ExpertPass) -> uec.Work:
    work = uec.replicate_experts(
        run.weights,
        run.handle,
        group=run.handle.group,
        async_op=True,
        mode=run.mode,
        segments=run.segments,
    )
    assert work is not None
    run.calls.has_restored = True
    return work


def _check_slots(run: ExpertPass, direction: str) -> None:
    """Raise InvalidArgumentError if the experts that ran last had another pass's replicas."""
    group, mine = run.handle.group, run.handle
    last = group.session.filled_by
    if last is None or _brings_the_same(last, mine):
        return
    found = "another plan"
    if isinstance(last, uec.PlanHandle):
        found = f"layer {last.layer}, microbatch {last.microbatch}"
    error = InvalidArgumentError(
        f"rank {group.rank}: the experts of layer {mine.layer}, microbatch {mine.microbatch}"
        f" had the replicas of {found} in their {direction} pass; passes that share a group's"
        " slots have to run one after the other: let nothing replicate between a pass's"
        " transfer and its experts, and let each layer's input depend on the output of the one"
        " before"
    )
    group.session.reject(error)
    raise error


def _start(run: ExpertPass, grads: Grads, mains: Tensors, slots: Sequence[str]) -> Grads:
    """Reduce gradients; those of ``mains`` and of the slots named follow that of the input."""
    if run.calls.has_restored:
        _check_slots(run, "backward")
    grad_x, *rest = grads
    if run.main_grads is None and not mains:  # nothing to reduce
        run.handle.release()
        return (grad_x,)
    for name, grad in zip(slots, rest[len(mains) :], strict=True):
        # Not added: an empty slot's gradient may be of anything, and no reduction clears it.
        slot_grad = run.handle.group.slot_grads[name]
        slot_grad.zero_() if grad is None else slot_grad.copy_(grad)
    own = [_own_gradient(main, grad) for main, grad in zip(mains.values(), rest, strict=False)]
    run.calls.reducing = uec.reduce_expert_grads(
        # Other tensors on the same memory: autograd takes over those that nobody else has.
        {name: grad.detach() for name, grad in zip(mains, own, strict=True)}
        if run.main_grads is None
        else run.main_grads,
        run.handle,
        group=run.handle.group,
        async_op=True,
        mode=run.reduce_mode,
    )
    return grad_x, *own, *(None for _ in slots)


def _join(run: ExpertPass, grads: Grads) -> Grads:
    if run.calls.reducing is None and run.handle.is_live:
        error = InvalidArgumentError(
            f"rank {run.handle.group.rank}: the reduction of layer {run.handle.layer}, microbatch"
            f" {run.handle.microbatch} is to be joined, and has not been started; pass the"
            " experts' input, and the main weights, through start_reduction behind"
            " join_reduction"
        )
        run.handle.group.session.reject(error)
        raise error
    work, run.calls.reducing = run.calls.reducing, None
    if work is not None:
        work.wait()
    return grads


def _brings_the_same(last: uec.Plan | uec.PlanHandle, handle: uec.PlanHandle) -> bool:
    """Return whether a transfer that was made by ``last`` brings what one by ``handle`` does.

    Recomputed activations have a handle of their own, of the same layer and an equal plan. Plans on
    a device are not read: that would synchronise.
    """
    if last is handle:
        return True
    mine = handle.saved.plan.slot_expert
    readable = mine.device.type == "cpu"
    if readable and not (mine >= 0).any():
        return True  # nothing: frameworks may leave that transfer out
    if isinstance(last, uec.PlanHandle):
        if last.layer != handle.layer:
            return False
        if last.microbatch == handle.microbatch:
            return True
        last = last.saved.plan
    theirs = last.slot_expert
    return not readable or theirs.device.type != "cpu" or torch.equal(theirs, mine)


def _own_gradient(main: Tensor, grad: Tensor | None) -> Tensor:
    """Return a gradient that nobody else has: a sum for several tensors is often one of them all.

    Also without a gradient: replicas may have some.
    """
    if grad is None:
        return torch.zeros_like(main)
    return torch.empty_like(main).copy_(grad)  # as the main weights lie


# ---- the hooks ----------------------------------------------------------------------------------


class _Hook(torch.autograd.Function):
    """Tensors as they are; ``at_backward`` makes their gradients of those that come."""

    @staticmethod
    def forward(
        ctx: Any, at_backward: Callable[[Grads], Grads], num_outputs: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.at_backward = at_backward
        ctx.set_materialize_grads(False)
        x, *weights = tensors[:num_outputs]
        # As the same tensor it could not be added to in place, as residuals are.
        return x if x.is_leaf and x.requires_grad else x.detach(), *weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.at_backward(grads)


def _hook(at_backward: Callable[[Grads], Grads], num_outputs: int, *tensors: Tensor) -> Any:
    return _Hook.apply(at_backward, num_outputs, *tensors)  # type: ignore[no-untyped-call]


def restore_replicas(y: Tensor, pass_: ExpertPass, *, anchor: Tensor | None = None) -> Tensor:
    """Return the experts' output; in the backward pass, fill the slots again before the experts.

    Args:
        y: the experts' output.
        pass_: of this layer and microbatch.
        anchor: the experts' input from :func:`start_reduction`: where ``y`` does not depend on it,
            because no token came, the backward pass takes part in the calls all the same.

    Raises:
        InvalidArgumentError: ``y`` is no tensor; or another transfer has filled the slots since
            this pass's, and peers fail likewise.
    """
    if not isinstance(y, Tensor):
        raise InvalidArgumentError(
            f"rank {pass_.handle.group.rank}: the output of the experts of layer"
            f" {pass_.handle.layer} is a {type(y).__name__}; expected one tensor: hand the rest on"
            " beside the hooks"
        )
    if torch.is_grad_enabled():
        _check_slots(pass_, "forward")
    tensors = (y, y if anchor is None else anchor)
    return _hook(partial(_restore, pass_), 1, *tensors)[0]  # type: ignore[no-any-return]


def prefetch_replicas(y: Tensor, pass_: ExpertPass) -> Tensor:
    """Return a later tensor of the layer, such as its output; the backward pass starts to restore.

    So that the transfer runs beside the backward pass of what lies between it and the experts, such
    as the combination of tokens. :func:`restore_replicas` waits for it.
    """
    return _hook(partial(_prefetch, pass_), 1, y)[0]  # type: ignore[no-any-return]


def start_reduction(
    x: Tensor, pass_: ExpertPass, mains: Tensors | None = None, slots: Tensors | None = None
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Return the experts' input and weights; their gradients start the reduction.

    Gradients of slots go to ``group.slot_grads``. Those of the main weights are copied, have the
    replicas' added, and go on to :func:`join_reduction`: take ``mains`` from there, and use them
    for nothing else.

    Args:
        x: the experts' input.
        pass_: of this layer and microbatch.
        mains: ``{name: [M, *shape]}``; None: the pass has ``main_grads``, and what gives the
            gradient of ``x`` has added to those, and to ``group.slot_grads``, by then.
        slots: ``{name: [S, *shape]}``, ``group.slots``.

    Raises:
        InvalidArgumentError: ``mains`` and ``main_grads``, or none of them; weights whose gradients
            the group does not reduce, that have no slots, or that do not come from
            :func:`join_reduction`; or nothing that needs a gradient, with ``main_grads``.
    """
    mains, slots = dict(mains or {}), dict(slots or {})
    group = pass_.handle.group
    if bool(mains) == (pass_.main_grads is not None):
        raise InvalidArgumentError(
            f"rank {group.rank}: start_reduction was given {len(mains)} main weights, and a pass"
            f" {'without' if pass_.main_grads is None else 'with'} main_grads; expected one of them"
        )
    wanted = find_trained(mains, group)
    missing = [name for name in wanted if name not in slots]
    if missing:
        raise InvalidArgumentError(
            f"rank {group.rank}: start_reduction was given no slots of {missing}, whose main"
            " weights need gradients; pass group.slots"
        )
    if torch.is_grad_enabled():
        _check_graph(x, pass_, {name: mains[name] for name in wanted})
    passed_mains = {name: mains[name] for name in wanted}
    passed_slots = {name: slot for name, slot in slots.items() if name in wanted}
    like = {name: main.detach() for name, main in passed_mains.items()}  # not the graph
    names = list(passed_slots)
    tensors = (x, *passed_mains.values(), *passed_slots.values())
    x, *rest = _hook(lambda grads: _start(pass_, grads, like, names), len(tensors), *tensors)
    mains.update(zip(passed_mains, rest, strict=False))
    slots.update(zip(names, rest[len(passed_mains) :], strict=True))
    return x, mains, slots


def find_trained(mains: Tensors, group: uec.Group) -> list[str]:
    """Return the names of the main weights that need gradients.

    Raises:
        InvalidArgumentError: those are neither all that the group reduces, nor none.
    """
    wanted = [name for name, main in mains.items() if main.requires_grad]
    if wanted and set(wanted) != set(group.slot_grads):
        raise InvalidArgumentError(
            f"rank {group.rank}: main weights {sorted(wanted)} need gradients; expected all that"
            f" the group reduces, {sorted(group.slot_grads)} (new_group's grads=), or none"
        )
    return wanted


def _check_graph(x: Tensor, pass_: ExpertPass, mains: Tensors) -> None:
    """Raise InvalidArgumentError where gradients would not pass by, or leave too early."""
    rank = pass_.handle.group.rank
    if pass_.main_grads is not None and not x.requires_grad:
        raise InvalidArgumentError(
            f"rank {rank}: the experts' input of layer {pass_.handle.layer} needs no gradient, so"
            " its backward pass would not start the reduction; call x.requires_grad_() first"
        )
    for name, main in mains.items():
        if not isinstance(main.grad_fn, undocumented(_Hook, "_backward_cls")):
            raise InvalidArgumentError(
                f"rank {rank}: main weights {name!r} of layer {pass_.handle.layer} do not come from"
                " join_reduction, so their gradients would leave before they are complete; pass"
                " what it returns"
            )


def join_reduction(
    x: Tensor, pass_: ExpertPass, mains: Tensors | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the layer's input and main weights; their gradients leave behind the reduction.

    Args:
        x: the layer's input: whatever has the gradient that leaves the layer last.
        pass_: of this layer and microbatch.
        mains: the parameters, ``{name: [M, *shape]}``. None: the pass has ``main_grads``, and
            nobody takes hooks of parameters, or their ``.grad``, for a sign that those are
            complete. Else the experts take what is returned, and give it some gradient.
    """
    mains = dict(mains or {})
    names = [name for name, main in mains.items() if main.requires_grad]
    tensors = (x, *(mains[name] for name in names))
    x, *rest = _hook(partial(_join, pass_), len(tensors), *tensors)
    mains.update(zip(names, rest, strict=True))
    return x, mains
