"""Scenes in which a rank is stopped."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from actor import Actor, plan_of
from cast import Cue
from deaths import BOTH
from scene import ALL, OK, Expect, Expected, Scene, everybody, go, refuses, start, strike

LIMIT = 1.5
LATE = LIMIT + 1.0  # seconds within which every wait has ended
OTHERS = (0, 1, 3)
STOPPED = 2


def stands_still(actor: Actor, *, calls_before: bool, limit: float) -> None:
    """Rank 2 is stopped before or in its call, with rank 3 late, and continued at the end."""
    own = actor.make(timeout=limit)
    plan = plan_of(BOTH)
    actor.together()
    late = 3 if calls_before else STOPPED
    if actor.rank == late:
        actor.hold("late")
    actor.say("calling")
    actor.attempt("call", lambda: own.replicate(plan, mode="push"))
    if actor.report.events[-1].kind == "ok":
        actor.report.wrong += own.wrong(plan)
    else:
        actor.say("failed")
    actor.attempt("again", lambda: own.replicate(plan, mode="push"))


def stands_still_in_new_group(actor: Actor) -> None:
    """Rank 2 is stopped before new_group for longer than the process group's timeout."""
    actor.together()
    if actor.rank == STOPPED:
        actor.hold("late")
    actor.say("calling")
    actor.attempt("new_group", actor.make)
    actor.say("failed")


def timed_out(limit: float) -> Expected:
    """Expect the others to fail within the limit: at first hand, or told by a peer."""
    each = Expect(
        kinds=("TransferTimeoutError", "TransferAbortedError"),
        peers={"TransferTimeoutError": ALL, "TransferAbortedError": OTHERS},
        roots=(STOPPED,),
        within=limit + 1.0,
    )
    return everybody(OTHERS, each)


# When it continues, the others have given up and it is told at once.
CONTINUED = Expect(
    kinds=("TransferAbortedError",),
    peers={"TransferAbortedError": OTHERS},
    roots=ALL,
    within=60.0,
)
# Stopped on its way into the call, it may find all that it waits for, and never look for news.
FINISHED = replace(CONTINUED, kinds=("ok", *CONTINUED.kinds))
REFUSED = Expect(kinds=("GroupClosedError",))
TOLD_NEXT = Expect(kinds=("GroupClosedError", "TransferAbortedError"))

ITEM = "stopped past the limit, then continued"
IN_CALL = (
    start(),
    strike("SIGSTOP", STOPPED, at="calling", by=(0, 1, STOPPED)),
    go(3, at="late"),
)
BEFORE_CALL = (
    start(),
    strike("SIGSTOP", STOPPED, at="late", by=(STOPPED,), after=0.0),
    Cue(at="late", by=(STOPPED,), act="go", to=(STOPPED,)),
)
CONTINUE = strike("SIGCONT", STOPPED, at="failed", by=OTHERS, after=0.1, fault=False)

STOPS = [
    *(
        Scene(
            name=f"stopped {when} past the limit, and continued",
            item=ITEM,
            part=partial(stands_still, calls_before=cues == IN_CALL, limit=LIMIT),
            cues=(*cues, CONTINUE),
            expect={
                "call": {**timed_out(LIMIT), STOPPED: own},
                "again": {**refuses(), STOPPED: again},
            },
            first_hand=("TransferTimeoutError",),
            limit=LIMIT,
        )
        for when, cues, own, again in (
            ("in a call", IN_CALL, FINISHED, TOLD_NEXT),
            ("before its call", BEFORE_CALL, CONTINUED, REFUSED),
        )
    ),
    Scene(
        name="stopped in a call for less than the limit",
        item=ITEM,
        part=partial(stands_still, calls_before=True, limit=20.0),
        cues=(
            *IN_CALL,
            strike("SIGCONT", STOPPED, at="calling", by=ALL, after=1.0, fault=False),
        ),
        expect={"call": everybody(ALL, Expect(within=5.0)), "again": everybody(ALL, OK)},
    ),
    Scene(
        name="stopped before new_group past the process group's limit",
        item=ITEM,
        part=stands_still_in_new_group,
        cues=(*BEFORE_CALL, CONTINUE),
        expect={
            "new_group": {
                **everybody(
                    OTHERS, Expect(kinds=("BootstrapError",), roots=(STOPPED,), within=8.0)
                ),
                STOPPED: Expect(kinds=("BootstrapError",), within=60.0),
            }
        },
        limit=3.0,
        pg_timeout=3.0,
    ),
]
