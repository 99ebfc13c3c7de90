"""Ranks that die, fail or are interrupted in new_group: the others are told at once."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankPool, raised
from short_ranks import run_ranks
from tiers import sampled

import ultraep_comm as uec
from ultraep_comm import errors, system
from ultraep_comm.engines import host
from ultraep_comm.fabrics import (
    meeting as bootstrap,
)
from ultraep_comm.fabrics import (
    meeting as notices,
)
from ultraep_comm.fabrics import (
    shm,
)
from ultraep_comm.fabrics import (
    sockets as connections,
)
from ultraep_comm.fabrics.meeting import Hello, Meeting
from ultraep_comm.system import Process

EXPERT = {"w": ((5000,), torch.uint8)}
SOON = 5.0  # seconds; the process group's timeout is half an hour


def _make(process_group: Any = None) -> uec.Group:
    return uec.new_group(
        process_group, num_experts=8, slots_per_rank=1, expert=EXPERT, timeout=20.0
    )


def _works(process_group: Any = None) -> bool:
    with _make(process_group) as group:
        load = uec.gather_load(torch.zeros((3, 1), dtype=torch.int64), group=group)
        return int(load.sum()) == 3 * group.num_ranks


def _resources() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


# ---- a record ---------------------------------------------------------------------------------


def test_a_record_comes_back_as_it_was_sent() -> None:
    hello = Hello(
        digest=2**64 - 1,
        machine=b"m" * 24,
        token=b"t" * 16,
        address=b"a" * 16,
        pid=77,
        pid_namespace=2**63,
        boot=b"b" * 16,
        start=2**64 - 1,
        cost=(1, 2, 3, 4, 100),
        values=(-5, 2**63 - 1),
        error="é" * 200,
        failed=True,
        echo=True,
    )
    data = hello.pack(3, 5)
    back = Hello.unpack(data, 3, 5)
    assert back.error == "é" * 128
    assert {**vars(back), "error": ""} == {**vars(hello), "error": ""}
    assert len(Hello().pack(0, 1)) == len(data)


@pytest.mark.parametrize(
    "at, value, part",
    [
        (0, b"X", "not a record of ultraep_comm"),
        (8, b"\1", "record version 1"),
        (12, b"\x80", "flags is invalid"),
        (16, b"\2", "rank is invalid"),
        (20, b"\7", "num_ranks is invalid"),
        (64, b"\xff", "machine is invalid"),
        (63, b"\1", "machine is invalid"),
        (103, b"\xff", "pid is invalid"),
        (136 + 7, b"\xff", "cost is invalid"),
        (136 + 40, b"\xff", "error is invalid"),
        (-1, b"\xff", "values is invalid"),
        (-5, b"\1", "values is invalid"),
    ],
)
def test_every_field_of_a_record_is_checked(at: int, value: bytes, part: str) -> None:
    data = bytearray(Hello(machine=b"m" * 24, pid=9).pack(1, 4))
    Hello.unpack(bytes(data), 1, 4)
    data[at % len(data)] = value[0]
    with pytest.raises(errors.BootstrapError, match=part):
        Hello.unpack(bytes(data), 1, 4)


@pytest.mark.parametrize("data", [b"", b"UEPCOMM1", bytes(4000), os.urandom(1568)])
def test_anything_else_is_no_record(data: bytes) -> None:
    with pytest.raises(errors.BootstrapError, match="rank 0 sent"):
        Hello.unpack(data, 0, 2)


def _bad_numbers(rank: int, process_group: Any) -> Any:
    meeting = Meeting(process_group)
    found = [
        raised(partial(meeting.gather_ints, *values, most=10))
        for values in ([3, 11 if rank == 1 else 0], [-1 if rank == 1 else 1], [1] * (1 + rank))
    ]
    rows = meeting.gather_ints(*range(200), least=0, most=200)
    return [str(error) for error in found], rows == [list(range(200))] * 2


def test_numbers_out_of_range_are_named(ranks: RankPool) -> None:
    for texts, good in ranks.run(2, _bad_numbers):
        assert good
        assert "rank 1 sent [11]" in texts[0]
        assert "rank 1 sent [-1]" in texts[1]
        assert "sent (1" in texts[2]


def test_a_process_that_has_ended_is_seen() -> None:
    assert not Process.this().has_ended()
    ready, other = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(other, Process.this().pack())
        signal.pause()
    process = Process.unpack(os.read(ready, 100))
    assert process is not None
    assert process.pid == child
    assert not process.has_ended()
    os.kill(child, signal.SIGKILL)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert process.has_ended()  # a zombie
    os.waitpid(child, 0)
    assert process.has_ended()
    assert Process(process.boot, process.namespace, os.getpid(), process.start).has_ended()
    assert not Process(bytes(16), process.namespace, child, 1).has_ended()  # of another machine
    assert Process.unpack(b"") is None
    with pytest.MonkeyPatch.context() as patched:  # an unknown namespace matches no other
        patched.setattr(system, "pid_namespace", lambda: 0)
        assert not Process(process.boot, 0, child, 1).has_ended()
    with pytest.MonkeyPatch.context() as patched:  # cloned with its boot id, under another name
        patched.setattr(os, "uname", lambda: SimpleNamespace(nodename="another"))
        assert not process.has_ended()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(system, "_BOOT_ID", b"")
        assert Process.this().boot == bytes(16)
        assert not Process(bytes(16), process.namespace, child, 1).has_ended()
    os.close(ready)
    os.close(other)


# ---- ranks that die ---------------------------------------------------------------------------


def _before(where: str, action: Callable[[], Any]) -> None:
    """Make a rank run ``action`` at a point of new_group."""
    if where == "agree":
        _patch(Meeting, "agree", action)
    elif where == "exchange":
        _patch(host, "ShmFabric", action)
    elif where == "connect":
        _patch(connections.Connections, "connect", action)
    elif where == "proof":
        _patch(connections.Connections, "_prove", action)
    elif where == "memory":
        _patch(shm, "create_memory", action)
    elif where == "send":
        _patch(connections.Connections, "send_memory", action)
    elif where == "receive":
        _patch(connections.Connections, "receive_memory", action)
    elif where == "engine":
        _patch(host, "_start_engine", action)
    else:
        raise KeyError(where)


def _patch(owner: Any, name: str, action: Callable[[], Any]) -> None:
    original = getattr(owner, name)

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        setattr(owner, name, original)
        action()
        return original(*args, **kwargs)

    setattr(owner, name, stand_in)


POINTS = ["agree", "exchange", "connect", "proof", "memory", "send", "receive", "engine"]


def _dies(rank: int, where: str) -> Any:
    dist.barrier()
    before = _resources()
    if rank == 1:
        _before(where, lambda: os.kill(os.getpid(), signal.SIGKILL))
    start = time.monotonic()
    error = raised(_make)
    seconds = time.monotonic() - start
    assert isinstance(error, errors.BootstrapError), error
    error.__traceback__ = None
    after = _resources()
    return str(error), error.failed_rank, seconds, after[1] - before[1] <= 0, os.getpid()


@pytest.mark.parametrize("where", sampled(POINTS, POINTS[-1].__eq__))  # faults/ has the others
def test_a_rank_that_dies_in_new_group_is_named_everywhere(tmp_path: Path, where: str) -> None:
    results = run_ranks(tmp_path, 5, _dies, where, silent=(1,))
    for rank in (0, 2, 3, 4):
        text, failed, seconds, no_threads, _ = results[rank]
        assert failed == 1, text
        assert "rank 1" in text
        assert seconds < SOON, text
        assert no_threads


def _dies_with_the_store(rank: int, folder: Path, who: int, where: str) -> Any:
    """Rank 0 hosts the store, and its process ends once it has failed."""
    if rank == who:
        _before(where, lambda: os.kill(os.getpid(), signal.SIGKILL))
    start = time.monotonic()
    error = raised(_make)
    seconds = time.monotonic() - start
    if rank == 0:
        assert isinstance(error, errors.BootstrapError)
        (folder / "named").write_text(str(error.failed_rank))
        os.kill(os.getpid(), signal.SIGKILL)
    end, named = start + SOON, ""
    while who != 0 and not named and time.monotonic() < end:  # its ranks are ended with the test
        named = (folder / "named").read_text() if (folder / "named").exists() else ""
        time.sleep(0.02)
    return type(error).__name__, str(error), getattr(error, "failed_rank", -9), seconds, named


@pytest.mark.parametrize("where", ["exchange", "memory", "engine"])
@pytest.mark.parametrize("who", sampled([0, 2], lambda who: who == 0))
def test_a_death_is_named_without_a_store(tmp_path: Path, who: int, where: str) -> None:
    results = run_ranks(
        tmp_path,
        3,
        _dies_with_the_store,
        tmp_path,
        who,
        where,
        silent=(0,) if who == 0 else (0, 2),
        hosted=True,
    )
    for rank in {1, 2} - {who}:
        name, text, failed, seconds, named = results[rank]
        assert name == "BootstrapError", text
        assert failed == who, text
        assert seconds < SOON
        assert who == 0 or named == str(who)


def _late(rank: int) -> Any:
    """The store is asked once for each rank present, and no more once all have met."""
    asked: list[str] = []
    original = notices.Notices._get
    notices.Notices._get = lambda self, key: asked.append(key) or original(self, key)  # type: ignore
    if rank == 2:
        time.sleep(1.5)
    with _make():
        first = [key for key in asked if "/here/" in key]
        asked.clear()
        if rank == 1:
            time.sleep(1)
        with _make():
            return first, [key for key in asked if "/here/" in key]


def test_the_store_is_asked_for_processes_until_all_have_met(tmp_path: Path) -> None:
    results = run_ranks(tmp_path, 3, _late, hosted=True)
    for rank, (first, later) in enumerate(results):
        assert not later
        for other in (0, 1):
            assert first.count(f"ultraep_comm/here/{other}") == (rank != 2), first


class _Group:
    """A process group as seen by a store's notices."""

    def __init__(self, store: Any, num_ranks: int = 2) -> None:
        self.store, self.num_ranks = store, num_ranks

    def size(self) -> int:
        return self.num_ranks


