"""Operators ``torch.ops.ultraep_comm``: the calls in a graph of torch.compile.

Each has a fake implementation that derives shapes from the arguments alone, as a cached graph must
not depend on a group of the process that compiled it. The real one finds the group by its name.
Caches identify an operator by name and arguments: if it changes what it mutates or returns, it
needs a new name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ultraep_comm.calls.gather import gather_load
from ultraep_comm.calls.plan import plan_for_group
from ultraep_comm.calls.reduce import reduce_expert_grads
from ultraep_comm.calls.replicate import replicate_experts
from ultraep_comm.calls.reroute import reroute, reroute_gradient, reroute_map
from ultraep_comm.calls.traced import bank_of, plan_of_fields, unflatten
from ultraep_comm.group.group import Group, session_of
from ultraep_comm.group.names import find_group
from ultraep_comm.group.work import Work
from ultraep_comm.plan.plan import PlanCost

Tensor = torch.Tensor
Impl = Callable[..., Any]
Copies = list[tuple[Tensor, Tensor]]
_FINISHED = 0  # token of a call that completed in place; other tokens are epochs

_LIBRARY: Any = torch.library.Library("ultraep_comm", "DEF")  # type: ignore[no-untyped-call,unused-ignore]
# Weights keep their strides; no CUDA graph trees. The oldest supported torch lacks some tags.
_TAGS = [
    getattr(torch.Tag, name)
    for name in ("pt2_compliant_tag", "needs_exact_strides", "cudagraph_unsafe")
    if hasattr(torch.Tag, name)
]


def _operator(schema: str, fake: Impl) -> Callable[[Impl], Impl]:
    """Define an operator; the decorated function is its real implementation."""
    name = schema.split("(", maxsplit=1)[0]

    def register(real: Impl) -> Impl:
        _LIBRARY.define(schema, tags=_TAGS)
        _LIBRARY.impl(name, real, "CompositeExplicitAutograd")
        torch.library.register_fake(f"ultraep_comm::{name}", fake, lib=_LIBRARY)
        return real

    return register


# ---- local ---------------------------------------------------------------------------------


def _fake_plan(
    load: Tensor, num_ranks: int, num_experts: int, slots_per_rank: int, *_: Any
) -> tuple[Tensor, ...]:
    slots, experts = (num_ranks, slots_per_rank), (num_experts,)
    shapes = (slots, slots, experts, experts, (num_ranks,))
    return tuple(load.new_empty(shape, dtype=torch.int32) for shape in shapes)


def _fake_plan_in_bank(
    load: Tensor, num_ranks: int, num_experts: int, slots_per_rank: int, *_: Any
) -> tuple[Tensor, ...]:
    moves = load.new_empty((num_ranks, slots_per_rank), dtype=torch.bool)
    return *_fake_plan(load, num_ranks, num_experts, slots_per_rank), moves


_LOAD = (
    "Tensor load, int num_ranks, int num_experts, int slots_per_rank, float target, float[] cost"
)


@_operator(
    f"plan_replicas({_LOAD}, str group) -> (Tensor, Tensor, Tensor, Tensor, Tensor)", _fake_plan
)
@_operator(
    f"plan_replicas_in_bank({_LOAD}, Tensor(a!) order, int bank, str group)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fake_plan_in_bank,
)
def _plan_replicas(
    load: Tensor, _g: int, _e: int, _s: int, target: float, cost: list[float], *rest: Any
) -> tuple[Tensor | None, ...]:
    *order_and_bank, group = rest
    reuse = bool(order_and_bank)
    bank: int = order_and_bank[-1] if reuse else 0
    # An operator's results must not share memory: a graph reuses each after its last use.
    plan = plan_for_group(load, find_group(group), target, _cost_of(cost), bank, reuse, apart=True)
    fields = (plan.slot_expert, plan.slot_quota, plan.home_quota, plan.home, plan.domains)
    return (*fields, plan.slots_to_fill) if reuse else fields


def _cost_of(cost: list[float]) -> PlanCost | None:
    if not cost:
        return None
    token, expert_byte, replica, *expert_bytes = cost
    return PlanCost(
        token=token,
        expert_byte=expert_byte,
        replica=replica,
        expert_bytes=int(expert_bytes[0]) if expert_bytes else None,
    )


_PLAN = "Tensor slot_expert, Tensor home, Tensor? slot_quota, Tensor? home_quota"


@_operator(
    f"reroute(Tensor topk_ids, {_PLAN}, Tensor? load, str group, *, int? source=None) -> Tensor",
    lambda topk_ids, *_, **__: topk_ids.new_empty(topk_ids.shape),
)
def _reroute(topk_ids: Tensor, *plan_and_group: Any, source: int | None = None) -> Tensor:
    *fields, group = plan_and_group
    return reroute(topk_ids, plan_of_fields(*fields), group=find_group(group), source=source)


def _fake_reroute_map(
    routing_map: Tensor, probs: Tensor | None, *plan_and_columns: Any, **_: Any
) -> tuple[Tensor, Tensor]:
    num_columns = plan_and_columns[5]
    shape = (routing_map.shape[0], num_columns)
    like = routing_map if probs is None else probs
    return like.new_empty((0,) if probs is None else shape), routing_map.new_empty(shape)


@_operator(
    f"reroute_map(Tensor routing_map, Tensor? probs, {_PLAN}, Tensor? load, int num_columns,"
    " str group, *, int? source=None) -> (Tensor, Tensor)",
    _fake_reroute_map,
)
def _reroute_map(
    routing_map: Tensor,
    probs: Tensor | None,
    *plan_and_columns: Any,
    source: int | None = None,
) -> tuple[Tensor, Tensor]:
    *fields, _columns, group = plan_and_columns
    physical_map, physical = reroute_map(
        routing_map, probs, plan_of_fields(*fields), group=find_group(group), source=source
    )
    return routing_map.new_empty(0) if physical is None else physical, physical_map


@_operator(
    f"reroute_map_backward(Tensor grad, Tensor routing_map, {_PLAN}, Tensor? load, str group,"
    " *, int? source=None) -> Tensor",
    lambda grad, routing_map, *_, **__: grad.new_empty(routing_map.shape),
)
def _reroute_map_backward(
    grad: Tensor, routing_map: Tensor, *plan_and_group: Any, source: int | None = None
) -> Tensor:
    *fields, group = plan_and_group
    plan = plan_of_fields(*fields)
    return reroute_gradient(grad, routing_map, plan, group=find_group(group), source=source)


def _save_routing(
    ctx: Any,
    inputs: tuple[Any, ...],
    keyword_only_inputs: dict[str, Any],
    output: tuple[Tensor, Tensor],
) -> None:
    routing_map, probs, *fields, _columns, ctx.group = inputs
    ctx.source = keyword_only_inputs["source"]
    ctx.has_probs = probs is not None
    ctx.save_for_backward(routing_map, *fields)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, grad: Tensor, _grad_map: Tensor) -> tuple[Tensor | None, ...]:
    found: Tensor | None = None
    if ctx.has_probs:
        found = torch.ops.ultraep_comm.reroute_map_backward(
            grad, *ctx.saved_tensors, ctx.group, source=ctx.source
        )
    return None, found, *(None for _ in range(7))


torch.library.register_autograd(
    "ultraep_comm::reroute_map", _differentiate, setup_context=_save_routing, lib=_LIBRARY
)

# ---- in order ------------------------------------------------------------------------------
#
# They and plan_replicas_in_bank declare a write to ``order`` and do not touch it: collective calls,
# and what reads the table of a bank, which these change.


def _fake_gather(topk_ids: Tensor, num_ranks: int, num_experts: int, *_: Any) -> Tensor:
    return topk_ids.new_empty((num_ranks, num_experts), dtype=torch.int32)


@_operator(
    "gather_load(Tensor topk_ids, int num_ranks, int num_experts, Tensor(a!) order, str group,"
    " bool are_counts=False) -> Tensor",
    _fake_gather,
)
def _gather_load(
    given: Tensor, _g: int, _e: int, _order: Tensor, group: str, are_counts: bool = False
) -> Tensor:
    if are_counts:
        return gather_load(counts=given, group=find_group(group))
    return gather_load(given, group=find_group(group))


_WEIGHTS = f"Tensor[] weights, int[] counts, str[] given, {_PLAN}"
_SLOTS = "Tensor(a!)[] slots, str[] names, Tensor(b!) order"
# Versions grow from step to step: as a SymInt, a new one compiles nothing anew.
_HOW = "str how, int bank, bool reuse, SymInt? version, int? layer, str group"


@_operator(
    f"replicate_experts({_WEIGHTS}, {_SLOTS}, {_HOW}) -> ()",
    lambda *_: None,
)
def _replicate(*arguments: Any) -> None:
    _run(*_transfer_of(*arguments))


@_operator(
    f"start_replicate_experts({_WEIGHTS}, {_SLOTS}, {_HOW}) -> Tensor",
    lambda *_: torch.empty(1, dtype=torch.int64, device="cpu"),
)
def _start_replicate(*arguments: Any) -> Tensor:
    copies, filled, call = _transfer_of(*arguments)
    if copies:  # the slots' contents are restored, so the call has to finish first
        _run(copies, filled, call)
        return torch.tensor([_FINISHED], device="cpu")
    work = call(async_op=True)
    assert work is not None
    return torch.tensor([work.epoch], device="cpu")


@_operator(
    f"wait_replicate_experts(Tensor token, Tensor[] held, Tensor slot_expert, {_SLOTS}, int bank,"
    " str group, bool synchronize, float timeout=0.0) -> ()",
    lambda *_: None,
)
def _wait_replicate(
    token: Tensor,
    _held: list[Tensor],
    slot_expert: Tensor,
    slots: list[Tensor],
    names: list[str],
    _order: Tensor,
    bank: int,
    group_name: str,
    synchronize: bool,
    timeout: float = 0.0,
) -> None:
    epoch = int(token)
    if epoch == _FINISHED:
        return
    group = find_group(group_name)
    work = Work(session_of(group), epoch, "replicate_experts", "")
    work.synchronize() if synchronize else work.wait(timeout)
    copies = _find_copies(slots, bank_of(bank, group).slots, names)
    _copy_rows(copies, _filled(slot_expert, group) if copies else [])


def _transfer_of(
    tensors: list[Tensor], counts: list[int], given: list[str], *rest: Any
) -> tuple[Copies, list[int], Callable[..., Work | None]]:
    """Return the slots that are copies, the rows that the plan fills, and the call."""
    *fields, slots, names, _order, mode, bank, reuse, version, layer, name = rest
    group = find_group(name)
    call = partial(
        replicate_experts,
        unflatten(tensors, counts, given),
        plan_of_fields(*fields, bank=bank, reuse=reuse),
        group=group,
        mode=mode,
        segments=names,
        version=version,
        layer=layer,
    )
    copies = _find_copies(slots, bank_of(bank, group).slots, names)
    return copies, _filled(fields[0], group) if copies else [], call


@_operator(
    f"reduce_expert_grads(Tensor(a!)[] grads, int[] counts, str[] given, {_PLAN},"
    " Tensor(b!)[] slot_grads, Tensor(c!) order, str how, bool zero, int bank, bool reuse,"
    " str group) -> ()",
    lambda *_: None,
)
def _reduce(grads: list[Tensor], counts: list[int], given: list[str], *rest: Any) -> None:
    *fields, slot_grads, _order, mode, zero, bank, reuse, name = rest
    group = find_group(name)
    held = bank_of(bank, group).slot_grads
    call = partial(
        reduce_expert_grads,
        unflatten(grads, counts, given),
        plan_of_fields(*fields, bank=bank, reuse=reuse),
        group=group,
        mode=mode,
        zero=zero,
    )
    _run(_find_copies(slot_grads, held, list(held)), range(group.topology.slots_per_rank), call)


# A functionalized graph passes copies of slots and slot gradients, and may still read the
# originals. Calls always use the group's memory: so the copies' contents, which a bank keeps and
# sends on, are copied there, the results are copied back, and the group's memory is restored.


def _find_copies(passed: list[Tensor], held: Mapping[str, Tensor], names: list[str]) -> Copies:
    """Return the passed tensors that are copies, each paired with the group's own."""
    own = [held[name] for name in names if name in held]
    return [(a, b) for a, b in zip(passed, own, strict=True) if a.data_ptr() != b.data_ptr()]


def _filled(slot_expert: Tensor, group: Group) -> list[int]:
    """Return this rank's slots that the plan fills; none if the call will reject the plan."""
    if slot_expert.shape != (group.num_ranks, group.topology.slots_per_rank):
        return []
    mine: list[int] = slot_expert[group.rank].tolist()
    return [slot for slot, expert in enumerate(mine) if expert >= 0]


def _run(copies: Copies, rows: Sequence[int], call: Callable[..., Work | None]) -> None:
    """Make the call, move its effect to the rows that were passed, and restore the group's."""
    kept = [(own[row], own[row].clone()) for _, own in copies for row in rows]
    _copy_rows([(own, copy) for copy, own in copies], rows)
    call(async_op=False)
    _copy_rows(copies, rows)
    for memory, before in kept:
        memory.copy_(before)


def _copy_rows(pairs: Copies, rows: Sequence[int]) -> None:
    """Copy rows of the second tensor of each pair to the first."""
    for to, source in pairs:
        for row in rows:
            to[row].copy_(source[row])
