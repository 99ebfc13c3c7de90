"""Runs the stages of a call within its limit, whatever fails or hangs."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hour import report

HALF_LOG = 1 << 19  # bytes kept of a log's begin, and of its end
GRACE = 5.0  # seconds from SIGINT, after which pytest writes its results, to SIGKILL


class CannotWriteError(Exception):
    """The folder of results cannot be written."""


@dataclass(frozen=True)
class Command:
    """What a stage runs. Without words, `why` says why not.

    Attributes:
        words: the command line.
        seconds: that it takes on the machine: its share of the call's time.
        env: added to the environment.
        why: there are no words.
        needs_gpu: that is no failure where there is none.
        xml: pytest's results.
        otherwise: run if it fails, and then in its place.
    """

    words: list[str]
    seconds: float = 10.0
    env: dict[str, str] = field(default_factory=dict)
    why: str = ""
    needs_gpu: bool = False
    xml: Path | None = None
    otherwise: tuple[Command, ...] = ()

    @property
    def name(self) -> str:
        """What tells it from others, in a few words."""
        own = self.words[1:] if self.words[:1] == [sys.executable] else self.words
        named = [Path(word).name for word in own if not word.startswith("-")]
        return " ".join(dict.fromkeys([*named[:3], *named[-1:]]))


@dataclass(frozen=True)
class Stage:
    """Commands, and what is made of the JSON lines that they print.

    Attributes:
        of_machine: says something of the machine, or leaves something on it: never left out.
    """

    title: str
    commands: list[Command]
    then: Callable[[Path, list[dict[str, Any]]], None] | None = None
    of_machine: bool = False


class Budget:
    """A call's time: each command may take what is left in proportion to its seconds.

    So what hangs takes nothing from what comes later, and what is quick leaves it more. What is
    very short gets some seconds: a first process takes longer.
    """

    def __init__(self, limit: float, stages: list[Stage], most: float) -> None:
        """Share out `limit` seconds; no command gets more than `most` times its seconds."""
        self.limit, self._end = limit, time.monotonic() + limit
        self._most = most
        self._rest = sum(c.seconds for stage in stages for c in stage.commands if c.words)

    def left(self) -> float:
        """Return the seconds left."""
        return max(0.0, self._end - time.monotonic())

    def share(self, command: Command, *, planned: bool = True) -> float:
        """Return a command's seconds; it is the next, or another in place of one that failed."""
        rest = self._rest + (0 if planned else command.seconds)
        left = self.left()
        share = max(left * command.seconds / rest, min(8.0, left / 8))
        self._rest -= command.seconds if planned else 0
        return min(share, max(30.0, self._most * command.seconds))


# ---- files --------------------------------------------------------------------------------------


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a file that becomes `path` at the end, and is removed if it cannot be written."""
    partial = path.with_name(path.name + ".partial")
    try:
        yield partial
        partial.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise CannotWriteError(f"{path}: {error.strerror}") from None


def write_whole(path: Path, text: str) -> None:
    """Write all of it, or raise CannotWriteError and leave what was there."""
    with replacing(path) as partial:
        partial.write_text(text)


class Log:
    """A stage's output: its begin as it comes and, when it is over, its end."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=0)
        self._room, self._left_out = HALF_LOG, 0
        self._end: collections.deque[bytes] = collections.deque()
        self._kept = 0

    def write(self, data: bytes) -> None:
        """Add what a command has printed."""
        now, later = data[: self._room], data[self._room :]
        self._put(now)
        self._room -= len(now)
        if later:
            self._end.append(later)
            self._kept += len(later)
        while self._kept - len(self._end[0] if self._end else b"") >= HALF_LOG:
            gone = len(self._end.popleft())
            self._kept -= gone
            self._left_out += gone

    def close(self) -> None:
        """Write the end."""
        with self._file:
            rest = b"".join(self._end)
            cut = max(0, len(rest) - HALF_LOG)
            if self._left_out + cut:
                self._put(b"\n... %d bytes left out ...\n" % (self._left_out + cut))
            self._put(rest[cut:])

    def _put(self, data: bytes) -> None:
        while data:  # a disk that gets full takes a part first
            data = data[self._file.write(data) :]


