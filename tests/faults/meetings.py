"""Scenes in which no group can be created: deaths in new_group, no memory, no descriptors."""

from __future__ import annotations

import resource
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from actor import BIG, Actor, plan_of
from cast import Cue
from deaths import BOTH, KILLED
from scene import ALL, OK, Expect, Scene, everybody, refuses, start, told

from ultraep_comm.fabrics import memory, rendezvous, shm

ODD = 1
REST = tuple(r for r in ALL if r != ODD)
NO_GROUP = Expect(kinds=("BootstrapError",), roots=(ODD,), says=f"rank {ODD}")


# ---- dying in new_group ---------------------------------------------------------------------


def _replace(owner: Any, name: str, act: Callable[[], None], number: int, *, behind: bool) -> None:
    """Patch a function so that its ``number``-th call, from 1, runs ``act`` before or after it."""
    function, calls = getattr(owner, name), 0

    def replaced(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number and not behind:
            act()
        result = function(*arguments, **options)
        if calls == number and behind:
            act()
        return result

    setattr(owner, name, replaced)


POINTS: dict[str, tuple[Any, str, int, bool]] = {
    "before the ranks meet": (rendezvous.Rendezvous, "exchange", 1, False),
    "when the ranks have met": (rendezvous.Rendezvous, "exchange", 1, True),
    "before machines are compared": (rendezvous.Rendezvous, "exchange", 2, False),
    "before its pipe": (shm.ShmFabric, "_watch_peers", 1, False),
    "when it watches one peer": (shm.ShmFabric, "_open_process", 1, True),
    "before its memory": (shm, "create_memory", 1, False),
    "with its memory": (shm, "create_memory", 1, True),
    "while memory is opened": (shm, "open_shared", len(ALL) + 1, True),
    "while it maps its peers' memory": (shm, "map_peer", 1, True),
}
SHORT = (
    "before the ranks meet",
    "when it watches one peer",
    "with its memory",
)


def dies_making(actor: Actor, *, point: str) -> None:
    dies_at(actor, POINTS[point])


def dies_at(actor: Actor, place: tuple[Any, str, int, bool]) -> None:
    """Rank 1 dies in new_group at a place, which is as the arguments of `_replace`."""
    owner, name, number, behind = place
    actor.together()
    if actor.rank == ODD:
        _replace(owner, name, actor.die, number, behind=behind)
    actor.attempt("new_group", actor.make)


def dies_when_made(actor: Actor) -> None:
    """Rank 1 dies when its peers need nothing more from it."""
    actor.together()
    if actor.rank == ODD:
        own = actor.make()
        actor.die()
    own = actor.attempt("new_group", actor.make)
    if own is not None:
        actor.attempt("call", lambda: own.replicate(plan_of(BOTH), mode="push"))


# ---- memory and descriptors -----------------------------------------------------------------


def _limited(kind: int, value: int, call: Callable[[], Any]) -> Any:
    """Run with a soft resource limit."""
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (value, before[1]))
    try:
        return call()
    finally:
        resource.setrlimit(kind, before)


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _descriptors(free: int) -> int:
    """Return the limit that leaves ``free`` descriptors."""
    used = {int(p.name) for p in Path("/proc/self/fd").iterdir()}
    limit = 0
    while free > 0 or limit == 0:
        free -= limit not in used
        limit += 1
    return limit


def no_memory(actor: Actor, *, how: str) -> None:
    make = partial(actor.make, expert=BIG)
    actor.together()
    if actor.rank != ODD:
        actor.attempt("new_group", make)
    elif how == "the machine has none":
        kept = memory.available_memory
        memory.available_memory = lambda: memory.Available(1000, "of a test")
        actor.attempt("new_group", make)
        memory.available_memory = kept
    elif how == "it cannot be reserved":  # posix_fallocate fails in the kernel
        actor.attempt("new_group", lambda: _limited(resource.RLIMIT_FSIZE, 1 << 20, make))
    elif how == "it cannot be mapped":  # mmap fails in the kernel, of a peer's memory
        space = _address_space() + (40 << 20)
        actor.attempt("new_group", lambda: _limited(resource.RLIMIT_AS, space, make))


