"""Scenes in which ranks do not make the same calls."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from actor import Actor, plan_of
from cast import Cue
from deaths import BOTH
from scene import ALL, Expect, Expected, Scene, everybody, go, refuses, start, told
from stops import LIMIT

ODD = 1
REST = tuple(r for r in ALL if r != ODD)
OTHER = [[6, -1], [0, 4], [0, 6], [0, -1]]


def disagrees(actor: Actor, *, how: str) -> None:
    """Rank 1 makes a different call from the others."""
    own = actor.make(shared=how == "mode")
    odd = actor.rank == ODD
    plan, other = plan_of(BOTH), plan_of(OTHER)
    calls: dict[str, Callable[[], Any]] = {
        "plan": lambda: own.replicate(other if odd else plan),
        "mode": lambda: own.replicate(plan, mode="pull" if odd else "push"),
        "operation": lambda: own.gather() if odd else own.replicate(plan),
        "layers": lambda: _layers(own, plan, [1, 0] if odd else [0, 1]),
    }
    actor.together()
    actor.attempt("call", calls[how])
    actor.attempt("again", own.gather)


def _layers(own: Any, plan: Any, order: list[int]) -> None:
    """The same plan for two layers, each with its handle: only the layer tells them apart."""
    handles = [own.group.save(plan, layer=layer) for layer in (0, 1)]
    own.note(plan)
    for layer in order:
        own.replicate_saved(handles[layer]).wait()


def swaps_groups(actor: Actor) -> None:
    """Rank 1 calls on the second group first. Calls block: each group waits for a rank."""
    first, second = actor.make(timeout=LIMIT), actor.make(timeout=LIMIT)
    plan = plan_of(BOTH)
    order = [second, first] if actor.rank == ODD else [first, second]
    actor.together()
    for name, own in zip(("call", "second"), order, strict=True):
        actor.attempt(name, lambda own=own: own.replicate(plan))  # type: ignore[misc]


def one_too_few(actor: Actor, *, then: str) -> None:
    """Rank 1 skips a call, and closes its group or is busy elsewhere."""
    own = actor.make(timeout=20.0 if then == "closes" else LIMIT)
    plan = plan_of(BOTH)
    actor.attempt("first", lambda: own.replicate(plan))
    actor.report.wrong += own.wrong(plan)
    actor.together()
    if actor.rank == ODD:
        if then == "closes":
            actor.say("fault")
            actor.attempt("close", own.group.close)
            return
        actor.hold("busy")
    actor.attempt("call", lambda: own.replicate(plan))
    actor.say("failed")
    actor.attempt("again", lambda: own.replicate(plan))


def bad_input(actor: Actor, *, what: str) -> None:
    own = actor.make()
    plan = plan_of(BOTH)
    weights: Any = dict(own.weights)
    if what == "weights" and actor.rank == ODD:
        weights["w"] = weights["w"][1:]
    ids = torch.full((2, 2), 99 if actor.rank == ODD else 0)
    actor.together()
    own.note(plan)
    if what == "weights":
        actor.attempt("call", lambda: own.replicate_others(weights, plan))
    else:
        actor.attempt("call", lambda: own.gather(ids))
    actor.attempt("again", own.gather)


def _mismatch(*, within: float = 1.0) -> Expected:
    """The others name rank 1; rank 1 names any of them, as a mismatch is symmetric."""
    rest = Expect(
        kinds=("PlanMismatchError", "TransferAbortedError"),
        peers={"PlanMismatchError": (ODD,), "TransferAbortedError": ALL},
        roots=ALL,
        within=within,
    )
    odd = Expect(
        kinds=("PlanMismatchError", "TransferAbortedError"),
        peers={"PlanMismatchError": REST, "TransferAbortedError": REST},
        roots=ALL,
        within=within,
    )
    return {**everybody(REST, rest), ODD: odd}


def _scene(name: str, item: str, how: str, **options: Any) -> Scene:
    return Scene(
        name=name,
        item=item,
        part=partial(disagrees, how=how),
        cues=(Cue(at="ready", by=ALL, act="go", to=ALL, fault=True),),
        expect={"call": _mismatch(), "again": refuses()},
        first_hand=("PlanMismatchError",),
        **options,
    )


def _waits_in_other_group(rank: int) -> Expect:
    """The first group waits for rank 1; rank 1's waits for all the others."""
    roots = REST if rank == ODD else (ODD,)
    return Expect(
        kinds=("TransferTimeoutError", "TransferAbortedError"),
        peers={"TransferTimeoutError": ALL, "TransferAbortedError": ALL},
        roots=roots,
        within=LIMIT + 1.0,
    )


ORDERS = [
    _scene("gather_load instead of replicate", "calls in another order", "operation"),
    _scene("two layers swapped", "calls in another order", "layers"),
    _scene("another plan", "passes another plan", "plan"),
    _scene("another mode", "passes another plan", "mode", long=True),
    Scene(
        name="two groups swapped",
        item="calls in another order",
        part=swaps_groups,
        cues=(start(),),
        expect={
            "call": {rank: _waits_in_other_group(rank) for rank in ALL},
            "second": {
                rank: Expect(
                    kinds=("TransferAbortedError", "TransferTimeoutError"), within=LIMIT + 1.0
                )
                for rank in ALL
            },
        },
        first_hand=("TransferTimeoutError",),
        limit=LIMIT,
    ),
    Scene(
        name="one collective too few, and close",
        item="calls one collective too few",
        part=partial(one_too_few, then="closes"),
        cues=(start(),),
        expect={
            "first": everybody(ALL, Expect(within=20.0)),
            "call": told("PeerGoneError", ODD, says="rank 1"),
            "again": refuses(REST),
        },
        first_hand=("PeerGoneError",),
    ),
    Scene(
        name="one collective too few, and busy elsewhere",
        item="calls one collective too few",
        part=partial(one_too_few, then="is busy"),
        cues=(
            Cue(at="ready", by=ALL, act="go", to=ALL, fault=True),
            Cue(at="failed", by=REST, act="go", to=(), after=0.1),
            go(ODD, at="busy"),
        ),
        expect={
            "first": everybody(ALL, Expect(within=20.0)),
            "call": {
                **everybody(
                    REST,
                    Expect(
                        kinds=("TransferTimeoutError", "TransferAbortedError"),
                        peers={"TransferTimeoutError": ALL, "TransferAbortedError": REST},
                        roots=(ODD,),
                        within=LIMIT + 1.0,
                    ),
                ),
                ODD: Expect(
                    kinds=("TransferAbortedError",),
                    peers={"TransferAbortedError": REST},
                    within=1.0,
                ),
            },
            "again": refuses(),
        },
        first_hand=("TransferTimeoutError",),
        limit=LIMIT,
    ),
    *(
        Scene(
            name=f"{what} that are not right on one rank",
            item="passes another plan",
            part=partial(bad_input, what=what),
            cues=(Cue(at="ready", by=ALL, act="go", to=ALL, fault=True),),
            expect={
                "call": {
                    **told("PeerRejectedError", ODD),
                    ODD: Expect(kinds=(error,), says="rank 1"),
                },
                "again": refuses(),
            },
            first_hand=("PeerRejectedError",),
            long=what == "ids",
        )
        for what, error in (("weights", "InvalidWeightsError"), ("ids", "InvalidLoadError"))
    ),
]
