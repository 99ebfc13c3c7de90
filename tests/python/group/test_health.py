"""``group.health()``, and every rank's last known state in error texts."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
from ranks import close_all, loopback, make_weights, raised, start_all, synchronize_all

import ultraep_comm as uec
from ultraep_comm import _core, errors
from ultraep_comm.errors import RankState, describe_states, name_ranks, read_states
from ultraep_comm.group.health import GroupHealth

EXPERT = {"w": ((16, 16), torch.float32)}
E, S = 8, 2


def _loopback(num_ranks: int, **options: Any) -> list[uec.Group]:
    return uec.testing.new_loopback_groups(
        num_ranks, num_experts=E, slots_per_rank=S, expert=EXPERT, **options
    )


def _plan(slots: list[list[int]]) -> uec.Plan:
    return uec.Plan.from_slots(torch.tensor(slots, dtype=torch.int32), num_experts=E)


# Home map on 2 ranks: 0 0 0 0 1 1 1 1. Rank 0 needs rank 1.
ONE = [[4, -1], [-1, -1]]


# ---- health --------------------------------------------------------------------------------


def test_calls_bytes_and_plans_are_counted() -> None:
    groups = _loopback(2, grads=torch.float32)
    health = groups[1].health()
    assert (health.rank, health.name, health.state) == (1, groups[1].name, "open")
    assert (health.epoch, health.completed, health.failed_epoch) == (0, 0, 0)
    assert set(health.calls.values()) == {health.bytes_stored, health.saved_plans} == {0}
    assert health.waits is not None
    assert (health.waits.longest, health.waits.seconds) == (None, 0)
    assert (health.peers_gone, health.last_error) == ((), None)
    assert health.peers is not None
    assert [p.state for p in health.peers] == ["not seen in a call yet"] * 2

    plan = _plan([[4, 5], [0, -1]])

    def rank(r: int) -> None:
        group = groups[r]
        weights, grads = make_weights(group), make_weights(group)
        uec.gather_load(torch.zeros((4, 2), dtype=torch.int64), group=group)
        for _ in range(3):
            uec.replicate_experts(weights, plan, group=group)
        uec.reduce_expert_grads(grads, plan, group=group)

    loopback(2, rank)
    handle = groups[0].save(plan)
    health = groups[0].health()
    assert health.calls == {"replicate": 3, "reduce": 1, "gather": 1, "rejected": 0}
    assert health.epoch == health.completed == 5
    assert health.bytes_stored is not None
    assert health.bytes_stored > 0
    assert health.saved_plans == 1
    assert health.peers is not None
    assert [p.epoch for p in health.peers] == [5, 5]
    handle.release()
    assert groups[0].health().saved_plans == 0
    close_all(groups)


@pytest.mark.parametrize("engine", ["host", "c10d"])
def test_a_wait_ends_in_time_and_the_call_continues(engine: str) -> None:
    groups = _loopback(2, engine=engine, timeout=0)  # no limit but those of the waits
    weights = [make_weights(group) for group in groups]
    plan = _plan([[4, 5], [0, -1]])
    (work,) = start_all(groups[1:], weights, plan)
    for limit, slots in ((1e-3, None), (timedelta(milliseconds=1), None), (1e-3, [0])):
        with pytest.raises(errors.TransferTimeoutError, match=r"within 0\.001 s") as caught:
            work.wait(limit, slots=slots)
        assert (caught.value.rank, caught.value.epoch) == (1, 1)
    for wrong in (-1, "1"):
        with pytest.raises(errors.InvalidArgumentError, match="timeout is"):
            work.wait(wrong)  # type: ignore[arg-type]
    assert work.exception() is None
    (other,) = start_all(groups[:1], weights, plan)
    work.wait(60, slots=[0])
    work.wait(60)
    other.wait(0)  # no limit
    close_all(groups)


def test_a_wait_for_a_late_peer_is_seen_while_it_lasts_and_names_the_peer() -> None:
    groups = _loopback(2)
    weights = [make_weights(group) for group in groups]
    plan = _plan(ONE)
    work = uec.replicate_experts(weights[0], plan, group=groups[0], async_op=True)
    assert work is not None
    while (waits := groups[0].health().waits) is not None and waits.over_100ms == 0:
        time.sleep(0.005)
    assert not work.is_completed()
    health = groups[0].health()
    assert (health.state, health.epoch, health.completed) == ("open", 1, 0)
    assert health.peers is not None
    assert [p.epoch for p in health.peers] == [1, 0]
    uec.replicate_experts(weights[1], plan, group=groups[1])
    work.wait()

    waits = groups[0].health().waits
    assert waits is not None
    assert waits.over_1ms >= waits.over_10ms >= waits.over_100ms >= 1 >= waits.over_1s
    assert waits.longest is not None
    assert waits.seconds >= waits.longest.seconds > 0.1
    longest = waits.longest
    assert (longest.peer, longest.flag, longest.expert, longest.epoch) == (1, "done", 4, 1)
    text = str(groups[0].health())
    assert "100 ms: 1" in text
    assert "`done` of rank 1, expert 4 in call 1" in text
    close_all(groups)


def test_it_is_read_and_written_as_json_after_a_failure_and_after_a_close() -> None:
    groups = _loopback(2, timeout=0.1)
    weights = make_weights(groups[0])
    error = raised(lambda: uec.replicate_experts(weights, _plan(ONE), group=groups[0]))
    assert isinstance(error, errors.TransferTimeoutError)
    failed = groups[0].health()
    assert (failed.state, failed.failed_epoch, failed.completed) == ("failed", 1, 0)
    assert failed.last_error == f"TransferTimeoutError: {error}"
    found = json.loads(json.dumps(failed.as_dict()))
    assert set(found) == {f.name for f in dataclasses.fields(GroupHealth)}
    assert found["waits"]["longest"]["peer"] == 1
    assert found["peers"][1]["state"] == "not yet in call 1 (not seen in a call yet)"
    groups[0].close()
    closed = groups[0].health()
    assert closed == dataclasses.replace(failed, state="closed")
    assert "rank 0" in str(closed)
    assert "closed (failed in call 1)" in str(closed)
    assert "last error: TransferTimeoutError: rank 0" in str(closed)
    groups[1].close()


def test_a_rejected_call_is_counted_and_its_error_kept() -> None:
    groups = _loopback(2)
    error = raised(lambda: uec.replicate_experts({}, _plan(ONE), group=groups[0]))
    assert isinstance(error, errors.InvalidWeightsError)
    health = groups[0].health()
    assert (health.calls["rejected"], health.calls["replicate"], health.epoch) == (1, 0, 1)
    assert health.last_error == f"InvalidWeightsError: {error}"
    assert health.peers is not None
    assert health.peers[0].state == "rejected its own input in call 1"
    close_all(groups)


def test_threads_may_read_it_while_calls_are_made() -> None:
    groups = _loopback(2)
    plan = _plan([[4, -1], [0, -1]])
    stop = threading.Event()
    seen: list[tuple[int, int]] = []

    def watch() -> None:
        while not stop.is_set():
            health = groups[0].health()
            assert health.completed is not None
            seen.append((health.epoch, health.completed))

    watcher = threading.Thread(target=watch)
    watcher.start()
    weights = [make_weights(group) for group in groups]

    def calls(r: int) -> None:
        for _ in range(200):
            uec.replicate_experts(weights[r], plan, group=groups[r])

    loopback(2, calls)
    stop.set()
    watcher.join()
    assert groups[0].health().epoch == groups[0].health().completed == 200
    assert seen == sorted(seen)
    close_all(groups)


# ---- states in words -------------------------------------------------------------------------

CALL, REJECTED, CLOSED = _core.RecordKind


@pytest.mark.parametrize(
    ("words", "epoch", "state"),
    [
        ((CALL, 7, 0, -1, -1, False, True), 7, "in call 7"),
        ((CALL, 8, 0, -1, -1, False, True), 7, "finished call 7, in call 8"),
        ((CALL, 6, 0, -1, -1, False, True), 7, "not yet in call 7 (last seen in call 6)"),
        ((CALL, 0, 0, -1, -1, False, True), 1, "not yet in call 1 (not seen in a call yet)"),
        ((CALL, 0, 0, -1, -1, False, False), 1, "unknown (out of reach)"),
        ((CALL, 6, 0, -1, -1, True, True), 7, "process ended (last seen in call 6)"),
        ((CALL, 0, 0, -1, -1, True, True), 1, "process ended (before its first call)"),
        ((CLOSED, 7, 0, -1, -1, False, True), 7, "closed after call 6"),
        ((CLOSED, 7, 0, -1, -1, True, True), 7, "closed after call 6"),
        ((CLOSED, 1, 0, -1, -1, False, True), 1, "closed before its first call"),
        ((REJECTED, 7, 7, -1, -1, False, True), 7, "rejected its own input in call 7"),
        ((CALL, 7, 7, 2, -1, False, True), 7, "in call 7, failed: waited for rank 2"),
        ((CALL, 7, 7, 2, 1, False, True), 7, "in call 7, failed: aborted by rank 1"),
        ((CALL, 7, 7, -1, -1, False, True), 7, "in call 7, failed by itself"),
        ((CALL, 7, 7, 2, -1, True, True), 7, "in call 7, failed: waited for rank 2, then left"),
        (
            (CALL, 6, 8, -1, 1, False, True),
            7,
            "not yet in call 7 (last seen in call 6), failed in call 8: aborted by rank 1",
        ),
        ((CALL, 7, 0, -1, -1, False, True), None, "last seen in call 7"),
    ],
)
def test_a_state_in_words(words: Any, epoch: int | None, state: str) -> None:
    names = ("kind", "epoch", "failed_epoch", "waited_for", "aborted_by", "gone", "reachable")
    (found,) = read_states([_core.PeerState(**dict(zip(names, words, strict=True)))], epoch)
    assert found.state == state
    assert found.gone == (words[5] and words[0] != CLOSED)
    assert found.epoch == (words[1] - 1 if words[0] == CLOSED else words[1])
    assert found.failed_epoch == words[2]
    assert (found.waited_for, found.aborted_by) == (words[3:5] if words[2] else (-1, -1))


def test_ranks_in_one_state_share_a_line() -> None:
    states = [RankState(rank=r, state="in call 7") for r in range(6)]
    states[3] = RankState(rank=3, state="not yet in call 7 (last seen in call 6)")
    states[4] = RankState(rank=4, state="process ended (last seen in call 6)")
    assert describe_states(states).splitlines() == [
        "  ranks 0-2, 5: in call 7",
        "  rank 3: not yet in call 7 (last seen in call 6)",
        "  rank 4: process ended (last seen in call 6)",
    ]
    assert name_ranks([0]) == "rank 0"
    assert name_ranks([0, 2, 3, 4, 9]) == "ranks 0, 2-4, 9"


def test_the_text_is_short_for_64_ranks_in_64_states() -> None:
    failed = [
        RankState(rank=r, state=f"in call 7, failed: waited for rank {r + 1}", failed_epoch=7)
        for r in range(63)
    ]
    late = RankState(rank=63, state="not yet in call 7 (last seen in call 6)")
    assert describe_states([*failed, late]).splitlines() == [
        "  ranks 0-62: in call 7, failed",
        "  rank 63: not yet in call 7 (last seen in call 6)",
    ]
    apart = [RankState(rank=r, state=f"in call {r}") for r in range(64)]
    lines = describe_states(apart).splitlines()
    assert len(lines) == 8
    assert lines[-1] == "  57 more ranks: see the error's `states`"


def test_a_timeout_tells_late_from_closed() -> None:
    groups = _loopback(4, timeout=0.5)  # home map: 0 0 1 1 2 2 3 3
    weights = [make_weights(group) for group in groups]
    first = _plan([[2, -1], [4, -1], [6, -1], [0, -1]])
    synchronize_all(start_all(groups, weights, first))
    groups[3].close()  # no rank needs it, and two need rank 2
    plan = _plan([[4, -1], [4, -1], [-1, -1], [-1, -1]])
    works = start_all(groups[:2], weights, plan)
    found: list[Any] = [raised(work.wait) for work in works]
    assert errors.TransferTimeoutError in map(type, found)
    for own, error in enumerate(found):
        assert isinstance(error, errors.TransferTimeoutError | errors.TransferAbortedError)
        assert [(s.rank, s.epoch, s.gone) for s in error.states] == [
            (rank, 2 - rank // 2, False) for rank in range(4)
        ]
        assert error.states[own].failed_epoch == 2
        assert "Last known states:\n" in str(error)
        assert "\n  rank 2: not yet in call 2 (last seen in call 1)" in str(error)
        assert "\n  rank 3: closed after call 1" in str(error)
    for group in groups:
        raised(group.close)
