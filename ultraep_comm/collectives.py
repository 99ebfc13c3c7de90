"""The calls on a group, in the order of the data flow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ultraep_comm import _core, tracing_calls
from ultraep_comm.costs import PlanCost
from ultraep_comm.errors import (
    InvalidArgumentError,
    InvalidWeightsError,
    UltraEPError,
    UnsupportedError,
)
from ultraep_comm.loads import REJECTED, LoadExchange, check_rows
from ultraep_comm.plan import Plan
from ultraep_comm.plan_calls import check_plan, open_call, reject_call
from ultraep_comm.plan_store import PlanHandle
from ultraep_comm.planning import check_ids, plan_objective, plan_replicas
from ultraep_comm.refusals import bad_id_error
from ultraep_comm.schedule import MODES
from ultraep_comm.segments import BoundWeights, Weights

if TYPE_CHECKING:
    from ultraep_comm.cuda.device import Device
    from ultraep_comm.group import Group
    from ultraep_comm.work import Work


def gather_load(topk_ids: torch.Tensor, *, group: Group) -> torch.Tensor:
    """Count this rank's routed tokens and exchange the counts. Collective.

    Args:
        topk_ids: int32 or int64 ``[T, k]``, logical expert ids; -1 is padding. On the CPU, or on
            the device of a CUDA group: then nothing synchronises, the call belongs to the current
            stream, and can be captured into a CUDA graph. (Not in a group whose domains are out of
            each other's reach: there the process group exchanges loads, by way of the CPU.)
        group: the group.

    Returns:
        int32 ``[G, E]``: tokens of each source rank for each expert; where ``topk_ids`` is.

    Raises:
        InvalidLoadError: wrong dtype, device or an id out of range; of an id on the device the next
            call raises it, and the load is zeros.
        UnsupportedError: the current stream is being captured, and ``topk_ids`` is on the CPU.
        TransferError: the exchange failed; that too may surface in the next call.
    """
    if torch.compiler.is_dynamo_compiling():
        return tracing_calls.gather_load(topk_ids, group)
    group._check_open("gather_load")
    t = group.topology
    counts = torch.empty(t.num_experts, dtype=torch.int32, device="cpu")
    if group._loads is not None:
        return _exchange(topk_ids, counts, group, group._loads)
    if group._device is not None:
        return _gather_on_device(topk_ids, group, group._device)
    try:
        _count(topk_ids, counts, group)
    except Exception as error:
        group._reject(error)
        raise
    table = torch.empty((t.num_ranks, t.num_experts), dtype=torch.int32, device="cpu")
    engine = group._engine
    assert isinstance(engine, _core.Engine)  # other groups have an exchange of their own
    try:
        epoch = engine.gather(counts.data_ptr(), table.data_ptr())
        group._submitted(epoch, (counts, table), "gather_load", "").wait()
    except BaseException as error:
        group._broke_off(error)
        raise
    return table


def gather_and_plan(
    topk_ids: torch.Tensor, *, group: Group, target: float = 1.01, cost: PlanCost | None = None
) -> Plan:
    """Do what :func:`gather_load` and :func:`plan_replicas` do, one after the other. Collective.

    With ids on the device of a CUDA group it is a single launch, from ids to plan; in groups that
    are too large for that, or that have ranks out of load/store reach, it is two.

    Args:
        topk_ids: as for :func:`gather_load`.
        group: the group.
        target: as for :func:`plan_replicas`; the same on every rank, as is ``cost``.
        cost: as for :func:`plan_replicas`.

    Returns:
        The plan, where ``topk_ids`` is; its ``load`` is that of :func:`gather_load`.

    Raises:
        InvalidArgumentError, InvalidLoadError, UnsupportedError, TransferError: as those two.
    """
    stages = group._stages
    if (
        torch.compiler.is_dynamo_compiling()
        or stages is None
        or not stages.holds(topk_ids)
        or group._loads is not None
        or not group._device_engine.plans_at_once
    ):
        load = gather_load(topk_ids, group=group)
        return plan_replicas(load, group=group, target=target, cost=cost)
    group._check_open("gather_and_plan")
    group._raise_stage_fault()
    try:
        objective = plan_objective(target, cost, group)
        ids, load = _prepare_gather(topk_ids, group)
        memory, plan = stages.plan_memory(load)
    except Exception as error:
        group._reject(error)
        raise
    try:
        epoch = group._device_engine.gather_and_plan(ids, load, memory, stages.core, *objective)
        group._submitted(epoch, (ids, load, memory), "gather_and_plan", "").wait()
    except BaseException as error:
        group._broke_off(error)
        raise
    return plan


def _prepare_gather(topk_ids: torch.Tensor, group: Group) -> tuple[torch.Tensor, torch.Tensor]:
    """Return dense ids on the device, and memory for the load."""
    device, t = group._device, group.topology
    assert device is not None
    check_ids(topk_ids, group.rank, group.device)
    ids = topk_ids.contiguous()
    if not (device.holds(ids) or device.holds(topk_ids)):
        if device.is_capturing():
            raise UnsupportedError(
                f"rank {group.rank}: topk_ids is on the CPU, and the current stream is being"
                " captured into a CUDA graph; give ids on the device"
            )
        on_host, ids = ids, device.empty(topk_ids.shape, topk_ids.dtype)
        device.upload(ids, on_host)
    return ids, device.empty((t.num_ranks, t.num_experts), torch.int32)


def _gather_on_device(topk_ids: torch.Tensor, group: Group, device: Device) -> torch.Tensor:
    try:
        ids, load = _prepare_gather(topk_ids, group)
    except Exception as error:
        group._reject(error)
        raise
    try:
        epoch = group._device_engine.gather(ids, load)
        work = group._submitted(epoch, (ids, load), "gather_load", "")
        if device.holds(topk_ids):
            work.wait()
            return load
        work.synchronize()
    except BaseException as error:
        group._broke_off(error)
        raise
    return torch.empty(load.shape, dtype=torch.int32, device="cpu").copy_(load)


def _exchange(
    topk_ids: torch.Tensor, counts: torch.Tensor, group: Group, loads: LoadExchange
) -> torch.Tensor:
    """Exchange loads outside the engine; a rank with bad ids says so in its row."""
    rejected: Exception | None = None
    stages, ids = group._stages, topk_ids
    on_device = stages is not None and stages.holds(topk_ids)
    if stages is not None and on_device:
        stages.prepare_copy("topk_ids, in a group whose domains are out of each other's reach,")
        ids = topk_ids.cpu()
    try:
        _count(ids, counts, group)
    except Exception as error:
        counts.fill_(REJECTED)
        rejected = error
    try:
        table = loads.exchange(counts)
        if rejected is None:
            check_rows(table, group.rank, group._engine.epoch)
    except UltraEPError as error:
        group._fail(rejected or error)
        raise (rejected or error) from (error if rejected is not None else error.__cause__)
    if rejected is not None:
        group._reject(rejected)
        raise rejected
    return stages.put(table) if stages is not None and on_device else table


def _count(topk_ids: torch.Tensor, counts: torch.Tensor, group: Group) -> None:
    check_ids(topk_ids, group.rank, group.device)
    ids = topk_ids.contiguous()
    bad = _core.count_experts(
        ids.data_ptr(), ids.numel(), ids.dtype == torch.int64, counts.numel(), counts.data_ptr()
    )
    if bad >= 0:
        raise bad_id_error(group.rank, bad, int(topk_ids.reshape(-1)[bad]), counts.numel())


def replicate_experts(
    weights: Weights | BoundWeights | torch.Tensor,
    plan: Plan | PlanHandle,
    *,
    group: Group,
    async_op: bool = False,
    mode: str = "auto",
    segments: Sequence[str] | None = None,
) -> Work | None:
    """Copy the experts of a plan into the slots that it names. Collective.

    When it has finished, this rank's filled slots are complete, bit for bit; empty slots are
    untouched; nobody reads this rank's main weights any more; its own sends are delivered.

    On the CUDA engine the call belongs to a stream, as any CUDA operation: it comes after what the
    current stream holds, and what the current stream gets after ``wait()`` comes after it. Without
    ``async_op`` it runs on the current stream itself; the host does not wait. With four calls
    under way it waits for the first.

    A plan on the device of a CUDA group stays there: the kernel checks it, chooses the mode and
    makes the schedule. What is wrong with it is raised where the call is waited for with
    ``synchronize()``, or by the next call. Such a call can be captured into a CUDA graph, with
    weights that were bound before or with ``group.weight_table``. (In groups of more than 32
    segments it is copied to the CPU, which synchronises.)

    Args:
        weights: this rank's main weights, ``{name: tensor [M, *shape] or sequence of M tensors}``,
            or what ``group.bind`` returned, or ``group.weight_table``. Not to be changed before the
            call has finished.
        plan: the same on every rank, or the handle that ``group.save`` returned for it; in a CUDA
            graph, in memory that every replay reads.
        group: the group.
        async_op: return a :class:`Work` at once; a CUDA group then uses a stream of its own.
        mode: "push", "pull" (weights from ``group.empty_weights()``), "direct", or "auto".
        segments: names of the segments to transfer; None: all.

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
    if torch.compiler.is_dynamo_compiling():
        plan, *_ = group._plan_of(plan, "replicate_experts")
        return tracing_calls.replicate_experts(weights, plan, group, async_op, mode, segments)
    given = plan
    plan, tag, operation, on_device = open_call(given, "replicate_experts", group)
    try:
        selection = group._selections.find(segments)
        check_plan(plan, on_device, group)
        bound = group._weights.bind(weights)
        group._selections.require(bound, selection)
        if not (on_device or bound.addresses or group.num_mains == 0):
            raise InvalidWeightsError(
                f"rank {group.rank}: group.weight_table goes with a plan on the device, and this"
                " one is on the CPU; pass the weights"
            )
        mode_id = _mode_id(mode, bound, group)
    except Exception as error:
        reject_call(error, tag, operation, group)
        raise
    try:
        if on_device:
            chosen = mode
            own = group._stages is not None and plan.home is group._stages.home
            epoch = group._device_engine.replicate_on_device(
                plan,
                0 if own else plan.home.data_ptr(),
                bound,
                selection.bits,
                mode_id,
                async_op,
                tag,
            )
        else:
            epoch, chosen_id = group._engine.replicate(
                plan.slot_expert.data_ptr(),
                0 if plan.slot_quota is None else plan.slot_quota.data_ptr(),
                0 if plan.home_quota is None else plan.home_quota.data_ptr(),
                bound.addresses.buffer_info()[0],
                selection.address,
                selection.count,
                mode_id,
                bound.region,
                async_op,
                tag,
            )
            chosen = MODES[chosen_id]
        group._filled_by = given
        planned = None if on_device else plan
        work = group._submitted(
            epoch, (bound, plan), operation, chosen, planned, tag, selection.nbytes
        )
        if not async_op:
            work.wait()
    except BaseException as error:
        group._broke_off(error)
        raise
    return work if async_op else None


def _mode_id(mode: str, bound: BoundWeights, group: Group) -> int:
    if mode == "auto":
        return -1
    if mode not in MODES:
        raise InvalidArgumentError(
            f"rank {group.rank}: mode is {mode!r}; expected 'auto' or one of {list(MODES)}"
        )
    if mode == "pull" and bound.region < 0:
        raise InvalidWeightsError(
            f"rank {group.rank}: mode='pull' needs weights that peers can address; fill the tensors"
            " of group.empty_weights() and pass those, or use 'push'"
        )
    return MODES.index(mode)
