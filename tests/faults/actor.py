"""One rank of a scene, a process: plays its part and reports what it finds afterwards."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from holdings import holdings, more_than
from ranks import (
    clear_slots,
    expert_bytes,
    fill_weights,
    make_weights,
    prepare_forked,
    raw,
    slot_memory,
    wrong_bytes,
)

import ultraep_comm as uec
from ultraep_comm import Segment
from ultraep_comm.bench.payload import SENTINEL
from ultraep_comm.group.group import session_of

E, S = 8, 2  # home map on 4 ranks: 0 0 1 1 2 2 3 3
SMALL = {"w": Segment((700, 720), torch.bfloat16), "s": Segment((5,), torch.uint8)}
BIG = {"w": Segment(((8 << 20) + 3,), torch.uint8), "s": Segment((5,), torch.uint8)}


@dataclass(kw_only=True)
class Event:
    """The outcome of one attempt on one rank. ``kind`` is the error's type, or "ok"."""

    name: str
    began: float
    ended: float = 0.0
    kind: str = "ok"
    text: str = ""
    peer: int = -9
    root: int = -9
    cause: str = ""


@dataclass(kw_only=True)
class Report:
    """The report of a rank that lives to the end.

    Attributes:
        events: the rank's attempts, in order.
        stray: bytes that changed although they must not: outside filled slots, or in main weights.
        wrong: wrong bytes in filled slots after a successful call.
        left: descriptors, threads and mappings leaked since the start of the scene.
        afterwards: "ok", or why the survivors could not create a group and transfer in it.
        broken: the error that the part itself raised; no part should.
        figures: other measurements of the part.
    """

    rank: int
    events: list[Event] = field(default_factory=list)
    stray: int = 0
    wrong: int = 0
    left: list[str] = field(default_factory=list)
    afterwards: str = ""
    broken: str = ""
    figures: dict[str, float] = field(default_factory=dict)


def plan_of(rows: list[list[int]], num_experts: int = E) -> uec.Plan:
    """Return the plan with these experts in the ranks' slots."""
    return uec.Plan.from_slots(torch.tensor(rows, dtype=torch.int32), num_experts=num_experts)


class RankGroup:
    """A group of this rank with its weights; remembers which slots its plans may have filled."""

    def __init__(self, group: uec.Group, *, shared: bool = False, salt: int = 1) -> None:
        self.group = group
        self.salt = salt  # of the payload: differs between groups
        self.weights = group.empty_weights() if shared else make_weights(group)
        self._filled: set[tuple[int, int]] = set()
        fill_weights(group, self.weights, salt)
        clear_slots(group)

    def replicate(self, plan: uec.Plan, **options: Any) -> Any:
        self.note(plan)
        return uec.replicate_experts(self.weights, plan, group=self.group, **options)

    def note(self, plan: uec.Plan) -> None:
        """Note that this plan may fill its slots from now on."""
        row = plan.slot_expert[self.group.rank].tolist()
        indices = range(len(self.group.segments))
        self._filled |= {(i, s) for i in indices for s, expert in enumerate(row) if expert >= 0}

    def replicate_saved(self, handle: Any) -> Any:
        return uec.replicate_experts(self.weights, handle, group=self.group, async_op=True)

    def replicate_others(self, weights: Any, plan: uec.Plan) -> Any:
        """Make a call with ``weights`` instead of the group's own."""
        return uec.replicate_experts(weights, plan, group=self.group)

    def gather(self, ids: torch.Tensor | None = None) -> torch.Tensor:
        ids = torch.full((3, 2), self.group.rank) if ids is None else ids
        return uec.gather_load(ids, group=self.group)

    def wrong(self, plan: uec.Plan) -> int:
        return wrong_bytes(self.group, plan, self.salt)

    def stray(self) -> int:
        """Return the number of bytes that changed in main weights or slots that no plan filled."""
        group, offset = self.group, session_of(self.group).engine.layout.slots_base
        if group.slot_grads:
            return 0  # their scenes compare values
        changed = slot_memory(group) != SENTINEL
        for index, segment in enumerate(group.segments.values()):
            start = session_of(group).engine.layout.slot_offset[index] - offset
            for slot in range(group.topology.slots_per_rank):
                if (index, slot) in self._filled:
                    at = start + slot * segment.nbytes
                    changed[at : at + segment.nbytes] = False
        count = int(changed.sum())
        for index, (name, segment) in enumerate(group.segments.items()):
            for i, expert in enumerate(group.topology.local_experts(group.rank).tolist()):
                own = raw(self.weights[name][i], segment)
                count += int((own != expert_bytes(self.salt, expert, index, segment)).sum())
        return count


