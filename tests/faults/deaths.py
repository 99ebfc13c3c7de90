"""Scenes in which a rank's process ends."""

from __future__ import annotations

import atexit
import os
from functools import partial
from typing import Any
from unittest import mock

import torch
from actor import BIG, Actor, RankGroup, plan_of
from cast import Cue
from ranks import clear_slots
from scene import ALL, OK, Expect, Scene, everybody, go, refuses, start, strike, told

import ultraep_comm as uec
from ultraep_comm.calibration import MeasuredCosts
from ultraep_comm.fabrics.shm import ShmFabric
from ultraep_comm.group.group import session_of

# Experts 0 (home 0) and 6 (home 3) on all other ranks: no rank finishes before ranks 0 and 3 call.
BOTH = [[6, -1], [0, 6], [0, 6], [0, -1]]
# The same, but rank 3 need not be there for expert 0.
EARLY = [[6, -1], [0, 6], [0, 6], [-1, -1]]
# Three hubs share expert 0, and its home is not done before all of them have called.
THREE = [[-1, -1], [0, -1], [0, -1], [0, -1]]
KILLED = -9
GLOO = MeasuredCosts(
    device="", ranks=4, store_gbps=3, load_gbps=1e6, flag_us=8, hop_us=50, parallel=1, call_us=60
)


def transfers(own: RankGroup, plan: Any, *, mode: str, wait: bool = False) -> Any:
    """Make one call, of the library's thread where ``wait``."""
    work = own.replicate(plan, mode=mode, async_op=wait)
    return work.wait() if wait else None


# ---- before and after a call ----------------------------------------------------------------


def before_the_call(actor: Actor) -> None:
    own = actor.make()
    actor.together()
    if actor.rank == 1:
        actor.die()
    actor.hold("dead")
    actor.attempt("call", lambda: own.replicate(plan_of(BOTH)))
    actor.attempt("again", lambda: own.replicate(plan_of(BOTH)))


def between_calls(actor: Actor, *, at_once: bool) -> None:
    """Rank 1 ends after a call, or just as it returns."""
    own = actor.make()
    plan = plan_of(BOTH)
    actor.together()
    actor.attempt("first", lambda: own.replicate(plan))
    if actor.rank == 1 and at_once:
        actor.die()
    actor.report.wrong += own.wrong(plan)
    if not at_once:
        actor.together("done")
    if actor.rank == 1:
        actor.die()
    actor.attempt("call", lambda: own.replicate(plan))
    actor.attempt("again", own.gather)


# ---- in a call ------------------------------------------------------------------------------


def peers_wait(actor: Actor, *, late: int, mode: str = "push", wait: bool = False) -> None:
    """All call but ``late``; the victim is killed while all wait; then ``late`` calls."""
    own = actor.make()
    plan = plan_of(BOTH)
    actor.together()
    if actor.rank == late:
        actor.hold("late")
    actor.say("calling")
    actor.attempt("call", lambda: transfers(own, plan, mode=mode, wait=wait))
    actor.attempt("again", lambda: own.replicate(plan))


def in_transfer(actor: Actor, *, mode: str, rows: list[list[int]]) -> None:
    """Bytes are arriving at rank 2 when the victim is killed; rank 3 has yet to call."""
    # Which rank c10d serves first depends on what it measures, and rank 2 might wait for rank 3.
    with mock.patch("ultraep_comm.engines.c10d.make.measure", return_value=GLOO):
        own = actor.make(expert=BIG, shared=mode == "pull")
    plan = plan_of(rows)
    actor.together()
    if actor.rank == 3:
        actor.hold("late")
    if actor.rank == 2:
        actor.when_slot_fills(own, lambda: actor.say("arriving"))
    actor.attempt("call", lambda: own.replicate(plan, mode=mode))
    actor.attempt("again", lambda: own.replicate(plan, mode=mode))


def in_reduction(actor: Actor) -> None:
    """The victim waits for the gradients of rank 3, which has yet to call."""
    expert = {"w": ((1 << 20,), torch.float32)}
    own = actor.make(expert=expert, grads=torch.float32)
    grads = {"w": torch.ones((own.group.num_local_experts, 1 << 20))}
    own.group.slot_grads["w"].fill_(2.0)
    plan = plan_of(BOTH)
    actor.together()
    if actor.rank == 3:
        actor.hold("late")
    actor.say("calling")
    # Rank 1 is to add up a part of expert 0's gradients, and rank 3's are missing.
    actor.attempt(
        "call", lambda: uec.reduce_expert_grads(grads, plan, group=own.group, mode="pull")
    )
    if actor.rank != 3:  # has expert 6, which others hold; expert 7 has no replica
        return
    actor.report.wrong += int((grads["w"][1] != 1.0).sum())


