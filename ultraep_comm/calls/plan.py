"""plan_replicas: the local stage from a load to a plan."""

from __future__ import annotations

from dataclasses import replace

import torch

from ultraep_comm import _core
from ultraep_comm.calls import traced
from ultraep_comm.engines.base import check_load_values, plan_on_cpu
from ultraep_comm.errors import (
    InvalidArgumentError,
    InvalidLoadError,
    InvalidPlanError,
)
from ultraep_comm.group.bank import Bank, find_bank
from ultraep_comm.group.group import Group, session_of
from ultraep_comm.plan.plan import Plan, PlanCost, as_int_tensor
from ultraep_comm.plan.planner import Costs, target_to_ppm
from ultraep_comm.plan.topology import IntArray, IntsLike, Topology, as_number, check_load_form


def plan_replicas(
    load: torch.Tensor,
    *,
    group: Group | None = None,
    topology: Topology | None = None,
    target: float = 1.01,
    cost: PlanCost | None = None,
    bank: Bank | int = 0,
    reuse: bool = False,
    residents: torch.Tensor | IntsLike | None = None,
) -> Plan:
    """Decide which experts to copy where. Local and pure: equal loads give equal plans.

    A load on the device of a CUDA group is planned there, by one launch on the current stream: the
    plan's tensors stay on the device, the host does not wait, and the call can be captured into a
    CUDA graph. If such a load has bad values, its plan is empty, without tokens, and a later call
    on the group, or ``group.close()``, raises the error.

    Minimises, in this order: the imbalance, down to the target; the transfer, which is the most
    experts that any rank exports or imports; the number of replicas. With ``cost`` it minimises the
    total time instead, over a set of plans from no replicas to the best balanced.

    With ``reuse``, slots keep what they hold: it minimises the imbalance, down to the target; the
    transfer of the slots that have to be written; their number; the instances in use.
    ``Plan.slots_to_fill`` says which they are. A slot whose expert has no tokens keeps it, with a
    quota of 0, until another expert needs the slot.

    Args:
        load: int32 or int64 ``[G, E]`` by source rank, as :func:`gather_load` returns it; or
            ``[E]``, global sums, whose plan cannot be rerouted. On the CPU, or on the device of a
            CUDA group.
        group: to plan for.
        topology: to plan for without a group: :meth:`Topology.make` of ``ultraep_comm.plan``.
        target: stop balancing when the largest rank quota is this many times the mean; at least 1.
        cost: replaces the target.
        bank: of the group: whose slots are meant.
        reuse: plan on top of what the bank holds. False: its slots count as empty.
        residents: without a group: integers ``[G, S]``, what slots hold already; -1: nothing.

    Raises:
        InvalidLoadError: wrong shape, dtype or device, a negative load, an expert with 2**31 or
            more tokens, or a total of 2**40 or more.
        InvalidArgumentError: neither a group nor a topology, or both; a target out of range; a bank
            of another group; residents that are no legal plan, or together with ``cost``.
        UnsupportedError: the load is on the device, and the group is too large to plan there; or
            it is on the CPU, with ``reuse``, and the current stream is being captured.
        DeviceError: the CUDA driver refused the launch.
    """
    if (group is None) == (topology is None):
        raise InvalidArgumentError(
            f"plan_replicas was given {'neither' if group is None else 'both'} of group= and"
            " topology=; expected one: a group, or Topology.make(num_ranks=, num_experts=,"
            " slots_per_rank=)"
        )
    if residents is not None if topology is None else (reuse or bank != 0):
        raise InvalidArgumentError(
            "plan_replicas needs bank= and reuse= with a group, and residents= without one"
        )
    if topology is not None:
        return _plan_alone(load, topology, target, cost, residents)
    assert group is not None
    session_of(group)
    if torch.compiler.is_dynamo_compiling():
        if isinstance(bank, Bank):
            bank = find_bank(bank, group.banks, group.rank).index
        return traced.plan_replicas(load, group, target, cost, bank, reuse)
    return plan_for_group(load, group, target, cost, bank, reuse)


