"""Calls beside captures into CUDA graphs and across their borders, on an emulated device."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from emulated_device import EmulatedDevice
from ranks import loopback, make_weights, prepare_all, start_all, wrong_bytes

import ultraep_comm as uec
from ultraep_comm import _core, errors
from ultraep_comm.group.group import session_of

EXPERT = {"w": ((8,), torch.float32)}


@pytest.fixture
def group(emulated: EmulatedDevice) -> Iterator[uec.Group]:
    made = make_group()
    yield made
    emulated.synchronize()
    made.abort()
    made.close()


def make_group(**options: Any) -> uec.Group:
    options = {"slots_per_rank": 1, "expert": EXPERT, "num_sms": 2, "timeout": 60.0, **options}
    (group,) = uec.testing.new_loopback_groups(1, num_experts=4, engine="cuda", **options)
    return group


def empty_plan(device: EmulatedDevice, group: uec.Group) -> uec.Plan:
    slots = torch.full((1, group.topology.slots_per_rank), -1)
    return device.put_plan(uec.Plan.from_slots(slots, num_experts=4))


def caller(device: EmulatedDevice, group: uec.Group) -> Callable[[], uec.Work]:
    """Return a function that makes a capturable background call; it was called once."""
    bound = group.bind({"w": torch.zeros(group.num_local_experts, 8)})
    plan = empty_plan(device, group)

    def call() -> uec.Work:
        work = uec.replicate_experts(bound, plan, group=group, async_op=True)
        assert work is not None
        return work

    call().synchronize()
    return call


# ---- beside a capture ----------------------------------------------------------------------------


def test_calls_beside_a_capture_of_somebody_else(
    emulated: EmulatedDevice, group: uec.Group
) -> None:
    """In torch's default mode, event queries of any thread invalidate a capture."""
    call = caller(emulated, group)
    load = emulated.put(torch.zeros(1, 4, dtype=torch.int32))
    plan = empty_plan(emulated, group)
    other = emulated.new_stream()[0]
    with emulated.capturing(other):  # it stays valid
        for _ in range(6):  # more than can be under way
            call().wait()
            with group.save(plan):
                pass
        work = call()
        work.synchronize()
        assert work.is_completed()
        assert work.exception() is None
        uec.plan_replicas(load, group=group)
        assert session_of(group).engine is not None
        session_of(group).engine.finish()
        group.assert_idle()
    assert group.health().epoch == 8


