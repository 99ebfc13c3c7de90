"""The calls on a group, in the order of the data flow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ultraep_comm import _core, tracing_calls
from ultraep_comm.errors import (
    InvalidArgumentError,
    InvalidLoadError,
    InvalidPlanError,
    InvalidWeightsError,
    UltraEPError,
)
from ultraep_comm.loads import REJECTED, LoadExchange, check_rows
from ultraep_comm.plan import Plan
from ultraep_comm.planning import check_ids, check_plan_fits, has_shape_of, plan_on_host
from ultraep_comm.schedule import MODES
from ultraep_comm.segments import BoundWeights, Weights

if TYPE_CHECKING:
    from ultraep_comm.group import Group
    from ultraep_comm.work import Work

# In the order of `enum class PlanFault` in src/core/validate.hpp.
_PLAN_FAULTS = (
    "",
    "expected an expert in [0, {num_experts}) or -1 for an empty slot",
    "which is at home on that rank; expected a rank other than its home",
    "which that rank already holds; expected at most one instance on a rank",
    "which is at home in another domain; place it inside, or allow_cross_domain=True",
)


def gather_load(topk_ids: torch.Tensor, *, group: Group) -> torch.Tensor:
    """Count this rank's routed tokens and exchange the counts. Collective.

    Args:
        topk_ids: int32 or int64 ``[T, k]``, logical expert ids; -1 is padding. On the CPU, or on
            the device of a CUDA group: then they are counted there, and the host waits for it.
        group: the group.

    Returns:
        int32 ``[G, E]`` on the CPU: tokens of each source rank for each expert.

    Raises:
        InvalidLoadError: wrong dtype, device or an id out of range.
        TransferError: the exchange failed.
    """
    if torch.compiler.is_dynamo_compiling():
        return tracing_calls.gather_load(topk_ids, group)
    group._check_open("gather_load")
    t = group.topology
    counts = torch.empty(t.num_experts, dtype=torch.int32)
    if group._loads is not None:
        return _exchange(topk_ids, counts, group, group._loads)
    try:
        _count(topk_ids, counts, group)
    except Exception as error:
        group._reject(error)
        raise
    table = torch.empty((t.num_ranks, t.num_experts), dtype=torch.int32)
    engine = group._engine
    assert isinstance(engine, _core.Engine)  # other groups have an exchange of their own
    epoch = engine.gather(counts.data_ptr(), table.data_ptr())
    group._submitted(epoch, (counts, table), "gather_load", "").wait()
    return table


def _exchange(
    topk_ids: torch.Tensor, counts: torch.Tensor, group: Group, loads: LoadExchange
) -> torch.Tensor:
    """Exchange loads outside the engine; a rank with bad ids says so in its row."""
    rejected: Exception | None = None
    try:
        _count(topk_ids, counts, group)
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
    return table


def _count(topk_ids: torch.Tensor, counts: torch.Tensor, group: Group) -> None:
    check_ids(topk_ids, group.rank, group.device)
    if topk_ids.device.type == "cpu":
        ids = topk_ids.contiguous()
        bad = _core.count_experts(
            ids.data_ptr(), ids.numel(), ids.dtype == torch.int64, counts.numel(), counts.data_ptr()
        )
    else:
        bad = count_on_device(topk_ids, counts)
    if bad >= 0:
        raise InvalidLoadError(
            f"rank {group.rank}: topk_ids has the id {int(topk_ids.reshape(-1)[bad])} at position"
            f" {bad}; expected [0, {counts.numel()}), or -1 for padding"
        )


def count_on_device(topk_ids: torch.Tensor, counts: torch.Tensor) -> int:
    """Count routed ids where they are; return a bad id's position, else -1."""
    num_experts = counts.numel()
    ids = topk_ids.reshape(-1)
    bad = (ids < -1) | (ids >= num_experts)
    # One bin for padding, one for each expert, one for what is out of range.
    bins = torch.where(bad, num_experts + 1, ids + 1)
    found = torch.bincount(bins, minlength=num_experts + 2).cpu()
    counts.copy_(found[1 : num_experts + 1])
    return int(torch.nonzero(bad)[0]) if int(found[num_experts + 1]) else -1


def replicate_experts(
    weights: Weights | BoundWeights,
    plan: Plan,
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
    under way it waits for the first. A plan on the device is copied to the CPU, which synchronises.

    Args:
        weights: this rank's main weights, ``{name: tensor [M, *shape] or sequence of M tensors}``,
            or what ``group.bind`` returned. Not to be changed before the call has finished.
        plan: the same on every rank.
        group: the group.
        async_op: return a :class:`Work` at once; a CUDA group then uses a stream of its own.
        mode: "push", "pull" (weights from ``group.empty_weights()``), "direct", or "auto".
        segments: names of the segments to transfer; None: all.

    Raises:
        InvalidWeightsError, InvalidPlanError, InvalidArgumentError: this rank's input is bad; its
            peers fail at once, and the group takes no more calls.
        GroupClosedError: the group is closed or failed earlier.
        DeviceError: the CUDA driver refused the call.
        UnsupportedError: the current stream is being captured into a CUDA graph.
        TransferError: the call failed.
    """
    if torch.compiler.is_dynamo_compiling():
        return tracing_calls.replicate_experts(weights, plan, group, async_op, mode, segments)
    group._check_open("replicate_experts")
    plan = plan_on_host(plan, group)  # refused in a capture, which is no reason to fail the peers
    try:
        selection = group._selection(segments)
        _check_plan(plan, group)
        bound = group.bind(weights)
        group._require(bound, selection)
        mode_id = _mode_id(mode, bound, group)
    except Exception as error:
        group._reject(error)
        raise
    try:
        epoch, chosen = group._engine.replicate(
            plan.slot_expert.data_ptr(),
            0 if plan.slot_quota is None else plan.slot_quota.data_ptr(),
            0 if plan.home_quota is None else plan.home_quota.data_ptr(),
            bound.addresses.buffer_info()[0],
            selection.address,
            selection.count,
            mode_id,
            bound.region,
            async_op,
        )
    except UltraEPError as error:
        group._first_error = group._first_error or error
        raise
    work = group._submitted(epoch, (bound, plan), "replicate_experts", MODES[chosen])
    if async_op:
        return work
    work.wait()
    return None


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


def _check_plan(plan: Plan, group: Group) -> None:
    if has_shape_of(plan, group) and group._engine.accepts(
        plan.slot_expert.data_ptr(), plan.home.data_ptr()
    ):
        return  # the rest says what is wrong
    check_plan_fits(plan, group)
    fault, rank, slot, expert = group._engine.check(plan.slot_expert.data_ptr())
    if fault:
        text = _PLAN_FAULTS[fault].format(num_experts=plan.num_experts)
        raise InvalidPlanError(
            f"rank {group.rank}: slot {slot} of rank {rank} holds expert {expert}: {text}"
        )
