"""Hooks: identities on a layer's tensors whose backward passes make the layer's calls.

In the order of a forward pass, as :class:`ultraep_comm.nn.replication.LayerPass` calls them::

    x, weights = join_reduction(x, run, weights)                # on the layer's input
    x, weights, slots = start_reduction(x, run, weights, slots)     # on the experts' input
    y = restore_replicas(experts(x, weights, slots), run, anchor=x) # on the experts' output
    y = prefetch_replicas(y, run)                               # on the layer's output

The backward pass runs them from the bottom up: replica weights are restored before the experts need
them, the gradient reduction starts when the experts are done, and it is joined before the gradient
of the layer's input leaves. Data dependences enforce this order: each hook takes what the previous
one returned.

A pass is given ``main_grads`` where the experts accumulate gradients by themselves: then only
activations go through :func:`start_reduction`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import _disable_current_modes

import ultraep_comm as uec
from ultraep_comm.calls.traced import flatten, unflatten
from ultraep_comm.engines.reports import DIVERGED
from ultraep_comm.errors import InvalidArgumentError
from ultraep_comm.group.bank import Bank
from ultraep_comm.group.group import is_on_device, rejecting
from ultraep_comm.nn.weights import check_trained, listed, names_with_gradient
from ultraep_comm.system import undocumented
from ultraep_comm.weights.binding import Binding
from ultraep_comm.weights.segments import Weights

Tensor = torch.Tensor
Grads = tuple[Tensor | None, ...]
# Forward passes made in a backward pass, until that reduces: the number of the backward pass, the
# layer, and the plan's slot_expert.
_recomputed: WeakKeyDictionary[uec.Group, list[tuple[int, int, Tensor]]] = WeakKeyDictionary()


@dataclass(eq=False, repr=False)
class ExpertPass:
    """The state that the hooks of one forward and backward pass of a layer's experts share.

    The pass ends its handle by the reduction or, if nothing is reduced or the graph is dropped, by
    releasing it. A handle saved in a capture into a CUDA graph belongs to that graph and is not
    released when the pass is dropped.
    """

    # Not the group: graphs reference passes, and errors of groups reference graphs.
    handle: uec.PlanHandle  # of the forward pass's plan; this pass is its last use
    weights: Weights | Binding  # the main weights; the backward pass reads their addresses
    _: KW_ONLY
    # Where the experts accumulate the gradients of main weights, and the reduction adds those of
    # replicas; None: autograd has them.
    main_grads: Weights | Binding | None = None
    mode: str = "auto"  # of the transfers
    segments: Sequence[str] | None = None  # that the backward pass needs; None: all
    owner: object = None  # for :func:`start_transfer`
    # The expert in each slot, by rank; None: the plan is on a device.
    slot_expert: list[list[int]] | None = field(init=False)
    is_empty: bool = field(init=False)  # known to have no replicas: backward makes no calls
    # The node of the graph that restores the replicas, weakly: it references this.
    restored_by: weakref.ref[object] | None = field(init=False, default=None)
    restoring: uec.Work | None = field(init=False, default=None)  # the prefetched transfer
    reducing: uec.Work | None = field(init=False, default=None)  # the reduction in flight
    has_restored: bool = field(init=False, default=False)  # filled the slots, in backward

    def __post_init__(self) -> None:
        handle = self.handle
        slots = handle.stored.slot_expert
        self.slot_expert = None if is_on_device(slots, handle.group) else slots.tolist()
        self.is_empty = self.slot_expert is not None and not any(
            expert >= 0 for row in self.slot_expert for expert in row
        )
        if handle.mark is None:  # else the graph still saves the plan of a dropped pass
            weakref.finalize(self, handle.release).atexit = False
        if (task := _graph_task()) >= 0:  # a forward pass in a backward pass: recomputed
            known = _recomputed.get(handle.group, [])
            # A copy: the handle ends with the recomputed graph, long before it is compared. Without
            # modes: a selective recomputation counts operations, which have to be the first pass's.
            with _disable_current_modes():
                copy = slots.clone()
            _recomputed[handle.group] = [
                *(one for one in known if one[0] == task),
                (task, handle.layer, copy),
            ]

    @property
    def bank(self) -> Bank:
        """Return the bank of the handle's plan."""
        return self.handle.group.banks[self.handle.stored.bank]