def test_what_a_call_reads_is_kept_though_the_driver_refuses(
    emulated: EmulatedDevice, group: uec.Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = caller(emulated, group)
    emulated.delay(20_000)
    call()

    def refuse(epoch: int) -> bool:
        raise errors.DeviceError("refused")

    with monkeypatch.context() as patch:
        patch.setattr(session_of(group).engine, "is_completed", refuse)
        with pytest.raises(errors.DeviceError, match="refused"):
            call()
    assert session_of(group)._in_flight[-1][0] == 3


def test_calls_outside_while_the_groups_own_stream_is_in_a_capture(
    emulated: EmulatedDevice, group: uec.Group
) -> None:
    call = caller(emulated, group)
    other = emulated.new_stream()[0]
    with emulated.capturing(other) as replay:
        with emulated.on(other):
            captured = call()
        call().synchronize()
        with emulated.on(other):
            captured.wait()
    replay()
    call().synchronize()


# ---- across its border ---------------------------------------------------------------------------


def test_waits_on_the_other_side_of_a_capture(emulated: EmulatedDevice, group: uec.Group) -> None:
    call = caller(emulated, group)
    eager = call()
    with emulated.capturing():
        with pytest.raises(
            errors.UnsupportedError, match=r"rank 0: wait\(\) in a capture .* before"
        ):
            eager.wait()
        eager.synchronize()
        first = call()
        first.wait()
        with pytest.raises(errors.UnsupportedError, match="part of a CUDA graph and runs in"):
            first.synchronize()
        for ask in (first.is_completed, first.exception):
            with pytest.raises(errors.UnsupportedError):
                ask()
    outside = r"rank 0: wait\(\) for a call that is a part of a CUDA graph, outside of the capture"
    with pytest.raises(errors.UnsupportedError, match=outside):
        first.wait()
    with emulated.capturing():
        with pytest.raises(errors.UnsupportedError, match=outside):
            first.wait()
        call().wait()
        with pytest.raises(errors.UnsupportedError, match=outside):
            first.wait()
    call().synchronize()


def test_two_captures_take_turns(emulated: EmulatedDevice, group: uec.Group) -> None:
    """The captures are on different streams, but the group's own stream can join only one."""
    call = caller(emulated, group)
    with emulated.capturing():
        first = call()
        other = emulated.new_stream()[0]
        with (
            emulated.on(other),
            emulated.capturing(),
            pytest.raises(errors.UnsupportedError, match=r"rank 0: .*capture"),
        ):
            call()
        first.wait()
    call().synchronize()


# ---- what cannot be captured ---------------------------------------------------------------------


def test_what_says_when_to_call_it(emulated: EmulatedDevice, group: uec.Group) -> None:
    weights = {"w": torch.zeros(4, 8)}
    calls: dict[str, Callable[[], object]] = {
        "empty_weights()": group.empty_weights,
        "expert_pointers()": lambda: group.expert_pointers(weights),
        "close()": group.close,
    }
    with emulated.capturing():
        for name, call in calls.items():
            match = re.escape(f"rank 0: {name} while the current stream is being captured")
            with pytest.raises(errors.UnsupportedError, match=match):
                call()
        group.assert_idle()
    caller(emulated, group)
    for name in ("empty_weights()", "expert_pointers()"):
        calls[name]()


@pytest.mark.parametrize(
    ("slots", "segments", "text"),
    [
        (0, 1, "has no slots: there is nothing to capture"),
        (1, 33, "has 33 segments, and at most 32 can"),
    ],
)
def test_groups_whose_plans_no_kernel_reads(
    emulated: EmulatedDevice, slots: int, segments: int, text: str
) -> None:
    expert = {f"w{i}": ((8,), torch.float32) for i in range(segments)}
    group = make_group(slots_per_rank=slots, expert=expert)
    bound = group.bind({name: torch.zeros(4, 8) for name in expert})
    plan = empty_plan(emulated, group)
    refused = pytest.raises(errors.UnsupportedError, match=f"rank 0: replicate_experts .* {text}")
    with emulated.capturing(), refused:
        uec.replicate_experts(bound, plan, group=group)
    uec.replicate_experts(bound, plan, group=group)
    group.close()


# ---- captures that fail --------------------------------------------------------------------------


def test_a_capture_that_only_one_rank_has_joined(
    emulated: EmulatedDevice, new_groups: Callable[..., list[uec.Group]]
) -> None:
    groups = new_groups(2, num_experts=4, slots_per_rank=1, expert=EXPERT, engine="cuda", num_sms=2)
    weights = [make_weights(group) for group in groups]
    bound = [group.bind(own) for group, own in zip(groups, weights, strict=True)]
    plan = uec.Plan.from_slots([[-1], [0]], num_experts=4)
    held = emulated.put_plan(plan)
    with emulated.capturing():  # and its graph is dropped
        assert groups[0].bind(weights[0]).table is None
        start_all(groups[:1], bound, held)
    prepare_all(groups, weights, 1)
    with emulated.capturing() as replay:
        for work in start_all(groups, bound, held):
            work.wait()
    replay()
    emulated.synchronize()
    assert [wrong_bytes(group, plan, 1) for group in groups] == [0, 0]


def test_ids_to_slots_are_two_launches(
    emulated: EmulatedDevice, new_groups: Callable[..., list[uec.Group]]
) -> None:
    groups = new_groups(3, num_experts=6, slots_per_rank=1, expert=EXPERT, engine="cuda", num_sms=1)
    bound = [group.bind(make_weights(group)) for group in groups]
    ids = emulated.put(torch.zeros(40, 2, dtype=torch.int64))

    def launch(rank: int) -> None:
        plan = uec.gather_and_plan(ids, group=groups[rank])
        uec.replicate_experts(bound[rank], plan, group=groups[rank])

    before = emulated.launches()
    loopback(3, launch)
    assert emulated.launches() - before == 2  # of all ranks, which share them


def test_stages_in_a_capture_that_is_invalid(emulated: EmulatedDevice, group: uec.Group) -> None:
    load = emulated.put(torch.tensor([[3, 0, 0, 0]], dtype=torch.int32))
    ids = emulated.put(torch.zeros(3, 1, dtype=torch.int64))
    routing = emulated.put(torch.zeros(3, 4, dtype=torch.bool))
    plan = uec.plan_replicas(load, group=group)
    uec.reroute(ids, plan, group=group)
    calls: list[Callable[[], object]] = [
        lambda: uec.plan_replicas(load, group=group),
        lambda: uec.reroute(ids, plan, group=group),
        lambda: uec.reroute(ids.clone(), plan, group=group),
        lambda: uec.reroute_map(routing, None, plan, group=group),
        lambda: uec.gather_load(ids, group=group),
        lambda: group.save(plan),
    ]
    with pytest.raises(AssertionError, match="901"), emulated.capturing():  # noqa: PT012
        assert emulated.library.cuCtxSynchronize() != 0  # this invalidates the capture
        for call in calls:
            with pytest.raises(errors.UnsupportedError, match=r"rank 0: .* is invalid"):
                call()
    uec.plan_replicas(load, group=group)
    caller(emulated, group)


def test_a_stage_that_the_driver_refuses_in_a_capture_leaves_the_group(
    emulated: EmulatedDevice, group: uec.Group
) -> None:
    load = emulated.put(torch.zeros(1, 4, dtype=torch.int32))
    stages: Any = session_of(group).engine

    def refuse(*_: object) -> None:
        raise _core.DriverError("refused")

    def plan(error: type[Exception], text: str) -> None:
        refusing = SimpleNamespace(take_faults=stages._stages.take_faults, plan=refuse)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(stages, "_stages", refusing)
            with pytest.raises(error, match=text):
                uec.plan_replicas(load, group=group)

    with emulated.capturing():
        plan(errors.UnsupportedError, r"rank 0: the capture .* failed: refused")
        uec.plan_replicas(load, group=group)
    plan(errors.DeviceError, "refused")


# ---- closing -------------------------------------------------------------------------------------


def test_closing_behind_a_replay_of_stages_alone(emulated: EmulatedDevice) -> None:
    group = make_group()
    load = emulated.put(torch.zeros(1, 4, dtype=torch.int32))
    uec.plan_replicas(load, group=group)
    with emulated.capturing() as replay:
        uec.plan_replicas(load, group=group)
    load.fill_(-5)
    emulated.delay(50_000)
    replay()
    with pytest.raises(errors.InvalidLoadError, match="expert 0"):
        group.close()
