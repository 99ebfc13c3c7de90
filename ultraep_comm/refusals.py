"""Plans that a rank refuses, found on the host or, for plans on a device, by its kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ultraep_comm import _core
from ultraep_comm.errors import (
    InvalidLoadError,
    InvalidPlanError,
    InvalidWeightsError,
    UltraEPError,
)
from ultraep_comm.plan import Plan
from ultraep_comm.planning import check_plan_fits, has_shape_of
from ultraep_comm.topology import Topology

if TYPE_CHECKING:
    from ultraep_comm.group import Group

REJECTED = 2  # in the order of `enum class Fault` in src/core/protocol.hpp
# In the order of `enum class PlanFault` in src/core/validate.hpp.
_PLAN_FAULTS = (
    "",
    "expected an expert in [0, {num_experts}) or -1 for an empty slot",
    "which is at home on that rank; expected a rank other than its home",
    "which that rank already holds; expected at most one instance on a rank",
    "which is at home in another domain; place it inside, or allow_cross_domain=True",
)
# `enum class Refusal` in src/cuda/args.hpp.
_HOME, _WEIGHTS = 5, 6


def bad_id_error(rank: int, position: int, value: int, num_experts: int) -> InvalidLoadError:
    """Return what ``rank`` says of an id that is none, at a flat position of its ``topk_ids``."""
    return InvalidLoadError(
        f"rank {rank}: topk_ids has the id {value} at position {position}; expected"
        f" [0, {num_experts}), or -1 for padding"
    )


def name_call(error: Exception, operation: str) -> None:
    """Add to an error's text which call it is of."""
    if isinstance(error, UltraEPError) and error.args:
        error.args = (f"{error.args[0]} (in {operation})", *error.args[1:])


def placement_error(
    rank: int, fault: int, place: tuple[int, int], expert: int, num_experts: int
) -> InvalidPlanError:
    """Return what ``rank`` says of an illegal replica in ``place``: a rank and its slot."""
    text = _PLAN_FAULTS[fault].format(num_experts=num_experts)
    return InvalidPlanError(
        f"rank {rank}: slot {place[1]} of rank {place[0]} holds expert {expert}: {text}"
    )


def refusal_error(
    report: _core.Report,
    bad_id: tuple[int, int],
    rank: int,
    topology: Topology,
    names: Sequence[str],
) -> UltraEPError | None:
    """Return why this rank's own device refused its call; None: it did not.

    Args:
        report: of the call that failed.
        bad_id: position and value, or -1, as `DeviceEngine.bad_id` returns them.
        rank: this rank.
        topology: of its group.
        names: of the group's segments.
    """
    reason = report.seen
    if report.fault != REJECTED or report.root != rank:
        return None
    if bad_id[0] >= 0:
        return bad_id_error(rank, *bad_id, topology.num_experts)
    if reason == 0:
        return None
    if reason == _HOME:
        return InvalidPlanError(
            f"rank {rank}: the plan's home map is not the group's, from expert {report.expert} on;"
            " pass home= to both"
        )
    if reason == _WEIGHTS:
        return InvalidWeightsError(
            f"rank {rank}: group.weight_table has no address of segment {names[report.piece]!r} of"
            f" expert {report.expert}, which the plan copies; call group.update_weight_table first"
        )
    place = divmod(report.piece, topology.slots_per_rank)
    return placement_error(rank, reason, place, report.expert, topology.num_experts)


def check_host_plan(plan: Plan, group: Group) -> None:
    """Check a plan on the CPU.

    Raises:
        InvalidPlanError: wrong shape, home map, expert, or placement.
    """
    if has_shape_of(plan, group) and group._engine.accepts(
        plan.slot_expert.data_ptr(), plan.home.data_ptr()
    ):
        return  # the rest says what is wrong
    check_plan_fits(plan, group)
    fault, rank, slot, expert = group._engine.check(plan.slot_expert.data_ptr())
    if fault:
        raise placement_error(group.rank, fault, (rank, slot), expert, plan.num_experts)