# ---- what the backward pass calls ----------------------------------------------------------------


def _prefetch(run: ExpertPass, grads: Grads) -> Grads:
    node = run.restored_by() if run.restored_by is not None else None
    # Rule: a transfer is started only if the same backward pass waits for it, before the weights
    # that it reads may be freed. The experts may need no gradient, or inputs= may leave them out.
    if node is not None and _will_run(node):
        if not run.is_empty:
            run.restoring = _replicate(run)
    elif node is not None and not _keeps_graph():
        run.handle.release()
    return grads


def _restore(run: ExpertPass, grads: Grads) -> Grads:
    if not run.is_empty:
        work, run.restoring = run.restoring or _replicate(run), None
        work.wait()
    return grads[0], None


def _replicate(run: ExpertPass) -> uec.Work:
    work = start_transfer(
        run.weights,
        run.handle,
        run.handle.group,
        mode=run.mode,
        segments=run.segments,
        owner=run.owner,
    )
    run.has_restored = True
    return work


def start_transfer(
    weights: Weights | Binding,
    plan: uec.Plan | uec.PlanHandle,
    group: uec.Group,
    *,
    mode: str,
    segments: Sequence[str] | None,
    owner: object,
    layer: int | None = None,
) -> uec.Work:
    """Start to fill slots.

    What their bank holds is not reused if the last transfer was that of another ``owner``, such as
    a copy of a layer; None: not known.
    """
    given, version = plan.stored if isinstance(plan, uec.PlanHandle) else plan, None
    bank = group.banks[given.bank]
    if given.reuse and owner is not None and bank.holder and bank.holder[0] is not owner:
        version = bank.version + 1
    bank.holder = (owner,)
    work = uec.replicate_experts(
        weights,
        plan,
        group=group,
        async_op=True,
        mode=mode,
        segments=segments,
        version=version,
        layer=layer,
    )
    assert work is not None
    return work


_C = undocumented(torch, "_C")


def _graph_task() -> int:
    """Return the number of the backward pass that this thread is in; -1: none."""
    return int(undocumented(_C, "_current_graph_task_id")())


def _will_run(node: object) -> bool:
    """Return whether the backward pass that this thread is in runs a node of the graph."""
    return bool(undocumented(_C, "_will_engine_execute_node")(node))


def _keeps_graph() -> bool:
    """Return whether the backward pass that this thread is in has ``retain_graph=True``."""
    try:
        autograd = undocumented(_C, "_autograd")
        return bool(undocumented(autograd, "_get_current_graph_task_keep_graph")())
    except AttributeError:  # an older torch: the handle is released with the graph
        return True


def _fail(run: ExpertPass, text: str) -> NoReturn:
    error = InvalidArgumentError(f"rank {run.handle.group.rank}: {text}")
    with rejecting(run.handle.group):
        raise error


def _check_slots(run: ExpertPass, direction: str) -> None:
    """Raise InvalidArgumentError if another pass has filled the slots since this one's transfer."""
    mine = run.handle
    last = run.bank.filled_by
    if last is None or _brings_the_same(last, mine):
        return
    found = "another plan"
    if isinstance(last, uec.PlanHandle):
        found = f"layer {last.layer}, microbatch {last.microbatch}"
    _fail(
        run,
        f"the experts of layer {mine.layer}, microbatch {mine.microbatch} had the replicas of"
        f" {found} in their {direction} pass; passes that share a group's slots have to run one"
        " after the other: start no transfer between a pass's transfer and its experts, and make"
        " each layer's input depend on the output of the previous one",
    )


