"""replicate_experts: copy experts into the slots of a plan."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ultraep_comm import _core
from ultraep_comm.calls import traced
from ultraep_comm.calls.transfer import Call, address, find_mode, plan_of
from ultraep_comm.errors import InvalidWeightsError
from ultraep_comm.group.bank import find_version
from ultraep_comm.group.group import Group, session_of
from ultraep_comm.group.saved_plans import PlanHandle
from ultraep_comm.group.work import Work
from ultraep_comm.plan.plan import Plan
from ultraep_comm.plan.schedule import MODES
from ultraep_comm.weights.binding import Binding
from ultraep_comm.weights.segments import Weights

_REPLICATE = _core.Operation.REPLICATE


def replicate_experts(
    weights: Weights | Binding,
    plan: Plan | PlanHandle,
    *,
    group: Group,
    async_op: bool = False,
    mode: str = "auto",
    segments: Sequence[str] | None = None,
    version: int | None = None,
    layer: int | None = None,
) -> Work | None:
    """Copy the experts of a plan into its slots. Collective.

    When the call has finished, this rank's filled slots are complete, bit for bit; empty slots are
    untouched; no peer reads this rank's main weights any more; its own sends are delivered.

    A plan with ``reuse`` is copied into its bank's slots as far as they do not hold it yet: slots
    that do are not written to, and may be used throughout the call. Ranks that hold an expert send
    it as well as its home does. What the bank held of another version, or in other segments, is
    gone. A plan without is copied as a whole, as after :meth:`Bank.invalidate`, and in bank 0
    nothing is kept for later calls.

    On the CUDA engine the call is stream-ordered: it runs after the work that the current stream
    already has, and work enqueued after ``wait()`` runs after it. Without ``async_op`` it runs on
    the current stream itself. The host does not wait, unless four calls are in flight: then it
    waits for the oldest.

    A plan on the device of a CUDA group stays there: the kernel checks it, chooses the mode and
    makes the schedule. A fault in it is raised by ``synchronize()`` of the call, or by the next
    call. Such a call can be captured into a CUDA graph, with weights bound before the capture. (In
    groups of more than 32 segments the plan is copied to the CPU, which synchronises.)

    Args:
        weights: this rank's main weights, ``{name: tensor [M, *shape] or sequence of M tensors}``,
            or what ``group.bind`` returned. Not to be changed before the call has finished.
        plan: the same on every rank, or the handle that ``group.save`` returned for it. In a CUDA
            graph, every replay reads the plan's memory.
        group: the group.
        async_op: return a :class:`Work` at once; a CUDA group then uses its own stream.
        mode: "push", "pull" (weights from ``group.empty_weights()``), "direct", or "auto".
        segments: names of the segments to transfer; None: all.
        version: of the main weights, for a plan with ``reuse``: a number that grows whenever they
            change, the same on every rank. None: that of the bank; see :meth:`Bank.invalidate`.
        layer: whose weights they are, so that a rank that skips a layer gets a PlanMismatchError
            instead of another layer's weights. None: a handle's layer, or not compared.

    Raises:
        InvalidWeightsError, InvalidPlanError, InvalidArgumentError: this rank's input is bad; its
            peers fail at once, and the group takes no more calls.
        PlanHandleError: the handle has ended, or is another group's; peers fail likewise.
        GroupClosedError: the group is closed or failed earlier.
        DeviceError: the CUDA driver refused the call.
        UnsupportedError: the current stream is being captured into a CUDA graph, and the plan or
            the addresses of the weights are on the CPU, or the handle's save was not captured.
        TransferError: the call failed.
    """
    session = session_of(group)
    if torch.compiler.is_dynamo_compiling():
        plan = plan_of(plan, "replicate_experts", session)
        how = (group, async_op, mode, segments, version)
        return traced.replicate_experts(weights, plan, *how, layer)

    call = Call(session, plan, "replicate_experts", layer)
    try:
        indices, expert_bytes = session.weights.select(segments)
        bound = session.weights.bind(weights)
        session.weights.require(bound, indices)
        if mode == "pull" and bound.region < 0:
            counts = session.layout.num_mains
            uneven = (
                f"; those of empty_instances() are not where ranks' numbers of experts differ, here"
                f" {counts}"
                if len(set(counts)) > 1
                else ""
            )
            raise InvalidWeightsError(
                f"rank {session.rank}: mode='pull' needs weights that peers can address"
                f"{uneven}; pass the tensors of group.empty_weights(), or use mode='push'"
            )
        transfer = _core.TransferCall(
            operation=_REPLICATE,
            plan=call.view,
            mains=bound.addresses.buffer_info()[0],
            num_segments=len(indices),
            mode=find_mode(mode, MODES, session.rank),
            background=async_op,
            tag=call.tag,
            segments=indices.buffer_info()[0],
            region=bound.region,
            on_device=call.on_device,
            own_home=call.plan.home is session.local.home,
            table=address(bound.table),
            bank=call.bank,
            version=(
                0
                if version is None and call.bank < 0
                else find_version(version, call.plan, session)
            ),
            known=address(call.filled) if call.bank >= 0 else 0,
        )
    except Exception as error:
        call.reject(error)
        raise
    work = call.submit(transfer, bound, expert_bytes, async_op)
    # After submit: a call that the engine refused fills nothing.
    session.filled_by[call.plan.bank] = plan
    return work