def _notices(store: Any, rank: int) -> notices.Notices:
    return notices.Notices(_Group(store), rank, Process.this())  # type: ignore[arg-type]


def test_a_later_process_group_of_the_same_name_has_its_own_notices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(notices, "_find_store", lambda group: group.store)
    store = dist.HashStore()
    _notices(store, 1)
    first = _notices(store, 0)
    first.tell(1, "an old error", stuck=True)
    assert first.failure(stuck=True) == (1, "an old error")
    later = _notices(store, 0)
    assert later.failure(stuck=True) is None
    assert not later.has_come(1)
    assert [rank for rank, _ in later.processes()] == [0]
    _notices(store, 1)
    assert later.has_come(1)
    assert [rank for rank, _ in later.processes()] == [0, 1]


def test_who_has_gone_on_to_the_next_making_has_come_to_this_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(notices, "_find_store", lambda group: group.store)
    store = dist.HashStore()
    own = _notices(store, 0)
    assert not own.has_come(1)
    for _ in range(11):  # as numbers, not as texts
        _notices(store, 1)
        assert own.has_come(1)
    for _ in range(9):
        own = _notices(store, 0)
        assert own.has_come(1)


def test_a_rank_without_the_store_for_a_while_is_not_behind_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A store client without a descriptor left for the store's file."""
    monkeypatch.setattr(notices, "_find_store", lambda group: group.store)
    store = dist.HashStore()
    groups: list[Any] = [_Group(store), _Group(store)]
    for making in range(4):
        both = []
        for rank, group in enumerate(groups):
            group.store = None if rank == 1 and making < 2 else store
            both.append(notices.Notices(group, rank, Process.this()))
    first, second = both
    assert first.has_come(1)
    assert second.has_come(0)
    first.tell(0, "an error", stuck=False)
    assert second.failure(stuck=False) == (0, "an error")


