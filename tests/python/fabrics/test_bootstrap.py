"""Ranks that die, fail or are interrupted in new_group: the others are told at once."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankPool, loopback, raised
from short_ranks import run_ranks
from tiers import sampled

import ultraep_comm as uec
from ultraep_comm import _core, errors, system
from ultraep_comm.engines import host
from ultraep_comm.fabrics import rendezvous as bootstrap
from ultraep_comm.fabrics import shm
from ultraep_comm.fabrics.rendezvous import PeerFailureError, Rendezvous
from ultraep_comm.system import Process

EXPERT = {"w": ((5000,), torch.uint8)}


def _make(process_group: Any = None) -> uec.Group:
    """Every wait may take longer than a test, which fails unless peers are told at once."""
    return uec.new_group(
        process_group, num_experts=8, slots_per_rank=1, expert=EXPERT, timeout=1000.0
    )


def _works(process_group: Any = None) -> bool:
    with _make(process_group) as group:
        load = uec.gather_load(torch.zeros((3, 1), dtype=torch.int64), group=group)
        return int(load.sum()) == 3 * group.num_ranks


def _resources() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def _failure(make: Callable[[], Any] = _make) -> tuple[str, str, int]:
    """Return the kind, text and rank of the error of a new_group, which leaves nothing behind."""
    before = _resources()
    error = raised(make)
    found = type(error).__name__, str(error), getattr(error, "failed_rank", -9)
    del error
    end = time.monotonic() + 20
    while _resources() != before and time.monotonic() < end:
        time.sleep(0.01)  # threads may still be ending
    assert _resources() == before, "descriptors or threads are left"
    return found


# ---- steps ------------------------------------------------------------------------------------


def _together(store: Any, num_ranks: int = 2) -> list[Any]:
    """Return process groups of ranks in this process, which have a store and nothing else."""
    return [dist.ProcessGroup(store, rank, num_ranks) for rank in range(num_ranks)]


def _exchange(groups: list[Any], **options: Any) -> list[Any]:
    return loopback(
        len(groups), lambda rank: Rendezvous(groups[rank], **options).exchange(["é", rank])
    )


def test_records_come_by_rank_and_the_store_keeps_those_of_the_last_step_only() -> None:
    store = dist.HashStore()
    groups = _together(store, 3)

    def run(rank: int) -> list[Any]:
        rendezvous = Rendezvous(groups[rank])
        return [rendezvous.exchange([step, rank]) for step in range(20)]

    assert loopback(3, run) == [[[[s, r] for r in range(3)] for s in range(20)]] * 3
    assert store.num_keys() < 60


def test_a_later_process_group_over_the_same_store_has_its_own_records() -> None:
    store = dist.HashStore()
    first = _together(store)
    assert isinstance(raised(lambda: _exchange(first[:1], limit=0.2)), errors.BootstrapError)
    raised(lambda: Rendezvous(first[1]).exchange())
    assert _exchange(_together(store)) == [[["é", 0], ["é", 1]]] * 2


def test_a_rank_that_is_behind_reads_the_old_failures_and_catches_up() -> None:
    groups = _together(dist.HashStore())
    for _ in range(3):
        error = raised(lambda: _exchange(groups[:1], limit=0.2))
        assert "because rank 1 failed: ranks [1] did not join" in str(error)
    for _ in range(3):
        error = raised(lambda: Rendezvous(groups[1]).exchange())
        assert str(error).startswith("rank 1: cannot continue, because rank 1 failed: ranks [1]")
    assert _exchange(groups) == [[["é", 0], ["é", 1]]] * 2


def test_a_peers_own_report_takes_precedence() -> None:
    groups = _together(dist.HashStore())

    def run(rank: int) -> str:
        rendezvous = Rendezvous(groups[rank])

        def steps() -> None:
            with rendezvous.failure_scope(), rendezvous.failure_scope():
                rendezvous.exchange()
                if rank == 0:  # at once
                    raise PeerFailureError("rank 1 closed the connection", failed_rank=1)
                time.sleep(0.2)
                raise OSError("no descriptor left")

        return str(raised(steps))

    told, own = loopback(2, run)
    assert own == "no descriptor left"
    assert told == "rank 0: cannot continue, because rank 1 failed: no descriptor left"


def test_a_process_group_without_a_store_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "_find_store", lambda _: None)
    with pytest.raises(errors.UnsupportedError, match="rank 0: the process group has no store, ov"):
        Rendezvous(dist.ProcessGroup(dist.HashStore(), 0, 1))


def test_a_store_that_is_gone_is_said() -> None:
    (group,) = _together(dist.HashStore(), 1)
    rendezvous = Rendezvous(group)
    rendezvous.store = None
    with pytest.raises(errors.BootstrapError, match="store cannot be reached; has the process end"):
        rendezvous.exchange()


# ---- arguments --------------------------------------------------------------------------------

BF16 = torch.bfloat16
TWO: dict[str, Any] = {"w": ((8,), torch.float32), "s": ((8,), torch.float32)}
OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "num_experts": ({"num_experts": 10}, "num_experts=10, and rank 0 with num_experts=8"),
    "slots_per_rank": ({"slots_per_rank": 3}, "slots_per_rank=3, and rank 0 with slots_per_rank=1"),
    "home": ({"home": [0, 1] * 4}, "home[1]=1, and rank 0 with home[1]=0"),
    "domains": ({"domains": [0, 0]}, "domains=[0, 0], and rank 0 with domains=None"),
    "crossing": ({"allow_cross_domain": True}, "allow_cross_domain=True, and rank 0 with allow_cr"),
    "shape": ({"expert": {**TWO, "s": ((9,), BF16)}}, "expert['s']='(9,) torch.bfloat16, stri"),
    "order": ({"expert": dict(reversed(TWO.items()))}, "list(expert)[0]='s', and rank 0 with list"),
    "grads": (
        {"grads": torch.float32},
        "grads['w']='torch.float32', and rank 0 with grads['w']='torc",
    ),
    "banks": ({"banks": 3}, "banks=3, and rank 0 with banks=2"),
    "grad_banks": ({"grad_banks": 2}, "grad_banks=2, and rank 0 with grad_banks=1"),
    "instances": ({"instances": True}, "instances=True, and rank 0 with instances=False"),
    "engine": ({"engine": "c10d"}, "engine='c10d', and rank 0 with engine='auto'"),
    "fabric": ({"fabric": "shm"}, "fabric='shm', and rank 0 with fabric='auto'"),
    "tile_bytes": ({"tile_bytes": 1024}, "tile_bytes=1024, and rank 0 with tile_bytes=65536"),
    "check": ({"check": True}, "check=True, and rank 0 with check=False"),
    "device": ({"device": "cpu"}, "device='cpu', and rank 0 with device=None"),
}


def _differs(rank: int, process_group: Any, others: list[dict[str, Any]]) -> list[str]:
    common: dict[str, Any] = {"num_experts": 8, "slots_per_rank": 1, "expert": TWO}
    common |= {"banks": 2, "grads": BF16}
    found = []
    for other in others:
        options = {**common, **other} if rank == 1 else common
        found.append(str(raised(partial(uec.new_group, process_group, **options))))
    return found


def test_an_argument_that_differs_is_named_with_both_values(ranks: RankPool) -> None:
    for found in ranks.run(2, _differs, [other for other, _ in OTHERS.values()]):
        for text, (_, expected) in zip(found, OTHERS.values(), strict=True):
            assert text.startswith(f"rank 1 called new_group with {expected}")


# ---- processes --------------------------------------------------------------------------------


def test_a_process_that_has_ended_is_seen() -> None:
    assert not Process.this().has_ended()
    ready, other = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(other, json.dumps(Process.this()).encode())
        signal.pause()
    process = Process(*json.loads(os.read(ready, 1000)))
    assert process.pid == child
    assert not process.has_ended()
    os.kill(child, signal.SIGKILL)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert process.has_ended()  # a zombie
    os.waitpid(child, 0)
    assert process.has_ended()
    assert Process(process.boot, process.namespace, os.getpid(), process.start).has_ended()
    assert not Process("", process.namespace, child, 1).has_ended()  # of another machine
    with pytest.MonkeyPatch.context() as patched:  # an unknown namespace matches no other
        patched.setattr(system, "pid_namespace", lambda: 0)
        assert not Process(process.boot, 0, child, 1).has_ended()
    with pytest.MonkeyPatch.context() as patched:  # cloned with its boot id, under another name
        patched.setattr(os, "uname", lambda: SimpleNamespace(nodename="another"))
        assert not process.has_ended()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(system, "_BOOT_ID", "")
        assert Process.this().boot == ""
        assert not Process("", process.namespace, child, 1).has_ended()
    os.close(ready)
    os.close(other)


# ---- ranks that die ---------------------------------------------------------------------------


POINTS: dict[str, tuple[Any, str]] = {  # of new_group
    "begin": (Rendezvous, "exchange"),
    "exchange": (host, "ShmFabric"),
    "pipe": (shm.ShmFabric, "_watch_peers"),
    "memory": (shm, "create_memory"),
    "map": (_core, "map_shared"),
    "engine": (host, "_start_threads"),
}


@contextlib.contextmanager
def _once(where: str, action: Callable[[], Any]) -> Iterator[None]:
    """Run ``action`` once, at a point of new_group."""
    owner, name = POINTS[where]
    original = getattr(owner, name)

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        setattr(owner, name, original)
        action()
        return original(*args, **kwargs)

    setattr(owner, name, stand_in)
    try:
        yield
    finally:
        setattr(owner, name, original)


def _end() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _dies_with_the_store(rank: int, folder: Path, who: int, where: str) -> Any:
    """Rank 0 hosts the store, and its process ends once it has failed."""
    with _once(where, _end) if rank == who else contextlib.nullcontext():
        error = raised(_make)
    assert isinstance(error, errors.BootstrapError), error
    named = folder / "named"
    if rank == 0:
        (folder / "part").write_text(str(error.failed_rank))
        (folder / "part").rename(named)
        _end()
    while who != 0 and not named.exists():  # its ranks are ended with the test
        time.sleep(0.02)
    return error.failed_rank, str(error)


@pytest.mark.parametrize("where", ["exchange", "memory", "engine"])
@pytest.mark.parametrize("who", sampled([0, 2], lambda who: who == 0))
def test_a_death_is_named_without_a_store(tmp_path: Path, who: int, where: str) -> None:
    silent, task = (0,) if who == 0 else (0, 2), (tmp_path, who, where)
    results = run_ranks(tmp_path, 3, _dies_with_the_store, *task, silent=silent, hosted=True)
    for rank in {1, 2} - {who}:
        failed, text = results[rank]
        assert failed == who, text
    assert who == 0 or (tmp_path / "named").read_text() == str(who)


def _late(rank: int) -> Any:
    """The store is asked for each rank's process until it is known, and then no more."""
    asked: list[tuple[str, bool]] = []  # and whether it was known

    class Asked(dist.PrefixStore):
        def check(self, keys: list[str]) -> bool:
            known = super().check(keys)
            asked.extend((key, known) for key in keys if "process/" in key)
            return known

    bootstrap.PrefixStore = Asked  # type: ignore[misc]
    if rank == 2:
        time.sleep(0.5)
    with _make():
        first = list(asked)
        asked.clear()
        if rank == 1:
            time.sleep(0.5)
        with _make():
            return first, asked


