"""The local stage from a load to a plan, and what calls ask of ids and plans."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from ultraep_comm import _core, tracing
from ultraep_comm.costs import PlanCost
from ultraep_comm.errors import InvalidArgumentError, InvalidLoadError, InvalidPlanError
from ultraep_comm.plan import Plan
from ultraep_comm.planner import Costs, target_to_ppm
from ultraep_comm.topology import IntsLike, Topology

if TYPE_CHECKING:
    from ultraep_comm.group import Group


def plan_replicas(
    load: torch.Tensor,
    *,
    group: Group | None = None,
    target: float = 1.01,
    slots_per_rank: int | None = None,
    num_ranks: int | None = None,
    home: IntsLike | None = None,
    domains: IntsLike | None = None,
    allow_cross_domain: bool = False,
    cost: PlanCost | None = None,
) -> Plan:
    """Decide which experts to copy where. Local and pure: equal loads give equal plans.

    A load on the device of a CUDA group is planned there, by one launch on the current stream: the
    plan's tensors are on the device, the host sees nothing of it and does not wait, and the call
    can be captured into a CUDA graph. What is wrong with the values of such a load is raised by a
    later call on the group, or by ``group.close()``; until then its plan is empty, with no tokens.

    Finds, in this order: the least imbalance, down to the target; the least transfer, which is the
    most experts that any rank exports or imports; the fewest replicas. With ``cost``: the plan with
    the least time in all, of a set of plans between none and the best balanced.

    Args:
        load: int32 or int64 ``[G, E]`` by source rank, as :func:`gather_load` returns them; or
            ``[E]``, global sums: a plan that cannot be rerouted. On the CPU, or on the device of a
            CUDA group.
        group: takes the place of the arguments from ``slots_per_rank`` on.
        target: good enough is a largest rank quota of this many times the mean, from 1.0 up.
        slots_per_rank: S.
        num_ranks: G; None: the rows of ``load``.
        home: integers ``[E]``; None: contiguous, as even as possible.
        domains: integers ``[G]``; None: a single domain.
        allow_cross_domain: replicas may lie outside their home's domain.
        cost: takes the place of the target.

    Raises:
        InvalidLoadError: wrong shape, dtype or device, a negative load, an expert with 2**31 or
            more tokens, or 2**40 or more in all.
        InvalidArgumentError: no group and no ``slots_per_rank``, or both; a target out of range.
        UnsupportedError: the load is on the device, and the group too large to be planned there.
        DeviceError: the CUDA driver refused the launch.
    """
    constants = (slots_per_rank, num_ranks, home, domains)
    if group is not None and (
        allow_cross_domain or any(constant is not None for constant in constants)
    ):
        raise InvalidArgumentError(
            "plan_replicas was given a group and its constants too; expected one of them"
        )
    if group is not None and torch.compiler.is_dynamo_compiling():
        return tracing.plan_replicas(load, group, target, cost)
    on_device = _check_load(load, group)
    if group is not None:
        topology = group.topology
    else:
        if slots_per_rank is None or (num_ranks is None and load.dim() == 1):
            raise InvalidArgumentError(
                "plan_replicas needs group=, or slots_per_rank= (and num_ranks= for an [E] load)"
            )
        topology = Topology.make(
            num_ranks=load.shape[0] if num_ranks is None else num_ranks,
            num_experts=load.shape[-1],
            slots_per_rank=slots_per_rank,
            home=home,
            domains=domains,
            allow_cross_domain=allow_cross_domain,
        )
    return _plan(load, group, topology, target, cost, on_device=on_device)


def plan_apart(load: torch.Tensor, group: Group, target: float, cost: PlanCost | None) -> Plan:
    """Do what :func:`plan_replicas` does, but no two tensors of the plan share memory.

    Nor does one with the group. ``load`` of the plan may be the caller's.
    """
    on_device = _check_load(load, group)
    return _plan(load, group, group.topology, target, cost, on_device=on_device, apart=True)


def _plan(
    load: torch.Tensor,
    group: Group | None,
    topology: Topology,
    target: float,
    cost: PlanCost | None,
    *,
    on_device: bool,
    apart: bool = False,
) -> Plan:
    expected = (topology.num_ranks, topology.num_experts)
    if tuple(load.shape) not in (expected, expected[1:]):
        raise InvalidLoadError(
            f"load has shape {tuple(load.shape)}; expected {expected}, or {expected[1:]} for global"
            " sums"
        )
    target_ppm, costs = plan_objective(target, cost, group)
    if group is not None and group._stages is not None and on_device:
        return group._stages.plan(load, target_ppm, costs, apart=apart)
    total = (load.sum(dim=0, dtype=torch.int64) if load.dim() == 2 else load.long()).contiguous()
    try:
        slot_expert, slot_quota, home_quota = _core.plan_replicas(
            total,
            topology.home,
            topology.domain,
            topology.slots_per_rank,
            topology.allow_cross_domain,
            target_ppm,
            costs,
        )
    except ValueError as error:
        raise InvalidLoadError(str(error)) from None
    return Plan(
        slot_expert=torch.from_numpy(slot_expert),
        home=torch.tensor(topology.home, device="cpu"),
        slot_quota=torch.from_numpy(slot_quota),
        home_quota=torch.from_numpy(home_quota),
        load=load.to(torch.int32, copy=True).contiguous() if load.dim() == 2 else None,
        domains=torch.tensor(topology.domain, device="cpu"),
    )


def plan_objective(
    target: float, cost: PlanCost | None, group: Group | None
) -> tuple[int, Costs | None]:
    """Return what a plan is to minimise, in the core's integers; InvalidArgumentError: nothing."""
    try:
        costs = None if cost is None else cost.in_integers(_expert_bytes(group))
        return target_to_ppm(target), costs
    except ValueError as error:
        raise InvalidArgumentError(str(error)) from None


