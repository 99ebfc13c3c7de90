"""Scenes on the c10d engine: those of the host engine that fit it, and deaths in its new_group."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from actor import Actor
from deaths import DEATHS, KILLED
from interrupts import INTERRUPTS
from meetings import NO_GROUP, ODD, REST, dies_at
from orders import ORDERS
from scene import Expect, Scene, everybody, start
from stops import STOPPED, STOPS

from ultraep_comm.engines.c10d import make
from ultraep_comm.engines.c10d.channel import GlooChannel

POINTS: dict[str, tuple[Any, str, int, bool]] = {
    "before it connects": (GlooChannel, "__init__", 1, False),
    "with one process group": (GlooChannel, "__init__", 1, True),
    "before it measures": (make, "measure", 1, False),
    "before its engine": (make, "C10dEngine", 1, False),
}
# A rank whose peers have sent all that it needs succeeds; a pull is done as a push; a forked child
# keeps connections open; and the host engine's groups are created and closed by other code.
OTHER = {
    "killed in the middle of a push, a hub",
    "killed in a direct transfer, a home",
    "dies in close, at its end",
    "another mode",
    "forks, is killed, and the child lives on",
}
SHORT = {
    "killed before a call",
    "killed in the middle of a push, a home",
    "killed at any moment, 2",
    "killed during a reduction",
    "killed during gather_load",
    "killed between calls",
    "abort()",
    "stopped in a call past the limit, and continued",
    "another plan",
    "one collective too few, and close",
    "weights that are not right on one rank",
    "Ctrl-C in the background",
    "forks, and the child closes it",
}


def dies_connecting(actor: Actor, *, point: str) -> None:
    dies_at(actor, POINTS[point])


def _on_c10d(scene: Scene) -> Scene:
    expect = dict(scene.expect)
    stopped = expect.get("call", {}).get(STOPPED)
    if scene in STOPS and stopped is not None and stopped.kinds != ("ok",):
        # It has missed its own limit too.
        late = Expect(kinds=("TransferAbortedError", "TransferTimeoutError"), within=stopped.within)
        expect["call"] = {**expect["call"], STOPPED: late}
    name, long = f"{scene.name} (c10d)", scene.name not in SHORT
    return replace(scene, name=name, expect=expect, long=long, engine="c10d")


MESSAGES = [
    *(
        _on_c10d(scene)
        for scene in (*DEATHS, *STOPS, *ORDERS, *INTERRUPTS)
        if scene.name not in OTHER
    ),
    *(
        Scene(
            name=f"dies in new_group, {point} (c10d)",
            item="dies in new_group",
            part=partial(dies_connecting, point=point),
            cues=(start(),),
            expect={"new_group": everybody(REST, NO_GROUP)},
            ends={ODD: KILLED},
            victims=(ODD,),
            limit=10.0,
            pg_timeout=10.0,
            engine="c10d",
            long=point != "with one process group",
        )
        for point in POINTS
    ),
]