# ---- ranks that fail and live ------------------------------------------------------------------


def _refuse() -> None:
    raise OSError(24, "Too many open files (pretended)")


def _no_thread() -> None:
    raise host.NoThreadError("rank 1: no thread (pretended)", failed_rank=1)


def _fails(rank: int, process_group: Any, where: str) -> Any:
    assert _works(process_group)
    before = _resources()
    kept = [
        (owner, name, getattr(owner, name))
        for owner, name in (
            (Meeting, "agree"),
            (host, "ShmFabric"),
            (connections.Connections, "connect"),
            (connections.Connections, "_prove"),
            (shm, "create_memory"),
            (connections.Connections, "send_memory"),
            (connections.Connections, "receive_memory"),
            (host, "_start_engine"),
        )
    ]
    if rank == 1:
        _before(where, _no_thread if where == "engine" else _refuse)
    start = time.monotonic()
    error = raised(lambda: _make(process_group))
    seconds = time.monotonic() - start
    for owner, name, original in kept:
        setattr(owner, name, original)
    text, name, failed = str(error), type(error).__name__, getattr(error, "failed_rank", -9)
    del error
    after = _resources()
    return name, text, failed, seconds, after == before, _works(process_group)


@pytest.mark.parametrize("where", POINTS)
def test_a_rank_that_fails_in_new_group_is_named_and_all_can_go_on(
    ranks: RankPool, where: str
) -> None:
    results = ranks.run(4, _fails, where)
    for rank, (name, text, failed, seconds, same, works) in enumerate(results):
        if rank != 1:
            assert name == "BootstrapError", text
            assert failed == 1, text
        assert "pretended" in text
        assert seconds < SOON, text
        assert same, "descriptors or threads are left"
        assert works