def _check_recomputed(run: ExpertPass) -> None:
    """Raise InvalidArgumentError if this pass's recomputation had another plan.

    The graph has the hooks of the first pass, but the saved tensors of the recomputed one.
    """
    mine = run.handle
    known, key = _recomputed.get(mine.group, []), (_graph_task(), mine.layer)
    found = [one for one in known if one[:2] == key]
    if not found:
        return
    same = _find_same(mine, [slots for _, _, slots in found])
    if same is None:
        _fail(
            run,
            f"the recomputed forward pass of layer {mine.layer}, microbatch {mine.microbatch}"
            " routed differently: its plan is not that of the forward pass, so its activations"
            " belong to other replicas. Save the router's ids, or keep the router and the plan out"
            " of what is recomputed",
        )
    _recomputed[mine.group] = [one for one in known if one is not found[same]]


def _find_same(handle: uec.PlanHandle, others: Sequence[Tensor]) -> int | None:
    """Return the last of some ``slot_expert`` that equals the handle's.

    On a device, where reading them would synchronize, return the last; if none is equal, invalidate
    the handle's plan there. The next call with the handle then fails and reports the cause.
    """
    mine = handle.stored.slot_expert
    if is_on_device(mine, handle.group):
        alike = [other for other in others if other.device == mine.device]
        if alike:
            differs = torch.stack([(mine != other).any() for other in alike]).all()
            mine.masked_fill_(differs, DIVERGED)
        return len(others) - 1
    equal = [i for i, other in enumerate(others) if torch.equal(other.to(mine.device), mine)]
    return equal[-1] if equal else None


def _start(run: ExpertPass, grads: Grads, weights: Weights, slots: Sequence[str]) -> Grads:
    """Start the reduction. ``grads`` are those of the input, of ``weights``, of ``slots``."""
    _check_recomputed(run)
    if run.has_restored:
        _check_slots(run, "backward")
    grad_x, *rest = grads
    tensors, counts = flatten(weights)
    if run.is_empty or (run.main_grads is None and not weights):  # nothing to reduce
        if run.is_empty:  # as the reduction does: a second backward pass is refused
            plans = run.handle.store
            plans.plan_of(run.handle, "reduce_expert_grads")
            plans.consume(run.handle, on_device=False)
        run.handle.release()
        own = [_or_zeros(weight, grad) for weight, grad in zip(tensors, rest, strict=False)]
        return grad_x, *own, *(None for _ in slots)
    for name, grad in zip(slots, rest[len(tensors) :], strict=True):
        _copy_slot_gradients(run, run.bank.slot_grads[name], grad)
    own = _own_gradients(run, weights, rest[: len(tensors)])
    run.reducing = uec.reduce_expert_grads(
        # Detached: autograd reuses a gradient's memory only if nothing else holds the tensor.
        unflatten([grad.detach() for grad in own], counts, weights)
        if run.main_grads is None
        else run.main_grads,
        run.handle,
        group=run.handle.group,
        async_op=True,
    )
    return grad_x, *own, *(None for _ in slots)


def _join(run: ExpertPass, grads: Grads) -> Grads:
    if run.reducing is None and run.handle.is_live:
        _fail(
            run,
            f"the reduction of layer {run.handle.layer}, microbatch {run.handle.microbatch} is"
            " joined but has not been started; pass the experts' input through before_experts, and"
            " use the weights that it returns",
        )
    work, run.reducing = run.reducing, None
    if work is not None:
        work.wait()
    return grads


def _brings_the_same(last: uec.Plan | uec.PlanHandle, handle: uec.PlanHandle) -> bool:
    """Return whether transfers of ``last`` and of ``handle`` fill the slots with the same replicas.

    A recomputed forward pass has another handle, of the same layer and with an equal plan.
    """
    if last is handle:
        return True
    mine = handle.stored.slot_expert
    on_device = is_on_device(mine, handle.group)
    if not on_device and not (mine >= 0).any():
        return True  # no replicas: frameworks may skip the transfer
    if isinstance(last, uec.PlanHandle):
        if last.layer != handle.layer:
            return False
        # On a device, the memory of a handle that has ended may have another plan by now.
        if not last.is_live and on_device:
            return True
        last = last.stored
    return _find_same(handle, [last.slot_expert]) is not None


def _or_zeros(weight: Tensor, grad: Tensor | None) -> Tensor:
    return torch.zeros_like(weight) if grad is None else grad


