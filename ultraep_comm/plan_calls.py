"""What transfers and reductions have in common before they go to an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ultraep_comm import _core
from ultraep_comm.errors import UltraEPError, UnsupportedError
from ultraep_comm.plan import Plan
from ultraep_comm.plan_store import PlanHandle
from ultraep_comm.planning import check_device_plan, plan_on_host
from ultraep_comm.refusals import check_host_plan, name_call

if TYPE_CHECKING:
    from ultraep_comm.group import Group


def open_call(given: Plan | PlanHandle, name: str, group: Group) -> tuple[Plan, int, str, bool]:
    """Begin a call by a plan or the handle of a saved one.

    Returns:
        The plan; what ranks compare besides it; the operation for errors, with the handle's layer
        and microbatch; and whether the plan is on the device, for a kernel to read.

    Raises:
        PlanHandleError: the handle cannot be used; peers have been told.
        GroupClosedError: the group is closed or failed earlier.
        UnsupportedError: the plan is on the CPU, or no kernel of this group reads it, and the
            current stream is being captured, which is no reason to fail the peers.
    """
    try:
        plan, tag, operation = group._plan_of(given, name)
    except UltraEPError as error:
        group._reject(error)
        raise
    group._check_open(operation)
    on_device = _is_read_by_kernels(plan, group)
    if not on_device:
        _refuse_capture_of_kind(plan, operation, group)
    return plan if on_device else plan_on_host(plan, group), tag, operation, on_device


def check_plan(plan: Plan, on_device: bool, group: Group) -> None:
    """Raise InvalidPlanError for a bad plan; of one on a device, only what the CPU knows of it."""
    check_device_plan(plan, group) if on_device else check_host_plan(plan, group)


def reject_call(error: Exception, tag: int, operation: str, group: Group) -> None:
    """Tell the peers of bad input, and have its error say which saved plan's call it was for."""
    if tag:
        name_call(error, operation)
    group._reject(error)


def _refuse_capture_of_kind(plan: Plan, operation: str, group: Group) -> None:
    """Raise UnsupportedError in a capture for a device plan that no kernel of the group reads."""
    device = group._device
    if device is None or not isinstance(plan, Plan) or not device.holds(plan.slot_expert):
        return
    if not device.is_capturing():
        return
    most = _core.CUDA_MAX_DEVICE_SEGMENTS
    why = (
        "has no slots: there is nothing to capture, leave the call out"
        if group.topology.slots_per_rank == 0
        else f"has {len(group.segments)} segments, and at most {most} can be captured: make it with"
        " fewer, larger ones"
    )
    raise UnsupportedError(
        f"rank {group.rank}: {operation} in a capture into a CUDA graph, on a group that {why}"
    )


def _is_read_by_kernels(plan: Plan, group: Group) -> bool:
    return (
        group._device is not None
        and isinstance(plan, Plan)
        and group._device.holds(plan.slot_expert)
        and len(group.segments) <= _core.CUDA_MAX_DEVICE_SEGMENTS
        and group.topology.slots_per_rank > 0  # no slots have no address
    )
