"""The local stage from routed experts to physical instances, as ids or as a map."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from ultraep_comm import _core, tracing
from ultraep_comm.errors import InvalidLoadError, InvalidPlanError
from ultraep_comm.plan import Plan
from ultraep_comm.plan_store import PlanHandle
from ultraep_comm.planning import (
    check_device_plan,
    check_ids,
    check_plan_fits,
    other_home,
    plan_on_host,
)
from ultraep_comm.topology import IntArray

if TYPE_CHECKING:
    from ultraep_comm.group import Group

PlanArrays = tuple[IntArray, IntArray, IntArray, IntArray, IntArray]


def reroute(topk_ids: torch.Tensor, plan: Plan | PlanHandle, *, group: Group) -> torch.Tensor:
    """Map routed experts to physical instances, so that each receives its quota. Local.

    Token j of an expert, in row-major order, goes to the first instance, by rank, whose cumulative
    share of this rank's tokens exceeds j.

    With ids and plan on the device of a CUDA group it is launched on the current stream: the host
    sees nothing of it and does not wait, and the call can be captured into a CUDA graph. What is
    wrong with the values of such ids or plans is raised by a later call on the group, or by
    ``group.close()``; the ids that it concerns are padding until then.

    Args:
        topk_ids: int32 or int64 ``[T, k]``: the ids that were counted for ``plan.load``; -1 is
            padding and stays -1. On the CPU, or on the device of a CUDA group.
        plan: or the handle of a saved one; with quotas and ``[G, E]`` load, on the CPU or on the
            device. Where one of plan and ids is on the CPU, the other is copied there and the
            result to where the ids are, which synchronises.
        group: the group; its rank is the source.

    Returns:
        The same shape, dtype and device: ``rank * P + index``, with P the largest number of mains
        on a rank plus S, mains first in expert order, then slots. Every id stays in its place, so
        that weights ``[T, k]`` keep belonging to it.

    Raises:
        InvalidPlanError: the plan has no quotas or no ``[G, E]`` load, or breaks its own sums.
        InvalidLoadError: wrong dtype or device, an id out of range, or ids that are not those
            counted in ``plan.load``.
        UnsupportedError: a stream is being captured, and something has to be copied, or the working
            memory has to grow: the text says which call to make once before the capture; or the
            handle's save was not captured.
        PlanHandleError: the handle has ended, or is another group's.
        DeviceError: the CUDA driver refused a launch.
    """
    plan, *_ = group._plan_of(plan, "reroute")
    if torch.compiler.is_dynamo_compiling():
        return tracing.reroute(topk_ids, plan, group)
    check_ids(topk_ids, group.rank, group.device)
    if group._stages is not None and _is_for_device(topk_ids, plan, group):
        return group._stages.reroute(topk_ids, plan)
    arrays = _plan_arrays(plan, group)
    ids = _on_host(topk_ids, "topk_ids", group).contiguous().numpy()
    out = np.empty_like(ids)
    status = _core.reroute(ids, *arrays, group.rank, out)
    raise_fault(status, "topk_ids", group.rank, group.topology.num_experts)
    return _beside(torch.from_numpy(out), topk_ids, group)


def reroute_map(
    routing_map: torch.Tensor,
    probs: torch.Tensor | None,
    plan: Plan | PlanHandle,
    *,
    group: Group,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Do what :func:`reroute` does, for a routing map and its probabilities. Local.

    Every token gets the instances that :func:`reroute` gives it for the list of the map's experts,
    token by token and in ascending order within a token.

    Args:
        routing_map: bool ``[T, E]``, True where a token goes to an expert: as many per expert as
            were counted for ``plan.load``. On the CPU, or on the device of a CUDA group.
        probs: ``[T, E]`` of any floating dtype, on the map's device; None: there are none.
        plan: a plan or a handle, with quotas and ``[G, E]`` load: what :func:`reroute` says of
            that, and of what is launched, captured and found wrong later, holds here too.
        group: the group; its rank is the source.

    Returns:
        ``(routing_map, probs)``, both ``[T, G * P]``, by the ids that :func:`reroute` returns;
        columns without an instance are False and 0. Probabilities of routed tokens are moved bit
        for bit, the others dropped. ``probs`` has the dtype of the input, and gradients flow back
        through it, unless it is an 8-bit float; None if there were none.

    Raises:
        InvalidPlanError: the plan has no quotas or no ``[G, E]`` load, or breaks its own sums.
        InvalidLoadError: wrong shape, dtype or device, or a map that is not the one counted in
            ``plan.load``.
        PlanHandleError, UnsupportedError, DeviceError: as :func:`reroute`.
    """
    plan, *_ = group._plan_of(plan, "reroute_map")
    if torch.compiler.is_dynamo_compiling():
        return tracing.reroute_map(routing_map, probs, plan, group)
    _check_map(routing_map, group)
    if probs is not None:
        _check_probs(probs, routing_map, group.rank)
    if group._stages is not None and _is_for_device(routing_map, plan, group):
        return group._stages.reroute_map(routing_map, probs, plan)
    before, after = _find_moves(routing_map, plan, group)
    t = group.topology
    shape = (routing_map.shape[0], t.num_ranks * t.instances_per_rank)
    physical_map = routing_map.new_zeros(shape)
    physical_map.view(-1).index_fill_(0, after, True)
    if probs is None:
        return physical_map, None
    # index_copy: as differentiable as scatter, and for bfloat16 seven times as fast. torch has it
    # for the bits of 8-bit floats only.
    values = probs.view(torch.uint8) if probs.element_size() == 1 else probs
    moved = values.reshape(-1).index_select(0, before)
    physical = values.new_zeros(shape[0] * shape[1]).index_copy_(0, after, moved).view(shape)
    return physical_map, physical if values is probs else physical.view(probs.dtype)


