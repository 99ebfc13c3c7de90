"""The calls as torch.compile traces them: operators of ``ops``.

All that are collective, or read what these change, declare a write to one tensor, so that a
compiler keeps each of them, once, in order.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from ultraep_comm.engines.base import Form, count_in_torch
from ultraep_comm.engines.options import as_seconds
from ultraep_comm.group.group import session_of
from ultraep_comm.group.names import find_group
from ultraep_comm.group.session import Session
from ultraep_comm.group.work import Work
from ultraep_comm.plan.plan import Plan
from ultraep_comm.weights.binding import Binding
from ultraep_comm.weights.segments import Weights

if TYPE_CHECKING:
    from ultraep_comm.group.bank import Bank
    from ultraep_comm.group.group import Group
    from ultraep_comm.plan.plan import PlanCost


# All groups share it, as ranks have to issue calls in one order across groups too. torch's effect
# tokens do not support operators that mutate arguments, as these mutate slots.
ORDER = torch.zeros(1, dtype=torch.int64, device="cpu")


def gather_load(routing: torch.Tensor, form: Form, group: Group) -> torch.Tensor:
    """Trace :func:`ultraep_comm.gather_load`."""
    t = group.topology
    if form == "routing_map":
        routing = count_in_torch(routing, t.num_experts)
    load: torch.Tensor = torch.ops.ultraep_comm.gather_load(
        routing, t.num_ranks, t.num_experts, ORDER, group.name, are_counts=form != "topk_ids"
    )
    return load


def replicate_experts(
    weights: Weights | Binding,
    plan: Plan,
    group: Group,
    async_op: bool,
    mode: str,
    segments: Sequence[str] | None,
    version: int | None = None,
    layer: int | None = None,
    order: torch.Tensor = ORDER,
) -> Work | None:
    """Trace :func:`ultraep_comm.replicate_experts`."""
    given = weights.tensors if isinstance(weights, Binding) else weights
    tensors, counts = flatten(given)
    tensors = [tensor.detach() for tensor in tensors]  # a transfer has no gradient
    names = list(group.slots) if segments is None else list(segments)
    held_slots = bank_of(plan.bank, group).slots
    slots = [held_slots[name] for name in names if name in held_slots]
    plan_fields = fields_of(plan)[:-1]
    arguments: tuple[Any, ...] = (
        *(tensors, counts, list(given), *plan_fields),
        *(slots, names, order, mode, plan.bank, plan.reuse, version, layer, group.name),
    )
    if not async_op:
        torch.ops.ultraep_comm.replicate_experts(*arguments)
        return None
    token = torch.ops.ultraep_comm.start_replicate_experts(*arguments)
    # The wait takes the transfer's inputs too, or a compiler might reuse their memory earlier.
    held = [*tensors, *(field for field in plan_fields if field is not None)]
    waited = (token, held, plan.slot_expert, slots, names, ORDER, plan.bank, group.name)
    return TracedWork("replicate_experts", mode, group.name, waited)


def reduce_expert_grads(
    grads: Weights,
    plan: Plan,
    group: Group,
    async_op: bool,
    mode: str,
    zero: bool,
    order: torch.Tensor = ORDER,
) -> Work | None:
    """Trace :func:`ultraep_comm.reduce_expert_grads`, which always completes in place."""
    tensors, counts = flatten(grads)
    slot_grads = list(bank_of(plan.bank, group).slot_grads.values())
    torch.ops.ultraep_comm.reduce_expert_grads(
        *(tensors, counts, list(grads), *fields_of(plan)[:-1], slot_grads),
        *(order, mode, zero, plan.bank, plan.reuse, group.name),
    )
    return TracedWork("reduce_expert_grads", "", group.name) if async_op else None


def flatten(weights: Weights) -> tuple[list[torch.Tensor], list[int]]:
    """Return all tensors, and the number of each segment's; -1: one stacked tensor."""
    tensors: list[torch.Tensor] = []
    counts: list[int] = []
    for value in weights.values():
        listed = [value] if isinstance(value, torch.Tensor) else list(value)
        counts.append(-1 if isinstance(value, torch.Tensor) else len(listed))
        tensors += listed
    return tensors, counts


def unflatten(
    tensors: Iterable[torch.Tensor], counts: Iterable[int], names: Iterable[str]
) -> dict[str, Any]:
    """Return main weights: the inverse of :func:`flatten`."""
    rest = iter(tensors)
    return {
        name: next(rest) if count < 0 else list(itertools.islice(rest, count))
        for name, count in zip(names, counts, strict=True)
    }