def _expert_bytes(group: Group | None) -> int | None:
    return None if group is None else sum(s.nbytes for s in group.segments.values())


def _check_load(load: torch.Tensor, group: Group | None) -> bool:
    """Return whether the load is on the group's device; raise for what the host can see."""
    stages = None if group is None else group._stages
    if stages is not None:
        stages.raise_fault()
    on_device = stages is not None and stages.holds(load)
    _check_kind(load, group, on_device)
    if not on_device:
        _check_values(load)
    return on_device


def _check_kind(load: torch.Tensor, group: Group | None, on_device: bool) -> None:
    if not isinstance(load, torch.Tensor) or load.dim() not in (1, 2):
        found = tuple(load.shape) if isinstance(load, torch.Tensor) else type(load).__name__
        raise InvalidLoadError(f"load is {found}; expected a tensor [G, E] or [E]")
    integral = load.dtype in (torch.int32, torch.int64)
    if not integral or not (on_device or load.device.type == "cpu"):
        devices = ["cpu"] if group is None or group._stages is None else ["cpu", str(group.device)]
        raise InvalidLoadError(
            f"load is {load.dtype} on {load.device}; expected int32 or int64 on"
            f" {' or '.join(dict.fromkeys(devices))}"
        )


def _check_values(load: torch.Tensor) -> None:
    if load.numel():
        low, high = (int(bound) for bound in load.aminmax())
        if low < 0 or high >= 2**31:
            at = tuple(((load < 0) | (load >= 2**31)).nonzero()[0].tolist())
            raise InvalidLoadError(
                f"load{list(at)} is {int(load[at])}; expected at least 0, below 2**31"
            )


def check_ids(topk_ids: torch.Tensor, rank: int, device: torch.device) -> None:
    """Raise InvalidLoadError unless ``topk_ids`` is an integer tensor on CPU or ``device``."""
    devices = (torch.device("cpu"), device)
    if not isinstance(topk_ids, torch.Tensor):
        raise InvalidLoadError(
            f"rank {rank}: topk_ids is a {type(topk_ids).__name__}; expected a tensor [T, k]"
        )
    if topk_ids.dtype not in (torch.int32, torch.int64) or topk_ids.device not in devices:
        expected = " or ".join(dict.fromkeys(map(str, devices)))
        raise InvalidLoadError(
            f"rank {rank}: topk_ids is {topk_ids.dtype} on {topk_ids.device}; expected int32 or"
            f" int64 on {expected}"
        )


def plan_on_host(plan: Plan, group: Group) -> Plan:
    """Return the plan of a CUDA group with its tensors on the CPU, which synchronises.

    Raises:
        UnsupportedError: the plan is on the device, and the current stream is being captured.
    """
    stages = group._stages
    if stages is not None and stages.holds(plan):
        stages.prepare_copy("the plan")
    elif not isinstance(plan, Plan) or plan.slot_expert.is_cpu or group.device.type == "cpu":
        return plan
    return plan.cpu()


def check_device_plan(plan: Plan, group: Group) -> None:
    """Raise InvalidPlanError unless all of a device plan is there, in the group's shape.

    What its tensors hold the kernels check.
    """
    _check_numbers(plan, group)
    device = plan.slot_expert.device
    for name, tensor in vars(plan).items():
        if tensor is not None and tensor.device != device:
            raise InvalidPlanError(
                f"rank {group.rank}: the plan's {name} is on {tensor.device}; expected {device},"
                " like its slot_expert"
            )


def has_shape_of(plan: Plan, group: Group) -> bool:
    """Return whether the plan is for as many ranks, slots and experts as the group, and on CPU."""
    t = group.topology
    return (
        isinstance(plan, Plan)
        and plan.slot_expert.shape == (t.num_ranks, t.slots_per_rank)
        and plan.home.shape == (t.num_experts,)
        and plan.slot_expert.is_cpu
        and plan.home.is_cpu
    )


def check_plan_fits(plan: Plan, group: Group) -> None:
    """Raise InvalidPlanError unless the plan is for a group like this one, and on CPU."""
    t = group.topology
    if has_shape_of(plan, group) and group._engine.has_home(plan.home.data_ptr()):
        return  # the rest says what is wrong
    if not isinstance(plan, Plan):
        raise InvalidPlanError(
            f"rank {group.rank}: plan is a {type(plan).__name__}; expected a Plan, for instance"
            " from Plan.from_slots"
        )
    _check_numbers(plan, group)
    if plan.slot_expert.device.type != "cpu":
        raise InvalidPlanError(
            f"rank {group.rank}: the plan is on {plan.slot_expert.device}; expected cpu"
        )
    if not np.array_equal(plan.home.numpy(), t.home):
        raise other_home(group.rank)


def other_home(rank: int) -> InvalidPlanError:
    """Return the error for a plan that was made for another home map."""
    return InvalidPlanError(
        f"rank {rank}: the plan's home map is not the group's; pass home= to both"
    )


def _check_numbers(plan: Plan, group: Group) -> None:
    t = group.topology
    found = (plan.num_ranks, plan.slots_per_rank, plan.num_experts)
    expected = (t.num_ranks, t.slots_per_rank, t.num_experts)
    if found != expected:
        raise InvalidPlanError(
            f"rank {group.rank}: the plan is for {found[0]} ranks, {found[1]} slots and {found[2]}"
            f" experts; expected {expected[0]}, {expected[1]} and {expected[2]}"
        )
