"""MoonEP: the experts that each rank copies."""

from __future__ import annotations

import torch

from ultraep_comm.errors import InvalidPlanError
from ultraep_comm.interop.tables import check_experts, make_plan, read_homes
from ultraep_comm.plan.plan import Plan, as_int_tensor
from ultraep_comm.plan.topology import IntsLike


def from_moonep(
    experts_to_copy: IntsLike,
    *,
    num_experts: int,
    alloc: IntsLike | None = None,
    load: torch.Tensor | None = None,
    slots_per_rank: int | None = None,
) -> Plan:
    """Make a plan of MoonEP's (Moonshot AI): ``MoonEPCommPlan.experts_to_copy``.

    Args:
        experts_to_copy: integers ``[R, B]``, the experts that each rank copies; -1: unused. An
            expert's home is rank ``e // (E / R)``.
        num_experts: E, a multiple of R.
        alloc: integers ``[R, E]``, the tokens that each rank computes of each expert, as the
            planner balances them; None: no quotas.
        load: integers ``[R, E]`` by source rank; None: the plan cannot be rerouted.
        slots_per_rank: the group's S; None: B.

    Raises:
        InvalidPlanError: an expert is out of range, ``alloc`` gives tokens to a rank that neither
            owns nor copies the expert, a rank needs more than ``slots_per_rank``; or as in
            :meth:`Plan.from_slots`.
    """
    copies = as_int_tensor(experts_to_copy, "experts_to_copy")
    if copies.dim() != 2 or len(copies) == 0:
        raise InvalidPlanError(
            f"experts_to_copy has shape {tuple(copies.shape)}; expected [R, B], all ranks' rows"
        )
    num_ranks, num_experts, homes = read_homes(len(copies), num_experts, even_in="MoonEP")
    slots: list[list[int]] = copies.tolist()
    for rank, row in enumerate(slots):
        check_experts(row, f"experts_to_copy[{rank}]", num_experts)
    tokens = None
    if alloc is not None:
        given = as_int_tensor(alloc, "alloc").cpu()
        if given.shape != (num_ranks, num_experts):
            raise InvalidPlanError(
                f"alloc has shape {tuple(given.shape)}; expected {(num_ranks, num_experts)}"
            )
        tokens = {(r, e): int(given[r, e]) for r, e in given.nonzero().tolist()}
    for (rank, expert), count in (tokens or {}).items():
        if rank != homes[expert] and expert not in slots[rank]:
            raise InvalidPlanError(
                f"alloc[{rank}, {expert}] is {count}, but rank {rank} is not the home of expert"
                f" {expert} and does not copy it: experts_to_copy[{rank}] is {slots[rank]}."
                " Expected a copy of each expert that a rank computes: pass alloc of the same"
                " plan, and give MoonEP's Buffer more slots (B) if it has a limit"
            )
    return make_plan(
        slots,
        homes,
        tokens,
        load=load,
        slots_per_rank=slots_per_rank,
        advice="use plan_replicas: MoonEP fills up to E / R slots",
        device=copies.device,
    )
