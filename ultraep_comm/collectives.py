"""The calls on a group, in the order of the data flow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ultraep_comm import _core
from ultraep_comm.errors import (
    InvalidArgumentError,
    InvalidLoadError,
    InvalidPlanError,
    InvalidWeightsError,
)
from ultraep_comm.plan import Plan
from ultraep_comm.planning import check_ids, check_plan_fits
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
        topk_ids: int32 or int64 ``[T, k]`` on CPU, logical expert ids; -1 is padding.
        group: the group.

    Returns:
        int32 ``[G, E]``: tokens of each source rank for each expert.

    Raises:
        InvalidLoadError: wrong dtype, device or an id out of range.
        TransferError: the exchange failed.
    """
    group._check_open("gather_load")
    t = group.topology
    counts = torch.empty(t.num_experts, dtype=torch.int32)
    with group._rejecting():
        _count(topk_ids, counts, group.rank)
    table = torch.empty((t.num_ranks, t.num_experts), dtype=torch.int32)
    if 0 in group._region.bases:
        # Ranks on other machines: the fabric does not reach them, the process group does.
        assert group._meeting is not None
        dist.all_gather(list(table), counts, group=group._meeting.group)
        return table
    epoch = group._engine.gather(counts.data_ptr(), table.data_ptr())
    group._submitted(epoch, (counts, table), "gather_load", "").wait()
    return table


def _count(topk_ids: torch.Tensor, counts: torch.Tensor, rank: int) -> None:
    check_ids(topk_ids, rank)
    ids = topk_ids.contiguous()
    num_experts = counts.numel()
    bad = _core.count_experts(
        ids.data_ptr(), ids.numel(), ids.dtype == torch.int64, num_experts, counts.data_ptr()
    )
    if bad >= 0:
        raise InvalidLoadError(
            f"rank {rank}: topk_ids has the id {int(ids.view(-1)[bad])} at position {bad}; expected"
            f" [0, {num_experts}), or -1 for padding"
        )


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

    Args:
        weights: this rank's main weights, ``{name: tensor [M, *shape] or sequence of M tensors}``,
            or what ``group.bind`` returned. Not to be changed before the call has finished.
        plan: the same on every rank.
        group: the group.
        async_op: return a :class:`Work` at once instead of blocking.
        mode: "push", "pull" (weights from ``group.empty_weights()``), "direct", or "auto".
        segments: names of the segments to transfer; None: all.

    Raises:
        InvalidWeightsError, InvalidPlanError, InvalidArgumentError: this rank's input is bad; its
            peers fail at once, and the group takes no more calls.
        GroupClosedError: the group is closed or failed earlier.
        TransferError: the call failed.
    """
    group._check_open("replicate_experts")
    with group._rejecting():
        selection = group._selection(segments)
        _check_plan(plan, group)
        bound = group.bind(weights)
        group._require(bound, selection)
        mode_id = _mode_id(mode, bound, group)
    engine = group._engine
    epoch, chosen = engine.replicate(
        plan.slot_expert.data_ptr(),
        0 if plan.slot_quota is None else plan.slot_quota.data_ptr(),
        0 if plan.home_quota is None else plan.home_quota.data_ptr(),
        bound.pointers.ctypes.data,
        selection.ctypes.data,
        len(selection),
        mode_id,
        bound.region,
        async_op,
    )
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
    check_plan_fits(plan, group)
    fault, rank, slot, expert = group._engine.check(plan.slot_expert.data_ptr())
    if fault:
        text = _PLAN_FAULTS[fault].format(num_experts=plan.num_experts)
        raise InvalidPlanError(
            f"rank {group.rank}: slot {slot} of rank {rank} holds expert {expert}: {text}"
        )
