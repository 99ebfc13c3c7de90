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
from ranks import close_all, loopback, make_weights, raised
from short_ranks import run_ranks

import ultraep_comm as uec
from ultraep_comm import errors
from ultraep_comm.group.group import session_of
from ultraep_comm.group.layers import group_for

E, S = 4, 1
EXPERT = {"w": ((200, 300), torch.float32)}
PLAN = uec.Plan.from_slots([[2], [0]], num_experts=E)


WAITS: dict[str, Callable[[uec.Group, Any], Any]] = {
    "replicate": lambda g, w: uec.replicate_experts(w, PLAN, group=g),
    "reduce": lambda g, w: uec.reduce_expert_grads(w, PLAN, group=g),
    "gather": lambda g, w: uec.gather_load(torch.zeros(1, 1).long(), group=g),
}


def _interrupt_soon() -> None:
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()


def _interrupted(rank: int, interrupted: Path) -> Any:
    """`tests/faults` interrupts other calls than one that is rejected behind another."""
    group = uec.new_group(num_experts=E, slots_per_rank=S, expert=EXPERT, timeout=200.0)
    weights = make_weights(group)
    while rank == 1 and not interrupted.exists():
        time.sleep(0.01)
    if rank == 0:
        uec.replicate_experts(weights, PLAN, group=group, async_op=True)
        _interrupt_soon()
    error = raised(lambda: uec.replicate_experts({} if rank == 0 else weights, PLAN, group=group))
    interrupted.touch()
    return type(error).__name__, repr(raised(group.close))


def test_ctrl_c_ends_a_wait_and_tells_the_peers(tmp_path: Path) -> None:
    first, second = run_ranks(tmp_path, 2, _interrupted, tmp_path / "interrupted")
    assert first == ("KeyboardInterrupt", "None")  # what ended the group has been raised
    assert issubclass(getattr(errors, second[0]), errors.TransferError)
    assert second[0] != "TransferTimeoutError"


def _asks(rank: int, interrupted: Path) -> str:
    like = {"w": torch.zeros(2, 3)}
    if rank == 0:
        _interrupt_soon()
    while rank == 1 and not interrupted.exists():
        time.sleep(0.01)
    error = raised(lambda: group_for(like=like, slots_per_rank=S))
    interrupted.touch()
    group_for(like=like, slots_per_rank=S).group.close()
    return repr(error)


def test_ctrl_c_in_group_for_is_at_the_peers(tmp_path: Path) -> None:
    first, second = run_ranks(tmp_path, 2, _asks, tmp_path / "interrupted")
    assert first == "KeyboardInterrupt()"
    assert "rank 0 failed: KeyboardInterrupt" in second


@pytest.mark.parametrize("what", ["replicate", "reduce", "gather"])
def test_ctrl_c_behind_the_submission_ends_the_call(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """The engine has taken the call, and no other thread knows of it yet."""
    groups = uec.testing.new_loopback_groups(
        2, num_experts=E, slots_per_rank=S, expert=EXPERT, grads=torch.float32, timeout=200.0
    )
    weights = [make_weights(group) for group in groups]

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(session_of(groups[0]), "add_call", interrupt)
    found = loopback(2, lambda r: raised(partial(WAITS[what], groups[r], weights[r])))
    assert isinstance(found[0], KeyboardInterrupt)
    assert isinstance(found[1], errors.TransferAbortedError)
    assert found[1].root == 0
    assert groups[0].health().failed_epoch == 1  # nothing of it is left to run
    close_all(groups)


def test_ctrl_c_while_weights_are_allocated_ends_the_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    groups = uec.testing.new_loopback_groups(2, num_experts=E, slots_per_rank=S, expert=EXPERT)

    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(session_of(groups[0]).engine.fabric, "allocate", interrupt)
    with pytest.raises(KeyboardInterrupt):
        groups[0].empty_weights()
    weights = make_weights(groups[1])
    with pytest.raises(errors.TransferAbortedError) as aborted:
        uec.replicate_experts(weights, PLAN, group=groups[1])
    assert aborted.value.root == 0
    close_all(groups)
