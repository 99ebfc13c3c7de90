"""Scenes of two jobs on one machine with the same names for everything."""

from __future__ import annotations

from dataclasses import replace

from actor import Actor, plan_of
from cast import Cue
from deaths import BOTH, DEATHS
from ranks import clear_slots
from scene import ALL, Expect, Scene, everybody

CALLS = 15


def works(actor: Actor) -> None:
    """A job without a fault: two groups and many calls."""
    first, second = actor.make(), actor.make()
    plan = plan_of(BOTH)
    actor.together()

    def run() -> None:
        for _ in range(CALLS):
            for own in (first, second):
                clear_slots(own.group)
                own.replicate(plan)
                actor.report.wrong += own.wrong(plan)

    actor.attempt("calls", run)


WORKS = Scene(
    name="a job without a fault",
    item="two jobs with the same names",
    part=works,
    cues=(Cue(at="ready", by=ALL, act="go", to=ALL),),
    expect={"calls": everybody(ALL, Expect(within=30.0))},
    long=True,
)
KILLED = next(scene for scene in DEATHS if scene.name == "killed at any moment, 2")
JOBS = [
    WORKS,
    replace(WORKS, name="two jobs with the same names", beside=WORKS, long=False),
    replace(
        KILLED,
        name="two jobs with the same names, and one loses a rank",
        item=WORKS.item,
        beside=WORKS,
    ),
]
