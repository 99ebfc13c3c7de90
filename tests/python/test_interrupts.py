"""Ctrl-C in every call that can wait: the peers are told, and a new group can be made."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import clear_slots, fill_weights, make_weights, raised, wrong_bytes
from short_ranks import run_ranks

import ultraep_comm as uec
from ultraep_comm import errors

E, S = 4, 1
PLAN = uec.Plan.from_slots([[2], [0]], num_experts=E)


def _group() -> uec.Group:
    return uec.new_group(
        num_experts=E,
        slots_per_rank=S,
        expert={"w": ((200, 300), torch.float32)},
        grads=torch.float32,
        timeout=20.0,
    )


def _full_queue(group: uec.Group, weights: Any) -> None:
    while True:
        uec.replicate_experts(weights, PLAN, group=group, async_op=True)


def _waits(group: uec.Group, weights: Any) -> None:
    work = uec.replicate_experts(weights, PLAN, group=group, async_op=True)
    assert work is not None
    work.wait()


def _rejects(group: uec.Group, weights: Any) -> None:
    uec.replicate_experts(weights, PLAN, group=group, async_op=True)
    uec.replicate_experts({}, PLAN, group=group)


def _closes(group: uec.Group, weights: Any) -> None:
    uec.replicate_experts(weights, PLAN, group=group, async_op=True)
    group.close()


WAITS: dict[str, Callable[[uec.Group, Any], Any]] = {
    "replicate": lambda g, w: uec.replicate_experts(w, PLAN, group=g),
    "reduce": lambda g, w: uec.reduce_expert_grads(w, PLAN, group=g),
    "gather": lambda g, w: uec.gather_load(torch.zeros(1, 1).long(), group=g),
    "wait": _waits,
    "full queue": _full_queue,
    "reject": _rejects,
    "close": _closes,
}


def _interrupted(rank: int, what: str) -> Any:
    group = _group()
    weights = make_weights(group)
    start = time.monotonic()
    if rank == 0:
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        error = raised(partial(WAITS[what], group, weights))
    else:
        time.sleep(1.5)
        start = time.monotonic()
        error = raised(partial(uec.replicate_experts, weights, PLAN, group=group))
    seconds = time.monotonic() - start
    closed = raised(group.close)
    del group
    with _group() as fresh:
        weights = make_weights(fresh)
        fill_weights(fresh, weights, 1)
        clear_slots(fresh)
        uec.replicate_experts(weights, PLAN, group=fresh)
        wrong = wrong_bytes(fresh, PLAN, 1)
    return type(error).__name__, repr(closed), seconds, wrong


@pytest.mark.parametrize("what", list(WAITS))
def test_ctrl_c_ends_a_wait_and_tells_the_peers(tmp_path: Path, what: str) -> None:
    first, second = run_ranks(tmp_path, 2, _interrupted, what)
    assert first[0] == "KeyboardInterrupt"
    assert first[1] == "None"  # what ended the group has been raised
    assert first[2] < 1.5
    assert issubclass(getattr(errors, second[0]), errors.TransferError)
    assert second[2] < 1.5  # of a limit of 20 s
    assert first[3] == second[3] == 0
