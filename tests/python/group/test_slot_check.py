"""Check mode: a wrong byte is reported exactly, and nothing else is."""

from __future__ import annotations

import dataclasses
import time
from functools import partial
from typing import Any

import pytest
import torch
from ranks import (
    MIXED,
    close_all,
    fill_weights,
    loopback,
    make_weights,
    plan_alone,
    prepare_all,
    raised,
    raw,
    start_all,
)

import ultraep_comm as uec
from ultraep_comm import errors
from ultraep_comm.group.group import session_of

E, S = 8, 2


def _groups(num_ranks: int, **options: Any) -> list[uec.Group]:
    options = {"expert": MIXED, "check": True, "timeout": 30.0, **options}
    return uec.testing.new_loopback_groups(num_ranks, num_experts=E, slots_per_rank=S, **options)


def _plan(slots: list[list[int]]) -> uec.Plan:
    return uec.Plan.from_slots(torch.tensor(slots, dtype=torch.int32), num_experts=E)


def _slot(group: uec.Group, name: str, slot: int) -> torch.Tensor:
    return raw(group.slots[name][slot], group.segments[name])


class Scene:
    """Home map 0 0 0 1 1 1 2 2. Ranks 0 and 1 have called; all that rank 2 does not owe is there.

    Rank 1 has expert 0 of rank 0 in slot 0, and waits for expert 6 of rank 2 in slot 1. Rank 0
    has nothing in slot 0, and waits for expert 7 of rank 2. So nobody checks before rank 2 calls.
    """

    def __init__(self, mode: str = "direct", segments: list[str] | None = None) -> None:
        self.groups = _groups(3)
        self.weights = loopback(3, lambda r: self.groups[r].empty_weights())
        prepare_all(self.groups, self.weights, 1)
        plan = _plan([[-1, 7], [0, 6], [-1, -1]])
        self._start = partial(
            start_all, given=self.weights, plan=plan, mode=mode, segments=segments
        )
        self.works = self._start(self.groups[:2])
        self.works[1].wait(slots=[0])

    def finish(self) -> list[BaseException | None]:
        self.works += self._start(self.groups[2:])
        found = [raised(work.wait) for work in self.works]
        close_all(self.groups)
        return found


@pytest.mark.parametrize(
    ("name", "offset", "mode"),
    [
        ("w13", 0, "direct"),
        ("packed", 384, "push"),
        ("w_t", 1000, "pull"),
        ("big", 200_000, "push"),
    ],
)
def test_a_byte_that_changes_in_a_slot_is_named(name: str, offset: int, mode: str) -> None:
    scene = Scene(mode)
    byte = _slot(scene.groups[1], name, 0)[offset]
    good = int(byte)
    byte.bitwise_xor_(1 << offset % 8)
    found = scene.finish()
    error = found[1]
    assert isinstance(error, errors.CorruptSlotError)
    assert isinstance(error, errors.TransferError)
    assert (error.rank, error.peer, error.root, error.epoch) == (1, 0, 1, 1)
    assert (error.expert, error.slot, error.segment) == (0, 0, name)
    assert error.offset == offset
    assert (error.found, error.expected) == (good ^ 1 << offset % 8, good)
    assert not error.source_changed
    for part in ("rank 1", f"byte {offset} of segment {name!r}", "slot 0", "rank 0", f"{good:02x}"):
        assert part in str(error)
    assert "weights" not in str(error)
    # Its home has waited for it, and is told; rank 2 had given rank 1 an expert too.
    for told in (found[0], found[2]):
        assert isinstance(told, errors.TransferAbortedError)
        assert told.root == 1


@pytest.mark.parametrize(
    ("rank", "expert", "name", "offsets", "text"),
    [
        (1, 0, "big", [150_000, 9_000, 9_001, 20_000], "byte 9000"),  # the first bad byte
        (0, -1, "big", [99_999], "leaves empty"),
        (1, 0, "w2", [17], "does not transfer it"),
    ],
)
def test_what_is_written_to_a_slot_is_named(
    rank: int, expert: int, name: str, offsets: list[int], text: str
) -> None:
    """Also where the call writes nothing: to an empty slot, or to a segment that is left out."""
    scene = Scene(segments=["w13", "scale"] if name == "w2" else None)
    for offset in offsets:
        _slot(scene.groups[rank], name, 0)[offset] ^= 0x11
    error = scene.finish()[rank]
    assert isinstance(error, errors.CorruptSlotError)
    assert (error.expert, error.slot, error.segment) == (expert, 0, name)
    assert (error.offset, error.found ^ error.expected) == (min(offsets), 0x11)
    assert rank or error.expected == 0xA5
    assert text in str(error)


