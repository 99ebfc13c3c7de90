"""Scenes with Ctrl-C, and with forked children."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from typing import Any

from actor import Actor, plan_of
from cast import Cue
from deaths import BOTH, KILLED
from scene import ALL, AT_ONCE, OK, Expect, Scene, everybody, go, refuses, start, strike, told

ODD, LATE = 1, 3
REST = tuple(r for r in ALL if r != ODD)
BUT_LATE = tuple(r for r in ALL if r != LATE)
CTRL_C = Expect(kinds=("KeyboardInterrupt",))


# ---- Ctrl-C ---------------------------------------------------------------------------------


def interrupted(actor: Actor, *, where: str) -> None:
    """Rank 1 gets Ctrl-C while it waits for rank 3, which calls later."""
    own = actor.make()
    plan = plan_of(BOTH)
    actor.together()
    if actor.rank == LATE:
        actor.hold("late")

    def call() -> Any:
        if where == "a call":
            return own.replicate(plan, mode="push")
        if where == "gather_load":
            return own.gather()
        works = [own.replicate(plan, mode="push", async_op=True)]
        if where == "a full queue" and actor.rank == ODD:
            works += [own.replicate(plan, mode="push", async_op=True) for _ in range(5)]
        if where == "close" and actor.rank == ODD:
            return own.group.close()
        return works[0].wait()

    actor.say("calling")
    actor.attempt("call", call)
    actor.attempt("again", own.gather)


def interrupted_in_new_group(actor: Actor) -> None:
    actor.together()
    if actor.rank == LATE:
        actor.hold("late")
    actor.say("calling")
    actor.attempt("new_group", actor.make)


def _ctrl_c(where: str) -> Scene:
    return Scene(
        name=f"Ctrl-C in {where}",
        item="Ctrl-C in the middle",
        part=partial(interrupted, where=where),
        cues=(
            start(),
            strike("SIGINT", ODD, at="calling", by=BUT_LATE),
            go(LATE, at="late", after=0.1),
        ),
        expect={
            "call": {**told("TransferAbortedError", ODD), ODD: CTRL_C},
            "again": refuses(),
        },
    )


# ---- forked children ------------------------------------------------------------------------


def forks(actor: Actor, *, then: str) -> None:
    """Rank 1 forks between two calls; what the child does must not affect later calls."""
    own = actor.make()
    plan = plan_of(BOTH)
    actor.together()
    actor.attempt("first", lambda: own.replicate(plan))
    actor.report.wrong += own.wrong(plan)
    if actor.rank == ODD:
        group = own.group

        def act() -> None:
            if then == "uses the group":
                actor.attempt("child", lambda: own.replicate(plan))
                assert actor.report.events[-1].kind == "GroupClosedError"
                actor.attempt("child", own.gather)
                assert actor.report.events[-1].kind == "GroupClosedError"
            elif then == "aborts it":
                group.abort()
            elif then == "closes it":
                group.close()
            elif then == "is killed":
                os.kill(os.getpid(), signal.SIGKILL)

        code = actor.child_ends(actor.child(act))
        expected = KILLED if then == "is killed" else 0
        actor.report.wrong += code != expected
    for _ in range(3):
        actor.attempt("call", lambda: own.replicate(plan))
        actor.report.wrong += own.wrong(plan)


def forks_and_dies(actor: Actor) -> None:
    """Rank 1 is killed in a call and its child lives on; all ranks must still see the death."""
    own = actor.make()
    plan = plan_of(BOTH)
    actor.together()
    if actor.rank == ODD:
        parent = os.getpid()

        def outlive() -> None:
            while os.getppid() == parent:
                time.sleep(0.01)
            time.sleep(AT_ONCE + 0.5)

        actor.child(outlive)
    if actor.rank == LATE:
        actor.hold("late")
    actor.say("calling")
    actor.attempt("call", lambda: own.replicate(plan, mode="push"))


def forks_in_a_call(actor: Actor) -> None:
    """A child is forked while a call runs in the background, and exits."""
    own = actor.make()
    plan = plan_of(BOTH)
    actor.together()
    if actor.rank == LATE:
        actor.hold("late")
    work = own.replicate(plan, mode="push", async_op=True)
    if actor.rank == ODD:
        actor.report.wrong += actor.child_ends(actor.child(lambda: None)) != 0
    actor.say("calling")
    actor.attempt("call", work.wait)
    actor.report.wrong += own.wrong(plan)


INTERRUPTS = [
    *(_ctrl_c(where) for where in ("a call", "gather_load", "the background", "a full queue")),
    _ctrl_c("close"),
    Scene(
        name="Ctrl-C in new_group",
        item="Ctrl-C in the middle",
        part=interrupted_in_new_group,
        cues=(
            start(),
            strike("SIGINT", ODD, at="calling", by=BUT_LATE),
            go(LATE, at="late", after=0.1),
        ),
        expect={
            "new_group": {
                **everybody(REST, Expect(kinds=("BootstrapError",), roots=(ODD,))),
                ODD: CTRL_C,
            }
        },
        limit=5.0,
        pg_timeout=5.0,
    ),
    *(
        Scene(
            name=f"forks, and the child {then}",
            item="fork after init",
            part=partial(forks, then=then),
            cues=(start(),),
            expect={"first": everybody(ALL, OK), "call": everybody(ALL, Expect(within=5.0))},
            long=then in ("exits", "aborts it"),
        )
        for then in ("exits", "uses the group", "closes it", "aborts it", "is killed")
    ),
    Scene(
        name="forks in a call",
        item="fork after init",
        part=forks_in_a_call,
        cues=(start(), Cue(at="calling", by=BUT_LATE, act="go", to=(LATE,), after=0.1)),
        expect={"call": everybody(ALL, Expect(within=5.0))},
    ),
    Scene(
        name="forks, is killed, and the child lives on",
        item="fork after init",
        part=forks_and_dies,
        cues=(start(), strike("SIGKILL", ODD, at="calling", by=BUT_LATE), go(LATE, at="late")),
        expect={"call": told("PeerGoneError", ODD)},
        first_hand=("PeerGoneError",),
        ends={ODD: KILLED},
        victims=(ODD,),
    ),
]