def _plan_alone(
    load: torch.Tensor,
    topology: Topology,
    target: float,
    cost: PlanCost | None,
    residents: torch.Tensor | IntsLike | None,
) -> Plan:
    if not isinstance(topology, Topology):
        raise InvalidArgumentError(f"topology is {topology!r}; expected what Topology.make returns")
    _check_load(load, topology)
    held = None if residents is None else _check_residents(residents, topology)
    objective = plan_objective(target, cost, None, has_residents=held is not None)
    return plan_on_cpu(topology, load, *objective, residents=held)


def _check_residents(residents: torch.Tensor | IntsLike, topology: Topology) -> IntArray:
    """Return residents, which have to be what a legal plan may have in its slots."""
    expected = (topology.num_ranks, topology.slots_per_rank)
    t = topology
    try:
        slots = as_int_tensor(residents, "residents")
        if tuple(slots.shape) != expected:
            raise InvalidPlanError(f"shape {tuple(slots.shape)}; expected {expected}")
        held: IntArray = slots.cpu().numpy()
        try:
            _core.check_residents(t.home, t.domain, held, t.allow_cross_domain)
        except ValueError:  # slower, and says more
            Plan.from_slots(
                slots,
                num_experts=t.num_experts,
                home=t.home,
                domains=t.domain,
                allow_cross_domain=t.allow_cross_domain,
            )
            raise
    except ValueError as error:
        raise InvalidArgumentError(f"residents: {error}") from None
    return held


def plan_for_group(
    load: torch.Tensor,
    group: Group,
    target: float,
    cost: PlanCost | None,
    bank: Bank | int = 0,
    reuse: bool = False,
    *,
    apart: bool = False,
) -> Plan:
    """Do :func:`plan_replicas` for a group.

    With ``apart`` the plan's tensors share no memory with each other or with the group; its
    ``load`` may be the caller's.
    """
    session = session_of(group)
    session.raise_fault()
    engine = session.engine
    _check_load(load, group.topology, group.device, on_device=engine.is_on_device(load))
    index = find_bank(bank, group.banks, group.rank).index
    objective = plan_objective(target, cost, group, has_residents=reuse)
    plan = engine.plan(load, *objective, apart=apart, bank=index if reuse else None)
    return replace(plan, bank=index, reuse=reuse) if index or reuse else plan


def plan_objective(
    target: float, cost: PlanCost | None, group: Group | None, *, has_residents: bool = False
) -> tuple[int, Costs | None]:
    """Return the target in parts per million, and the costs, as the core's integers.

    Raises:
        InvalidArgumentError: the target or a cost is out of range, or a cost comes with residents.
    """
    if has_residents and cost is not None:
        raise InvalidArgumentError(
            "plan_replicas was given a cost and residents, or reuse=True; expected a target with"
            " these"
        )
    nbytes = None if group is None else sum(s.nbytes for s in group.segments.values())
    if not isinstance(cost, PlanCost | None):
        raise InvalidArgumentError(f"cost is {cost!r}; expected a PlanCost, or None")
    costs = None if cost is None else cost.in_integers(nbytes)
    return target_to_ppm(as_number(target, "target")), costs


def _check_load(
    load: torch.Tensor,
    topology: Topology,
    device: torch.device | str = "cpu",
    *,
    on_device: bool = False,
) -> None:
    """Raise InvalidLoadError for a bad shape, dtype or device and, on the CPU, bad values."""
    check_load_form(load)
    if not (on_device or load.device.type == "cpu"):
        expected = " or ".join(dict.fromkeys(["cpu", str(device)]))
        raise InvalidLoadError(f"load is on {load.device}; expected {expected}")
    if not on_device:
        check_load_values(load)
    shape = (topology.num_ranks, topology.num_experts)
    if tuple(load.shape) not in (shape, shape[1:]):
        raise InvalidLoadError(
            f"load has shape {tuple(load.shape)}; expected {shape}, or {shape[1:]} for global sums"
        )