# ---- running ------------------------------------------------------------------------------------


def run(
    command: Command, limit: float, log: Log, folder: Path, env: dict[str, str]
) -> tuple[dict[str, Any], str]:
    """Run a command within `limit` seconds; return its record and the end of its output."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # begun with `&`: commands inherit that
        signal.signal(signal.SIGINT, signal.default_int_handler)
    begin, output, status, late = time.monotonic(), b"", None, False
    line = shlex.join(command.words)
    log.write(f"$ {line}\n".encode())
    try:
        process = subprocess.Popen(
            command.words,
            cwd=folder,
            env=os.environ | env | command.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        return {"command": line, "status": "failed", "last": str(error)}, ""
    assert process.stdout is not None
    try:
        end = begin + limit
        while True:
            left = end - time.monotonic()
            if left <= 0 and late:
                break
            if left <= 0:
                late, end = True, time.monotonic() + GRACE
                process.send_signal(signal.SIGINT)
            elif select.select([process.stdout], [], [], min(left, 0.5))[0]:
                data = os.read(process.stdout.fileno(), 1 << 16)
                if not data:
                    break
                output = (output + data)[-HALF_LOG:]
                log.write(data)
            elif process.poll() is not None:  # a child that outlived it has the pipe
                break
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = process.wait(max(0.01, end - time.monotonic()))
    finally:  # with all that it started
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
    seconds = round(time.monotonic() - begin, 1)
    text = output.decode(errors="replace")
    timed_out = late or status is None
    result = "timeout" if timed_out else "failed" if status else "passed"
    log.write(f"[{result}, {status}, {seconds} s]\n\n".encode())
    last = (text.strip().splitlines() or [""])[-1][-200:]
    record = {"command": line, "exit_status": status, "seconds": seconds, "status": result}
    record["last"] = f"ended after {limit:.0f} s: {last}" if timed_out else last
    return record, text


def run_stage(
    name: str, stage: Stage, out: Path, budget: Budget, folder: Path, env: dict[str, str]
) -> dict[str, Any]:
    """Run a stage's commands, also after one that failed; return its record."""
    begin, records, lines = time.monotonic(), [], []

    def attempt(command: Command, *, planned: bool = True) -> dict[str, Any]:
        if not command.words:
            status = "skipped" if command.needs_gpu else "failed"
            record: dict[str, Any] = {"command": "", "status": status, "last": command.why}
        elif (share := budget.share(command, planned=planned)) < command.seconds / 4:
            why = f"{share:.0f} s are its share of what is left of {budget.limit:.0f} s"
            line = shlex.join(command.words)
            record = {"command": line, "status": "not run", "last": why}
        else:
            record, text = run(command, share, log, folder, env)
            if "gpu_probes/probes.py" in " ".join(command.words):
                lines.extend(found for line in text.splitlines() if (found := as_json(line)))
            record |= report.explain(command.name, record, text, command.xml)
        record = {"name": command.name or name, **record}
        records.append(record)
        print(f"  {record['status']:8}{command.name}: {record['last'][:120]}", flush=True)
        return record

    with replacing(out / f"{name}.log") as partial:
        log = Log(partial)
        for command in stage.commands:
            record = attempt(command)
            if record["status"] == "failed" and command.otherwise:
                others = [attempt(other, planned=False) for other in command.otherwise]
                if all(other["status"] == "passed" for other in others):
                    record["status"] = "replaced"
        log.close()
    if stage.then:
        stage.then(out, lines)
    good = all(record["status"] in ("passed", "skipped", "replaced") for record in records)
    skipped = all(record["status"] == "skipped" for record in records)
    ran = any(record["status"] != "not run" for record in records)
    status = "skipped" if skipped else "passed" if good else "failed" if ran else "not run"
    return {
        "stage": name,
        "status": status,
        "seconds": round(time.monotonic() - begin, 1),
        "commands": records,
        "results": lines,
    }


def as_json(line: str) -> dict[str, Any] | None:
    """Return the object that a line is, if it is one."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
