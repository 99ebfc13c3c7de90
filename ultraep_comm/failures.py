"""What went wrong in a call on a group: from the engine's report to the error that is raised."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ultraep_comm import _core
from ultraep_comm.errors import GroupClosedError, UltraEPError
from ultraep_comm.rank_states import RankState, read_states, unread_states
from ultraep_comm.refusals import name_call, refusal_error
from ultraep_comm.reports import error_from
from ultraep_comm.slot_check import DAMAGED, damage_error

if TYPE_CHECKING:
    from ultraep_comm.group import Group


def failure_of(group: Group, epoch: int, operation: str) -> UltraEPError:
    """Return the error of call ``epoch`` of a group that has failed in it or before it."""
    failed = group._engine.failed_epoch()
    if failed != 0 and failed < epoch and not epoch & _core.CUDA_CAPTURED:
        return GroupClosedError(
            f"rank {group.rank}: {operation} (call {epoch} on this group) did not run, because"
            f" call {failed} failed; make a new group"
        )
    report = group._engine.report()
    if group._device is not None:
        bad_id = group._device_engine.bad_id()
        error = refusal_error(report, bad_id, group.rank, group.topology, group._names)
        if error is not None:
            name_call(error, operation)
            return error
    if report.fault == DAMAGED and isinstance(group._engine, _core.Engine):
        states = read_states(group._engine.last_words(), report.epoch)
        damage = group._engine.damage()
        return damage_error(damage, report.epoch, group.rank, operation, group._names, states)
    return error_from(report, group.rank, operation, _states(group, report))


def _states(group: Group, report: _core.Report) -> tuple[RankState, ...]:
    if isinstance(group._engine, _core.Engine):
        return read_states(group._engine.last_words(), report.epoch)
    # What ranks have said is in the device's memory, which may be busy for ever.
    known = {group.rank: f"failed in call {report.epoch}"}
    if report.aborter >= 0 and report.aborter != group.rank:
        known[report.aborter] = "failed, and told this rank"
    elif report.peer >= 0 and report.peer != group.rank:
        known[report.peer] = f"waited for by rank {group.rank}"
    return unread_states(group.num_ranks, known)