# ---- Ctrl-C -----------------------------------------------------------------------------------


def _interrupted(rank: int, where: str) -> Any:
    assert _works()
    before = _resources()
    if rank == 1:
        _before(where, lambda: os.kill(os.getpid(), signal.SIGINT))
    start = time.monotonic()
    error = raised(_make)
    seconds = time.monotonic() - start
    text, name = str(error), type(error).__name__
    del error
    time.sleep(0.2)
    after = _resources()
    return name, text, seconds, after == before, _works()


@pytest.mark.parametrize("where", sampled(POINTS, POINTS[-1].__eq__))
def test_ctrl_c_in_new_group_is_told_and_all_can_go_on(tmp_path: Path, where: str) -> None:
    for rank, (name, text, seconds, same, works) in enumerate(
        run_ranks(tmp_path, 3, _interrupted, where)
    ):
        assert name == ("KeyboardInterrupt" if rank == 1 else "BootstrapError"), text
        assert rank == 1 or "rank 1 failed: KeyboardInterrupt" in text
        assert seconds < SOON
        assert same, "descriptors or threads are left"
        assert works


def _waits_for_a_late_rank(rank: int) -> Any:
    assert _works()
    if rank == 1:
        timer = threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT))
        timer.start()
    elif rank == 2:
        time.sleep(2)  # no rank sends a step to it before
    start = time.monotonic()
    error = raised(_make)
    return type(error).__name__, time.monotonic() - start, _works()


def test_ctrl_c_ends_the_wait_for_a_late_rank(tmp_path: Path) -> None:
    results = run_ranks(tmp_path, 3, _waits_for_a_late_rank)
    assert [name for name, *_ in results] == [
        "BootstrapError",
        "KeyboardInterrupt",
        "BootstrapError",
    ]
    assert results[1][1] < 1.8
    assert all(works for *_, works in results)


# ---- descriptors and threads that cannot be had ---------------------------------------------


def _few_descriptors(rank: int, process_group: Any, spare: int) -> Any:
    assert _works(process_group)
    kept = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(fd) for fd in os.listdir("/proc/self/fd"))
    used = len(os.listdir("/proc/self/fd")) - 1
    holes = [os.open("/dev/null", os.O_RDONLY) for _ in range(highest + 1 - used)]
    before = _resources()
    if rank == 1:
        top = max(int(fd) for fd in os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (top + spare, kept[1]))
    try:
        start = time.monotonic()
        error = raised(lambda: _make(process_group))
        seconds = time.monotonic() - start
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, kept)
    name, text = type(error).__name__, str(error)
    del error
    same = _resources() == before
    for fd in holes:
        os.close(fd)
    return name, text, seconds, same, _works(process_group)


@pytest.mark.parametrize("spare", [0, 1, 3, 10])
def test_a_rank_without_descriptors_says_so(ranks: RankPool, spare: int) -> None:
    for name, text, seconds, same, works in ranks.run(3, _few_descriptors, spare):
        assert name == "BootstrapError", text
        assert "rank 1" in text
        assert "ulimit -n" in text
        assert seconds < SOON
        assert same
        assert works


def _no_room(rank: int, process_group: Any) -> Any:
    """The file size limit applies to shared memory too."""
    assert _works(process_group)
    before = _resources()
    kept = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, kept[1]))
    try:
        error = raised(lambda: _make(process_group))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, kept)
        signal.signal(signal.SIGXFSZ, handler)
    name, text = type(error).__name__, str(error)
    del error
    return name, text, _resources() == before, _works(process_group)


def test_memory_that_cannot_be_reserved(ranks: RankPool) -> None:
    results = ranks.run(3, _no_room)
    assert [name for name, *_ in results] == [
        "BootstrapError",
        "OutOfSharedMemoryError",
        "BootstrapError",
    ]
    for _, text, same, works in results:
        assert "rank 1: " in text
        assert "could not be reserved" in text
        assert same
        assert works


def test_records_have_one_size() -> None:
    assert bootstrap._RECORD.size == len(Hello(error="x" * 1000).pack(0, 2))