def _copy_slot_gradients(run: ExpertPass, to: Tensor, grad: Tensor | None) -> None:
    """Copy gradients ``[S, *shape]`` of filled slots to where the reduction reads them."""
    filled: Sequence[int] = range(len(to))
    if run.slot_expert is not None:
        own = run.slot_expert[run.handle.group.rank]
        filled = [slot for slot, expert in enumerate(own) if expert >= 0]
    # Copied, not added: no reduction clears the gradients of empty slots.
    if len(filled) == len(to):
        to.zero_() if grad is None else to.copy_(grad)
        return
    for slot in filled:
        to[slot].zero_() if grad is None else to[slot].copy_(grad[slot])


def _own_gradients(
    run: ExpertPass, weights: Weights, grads: Sequence[Tensor | None]
) -> list[Tensor]:
    """Return gradients to which the reduction may add; zeros for None, as replicas may have one.

    Copies, as autograd may share one tensor among several gradients; but not of experts without
    replicas, to which nothing is added.
    """
    group, found, seen, rest = run.handle.group, [], set(), iter(grads)
    has_replicas = [True] * group.num_local_experts
    if run.slot_expert is not None:
        placed = {expert for row in run.slot_expert for expert in row}
        has_replicas = [e in placed for e in group.topology.local_experts(group.rank).tolist()]
    for weight in weights.values():
        added = [any(has_replicas)] if isinstance(weight, Tensor) else has_replicas
        for like, is_added, grad in zip(listed(weight), added, rest, strict=False):
            own = _or_zeros(like, grad)
            # The reduction takes no memory twice, nor other strides than those of the weights.
            if is_added or own.data_ptr() in seen or own.stride() != like.stride():
                own = torch.empty_like(like).copy_(own)
            seen.add(own.data_ptr())
            found.append(own)
    return found


# ---- the hooks ----------------------------------------------------------------------------------


class Hook(torch.autograd.Function):
    """Identity; ``at_backward`` maps the gradients of its outputs to those of its inputs."""

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any, at_backward: Callable[[Grads], Grads], num_outputs: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.at_backward = at_backward
        ctx.set_materialize_grads(False)
        x, *weights = tensors[:num_outputs]
        # Detached: the input itself could not be modified in place, as residual additions do.
        return x if x.is_leaf and x.requires_grad else x.detach(), *weights

    @staticmethod
    @once_differentiable
    def backward(  # noqa: D102
        ctx: Any, *grads: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.at_backward(grads)


def hook(at_backward: Callable[[Grads], Grads], num_outputs: int, *tensors: Tensor) -> Any:
    """Return the first ``num_outputs`` tensors, whose gradients go through ``at_backward``."""
    return Hook.apply(at_backward, num_outputs, *tensors)  # type: ignore[no-untyped-call]


def restore_replicas(y: Tensor, run: ExpertPass, *, anchor: Tensor | None = None) -> Tensor:
    """Return the experts' output; in the backward pass, fill the slots again before the experts.

    Without a gradient for the experts there is no such backward pass, and the handle is released.
    ``anchor``, the experts' input from :func:`start_reduction`, keeps the backward pass in the
    collective calls when ``y`` does not depend on it, because the rank got no tokens.

    Raises:
        InvalidArgumentError: ``y`` is not a tensor; or another transfer has filled the slots since
            this pass's, and peers fail too.
    """
    if not isinstance(y, Tensor):
        raise InvalidArgumentError(
            f"rank {run.handle.group.rank}: the output of the experts of layer"
            f" {run.handle.layer} is a {type(y).__name__}; expected one tensor: pass other"
            " outputs around the hook"
        )
    if torch.is_grad_enabled():
        _check_slots(run, "forward")
    tensors = (y, y if anchor is None else anchor)
    result: Tensor = hook(partial(_restore, run), 1, *tensors)[0]
    if result.grad_fn is not None:
        run.restored_by = weakref.ref(result.grad_fn)
    elif torch.is_grad_enabled():  # no backward pass comes here
        run.handle.release()
    return result


def prefetch_replicas(y: Tensor, run: ExpertPass) -> Tensor:
    """Return ``y``, a later tensor of the layer; its backward pass starts to restore replicas.

    The transfer then overlaps the backward pass of what lies between ``y`` and the experts' output,
    such as the combine. :func:`restore_replicas` waits for it; if that is not in the backward pass,
    nothing is started.
    """
    return hook(partial(_prefetch, run), 1, y)[0]  # type: ignore[no-any-return]


def start_reduction(
    x: Tensor, run: ExpertPass, weights: Weights, slots: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, Any], dict[str, Tensor]]:
    """Return the experts' input and weights; their gradients start the reduction.

    Gradients of filled slots go to ``slot_grads`` of the plan's bank. Gradients of main weights
    with replicas are copied, and the reduction adds the replicas' to them. All go on to
    :func:`join_reduction`. With ``main_grads`` whatever computes the gradient of ``x`` has by then
    accumulated into those and into ``slot_grads``.

    Raises:
        InvalidArgumentError: main weights whose gradients the group does not reduce, or that do not
            come from :func:`join_reduction`; or ``main_grads`` and an ``x`` that needs no gradient.
    """
    wanted = [] if run.main_grads is not None else find_trained(weights, run.handle.group)
    passed = {name: weights[name] for name in wanted}
    if torch.is_grad_enabled():
        _check_graph(x, run, passed)
    passed_slots = {name: slot for name, slot in slots.items() if name in wanted}
    own, counts = flatten(passed)
    like = unflatten([weight.detach() for weight in own], counts, passed)  # without their graph
    names = list(passed_slots)
    tensors = (x, *own, *passed_slots.values())
    x, *rest = hook(lambda grads: _start(run, grads, like, names), len(tensors), *tensors)
    after = zip(names, rest[len(own) :], strict=True)
    return x, {**weights, **unflatten(rest[: len(own)], counts, passed)}, {**slots, **dict(after)}


