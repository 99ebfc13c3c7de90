"""Negative controls: the director and the judge must see the faults they look for."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace

import pytest
import torch
from actor import Actor, Event, Report, plan_of
from cast import Cue, Outcome
from deaths import BOTH
from scene import ALL, Expect, Scene, everybody, judge, start, told
from scenes import SCENES
from tiers import sampled

# The list of faults; each has a scene that runs by default.
ITEMS = {
    "killed before a transfer",
    "killed during a transfer",
    "killed after a transfer",
    "stopped past the limit, then continued",
    "calls in another order",
    "calls one collective too few",
    "passes another plan",
    "dies in new_group",
    "dies in close",
    "shared memory exhausted",
    "descriptors exhausted",
    "Ctrl-C in the middle",
    "fork after init",
    "two jobs with the same names",
}


def test_every_fault_has_a_scene_by_default() -> None:
    assert {scene.item for scene in SCENES} == ITEMS
    assert {scene.item for scene in SCENES if not scene.long} == ITEMS


# ---- what a process does ----------------------------------------------------------------------


def _misbehaves(actor: Actor, *, how: str) -> None:
    own = actor.make()
    plan = plan_of(BOTH)
    actor.together()
    if actor.rank == 2 and how == "hangs":
        threading.Event().wait()
    actor.attempt("call", lambda: own.replicate(plan))
    if actor.rank != 2:
        return
    if how == "a byte of an empty slot":
        own.group.slots["s"][0].view(-1)[3] ^= 1
        own._filled.discard((1, 0))  # as if the plan left it empty
    elif how == "one of its weights":
        own.weights["w"].view(-1)[3:4].view(torch.uint8).bitwise_not_()
    elif how == "a descriptor":
        os.dup(1)
    elif how == "a thread":
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    elif how == "a group":
        actor.kept = own.group  # type: ignore[attr-defined]
        actor.groups.clear()
    elif how == "a mapping":
        actor.kept = own.group.slots  # type: ignore[attr-defined]
    elif how == "breaks":
        raise RuntimeError("a part that is wrong")
    elif how == "ends":
        os._exit(3)


@pytest.mark.parametrize(
    "how, complaint",
    sampled(
        [
            ("a byte of an empty slot", "5 bytes changed that must not"),
            ("one of its weights", "2 bytes changed that must not"),
            ("a descriptor", "more of descriptor"),
            ("a thread", "more of thread"),
            ("a group", "more of mapping"),
            ("a mapping", "more of mapping"),
            ("breaks", "a part that is wrong"),
            ("ends", "rank 2 ended with 3"),
            ("hangs", "waited in vain"),
        ],
        lambda row: row[0] in ("a byte of an empty slot", "a thread", "a mapping", "ends"),
    ),
)
def test_what_a_rank_must_not_do_is_seen(how: str, complaint: str) -> None:
    scene = Scene(
        name=how,
        item="",
        part=_Misbehaves(how),
        cues=(start(),),
        expect={"call": everybody(ALL, Expect(within=20.0))},
        victims=(2,),
        seconds=6.0 if how == "hangs" else 45.0,
    )
    began = time.monotonic()
    wrong = judge(scene, scene.run())
    assert [w for w in wrong if complaint in w], wrong
    assert time.monotonic() - began < 60


class _Misbehaves:
    """A part that can be pickled from a test module."""

    def __init__(self, how: str) -> None:
        self.how = how

    def __call__(self, actor: Actor) -> None:
        _misbehaves(actor, how=self.how)


# ---- what the judge says ----------------------------------------------------------------------

SCENE = Scene(
    name="a rank is gone",
    item="",
    part=_misbehaves,
    cues=(Cue(at="ready", by=ALL, act="SIGKILL", to=(1,), fault=True),),
    expect={"call": told("PeerGoneError", 1)},
    first_hand=("PeerGoneError",),
    ends={1: -9},
    victims=(1,),
)


def _outcome() -> Outcome:
    """Return a correct outcome: rank 0 sees the death and tells the others."""
    outcome = Outcome(ends={1: -9}, fault_at=100.0)
    for rank in (0, 2, 3):
        kind = "PeerGoneError" if rank == 0 else "TransferAbortedError"
        peer = 1 if rank == 0 else 0
        event = Event(name="call", began=99.0, ended=100.5, kind=kind, peer=peer, root=1)
        outcome.reports[rank] = Report(rank=rank, events=[event], afterwards="ok")
    return outcome


def test_the_judge_has_nothing_to_say_of_what_is_right() -> None:
    assert judge(SCENE, _outcome()) == []


@pytest.mark.parametrize(
    "change, complaint",
    [
        ({"kind": "ok"}, "expected PeerGoneError or TransferAbortedError"),
        ({"kind": "RuntimeError"}, "RuntimeError"),
        ({"peer": 3}, "names rank 3"),
        ({"root": 0}, "ends at rank 0"),
        ({"ended": 101.1}, "1.10 s"),
        ({"name": "other"}, "was not expected"),
        ({"kind": "TransferAbortedError", "peer": 2}, "nobody raised"),
    ],
)
def test_the_judge_sees_a_wrong_error(change: dict[str, object], complaint: str) -> None:
    outcome = _outcome()
    events = outcome.reports[0].events
    events[0] = replace(events[0], **change)  # type: ignore[arg-type]
    assert [w for w in judge(SCENE, outcome) if complaint in w]


@pytest.mark.parametrize(
    "change, complaint",
    [
        ({"stray": 1}, "1 bytes changed"),
        ({"wrong": 2}, "2 bytes of filled slots"),
        ({"left": ["a thread"]}, "left with a thread"),
        ({"afterwards": "no"}, "a new group: no"),
        ({"broken": "no"}, "broke"),
        ({"events": []}, "did not come to call"),
    ],
)
def test_the_judge_sees_a_wrong_report(change: dict[str, object], complaint: str) -> None:
    outcome = _outcome()
    outcome.reports[2] = replace(outcome.reports[2], **change)  # type: ignore[arg-type]
    assert [w for w in judge(SCENE, outcome) if complaint in w]


def test_the_judge_sees_how_processes_end() -> None:
    outcome = _outcome()
    outcome.ends = {}
    assert "rank 1 did not end" in judge(SCENE, outcome)
    outcome.ends = {1: 0}
    assert "rank 1 ended with 0, expected -9" in judge(SCENE, outcome)
