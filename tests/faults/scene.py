"""A fault as data: every rank's part, the director's cues, and the expected outcome."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from actor import Actor, Event
from cast import Cue, Outcome, run_cast

AT_ONCE = 1.0  # seconds until the death of a process, or a peer's abort, is seen
TOO_LATE = "expected at most"  # in what judge() says of an attempt that took too long
SIZE = 4
ALL = tuple(range(SIZE))


@dataclass(frozen=True, kw_only=True)
class Expect:
    """The expected outcome of one rank's attempt.

    Attributes:
        kinds: the accepted types of error, or "ok".
        peers: by kind, the ranks that the error may name as its peer. None: not checked.
        roots: the ranks that the error may name as the root cause. None: not checked.
        within: seconds from the fault, or from the attempt's start if that is later.
        says: text that the error has to contain.
    """

    kinds: tuple[str, ...] = ("ok",)
    peers: Mapping[str, tuple[int, ...]] | None = None
    roots: tuple[int, ...] | None = None
    within: float = AT_ONCE
    says: str = ""


OK = Expect()
Expected = Mapping[int, Expect]


@dataclass(frozen=True, kw_only=True)
class Scene:
    """One fault.

    Attributes:
        name: its name in the tests and the table.
        item: its entry in the list of faults; scenes of a kind share one.
        part: one rank's side.
        cues: what the director does, in order.
        expect: by attempt and rank. :func:`judge` rejects attempts that are not listed here.
        first_hand: types of error of which at least one rank has to raise one.
        ends: exit codes, by rank, of processes that do not live to the end.
        victims: ranks that are not in the group created afterwards.
        limit: the groups' timeout, for the table.
        seconds: after which a rank without a report counts as hung.
        beside: another job that runs at the same time, with the same names.
        long: run only on request.
        engine: of the groups.
    """

    name: str
    item: str
    part: Callable[[Actor], None]
    cues: tuple[Cue, ...] = ()
    expect: Mapping[str, Expected] = field(default_factory=dict)
    first_hand: tuple[str, ...] = ()
    ends: Mapping[int, int] = field(default_factory=dict)
    victims: tuple[int, ...] = ()
    size: int = SIZE
    limit: float = 20.0
    pg_timeout: float = 30.0
    seconds: float = 45.0
    beside: Scene | None = None
    long: bool = False
    engine: str = "host"

    def run(self) -> Outcome:
        """Play it once."""
        if self.beside is None:
            return self._run()
        with ThreadPoolExecutor(1) as thread:
            other = thread.submit(self.beside.run)
            outcome = self._run()
        troubles = judge(self.beside, other.result())
        outcome.troubles += [f"the job beside: {trouble}" for trouble in troubles]
        return outcome

    def _run(self) -> Outcome:
        return run_cast(
            self.part,
            self.cues,
            size=self.size,
            victims=self.victims,
            pg_timeout=self.pg_timeout,
            seconds=self.seconds,
            engine=self.engine,
        )


# ---- what ranks have to see -----------------------------------------------------------------


def everybody(ranks: tuple[int, ...], expect: Expect) -> Expected:
    """Expect the same of all these ranks."""
    return dict.fromkeys(ranks, expect)


def told(first: str, culprit: int, ranks: tuple[int, ...] = ALL, **options: Any) -> Expected:
    """Expect ranks to fail because of ``culprit``: at first hand, or told by a peer.

    A rank that sees the fault names the culprit as its peer, a rank that is told names the teller;
    both name the culprit as the root.
    """
    others = tuple(r for r in ranks if r != culprit)
    return {
        rank: Expect(
            kinds=(first, "TransferAbortedError"),
            peers={first: (culprit,), "TransferAbortedError": ALL},
            roots=(culprit,),
            **options,
        )
        for rank in others
    }


def refuses(ranks: tuple[int, ...] = ALL) -> Expected:
    """Expect a failed group to refuse further calls."""
    return everybody(ranks, Expect(kinds=("GroupClosedError",)))


# ---- cues -----------------------------------------------------------------------------------


def start(point: str = "ready", by: tuple[int, ...] = ALL) -> Cue:
    """Release ranks together from a point where all of them hold."""
    return Cue(at=point, by=by, act="go", to=by)


def strike(
    name: str, rank: int, *, at: str, by: tuple[int, ...], after: float = 0.2, fault: bool = True
) -> Cue:
    """Send a signal to a rank ``after`` seconds after others have announced a call."""
    return Cue(at=at, by=by, act=name, to=(rank,), after=after, fault=fault)


def go(rank: int, *, at: str, after: float = 0.0, fault: bool = False) -> Cue:
    """Release a rank that holds."""
    return Cue(at=at, by=(rank,), act="go", to=(rank,), after=after, fault=fault)


# ---- judging --------------------------------------------------------------------------------


def times(outcome: Outcome) -> Iterator[tuple[int, Event, float]]:
    """Yield rank, attempt, and seconds since its start or the fault, whichever is later."""
    for rank, report in outcome.reports.items():
        for event in report.events:
            yield rank, event, event.ended - max(event.began, outcome.fault_at)


def judge(scene: Scene, outcome: Outcome) -> list[str]:
    """Return every deviation from what the scene expects."""
    wrong = list(outcome.troubles)
    wrong += [
        f"rank {rank} ended with {code}, expected {scene.ends.get(rank)}"
        for rank, code in outcome.ends.items()
        if scene.ends.get(rank) != code
    ]
    wrong += [f"rank {rank} did not end" for rank in scene.ends if rank not in outcome.ends]
    for rank, report in outcome.reports.items():
        if report.broken:
            wrong.append(f"rank {rank} broke:\n{report.broken}")
        if report.stray:
            wrong.append(f"rank {rank}: {report.stray} bytes changed that must not")
        if report.wrong:
            wrong.append(f"rank {rank}: {report.wrong} bytes of filled slots are wrong")
        wrong += [f"rank {rank} is left with {what}" for what in report.left]
        if rank not in scene.victims and report.afterwards != "ok":
            wrong.append(f"rank {rank}, a new group: {report.afterwards}")
    seen: dict[str, list[str]] = {}
    for rank, event, seconds in times(outcome):
        seen.setdefault(event.name, []).append(event.kind)
        expect = scene.expect.get(event.name, {}).get(rank)
        if expect is None and event.name == "close":
            expect = OK
        if expect is None:
            wrong.append(f"rank {rank}: {event.name} was not expected ({event.kind})")
        else:
            wrong += [f"rank {rank}, {event.name}: {why}" for why in _differs(event, expect)]
            if seconds > expect.within:
                wrong.append(
                    f"rank {rank}, {event.name}: {seconds:.2f} s, {TOO_LATE} {expect.within}"
                )
    for name, ranks in scene.expect.items():
        made = {r for r, e, _ in times(outcome) if e.name == name}
        wrong += [f"rank {r} did not come to {name}" for r in ranks if r not in made]
    kinds = [kind for found in seen.values() for kind in found]
    if scene.first_hand and not set(kinds) & set(scene.first_hand):
        wrong.append(f"nobody raised one of {scene.first_hand}: {seen}")
    return wrong


def _differs(event: Event, expect: Expect) -> Iterator[str]:
    if event.kind not in expect.kinds:
        yield f"{event.kind} ({event.text}), expected {' or '.join(expect.kinds)}"
        return
    if event.kind == "ok":
        return
    peers = None if expect.peers is None else expect.peers.get(event.kind)
    if peers is not None and event.peer not in peers:
        yield f"{event.kind} names rank {event.peer}, expected one of {peers}: {event.text}"
    if expect.roots is not None and event.root not in expect.roots:
        yield f"{event.kind} ends at rank {event.root}, expected {expect.roots}: {event.text}"
    if expect.says not in event.text:
        yield f"{event.kind} does not say {expect.says!r}: {event.text}"