def reroute_gradient(
    grad: torch.Tensor, routing_map: torch.Tensor, plan: Plan, *, group: Group
) -> torch.Tensor:
    """Return the gradient ``[T, E]`` of probabilities from that of the rerouted, ``[T, G * P]``."""
    if group._stages is not None and _is_for_device(routing_map, plan, group):
        return group._stages.gradient(grad, routing_map, plan)
    before, after = _find_moves(routing_map, plan, group)
    moved = grad.reshape(-1).index_select(0, after)
    found = grad.new_zeros(routing_map.numel()).index_copy_(0, before, moved)
    return found.view(routing_map.shape)


def _find_moves(routing_map: torch.Tensor, plan: Plan, group: Group) -> torch.Tensor:
    """Return ``[2, N]``: flat positions of what is routed, before and after."""
    arrays = _plan_arrays(plan, group)
    on_host = _on_host(routing_map, "routing_map", group).contiguous().numpy()
    status, moves = _core.reroute_map(on_host.view(np.uint8), *arrays, group.rank)
    raise_fault(status, "routing_map", group.rank, group.topology.num_experts)
    return torch.from_numpy(moves).to(routing_map.device)


def _is_for_device(routing: torch.Tensor, plan: Plan, group: Group) -> bool:
    """Return whether a reroute is to be launched; raises what launches before have found."""
    stages = group._stages
    if stages is None:
        return False
    stages.raise_fault()
    if not (stages.holds(routing) and stages.holds(plan)):
        return False
    check_device_plan(plan, group)
    _check_tokens(plan, group)
    return True


def _on_host(routing: torch.Tensor, name: str, group: Group) -> torch.Tensor:
    if group._stages is not None and group._stages.holds(routing):
        group._stages.prepare_copy(name)
    return routing.cpu()


