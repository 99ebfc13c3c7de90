"""Forks of a process with groups: the child leaves them alone, parent and peers go on."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import clear_slots, fill_weights, make_weights, raised, run_python, wrong_bytes
from short_ranks import run_ranks
from tiers import cases

import ultraep_comm as uec
from ultraep_comm import Segment, errors, system
from ultraep_comm.group.group import session_of

E, S = 4, 1
EXPERT = {"w": Segment((200, 300), torch.bfloat16)}
PLAN = uec.Plan.from_slots([[2], [0]], num_experts=E)


def _group(**options: Any) -> uec.Group:
    options = {"expert": EXPERT, "timeout": 200.0, "num_sms": 2, **options}
    return uec.new_group(None, num_experts=E, slots_per_rank=S, **options)


def _transfer(group: uec.Group, epoch: int, async_op: bool) -> int:
    weights = make_weights(group)
    fill_weights(group, weights, epoch)
    clear_slots(group)
    work = uec.replicate_experts(weights, PLAN, group=group, async_op=async_op)
    if work is not None:
        work.wait()
    return wrong_bytes(group, PLAN, epoch)


def _fork(in_child: Callable[[], Any]) -> int:
    """Return the id of a child that runs a function and ends: with 0, if all is well."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        in_child()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _ended(child: int, limit: float = 200) -> int:
    """Return a child's exit status; a child that hangs is an error."""
    end = time.monotonic() + limit
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError("the child hangs")


def _refusals(group: uec.Group, work: uec.Work) -> list[str]:
    """Return the errors that a child gets from everything that needs the engine."""
    weights = make_weights(group)
    calls: list[Callable[[], Any]] = [
        lambda: uec.replicate_experts(weights, PLAN, group=group),
        lambda: uec.gather_load(torch.zeros(1, 1).long(), group=group),
        lambda: group.save(PLAN),
        group.empty_weights,
        group.banks[0].empty_instances,
        group.banks[0].empty_instance_grads,
        group.assert_idle,
        group.start_recording,
        work.wait,
        work.synchronize,
        work.is_completed,
        work.exception,
    ]
    texts = []
    for call in calls:
        error = raised(call)
        assert isinstance(error, errors.GroupClosedError), error
        texts.append(str(error))
    return texts


def _link(fd: int) -> str:
    """Return what a descriptor is of; empty if it is closed."""
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


def _child(kept: list[Any], pipes: set[str]) -> None:
    texts = _refusals(*kept)
    assert all(f"a group inherited from process {os.getppid()}" in text for text in texts), texts
    assert all("create a new group" in text for text in texts), texts
    group: uec.Group = kept[0]
    held = [f for f in os.listdir("/proc/self/fd") if _link(int(f)) in pipes]
    assert not held, held
    health = group.health()
    assert health.state == "inherited"
    assert health.waits is None  # behind a lock, which another thread may have held at the fork
    assert health.peers is None
    with pytest.raises(KeyError), group:
        raise KeyError
    fabric = weakref.ref(session_of(group).engine.fabric)
    del group
    kept.clear()
    gc.collect()
    assert fabric() is None  # and the engine went too


def _forks(rank: int) -> Any:
    kept: list[Any] = [_group()]
    wrong = _transfer(kept[0], 1, True)
    # The engine's thread is in this call, and holds what it locks there: rank 1 comes later.
    if rank == 1:
        time.sleep(0.5)
    kept.append(uec.replicate_experts(make_weights(kept[0]), PLAN, group=kept[0], async_op=True))
    pipes = {_link(fd) for fd in session_of(kept[0]).engine.fabric._opened} - {"anon_inode:[pidfd]"}
    assert len(pipes) == 2
    child = _fork(lambda: _child(kept, pipes)) if rank == 0 else 0
    kept[1].wait()
    for epoch in range(2, 8):
        wrong += _transfer(kept[0], epoch, epoch % 2 == 0)
    status = _ended(child) if child else 0
    wrong += _transfer(kept[0], 9, False)
    kept[0].close()
    return wrong, status


def test_a_forked_child_changes_nothing(tmp_path: Path) -> None:
    """`tests/faults` has children that call, abort and close."""
    assert run_ranks(tmp_path, 2, _forks) == [(0, 0)] * 2


def _dies_with_child(rank: int) -> Any:
    group = _group()
    _transfer(group, 1, False)
    dist.barrier()
    if rank == 1:
        if ctypes.CDLL(None).fork() == 0:  # as a library in C does it: nothing is closed
            ctypes.CDLL(None).sleep(15)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    error: Any = raised(lambda: _transfer(group, 2, False))
    gone = group.health().peers_gone
    group.close()
    return type(error).__name__, str(error), error.root, error.states[1], gone


def test_the_end_of_a_rank_is_seen_although_its_child_lives(tmp_path: Path) -> None:
    (kind, text, root, state, gone), _ = run_ranks(tmp_path, 2, _dies_with_child, silent=(1,))
    assert (kind, root, gone) == ("PeerGoneError", 1, (1,))
    assert state.gone
    assert state.state == "process ended (last seen in call 1)"
    assert f"\n  rank 1: {state.state}" in text


_SCRIPT = """
import os, sys, threading, torch
import ultraep_comm as uec
groups = uec.testing.new_loopback_groups(
    2, num_experts=2, slots_per_rank=1, expert={"w": ((1 << 16,), torch.uint8)}, num_sms=3
)
weights = [{"w": torch.zeros((1, 1 << 16), dtype=torch.uint8)} for _ in groups]
plan = uec.Plan.from_slots([[1], [0]], num_experts=2)
def call():
    works = [
        uec.replicate_experts(w, plan, group=g, async_op=True) for g, w in zip(groups, weights)
    ]
    for work in works:
        work.wait()
stop = threading.Event()
def busy():
    while not stop.is_set():
        call()
thread = threading.Thread(target=busy)
thread.start()
for _ in range(int(sys.argv[1])):
    child = os.fork()
    if child == 0:
        del groups
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
stop.set()
thread.join()
for group in groups:
    group.close()
"""


@pytest.mark.cases
def test_forks_in_the_middle_of_calls_of_another_thread() -> None:
    done = run_python("-c", _SCRIPT, str(cases(3, 20)), timeout=240)
    assert done.returncode == 0, done.stderr


def test_one_thing_that_fails_in_a_child_keeps_no_other_from_its_end() -> None:
    class Thing:
        def __init__(self, fails: bool) -> None:
            self.fails, self.left = fails, 0

        def leave_to_parent(self) -> None:
            self.left += 1
            if self.fails:
                raise OSError("a descriptor that is not one (pretended)")

    things = [Thing(fails) for fails in (True, False) * 4]
    for thing in things:
        system.watch_forks(thing)
    child = _fork(lambda: os._exit(sum(thing.left for thing in things)))
    assert _ended(child) == len(things)


def test_a_group_made_by_a_child_is_its_own() -> None:
    groups = uec.testing.new_loopback_groups(1, num_experts=1, slots_per_rank=1, expert=EXPERT)
    threads = threading.active_count()

    def make() -> None:
        assert isinstance(raised(groups[0].assert_idle), errors.GroupClosedError)
        (own,) = uec.testing.new_loopback_groups(1, num_experts=1, slots_per_rank=1, expert=EXPERT)
        with own:
            assert uec.gather_load(torch.zeros(3, 1).long(), group=own).tolist() == [[3]]

    assert _ended(_fork(make)) == 0
    assert threading.active_count() == threads
    groups[0].close()
