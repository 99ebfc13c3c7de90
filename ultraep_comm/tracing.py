"""What the local calls become while torch.compile traces them: operators of ``ops``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ultraep_comm.plan import Plan

if TYPE_CHECKING:
    from ultraep_comm.costs import PlanCost
    from ultraep_comm.group import Group


def plan_replicas(load: torch.Tensor, group: Group, target: float, cost: PlanCost | None) -> Plan:
    """Trace :func:`ultraep_comm.plan_replicas` with a group."""
    t = group.topology
    costs: list[float] = []
    if cost is not None:
        costs = [cost.token, cost.expert_byte, cost.replica]
        if cost.expert_bytes is not None:
            costs.append(cost.expert_bytes)
    slot_expert, slot_quota, home_quota, home, domains = torch.ops.ultraep_comm.plan_replicas(
        load, t.num_ranks, t.num_experts, t.slots_per_rank, target, costs, group.name
    )
    return Plan(
        slot_expert=slot_expert,
        home=home,
        slot_quota=slot_quota,
        home_quota=home_quota,
        load=load.to(torch.int32, copy=True).contiguous() if load.dim() == 2 else None,
        domains=domains,
    )


def reroute(topk_ids: torch.Tensor, plan: Plan, group: Group) -> torch.Tensor:
    """Trace :func:`ultraep_comm.reroute`."""
    result: torch.Tensor = torch.ops.ultraep_comm.reroute(topk_ids, *_fields(plan), group.name)
    return result


def reroute_map(
    routing_map: torch.Tensor, probs: torch.Tensor | None, plan: Plan, group: Group
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Trace :func:`ultraep_comm.reroute_map`."""
    t = group.topology
    physical, physical_map = torch.ops.ultraep_comm.reroute_map(
        routing_map, probs, *_fields(plan), t.num_ranks * t.instances_per_rank, group.name
    )
    return physical_map, None if probs is None else physical


def _fields(plan: Plan) -> tuple[torch.Tensor | None, ...]:
    """Return what a reroute reads of a plan, in the order in which its operators take it."""
    return plan.slot_expert, plan.home, plan.slot_quota, plan.home_quota, plan.load