class Actor:
    """The argument of a part: ``part(actor)`` is one rank's side of a scene."""

    def __init__(
        self, rank: int, size: int, pipe: Connection, victims: tuple[int, ...], engine: str
    ) -> None:
        self.rank, self.size, self.victims, self.engine = rank, size, victims, engine
        self.report = Report(rank=rank)
        self.groups: list[RankGroup] = []
        self.world = dist.group.WORLD
        self._pipe = pipe
        self._pids: list[int] = []
        survivors = [r for r in range(size) if r not in victims]
        made = dist.new_group(survivors)  # for the group made afterwards
        self.survivors: Any = made if rank not in victims else None

    @property
    def is_victim(self) -> bool:
        return self.rank in self.victims

    # ---- the director ---------------------------------------------------------------------

    def say(self, point: str) -> None:
        """Tell the director that this rank has reached a point."""
        self._pipe.send(("at", point, time.monotonic()))

    def hold(self, point: str) -> None:
        """Tell the director of a point, and wait until it lets this rank go on."""
        self.say(point)
        self._pipe.recv()

    def together(self, point: str = "ready") -> None:
        """Wait until every rank has reached this point."""
        self.hold(point)

    def die(self) -> None:
        self.say("fault")
        os.kill(os.getpid(), signal.SIGKILL)

    # ---- playing --------------------------------------------------------------------------

    def make(self, *, process_group: Any = None, shared: bool = False, **options: Any) -> RankGroup:
        """Create a group that is checked and closed at the end."""
        options = {"num_experts": E, "slots_per_rank": S, "expert": SMALL, "num_sms": 1, **options}
        options = {"timeout": 20.0, "engine": self.engine, **options}
        group = uec.new_group(process_group or self.world, **options)
        self.groups.append(RankGroup(group, shared=shared, salt=1 + len(self.groups)))
        return self.groups[-1]

    def attempt(self, name: str, call: Callable[[], Any]) -> Any:
        """Run ``call`` and record how it ended; never raises."""
        event = Event(name=name, began=time.monotonic())
        result = None
        try:
            result = call()
        except BaseException as error:
            event.ended = time.monotonic()
            event.kind, event.text = type(error).__name__, str(error)
            event.peer = getattr(error, "peer", -9)
            event.root = getattr(error, "root", getattr(error, "failed_rank", -9))
            event.cause = type(error.__cause__).__name__ if error.__cause__ else ""
        event.ended = event.ended or time.monotonic()
        self.report.events.append(event)
        return result

    def when_slot_fills(self, own: RankGroup, then: Callable[[], None]) -> None:
        """Call ``then`` while bytes are arriving in this rank's slots."""
        slots = own.group.slots["w"].flatten()[4096::4096]  # of every piece

        def watch() -> None:
            while bool((slots == SENTINEL).all()):
                time.sleep(0.0005)
            then()

        threading.Thread(target=watch, daemon=True).start()

    def child(self, act: Callable[[], None]) -> int:
        """Fork a process that does ``act`` and ends without cleaning up; return its id."""
        pid = os.fork()
        if pid == 0:
            code = 1
            with contextlib.suppress(BaseException):
                act()
                code = 0
            os._exit(code)
        self._pids.append(pid)
        return pid

    def child_ends(self, pid: int) -> int:
        """Wait for a child's end and return its exit status."""
        self._pids.remove(pid)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    # ---- the end --------------------------------------------------------------------------

    def stop_here(self) -> None:
        """Compare every byte and close every open group; errors of close are recorded too."""
        for own in self.groups:
            self.report.stray += own.stray()
        for own in self.groups:
            if session_of(own.group).state == "open":
                self.attempt("close", own.group.close)
        self.groups.clear()

    def go_on(self) -> None:
        """Create a group of the survivors and transfer in it."""
        if self.survivors is None:
            return
        try:
            rank, size = dist.get_rank(self.survivors), dist.get_world_size(self.survivors)
            with uec.new_group(
                self.survivors,
                num_experts=size,
                slots_per_rank=1,
                expert=SMALL,
                timeout=20.0,
                engine=self.engine,
            ) as group:
                own = RankGroup(group, salt=99)
                plan = plan_of([[(r + 1) % size if size > 1 else -1] for r in range(size)], size)
                own.replicate(plan)
                wrong = own.wrong(plan) + own.stray()
            self.report.afterwards = f"{wrong} wrong bytes on rank {rank}" if wrong else "ok"
        except BaseException:
            self.report.afterwards = traceback.format_exc()


# ---- the process ----------------------------------------------------------------------------


def _warm_up(actor: Actor) -> None:
    """Create what the first use leaves behind: modules, torch's threads, gloo's connections."""
    for group in (actor.world, actor.survivors):
        if group is None:
            continue
        with uec.new_group(
            group,
            num_experts=E,
            slots_per_rank=1,
            expert=SMALL,
            timeout=30.0,
            engine=actor.engine,
        ) as warm:
            own = RankGroup(warm)
            own.gather()
            own.wrong(plan_of([[-1]] * warm.num_ranks))


def play(
    rank: int,
    size: int,
    port: int,
    part: Callable[[Actor], None],
    victims: tuple[int, ...],
    pg_timeout: float,
    engine: str,
    pipe: Connection,
) -> None:
    """Run the process of one rank: join the cast, play the part, and report."""
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    prepare_forked()
    # torch's records of its last collectives would look like a leak.
    os.environ["TORCH_FR_BUFFER_SIZE"] = "0"
    try:
        dist.init_process_group(
            "gloo",
            store=dist.TCPStore("127.0.0.1", port, is_master=False),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=pg_timeout),
        )
        actor = Actor(rank, size, pipe, victims, engine)
        _warm_up(actor)
        gc.collect()
        before = holdings()
        actor.together("on stage")
        report = actor.report
        try:
            part(actor)
            actor.stop_here()
        except BaseException:
            report.broken = traceback.format_exc()
        actor.go_on()
        if not report.broken:
            report.left += more_than(before)
        pipe.send(("report", report))
    except BaseException:
        pipe.send(("broken", traceback.format_exc()))
    with contextlib.suppress(EOFError):
        pipe.recv()  # keep connections open until every rank has reported
    os._exit(0)