def test_main_weights_that_change_behind_the_transfer_are_the_callers_fault() -> None:
    scene = Scene()
    byte = raw(scene.weights[0]["big"][0], MIXED["big"])[70_000]
    good = int(byte)
    byte.bitwise_xor_(0x40)
    error = scene.finish()[0]
    assert isinstance(error, errors.CorruptSlotError)
    assert error.source_changed
    assert (error.peer, error.expert, error.slot) == (0, 0, -1)
    assert (error.segment, error.offset) == ("big", 70_000)
    assert (error.found, error.expected) == (good ^ 0x40, good)
    assert "main weights of expert 0 changed during the call" in str(error)


def test_main_weights_that_change_ahead_of_the_transfer_are_the_callers_fault() -> None:
    groups = _groups(2)
    weights = [make_weights(group) for group in groups]
    plan = _plan([[4, -1], [0, -1]])
    for group, own in zip(groups, weights, strict=True):
        fill_weights(group, own, 1)
    first = uec.replicate_experts(weights[0], plan, group=groups[0], async_op=True, mode="direct")
    while groups[1].health().peers[0].epoch == 0:  # type: ignore[index]
        time.sleep(0.002)
    raw(weights[0]["w2"][0], MIXED["w2"])[33] += 1  # rank 1's slots are not open yet
    second = uec.replicate_experts(weights[1], plan, group=groups[1], async_op=True, mode="direct")
    assert first is not None
    assert second is not None
    found = [raised(first.wait), raised(second.wait)]
    # Both find it; the slower one may be told by the other.
    kinds = {type(error) for error in found}
    assert errors.CorruptSlotError in kinds
    assert kinds <= {errors.CorruptSlotError, errors.TransferAbortedError}
    for error in found:
        if isinstance(error, errors.CorruptSlotError):
            assert error.source_changed
            assert (error.segment, error.offset, error.peer) == ("w2", 33, 0)
            assert "changed" in str(error)
            assert "weights" in str(error)
    close_all(groups)


def test_without_check_nothing_is_compared() -> None:
    groups = _groups(2, check=False)
    weights = [make_weights(group) for group in groups]
    plan = _plan([[4, -1], [0, -1]])
    first = uec.replicate_experts(weights[0], plan, group=groups[0], async_op=True)
    _slot(groups[0], "w13", 1)[0] += 1
    uec.replicate_experts(weights[1], plan, group=groups[1])
    assert first is not None
    first.wait()
    close_all(groups)


def _planned(**changes: list[int]) -> uec.Plan:
    """Return a plan with quotas and load, of which some are then replaced."""
    load = torch.tensor([[9, 1, 1, 1, 1, 1, 1, 1]] * 2)
    plan = plan_alone(load, slots_per_rank=S, target=1.0)
    assert plan.num_replicas
    tensors = {name: torch.tensor(x, dtype=torch.int32) for name, x in changes.items()}
    return dataclasses.replace(plan, **tensors)


@pytest.mark.parametrize("check", [True, False])
def test_plans_are_verified(check: bool) -> None:
    groups = _groups(2, check=check)

    def replicate(plan: uec.Plan) -> None:
        loopback(2, lambda r: uec.replicate_experts(make_weights(groups[r]), plan, group=groups[r]))

    replicate(_planned())
    if not check:
        replicate(_planned(home_quota=[99] * E))
    close_all(groups)


def test_a_plan_that_breaks_a_rule_is_rejected() -> None:
    bad = _planned(home_quota=[99] * E)
    without_load = dataclasses.replace(bad, load=None, home_quota=torch.full_like(bad.home, -1))
    texts = {"expert 0 sum to .*; expected its load, 18": bad, "home_quota.* -1": without_load}
    for text, plan in texts.items():
        for operation in (uec.replicate_experts, uec.reduce_expert_grads):
            groups = _groups(2, grads=torch.float32)
            with pytest.raises(errors.InvalidPlanError, match=f"rank 0: check mode: .*{text}"):
                operation(make_weights(groups[0]), plan, group=groups[0])
            with pytest.raises(errors.PeerRejectedError):
                uec.replicate_experts(make_weights(groups[1]), _planned(), group=groups[1])
            close_all(groups)


def test_a_home_does_not_wait_for_a_reader_that_has_left() -> None:
    groups = _groups(2)
    groups[1].close()
    with pytest.raises(errors.PeerGoneError):  # not of a timeout
        uec.replicate_experts(make_weights(groups[0]), _plan([[-1, -1], [0, -1]]), group=groups[0])
    groups[0].close()


def test_the_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    def checked(**options: Any) -> bool:
        (group,) = uec.testing.new_loopback_groups(
            1, num_experts=2, slots_per_rank=1, expert=MIXED, **options
        )
        with group:
            return len(session_of(group).engine.memory) == 2

    assert not checked()
    monkeypatch.setenv("ULTRAEP_CHECK", "1")
    assert checked()
    assert not checked(check=False)  # an argument wins
    monkeypatch.setenv("ULTRAEP_CHECK", "0")
    assert not checked()
    monkeypatch.setenv("ULTRAEP_CHECK", "2")
    with pytest.raises(errors.InvalidArgumentError, match="ULTRAEP_CHECK=2"):
        checked()