def _beside(result: torch.Tensor, routing: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the result where the routing is."""
    if group._stages is not None and group._stages.holds(routing):
        return group._stages.put(result)
    return result


def _plan_arrays(plan: Plan, group: Group) -> PlanArrays:
    """Return load, slot_expert, slot_quota, home_quota and home.

    As NumPy arrays, which the core takes in a fraction of the 4 us for a tensor.
    """
    plan = plan_on_host(plan, group)
    check_plan_fits(plan, group)
    _check_tokens(plan, group)
    assert plan.load is not None
    assert plan.slot_quota is not None
    assert plan.home_quota is not None
    return (
        plan.load.numpy(),
        plan.slot_expert.numpy(),
        plan.slot_quota.numpy(),
        plan.home_quota.numpy(),
        plan.home.numpy(),
    )


def _check_tokens(plan: Plan, group: Group) -> None:
    if plan.slot_quota is None or plan.home_quota is None or plan.load is None:
        raise InvalidPlanError(
            f"rank {group.rank}: a plan without quotas or [G, E] load cannot be rerouted; plan from"
            " gather_load's result, or give Plan.from_slots its quotas and load"
        )


def _check_map(routing_map: torch.Tensor, group: Group) -> None:
    if not isinstance(routing_map, torch.Tensor):
        raise InvalidLoadError(
            f"rank {group.rank}: routing_map is a {type(routing_map).__name__}; expected a bool"
            " tensor [T, E]"
        )
    num_experts = group.topology.num_experts
    if routing_map.dim() != 2 or routing_map.shape[1] != num_experts:
        raise InvalidLoadError(
            f"rank {group.rank}: routing_map has shape {tuple(routing_map.shape)}; expected"
            f" [T, {num_experts}]"
        )
    devices = (torch.device("cpu"), group.device)
    if routing_map.dtype != torch.bool or routing_map.device not in devices:
        expected = " or ".join(dict.fromkeys(map(str, devices)))
        raise InvalidLoadError(
            f"rank {group.rank}: routing_map is {routing_map.dtype} on {routing_map.device};"
            f" expected torch.bool on {expected}"
        )


def _check_probs(probs: torch.Tensor, routing_map: torch.Tensor, rank: int) -> None:
    if not isinstance(probs, torch.Tensor):
        raise InvalidLoadError(
            f"rank {rank}: probs is a {type(probs).__name__}; expected a tensor [T, E] or None"
        )
    if probs.shape != routing_map.shape:
        raise InvalidLoadError(
            f"rank {rank}: probs has shape {tuple(probs.shape)}; expected that of routing_map,"
            f" {tuple(routing_map.shape)}"
        )
    if not probs.is_floating_point() or probs.device != routing_map.device:
        raise InvalidLoadError(
            f"rank {rank}: probs is {probs.dtype} on {probs.device}; expected a floating dtype on"
            f" {routing_map.device}, like routing_map"
        )


def raise_fault(status: _core.RerouteStatus, routing: str, rank: int, num_experts: int) -> None:
    """Raise what the core found wrong with the plan, or with the argument named ``routing``."""
    faults = _core.RerouteFault
    if status.fault is faults.NONE:
        return
    if status.fault is faults.ID_OUT_OF_RANGE:
        raise InvalidLoadError(
            f"rank {rank}: {routing} has the id {status.value} at position {status.position};"
            f" expected [0, {num_experts}), or -1 for padding"
        )
    if status.fault is faults.COUNT_MISMATCH:
        raise InvalidLoadError(
            f"rank {rank}: {routing} has expert {status.expert} {status.counted} times, but the"
            f" plan was made for {status.expected}; reroute what gather_load counted"
        )
    if status.fault is faults.QUOTA_MISMATCH:
        raise InvalidPlanError(
            f"rank {rank}: the quotas of expert {status.expert} sum to {status.counted}; expected"
            f" its load, {status.expected}"
        )
    if status.fault is faults.OTHER_HOME:
        raise other_home(rank)
    if status.fault is faults.BAD_SLOT:
        raise InvalidPlanError(
            f"rank {rank}: slot_expert has {status.value} at flat index {status.position};"
            " expected -1 or an expert that its rank does not hold yet"
        )
    raise InvalidPlanError(
        f"rank {rank}: a load or quota of expert {status.expert} is {status.value}; expected at"
        " least 0 and sums below 2**31"
    )