def too_much_for_the_machine(actor: Actor) -> None:
    actor.together()
    expert = {"w": ((1 << 40,), torch.uint8)}
    actor.attempt("new_group", lambda: actor.make(expert=expert))


def no_memory_for_weights(actor: Actor) -> None:
    """The slots fit, and then the weights of rank 1 do not."""
    own = actor.make(expert=BIG)
    actor.together()
    if actor.rank == ODD:
        small = resource.RLIMIT_FSIZE, 1 << 20
        actor.attempt("empty_weights", lambda: _limited(*small, own.group.empty_weights))
    else:
        actor.attempt("empty_weights", own.group.empty_weights)
    actor.attempt("again", own.gather)


def no_descriptors(actor: Actor, *, free: int) -> None:
    actor.together()
    if actor.rank == ODD:
        limit = _descriptors(free)
        actor.attempt("new_group", lambda: _limited(resource.RLIMIT_NOFILE, limit, actor.make))
    else:
        actor.attempt("new_group", actor.make)


def bad_argument(actor: Actor) -> None:
    actor.together()
    slots = -1 if actor.rank == ODD else 2
    actor.attempt("new_group", lambda: actor.make(slots_per_rank=slots))


def _fails(name: str, item: str, part: Any, own: tuple[str, ...], **options: Any) -> Scene:
    what = options.pop("what", "new_group")
    expect = {what: {**everybody(REST, NO_GROUP), ODD: Expect(kinds=own)}}
    if what != "new_group":
        expect["again"] = refuses()
    cues = (Cue(at="ready", by=ALL, act="go", to=ALL, fault=True),)
    limits = {"limit": 10.0, "pg_timeout": 10.0}
    return Scene(name=name, item=item, part=part, cues=cues, expect=expect, **limits, **options)


MEMORY, OUT = "shared memory exhausted", ("OutOfSharedMemoryError",)
MEETINGS = [
    *(
        Scene(
            name=f"dies in new_group, {point}",
            item="dies in new_group",
            part=partial(dies_making, point=point),
            cues=(start(),),
            expect={"new_group": everybody(REST, NO_GROUP)},
            ends={ODD: KILLED},
            victims=(ODD,),
            limit=10.0,
            pg_timeout=10.0,
            long=point not in SHORT,
        )
        for point in POINTS
    ),
    Scene(
        name="dies when new_group returns",
        item="dies in new_group",
        part=dies_when_made,
        cues=(start(),),
        expect={"new_group": everybody(REST, OK), "call": told("PeerGoneError", ODD)},
        first_hand=("PeerGoneError",),
        ends={ODD: KILLED},
        victims=(ODD,),
    ),
    *(
        _fails(
            f"no shared memory: {how}", MEMORY, partial(no_memory, how=how), OUT, long=not default
        )
        for how, default in (
            ("the machine has none", False),
            ("it cannot be reserved", True),
            ("it cannot be mapped", True),
        )
    ),
    Scene(
        name="no shared memory: more than the machine has",
        item=MEMORY,
        part=too_much_for_the_machine,
        cues=(start(),),
        expect={"new_group": everybody(ALL, Expect(kinds=OUT))},
    ),
    _fails(
        "no shared memory for empty_weights",
        MEMORY,
        no_memory_for_weights,
        OUT,
        what="empty_weights",
    ),
    *(
        _fails(
            f"{free} descriptors left",
            "descriptors exhausted",
            partial(no_descriptors, free=free),
            ("BootstrapError",),
            long=free not in (0, 3),
        )
        for free in (0, 1, 2, 3, 8)
    ),
    _fails(
        "a bad argument of new_group",
        "dies in new_group",
        bad_argument,
        ("InvalidArgumentError",),
        long=True,
    ),
]