def in_gather(actor: Actor) -> None:
    own = actor.make()
    actor.together()
    if actor.rank == 1:
        actor.hold("late")
    actor.say("calling")
    actor.attempt("call", own.gather)
    actor.attempt("again", own.gather)


def any_moment(actor: Actor) -> None:
    """Calls without a pause until rank 1 is killed, whatever is going on then."""
    own = actor.make()
    plan = plan_of(BOTH)
    actor.together()

    def run() -> None:
        for number in range(10_000):
            mode = ("push", "direct", "auto")[number % 3]
            clear_slots(own.group)
            own.replicate(plan, mode=mode)
            if number % 3 == 0:  # also by those whose peers have failed by now
                actor.report.wrong += own.wrong(plan)
            if number == 2:
                actor.say("calling")

    actor.attempt("call", run)
    actor.attempt("again", own.gather)


# ---- at the end -----------------------------------------------------------------------------


def in_close(actor: Actor, *, how: str) -> None:
    """Rank 1 dies in ``close()``: at its start, or when all but its connections is done."""
    own = actor.make()
    plan = plan_of(BOTH)
    actor.together()
    actor.attempt("first", lambda: own.replicate(plan))
    actor.report.wrong += own.wrong(plan)
    if actor.rank == 1:
        if how == "at its start":
            session_of(own.group).plans.busy_error = lambda *_: actor.die()  # type: ignore[method-assign]
        else:
            ShmFabric.close = lambda self: actor.die()  # type: ignore[method-assign]
    actor.attempt("close", own.group.close)


def in_close_with_a_call(actor: Actor) -> None:
    """Rank 1's ``close()`` waits for its call, as rank 3 has yet to call, and it is killed."""
    own = actor.make()
    plan = plan_of(BOTH)
    actor.together()
    if actor.rank == 3:
        actor.hold("late")
    work = own.replicate(plan, mode="push", async_op=True)
    actor.say("calling")
    actor.attempt("call", own.group.close if actor.rank == 1 else work.wait)


def exits(actor: Actor, *, how: str) -> None:
    """Rank 1 exits without its last call and with its group open."""
    own = actor.make()
    plan = plan_of(BOTH)
    actor.attempt("first", lambda: own.replicate(plan))
    actor.report.wrong += own.wrong(plan)
    actor.together()
    if actor.rank == 1:
        actor.say("fault")
        if how == "as an interpreter does":
            atexit._run_exitfuncs()
        os._exit(7)
    actor.attempt("call", lambda: own.replicate(plan))


def raises_within(actor: Actor) -> None:
    """Rank 1's ``with group:`` block raises an exception of the caller."""
    own = actor.make()
    plan = plan_of(BOTH)
    actor.together()

    def block() -> None:
        with own.group:
            if actor.rank == 1:
                actor.hold("raising")
                raise KeyError("the model's own")
            actor.say("calling")
            own.replicate(plan)

    actor.attempt("call", block)


def aborts(actor: Actor) -> None:
    own = actor.make()
    plan = plan_of(BOTH)
    actor.together()
    if actor.rank == 1:
        actor.hold("raising")
        own.group.abort()
    else:
        actor.say("calling")
        actor.attempt("call", lambda: own.replicate(plan))
    actor.attempt("again", lambda: own.replicate(plan))


def _but(*victims: int) -> tuple[int, ...]:
    return tuple(r for r in ALL if r not in victims)


def _gone(victim: int, again: bool = True) -> dict[str, Any]:
    """Return what survivors of a death expect."""
    expect = {"call": told("PeerGoneError", victim)}
    if again:
        expect["again"] = refuses(_but(victim))
    return {
        "expect": expect,
        "first_hand": ("PeerGoneError",),
        "ends": {victim: KILLED},
        "victims": (victim,),
    }


def _killed_waiting(name: str, victim: int, late: int, **options: Any) -> Scene:
    waiting = tuple(r for r in ALL if r != late)
    cues = [start(), strike("SIGKILL", victim, at="calling", by=waiting)]
    if late != victim:
        cues.append(go(late, at="late"))
    played = {key: options.pop(key) for key in ("wait", "mode") if key in options}
    part = partial(peers_wait, late=late, **played)
    return Scene(name=name, part=part, cues=tuple(cues), **_gone(victim), **options)


