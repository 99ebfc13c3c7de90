"""Groups opened and closed in one process, which must leak nothing, memory included."""

from __future__ import annotations

import ctypes
import gc
import sys
import time
from functools import partial

from actor import Actor, E, RankGroup, plan_of
from ranks import MIXED, expert_bytes
from scene import Expect, Scene, everybody, start

import ultraep_comm as uec

PLAN = [[6, -1], [0, 1]]
WARM = 30
# Growth that is allowed: the allocator's own, and containers that double.
FIXED_BYTES, BYTES_PER_GROUP = 48 << 10, 64
FIXED_OBJECTS, OBJECTS_PER_GROUP = 300, 0.5


class _Mallinfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            [
                "arena",
                "ordblks",
                "smblks",
                "hblks",
                "hblkhd",
                "usmblks",
                "fsmblks",
                "uordblks",
                "fordblks",
                "keepcost",
            ]
        )
    ]


def bytes_in_use() -> int:
    """Return the bytes allocated by malloc in this process; -1: the C library cannot tell."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        return -1
    libc.mallinfo2.restype = _Mallinfo
    libc.malloc_trim(0)
    info = libc.mallinfo2()
    return int(info.uordblks + info.hblkhd)


def open_and_close(actor: Actor, *, groups: int) -> None:
    """Open and close ``groups`` groups, with a checked call in every tenth."""
    actor.together()
    expert = {name: MIXED[name] for name in ("w13", "scale", "bias")}

    def life(number: int) -> None:
        with uec.new_group(
            actor.world, num_experts=E, slots_per_rank=2, expert=expert, timeout=60.0, num_sms=2
        ) as group:
            if number % 10 == 0:
                own, plan = RankGroup(group, salt=number), plan_of(PLAN)
                own.replicate(plan, mode="push")
                actor.report.wrong += own.wrong(plan)
                actor.report.stray += own.stray()

    def run() -> None:
        for number in range(WARM):
            life(number)
        expert_bytes.cache_clear()  # the test's own memory
        gc.collect()
        memory, objects = bytes_in_use(), sys.getallocatedblocks()
        for number in range(groups):
            life(number)
        expert_bytes.cache_clear()
        gc.collect()
        more = bytes_in_use() - memory
        more_objects = sys.getallocatedblocks() - objects
        actor.report.figures = {"groups": groups, "bytes": more, "objects": more_objects}
        if memory >= 0 and more > FIXED_BYTES + BYTES_PER_GROUP * groups:
            actor.report.left.append(f"{more} bytes of {groups} groups")
        if more_objects > FIXED_OBJECTS + OBJECTS_PER_GROUP * groups:
            actor.report.left.append(f"{more_objects} Python objects of {groups} groups")

    began = time.monotonic()
    actor.attempt("lives", run)
    actor.report.figures["seconds"] = time.monotonic() - began


def lives_scene(groups: int) -> Scene:
    """Return the scene of ``groups`` groups of two ranks."""
    seconds = 60.0 + 0.3 * groups
    return Scene(
        name=f"{groups} groups opened and closed",
        item="groups opened and closed",
        part=partial(open_and_close, groups=groups),
        cues=(start(by=(0, 1)),),
        expect={"lives": everybody((0, 1), Expect(within=seconds))},
        size=2,
        seconds=seconds,
        limit=60.0,
    )