def test_the_store_is_asked_for_processes_until_all_have_met(tmp_path: Path) -> None:
    results = run_ranks(tmp_path, 3, _late, hosted=True)
    for first, later in results:
        assert not later
        found = [key for key, known in first if known]
        assert len(set(found)) == len(found), first
        assert {"process/0", "process/1"} <= set(found)


# ---- ranks that fail and live ------------------------------------------------------------------


def _refuse() -> None:
    raise OSError(24, "Too many open files (pretended)")


def _interrupt() -> None:
    raise KeyboardInterrupt


def _fails(rank: int, process_group: Any, where: str, action: Any) -> tuple[str, str, int]:
    assert _works(process_group)
    with _once(where, action) if rank == 1 else contextlib.nullcontext():
        found = _failure(partial(_make, process_group))
    assert _works(process_group)
    return found


@pytest.mark.parametrize("where", POINTS)
@pytest.mark.parametrize("action", [_refuse, _interrupt])
def test_a_rank_that_fails_in_new_group_is_named_and_all_can_continue(
    ranks: RankPool, where: str, action: Any
) -> None:
    said = "pretended" if action is _refuse else "rank 1 failed: KeyboardInterrupt"
    for rank, (kind, text, failed) in enumerate(ranks.run(4, _fails, where, action)):
        if rank == 1 and action is _interrupt:
            assert kind == "KeyboardInterrupt"
        else:
            assert said in text
            assert rank == 1 or (kind, failed) == ("BootstrapError", 1), text
