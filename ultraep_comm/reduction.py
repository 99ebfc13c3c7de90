"""Bringing the gradients of replicas home."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ultraep_comm import tracing_calls
from ultraep_comm.errors import InvalidArgumentError
from ultraep_comm.gradients import BoundGrads
from ultraep_comm.plan import Plan
from ultraep_comm.plan_calls import check_plan, open_call, reject_call
from ultraep_comm.plan_store import PlanHandle
from ultraep_comm.schedule import MODES
from ultraep_comm.segments import Weights
from ultraep_comm.work import Work

if TYPE_CHECKING:
    from ultraep_comm.group import Group

REDUCE_MODES = ("pull", "direct")


def reduce_expert_grads(
    grads: Weights | BoundGrads,
    plan: Plan | PlanHandle,
    *,
    group: Group,
    async_op: bool = False,
    mode: str = "auto",
    zero: bool = True,
) -> Work | None:
    """Add the gradients of a plan's replicas to the main gradients. Collective.

    Each main gradient of a replicated expert becomes ``main + (r1 + r2 + ... + rn)``: the replicas'
    slot gradients in ascending rank order, added in fp32, and rounded once to the main gradient's
    dtype. These bits depend neither on the mode nor on tiles, threads or ranks.

    When it has finished, this rank's main gradients are complete, nobody reads its slot gradients
    any more, and those of filled slots are zero (with ``zero=False`` undefined: sums are made in
    their place). Gradients of empty slots and of experts without replicas are untouched.

    On the CUDA engine the call belongs to a stream, its plan may stay on the device, and it can be
    captured into a CUDA graph, as :func:`replicate_experts` says; its gradients are bound before,
    with ``group.bind_grads``.

    Args:
        grads: this rank's main gradients, ``{name: tensor [M, *shape] or sequence of M tensors}``
            for the segments of ``group.slot_grads``, float32 or bfloat16 each, in any memory of the
            group's device; or what ``group.bind_grads`` returned. Not to be used before the call
            has finished.
        plan: the one that the slots were filled by, the same on every rank; or its handle, which
            this call ends; in a CUDA graph, in memory that every replay reads.
        group: made with ``grads=``.
        async_op: return a :class:`Work` at once; a CUDA group then uses a stream of its own.
        mode: "pull" (each replica's rank adds up a share, and the home loads the sums), "direct"
            (the home loads every replica), or "auto".
        zero: clear the slot gradients that were used, for the next microbatch. False: whoever
            uses those slots next overwrites their gradients.

    Raises:
        InvalidGradientsError, InvalidPlanError, InvalidArgumentError: this rank's input is bad; its
            peers fail at once, and the group takes no more calls.
        PlanHandleError: the handle has ended (backward twice?), or is another group's; peers fail
            likewise.
        GroupClosedError: the group is closed or failed earlier.
        DeviceError: the CUDA driver refused the call.
        UnsupportedError: the current stream is being captured into a CUDA graph, and the plan or
            the addresses of the gradients are on the CPU, or the handle's save was not captured.
        TransferError: the call failed. Slot gradients and the main gradients of replicated experts
            are undefined then.
    """
    if torch.compiler.is_dynamo_compiling():
        plan, *_ = group._plan_of(plan, "reduce_expert_grads")
        grads = grads.grads if isinstance(grads, BoundGrads) else grads
        return tracing_calls.reduce_expert_grads(grads, plan, group, async_op, mode, zero)
    given = plan
    plan, tag, operation, on_device = open_call(given, "reduce_expert_grads", group)
    try:
        bound = group._grads.bind(grads)
        check_plan(plan, on_device, group)
        mode_id = _mode_id(mode, group)
    except Exception as error:
        reject_call(error, tag, operation, group)
        raise
    try:
        if on_device:
            chosen = mode
            own = group._stages is not None and plan.home is group._stages.home
            home = 0 if own else plan.home.data_ptr()
            in_use = given._in_use if isinstance(given, PlanHandle) else 0
            epoch = group._device_engine.reduce_on_device(
                plan, home, bound, mode_id, zero, in_use, async_op, tag
            )
        else:
            epoch, chosen_id = group._engine.reduce(
                plan.slot_expert.data_ptr(),
                0 if plan.slot_quota is None else plan.slot_quota.data_ptr(),
                0 if plan.home_quota is None else plan.home_quota.data_ptr(),
                bound.addresses.buffer_info()[0],
                bound.types.buffer_info()[0],
                mode_id,
                zero,
                async_op,
                tag,
            )
            chosen = MODES[chosen_id]
        planned, num_bytes = None if on_device else plan, group._grads.expert_bytes
        work = group._submitted(epoch, (bound, plan), operation, chosen, planned, tag, num_bytes)
        if isinstance(given, PlanHandle):
            given._spend(on_device=on_device)
        if not async_op:
            work.wait()
    except BaseException as error:
        group._broke_off(error)
        raise
    return work if async_op else None


def _mode_id(mode: str, group: Group) -> int:
    if mode == "auto":
        return -1
    if mode not in REDUCE_MODES:
        raise InvalidArgumentError(
            f"rank {group.rank}: mode is {mode!r}; expected 'auto' or one of {list(REDUCE_MODES)}"
        )
    return MODES.index(mode)