def find_trained(weights: Weights, group: uec.Group) -> list[str]:
    """Return the names of the main weights that need gradients.

    Raises:
        InvalidArgumentError: only some of the weights that the group reduces need gradients.
        UnsupportedError: their dtype is neither float32 nor bfloat16.
    """
    check_trained(weights, group.rank)
    wanted = names_with_gradient(weights)
    if wanted and set(wanted) != set(group.slot_grads):
        raise InvalidArgumentError(
            f"rank {group.rank}: main weights {sorted(wanted)} need gradients; expected all that"
            f" the group reduces, {sorted(group.slot_grads)} (new_group's grads=), or none"
        )
    return wanted


def _check_graph(x: Tensor, run: ExpertPass, weights: Weights) -> None:
    """Raise InvalidArgumentError if gradients would bypass the reduction or leave before it."""
    rank = run.handle.group.rank
    if run.main_grads is not None and not x.requires_grad:
        raise InvalidArgumentError(
            f"rank {rank}: the experts' input of layer {run.handle.layer} needs no gradient, so"
            " its backward pass would not start the reduction; call x.requires_grad_() first"
        )
    for name, weight in weights.items():
        node = undocumented(Hook, "_backward_cls")
        if not all(isinstance(t.grad_fn, node) for t in listed(weight)):
            raise InvalidArgumentError(
                f"rank {rank}: main weights {name!r} of layer {run.handle.layer} have not been"
                " through before_dispatch, so their gradients would leave before they are complete;"
                " call it on the layer's input first"
            )


def join_reduction(x: Tensor, run: ExpertPass, weights: Weights) -> tuple[Tensor, dict[str, Any]]:
    """Return the layer's input and main weights; their gradients wait for the reduction.

    The experts have to use the returned weights. With ``main_grads`` hooks on parameters then run
    after the reduction.
    """
    trained = {name: weights[name] for name in names_with_gradient(weights)}
    tensors, counts = flatten(trained)
    x, *rest = hook(partial(_join, run), 1 + len(tensors), x, *tensors)
    return x, {**weights, **unflatten(rest, counts, trained)}