def _killed_moving(
    mode: str, victim: int, role: str, rows: list[list[int]], **options: Any
) -> Scene:
    return Scene(
        name=f"killed in the middle of a {mode}, {role}",
        item="killed during a transfer",
        part=partial(in_transfer, mode=mode, rows=rows),
        cues=(
            start(),
            strike("SIGKILL", victim, at="arriving", by=(2,), after=0.0),
            go(3, at="late", after=0.05),
        ),
        **_gone(victim),
        **options,
    )


DEATHS = [
    Scene(
        name="killed before a call",
        item="killed before a transfer",
        part=before_the_call,
        cues=(start(), Cue(at="dead", by=_but(1), act="go", to=_but(1), after=0.1)),
        **_gone(1),
    ),
    _killed_waiting("killed, and has not called", 1, 1, item="killed before a transfer"),
    _killed_waiting("killed while all wait for another", 1, 3, item="killed during a transfer"),
    _killed_waiting(
        "killed while calls run in the background", 2, 3, item="killed during a transfer", wait=True
    ),
    _killed_moving("push", 1, "a hub", BOTH),
    _killed_moving("push", 0, "a home", THREE),
    _killed_moving("pull", 1, "a hub", EARLY, long=True),  # hubs that pull store to all, or wait
    _killed_waiting(
        "killed in a direct transfer, a home", 0, 3, item="killed during a transfer", mode="direct"
    ),
    *(
        Scene(
            name=f"killed at any moment, {number}",
            item="killed during a transfer",
            part=any_moment,
            cues=(
                start(),
                strike("SIGKILL", 1, at="calling", by=ALL, after=0.01 + 0.0371 * number),
            ),
            **_gone(1),
            long=number > 1,
        )
        for number in range(1, 7)
    ),
    Scene(
        name="killed during a reduction",
        item="killed during a transfer",
        part=in_reduction,
        cues=(start(), strike("SIGKILL", 1, at="calling", by=_but(3)), go(3, at="late")),
        **_gone(1, again=False),
    ),
    Scene(
        name="killed during gather_load",
        item="killed during a transfer",
        part=in_gather,
        cues=(start(), strike("SIGKILL", 1, at="calling", by=_but(1))),
        **_gone(1),
    ),
    *(
        Scene(
            name=f"killed {when}",
            item="killed after a transfer",
            part=partial(between_calls, at_once=at_once),
            cues=(start(),) if at_once else (start(), start("done")),
            **{
                **_gone(1),
                "expect": {**_gone(1)["expect"], "first": everybody(_but(1), OK)},
            },
        )
        for when, at_once in (("between calls", False), ("as its call returns", True))
    ),
    *(
        Scene(
            name=f"dies in close, {how}",
            item="dies in close",
            part=partial(in_close, how=how),
            cues=(start(),),
            expect={"first": everybody(_but(1), OK), "close": everybody(_but(1), OK)},
            ends={1: KILLED},
            victims=(1,),
        )
        for how in ("at its start", "at its end")
    ),
    Scene(
        name="dies in close, which waits for a call",
        item="dies in close",
        part=in_close_with_a_call,
        cues=(start(), strike("SIGKILL", 1, at="calling", by=_but(3)), go(3, at="late")),
        **_gone(1, again=False),
    ),
    *(
        Scene(
            name=f"exits without close, {how}",
            item="calls one collective too few",
            part=partial(exits, how=how),
            cues=(start(),),
            expect={
                "first": everybody(_but(1), Expect(within=20.0)),
                "call": told("PeerGoneError", 1),
            },
            first_hand=("PeerGoneError",),
            ends={1: 7},
            victims=(1,),
        )
        for how in ("at once", "as an interpreter does")
    ),
    *(
        Scene(
            name=name,
            item="calls one collective too few",
            part=part,
            cues=(
                start(),
                Cue(at="calling", by=_but(1), act="go", to=(), after=0.2),
                go(1, at="raising", fault=True),
            ),
            expect={"call": told("TransferAbortedError", 1) | own, **more},
        )
        for name, part, own, more in (
            (
                "an exception of the caller's within its group",
                raises_within,
                {1: Expect(kinds=("KeyError",))},
                {},
            ),
            ("abort()", aborts, {}, {"again": refuses()}),
        )
    ),
]
