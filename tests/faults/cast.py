"""The director of a scene: starts the ranks, gives the cues, and kills ranks that hang."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist
from actor import Actor, Report, play
from ranks import forkserver

STARTING = 60.0  # seconds until every rank is on stage, on a busy machine


@dataclass(frozen=True, kw_only=True)
class Cue:
    """An action of the director, once ranks have reached a point.

    Attributes:
        at: the point.
        by: the ranks that have to reach it.
        act: "go" (release ranks that hold), or the name of a signal.
        to: the ranks that it applies to.
        after: seconds to wait first, so that ranks that announced a call have entered it.
        fault: this action is the fault; times are measured from it.
    """

    at: str
    by: tuple[int, ...]
    act: str
    to: tuple[int, ...]
    after: float = 0.0
    fault: bool = False


@dataclass(kw_only=True)
class Outcome:
    """The outcome of a scene.

    Attributes:
        reports: of the ranks that lived to the end.
        ends: exit codes, by rank, of processes that ended early.
        fault_at: the time of the fault; 0: none was reported.
        troubles: what went wrong: ranks that hung or broke, leaked shared memory.
        seconds: from the first process's start to the last report.
    """

    reports: dict[int, Report] = field(default_factory=dict)
    ends: dict[int, int] = field(default_factory=dict)
    fault_at: float = 0.0
    troubles: list[str] = field(default_factory=list)
    seconds: float = 0.0


def shared_memory_entries(pids: list[int]) -> set[str]:
    """Return the entries of /dev/shm that may belong to these processes or to the library."""
    marks = ["ultraep", *(f"_{pid}" for pid in pids)]
    return {p.name for p in Path("/dev/shm").iterdir() if any(m in p.name for m in marks)}


_starting = threading.Lock()  # of two casts at a time


class Cast:
    """The processes of a scene; a context manager that ends all of them."""

    def __init__(
        self,
        part: Callable[[Actor], None],
        *,
        size: int,
        victims: tuple[int, ...] = (),
        pg_timeout: float = 30.0,
        engine: str = "host",
    ) -> None:
        context = forkserver()
        self.size = size
        self.outcome = Outcome()
        self._began = time.monotonic()
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        self._points: dict[int, list[str]] = {rank: [] for rank in range(size)}
        # Outside of the ranks, as torchrun hosts it.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(size):
            here, there = context.Pipe()
            arguments = (rank, size, self._store.port, part, victims, pg_timeout, engine, there)
            process = context.Process(target=play, args=arguments, daemon=True)
            with _starting:
                process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def __enter__(self) -> Cast:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(10)
        pids = [process.pid for process in self._processes]
        self.outcome.troubles += [
            f"/dev/shm still has {name}" for name in shared_memory_entries(pids)
        ]

    def perform(self, cues: tuple[Cue, ...], seconds: float) -> Outcome:
        """Give the cues in order and collect the reports, all within ``seconds``."""
        everybody = tuple(range(self.size))
        opening = Cue(at="on stage", by=everybody, act="go", to=everybody)
        end = time.monotonic() + STARTING
        for cue in (opening, *cues):
            if not self._until(lambda cue=cue: self._reached(cue), end):  # type: ignore[misc]
                self._stuck(f"ranks {cue.by} to come to {cue.at!r}")
                return self.outcome
            if cue is opening:
                end = time.monotonic() + seconds
            self._do(cue)
        if not self._until(lambda: not self._missing(), end):
            self._stuck("every rank's report")
        self.outcome.seconds = time.monotonic() - self._began
        return self.outcome

    def _do(self, cue: Cue) -> None:
        time.sleep(cue.after)
        if cue.fault:
            self.outcome.fault_at = time.monotonic()
        for rank in cue.to:
            if cue.act == "go":
                with suppress(OSError):
                    self._pipes[rank].send("go")
            else:
                os.kill(self._processes[rank].pid, signal.Signals[cue.act])

    def _reached(self, cue: Cue) -> bool:
        return all(cue.at in self._points[rank] for rank in cue.by)

    def _missing(self) -> list[int]:
        seen = {**self.outcome.reports, **self.outcome.ends}
        return [rank for rank in range(self.size) if rank not in seen]

    def _until(self, true: Callable[[], bool], end: float) -> bool:
        while not true():
            left = end - time.monotonic()
            if left <= 0 or self.outcome.troubles:
                return False
            missing = self._missing()
            if not missing:
                return true()
            # Not the end of its pipe: a forked child may hold a copy.
            ended = {self._processes[r].sentinel: r for r in missing}
            pipes = {self._pipes[r]: r for r in missing}
            ready = wait([*pipes, *ended], min(left, 1.0))
            for pipe, rank in pipes.items():
                if pipe in ready:
                    self._receive(rank)
            for sentinel, rank in ended.items():
                if sentinel in ready:
                    while rank in self._missing() and self._pipes[rank].poll():
                        self._receive(rank)
                    self._processes[rank].join(10)
                    if rank in self._missing():
                        self.outcome.ends[rank] = self._processes[rank].exitcode
        return True

    def _receive(self, rank: int) -> None:
        try:
            kind, *rest = self._pipes[rank].recv()
        except (EOFError, ConnectionResetError):
            self._processes[rank].join(10)
            self.outcome.ends[rank] = self._processes[rank].exitcode
            return
        if kind == "at":
            point, when = rest
            self._points[rank].append(point)
            if point == "fault":
                self.outcome.fault_at = when
        elif kind == "report":
            self.outcome.reports[rank] = rest[0]
        else:
            self.outcome.troubles.append(f"rank {rank} broke:\n{rest[0]}")

    def _stuck(self, waited_for: str) -> None:
        if not self.outcome.troubles:
            where = {rank: self._points[rank][-1:] for rank in self._missing()}
            self.outcome.troubles.append(f"waited in vain for {waited_for}; ranks: {where}")
            for rank in self._missing():  # their stacks, on stderr
                with suppress(OSError):
                    os.kill(self._processes[rank].pid, signal.SIGUSR1)
                time.sleep(0.2)


def run_cast(
    part: Callable[[Actor], None],
    cues: tuple[Cue, ...] = (),
    *,
    size: int = 4,
    victims: tuple[int, ...] = (),
    pg_timeout: float = 30.0,
    seconds: float = 45.0,
    engine: str = "host",
) -> Outcome:
    """Start a cast, direct it, and return the outcome."""
    with Cast(part, size=size, victims=victims, pg_timeout=pg_timeout, engine=engine) as cast:
        cast.perform(cues, seconds)
    return cast.outcome
