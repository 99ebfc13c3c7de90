"""Health of a group: calls, bytes, waits, peers, the last error."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import Any

from ultraep_comm import _core
from ultraep_comm.errors import RankState, describe_states, name_ranks, read_states
from ultraep_comm.group.session import Session


@dataclass(frozen=True, kw_only=True)
class LongestWait:
    """The longest wait so far, finished or not.

    Attributes:
        seconds: its length, so far if it is not finished.
        peer: the rank waited for; -1: none in particular.
        flag: the flag waited for: "call", "open", "ready", "done", "pulled", "gathered", "summed",
            "consumed", "checked".
        expert: the flag's expert; -1: none.
        epoch: the call that waited.
    """

    seconds: float
    peer: int
    flag: str
    expert: int
    epoch: int


@dataclass(frozen=True, kw_only=True)
class WaitHealth:
    """Waits in which this rank's workers slept; waits that ended while spinning do not count.

    Attributes:
        seconds: total over all workers.
        over_1ms: waits longer than this; an unfinished wait counts with its length so far.
        over_10ms: likewise.
        over_100ms: likewise.
        over_1s: likewise.
        longest: the longest wait; None: there was none.
    """

    seconds: float
    over_1ms: int
    over_10ms: int
    over_100ms: int
    over_1s: int
    longest: LongestWait | None


@dataclass(frozen=True, kw_only=True)
class GroupHealth:
    """Snapshot of a group on one rank. ``str()`` is for people, :meth:`as_dict` for logs.

    Attributes:
        rank: this rank.
        name: the group's name in this process.
        state: "open", "failed" (it takes no more calls), "closed", or "inherited" (by a forked
            child of the group's process).
        epoch: calls submitted so far, which is the number of the last one.
        completed: calls finished; None on a CUDA group, where it would need a device query.
        failed_epoch: the first call known to have failed; 0: none.
        calls: calls that took an epoch, by operation: "replicate" (transfers), "reduce", "gather"
            (except over the process group), and "rejected", for this rank's own bad input.
        bytes_stored: bytes stored by finished calls; None on a CUDA group, likewise.
        waits: this rank's waits; None on a CUDA group, where kernels wait, and in a forked child.
        peers_gone: ranks whose processes have ended, or that closed the group after a failure.
        peers: the last known state of every rank ``[G]``, this one included, at the time of the
            failure, or now if there was none. None on a CUDA group before a failure on the device,
            and in a forked child.
        last_error: the error that ended the group, as "Type: text"; None: none.
        saved_plans: saved plans that were neither reduced nor released.
    """

    rank: int
    name: str
    state: str
    epoch: int
    completed: int | None
    failed_epoch: int
    calls: dict[str, int]
    bytes_stored: int | None
    waits: WaitHealth | None
    peers_gone: tuple[int, ...]
    peers: tuple[RankState, ...] | None
    last_error: str | None
    saved_plans: int

    def as_dict(self) -> dict[str, Any]:
        """Return the same as dictionaries, lists, strings and numbers, ready for JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        finished = "" if self.completed is None else f", {self.completed} finished"
        stored = "" if self.bytes_stored is None else f", {self.bytes_stored} bytes stored"
        state = self.state
        if self.failed_epoch:
            where = f"failed in call {self.failed_epoch}"
            state = where if state == "failed" else f"{state} ({where})"
        calls = ", ".join(f"{count} {operation}" for operation, count in self.calls.items())
        lines = [
            f"rank {self.rank}, group {self.name}: {state}, {self.epoch} calls{finished}"
            f" ({calls}){stored}, {self.saved_plans} saved plans"
        ]
        if self.waits is not None:
            w = self.waits
            lines.append(
                f"  waited {w.seconds:.3f} s; longer than 1 ms: {w.over_1ms}, 10 ms: {w.over_10ms},"
                f" 100 ms: {w.over_100ms}, 1 s: {w.over_1s}{_longest(w.longest)}"
            )
        if self.peers_gone:
            lines.append(f"  gone: {name_ranks(self.peers_gone)}")
        if self.peers is not None:
            lines.append(describe_states(self.peers))
        if self.last_error is not None:
            lines.append(f"  last error: {self.last_error.splitlines()[0]}")
        return "\n".join(lines)


def _longest(wait: LongestWait | None) -> str:
    if wait is None:
        return ""
    of = "" if wait.expert < 0 else f", expert {wait.expert}"
    return (
        f"; the longest {wait.seconds:.3f} s for `{wait.flag}` of rank {wait.peer}{of} in call"
        f" {wait.epoch}"
    )


def health_of(session: Session) -> GroupHealth:
    """Return the health of a group; see ``Group.health``."""
    engine = session.engine
    failed = engine.failed_epoch()
    error, peers = session.first_error, None
    # A forked child inherits locks in their state at the fork; nobody there releases them.
    is_own = session.process == os.getpid()
    if is_own:
        if error is None and failed:
            error = session.explain(failed, "a call")
        report = engine.report()
        if report.peers is not None:
            peers = read_states(report.peers, report.epoch or None)
    done = engine.health(waits=is_own)
    return GroupHealth(
        rank=session.rank,
        name=session.name,
        state="failed" if session.state == "open" and failed else session.state,
        epoch=engine.epoch,
        completed=done.completed,
        failed_epoch=failed,
        calls={
            "replicate": done.replicate,
            "reduce": done.reduce,
            "gather": done.gather,
            "rejected": done.rejected,
        },
        bytes_stored=done.bytes_stored,
        waits=None if done.waits is None else _waits(done.waits),
        peers_gone=() if peers is None else tuple(p.rank for p in peers if p.gone),
        peers=peers,
        last_error=None if error is None else f"{type(error).__name__}: {error}",
        saved_plans=session.plans.num_live,
    )


def _waits(waits: _core.Waits) -> WaitHealth:
    over_1ms, over_10ms, over_100ms, over_1s = waits.longer
    longest = LongestWait(
        seconds=waits.longest,
        peer=waits.peer,
        flag=waits.flag.name.lower(),
        expert=waits.expert,
        epoch=waits.epoch,
    )
    return WaitHealth(
        seconds=waits.seconds,
        over_1ms=over_1ms,
        over_10ms=over_10ms,
        over_100ms=over_100ms,
        over_1s=over_1s,
        longest=longest if waits.longest > 0 else None,
    )