def bank_of(index: int, group: Group) -> Bank:
    """Return the bank that a plan's calls use; the first if they will reject the plan."""
    return group.banks[index if index < len(group.banks) else 0]


class TracedWork(Work):
    """A call of a compiled function; outside of the function it has every member of a Work.

    Args:
        operation: the call's name.
        mode: the requested mode.
        group_name: of its group.
        waited: the arguments of ``wait_replicate_experts``; None: the call completed in place.
    """

    def __init__(
        self, operation: str, mode: str, group_name: str, waited: tuple[Any, ...] | None = None
    ) -> None:
        self.mode = mode
        self._operation = operation
        self._group_name = group_name
        self._waited = waited
        slot_expert = None if waited is None else waited[2]
        self._filled = slot_expert if slot_expert is not None and slot_expert.is_cpu else None

    def wait(
        self, timeout: timedelta | float | None = None, *, slots: Sequence[int] | None = None
    ) -> None:
        """See :meth:`Work.wait`: for the whole call."""
        limit = 0.0 if timeout is None else as_seconds(timeout)
        if self._waited is not None:
            torch.ops.ultraep_comm.wait_replicate_experts(*self._waited, False, limit)

    def synchronize(self) -> None:
        """See :meth:`Work.synchronize`."""
        if self._waited is not None:
            torch.ops.ultraep_comm.wait_replicate_experts(*self._waited, True)

    @property
    def epoch(self) -> int:  # type: ignore[override]
        """See :class:`Work`; only outside the compiled function."""
        return 0 if self._waited is None else int(self._waited[0])

    @property
    def _session(self) -> Session:  # type: ignore[override]
        return session_of(find_group(self._group_name))


def plan_replicas(
    load: torch.Tensor,
    group: Group,
    target: float,
    cost: PlanCost | None,
    bank: int = 0,
    reuse: bool = False,
) -> Plan:
    """Trace :func:`ultraep_comm.plan_replicas` with a group."""
    t = group.topology
    costs: list[float] = []
    if cost is not None:
        costs = [cost.token, cost.expert_byte, cost.replica]
        if cost.expert_bytes is not None:
            costs.append(cost.expert_bytes)
    sizes = (t.num_ranks, t.num_experts, t.slots_per_rank)
    if reuse:
        fields = torch.ops.ultraep_comm.plan_replicas_in_bank(
            load, *sizes, target, costs, ORDER, bank, group.name
        )
    else:
        fields = torch.ops.ultraep_comm.plan_replicas(load, *sizes, target, costs, group.name)
    slot_expert, slot_quota, home_quota, home, domains, *moves = fields
    return Plan(
        slot_expert=slot_expert,
        home=home,
        slot_quota=slot_quota,
        home_quota=home_quota,
        load=load.to(torch.int32, copy=True).contiguous() if load.dim() == 2 else None,
        domains=domains,
        slots_to_fill=moves[0] if reuse else None,
        bank=bank,
        reuse=reuse,
    )


def reroute(
    topk_ids: torch.Tensor, plan: Plan, group: Group, source: int | None = None
) -> torch.Tensor:
    """Trace :func:`ultraep_comm.reroute`."""
    result: torch.Tensor = torch.ops.ultraep_comm.reroute(
        topk_ids, *fields_of(plan), group.name, source=source
    )
    return result


def reroute_map(
    routing_map: torch.Tensor,
    probs: torch.Tensor | None,
    plan: Plan,
    group: Group,
    source: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Trace :func:`ultraep_comm.reroute_map`."""
    t = group.topology
    physical, physical_map = torch.ops.ultraep_comm.reroute_map(
        routing_map,
        probs,
        *fields_of(plan),
        t.num_ranks * t.instances_per_rank,
        group.name,
        source=source,
    )
    return physical_map, None if probs is None else physical


_FIELDS = ("slot_expert", "home", "slot_quota", "home_quota", "load")


def fields_of(plan: Plan) -> tuple[torch.Tensor | None, ...]:
    """Return the tensors of a plan in the order of the operators; only reroutes take the load."""
    return plan.slot_expert, plan.home, plan.slot_quota, plan.home_quota, plan.load


def plan_of_fields(*fields: torch.Tensor | None, bank: int = 0, reuse: bool = False) -> Plan:
    """Return the plan of such tensors, with or without a load."""
    tensors: dict[str, Any] = dict(zip(_FIELDS, fields, strict=False))
    return Plan(**tensors, bank=bank, reuse=reuse)
