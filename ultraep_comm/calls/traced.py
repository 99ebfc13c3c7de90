"""The calls as torch.compile traces them: operators of ``ops``.

All that are collective, or read what these change, declare a write to one tensor, so that a
compiler keeps each of them, once, in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from ultraep_comm.engines.base import Form, count_in_torch
from ultraep_comm.engines.options import as_seconds
from ultraep_comm.errors import InvalidArgumentError, UltraEPError
from ultraep_comm.group.group import session_of
from ultraep_comm.group.names import find_group
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
    counts: list[int] = []  # tensors of each segment; -1: one stacked tensor
    tensors: list[torch.Tensor] = []
    for value in given.values():
        listed = [value] if isinstance(value, torch.Tensor) else list(value)
        counts.append(-1 if isinstance(value, torch.Tensor) else len(listed))
        tensors += [tensor.detach() for tensor in listed]  # a transfer has no gradient
    names = list(group.slots) if segments is None else list(segments)
    held_slots = bank_of(plan.bank, group).slots
    slots = [held_slots[name] for name in names if name in held_slots]
    plan_fields = (plan.slot_expert, plan.home, plan.slot_quota, plan.home_quota)
    arguments: tuple[Any, ...] = (
        *(tensors, counts, list(given), *plan_fields),
        *(slots, names, order, mode, plan.bank, plan.reuse, version, layer, group.name),
    )
    if not async_op:
        torch.ops.ultraep_comm.replicate_experts(*arguments)
        return None
    token = torch.ops.ultraep_comm.start_replicate_experts(*arguments)
    held = [*tensors, *(field for field in plan_fields if field is not None)]
    return TracedWork(token, held, plan.slot_expert, slots, names, plan.bank, mode, group.name)


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
    counts: list[int] = []  # tensors of each segment; -1: one stacked tensor
    tensors: list[torch.Tensor] = []
    for value in grads.values():
        listed = [value] if isinstance(value, torch.Tensor) else list(value)
        counts.append(-1 if isinstance(value, torch.Tensor) else len(listed))
        tensors += listed
    torch.ops.ultraep_comm.reduce_expert_grads(
        tensors,
        counts,
        list(grads),
        *(plan.slot_expert, plan.home, plan.slot_quota, plan.home_quota),
        list(bank_of(plan.bank, group).slot_grads.values()),
        order,
        mode,
        zero,
        plan.bank,
        plan.reuse,
        group.name,
    )
    return FinishedWork() if async_op else None


def bank_of(index: int, group: Group) -> Bank:
    """Return the bank that a plan's calls use; the first if they will reject the plan."""
    return group.banks[index if index < len(group.banks) else 0]


class FinishedWork(Work):
    """The result of ``async_op`` for a call that completes in place in a compiled function."""

    def __init__(self) -> None:
        self.mode = ""
        self.epoch = 0

    def wait(
        self, timeout: timedelta | float | None = None, *, slots: Sequence[int] | None = None
    ) -> None:
        """Return at once."""

    def slot_ready(self, slot: int) -> bool:
        """Raise InvalidArgumentError: a reduction fills no slot."""
        raise InvalidArgumentError(
            f"slot {slot} of a reduce_expert_grads; expected a replicate_experts: other calls are"
            " waited for as a whole"
        )

    def synchronize(self) -> None:
        """Return at once."""

    def is_completed(self) -> bool:
        """Return True."""
        return True

    def exception(self) -> UltraEPError | None:
        """Return None."""
        return None


class TracedWork(Work):
    """A call in flight in a compiled function. ``mode`` is the requested one."""

    def __init__(
        self,
        token: torch.Tensor,
        held: list[torch.Tensor],
        slot_expert: torch.Tensor,
        slots: list[torch.Tensor],
        names: list[str],
        bank: int,
        mode: str,
        group_name: str,
    ) -> None:
        self.mode = mode
        # The wait takes the transfer's inputs too, or a compiler might reuse their memory earlier.
        self._arguments = (token, held, slot_expert, slots, names, ORDER, bank, group_name)

    def wait(
        self, timeout: timedelta | float | None = None, *, slots: Sequence[int] | None = None
    ) -> None:
        """See :meth:`Work.wait`: for the whole call."""
        limit = 0.0 if timeout is None else as_seconds(timeout)
        torch.ops.ultraep_comm.wait_replicate_experts(*self._arguments, False, limit)

    def synchronize(self) -> None:
        """See :meth:`Work.synchronize`."""
        torch.ops.ultraep_comm.wait_replicate_experts(*self._arguments, True)

    def is_completed(self) -> bool:
        """See :meth:`Work.is_completed`; only outside the compiled function."""
        return self._started().is_completed()

    def slot_ready(self, slot: int) -> bool:
        """See :meth:`Work.slot_ready`; only outside the compiled function."""
        return self._started().slot_ready(slot)

    def exception(self) -> UltraEPError | None:
        """See :meth:`Work.exception`; only outside the compiled function."""
        return self._started().exception()

    @property
    def epoch(self) -> int:  # type: ignore[override]
        """See :class:`Work`; only outside the compiled function."""
        return int(self._arguments[0])

    def _started(self) -> Work:
        token, _, slot_expert, *_, group_name = self._arguments
        filled = slot_expert if slot_expert.is_cpu else None
        return work_of(int(token), find_group(group_name), self.mode, filled)


def work_of(epoch: int, group: Group, mode: str = "", filled: torch.Tensor | None = None) -> Work:
    """Return the handle of a transfer that was started in a compiled function."""
    return Work(session_of(group), epoch, "replicate_experts", mode, filled)


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
        topk_ids, *_fields(plan), group.name, source=source
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
        *_fields(plan),
        t.num_ranks * t.instances_per_rank,
        group.name,
        source=source,
    )
    return physical_map, None if probs is None else physical


def _fields(plan: Plan) -> tuple[torch.Tensor | None, ...]:
    """Return the fields of a plan that a reroute reads, in the order of its operators."""
    return plan.slot_expert, plan.home, plan.slot_quota, plan.home_quota, plan.load
