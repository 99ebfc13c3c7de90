"""Plans that stay on the device, and calls captured into graphs, on an emulated device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from emulated_device import EmulatedDevice
from ranks import (
    MIXED,
    clear_slots,
    fan_out_plan,
    make_weights,
    prepare_all,
    random_plan,
    start_all,
    synchronize_all,
    wrong_bytes,
)
from tiers import sampled

import ultraep_comm as uec
from ultraep_comm import errors

SIZES = [(2, 5, 1), (3, 7, 2), (5, 8, 2)]


@pytest.fixture
def groups_of(emulated: EmulatedDevice, new_groups: Callable[..., Any]) -> Callable[..., Any]:
    return partial(new_groups, engine="cuda", expert=MIXED, timeout=60.0, num_sms=2)


def check_bytes(groups: list[uec.Group], plan: uec.Plan, epoch: int) -> None:
    assert [wrong_bytes(group, plan, epoch) for group in groups] == [0] * len(groups)


def test_ranks_may_hold_the_same_plan_on_host_and_device(
    emulated: EmulatedDevice, groups_of: Any
) -> None:
    groups = groups_of(3, num_experts=7, slots_per_rank=2)
    weights = [make_weights(group) for group in groups]
    for epoch in range(1, 6):
        plan = random_plan(epoch, 3, 7, 2)
        prepare_all(groups, weights, epoch)
        works = []
        for group in groups:
            given = plan if (group.rank + epoch) % 2 else emulated.put_plan(plan)
            works += start_all([group], weights, given)
        synchronize_all(works)
        check_bytes(groups, plan, epoch)


def test_segments_are_chosen(emulated: EmulatedDevice, groups_of: Any) -> None:
    groups = groups_of(2, num_experts=5, slots_per_rank=1)
    names = list(groups[0].segments)
    weights = [make_weights(group) for group in groups]
    plan = fan_out_plan(2, 5, 1)
    prepare_all(groups, weights, 1)
    synchronize_all(start_all(groups, weights, emulated.put_plan(plan), segments=names[1:]))
    before = [group.slots[names[0]].clone() for group in groups]
    for group in groups:
        clear_slots(group)
    assert all(
        torch.equal(a.view(torch.uint8), group.slots[names[0]].view(torch.uint8))
        for a, group in zip(before, groups, strict=True)
    )


def test_illegal_plan_is_refused_where_it_is_waited_for(
    emulated: EmulatedDevice, groups_of: Any
) -> None:
    groups = groups_of(2, num_experts=4, slots_per_rank=1)  # experts 0 and 1 are rank 0's
    weights = [make_weights(group) for group in groups]
    legal = emulated.put_plan(uec.Plan.from_slots([[2], [0]], num_experts=4))
    illegal = emulated.put_plan(uec.Plan.from_slots([[2], [0]], num_experts=4))
    illegal.slot_expert[0, 0] = 1
    works = start_all(groups[:1], weights, illegal) + start_all(groups[1:], weights, legal)
    with pytest.raises(errors.InvalidPlanError, match="slot 0 of rank 0 holds expert 1: which is"):
        works[0].synchronize()
    with pytest.raises(errors.PeerRejectedError, match="rank 0 rejected its own input"):
        works[1].synchronize()
    with pytest.raises(errors.GroupClosedError) as raised:
        start_all(groups[:1], weights, legal)
    assert isinstance(raised.value.__cause__, errors.InvalidPlanError)


def test_home_map_of_another_group_is_refused(emulated: EmulatedDevice, groups_of: Any) -> None:
    groups = groups_of(2, num_experts=4, slots_per_rank=1)
    weights = [make_weights(group) for group in groups]
    plan = emulated.put_plan(uec.Plan.from_slots([[2], [0]], num_experts=4, home=[0, 1, 1, 0]))
    works = start_all(groups, weights, plan)
    with pytest.raises(errors.InvalidPlanError, match="home map is not the group's, from expert 1"):
        works[0].synchronize()


def test_shapes_are_refused_at_once(emulated: EmulatedDevice, groups_of: Any) -> None:
    groups = groups_of(2, num_experts=4, slots_per_rank=1)
    weights = [make_weights(group) for group in groups]
    plan = emulated.put_plan(uec.Plan.from_slots([[4], [0]], num_experts=5))
    with pytest.raises(errors.InvalidPlanError, match="2 ranks, 1 slots and 5 experts"):
        start_all(groups[:1], weights, plan)


def capture(device: EmulatedDevice, groups: list[uec.Group], calls: Any) -> int:
    """Capture ``calls()`` and the waits for the works that it returns."""
    device.begin_capture()
    for work in calls():
        work.wait()
    return device.end_capture()


@pytest.mark.parametrize("num_ranks, num_experts, slots", sampled(SIZES, lambda case: case[0] < 5))
def test_graph_replays_with_fresh_plans_and_weights(
    emulated: EmulatedDevice, groups_of: Any, num_ranks: int, num_experts: int, slots: int
) -> None:
    groups = groups_of(num_ranks, num_experts=num_experts, slots_per_rank=slots)
    weights = [make_weights(group) for group in groups]
    bound = [group.bind(w) for group, w in zip(groups, weights, strict=True)]
    held = emulated.put_plan(fan_out_plan(num_ranks, num_experts, slots))
    emulated.synchronize()
    graph = capture(emulated, groups, lambda: start_all(groups, bound, held))
    for epoch in range(1, 9):
        plan = random_plan(epoch, num_ranks, num_experts, slots)
        prepare_all(groups, weights, epoch)
        if epoch % 4 == 3:  # calls of both kinds take turns
            synchronize_all(start_all(groups, weights, plan))
        else:
            held.slot_expert.copy_(plan.slot_expert)
            emulated.replay(graph)
            emulated.synchronize()
        check_bytes(groups, plan, epoch)
    assert [group.health().epoch for group in groups] == [2] * num_ranks


def test_graph_follows_weights_that_move(emulated: EmulatedDevice, groups_of: Any) -> None:
    groups = groups_of(3, num_experts=7, slots_per_rank=2)
    plan = fan_out_plan(3, 7, 2)
    held = emulated.put_plan(plan)
    bound = [group.bind(make_weights(group)) for group in groups]
    tables = [own.table for own in bound]
    graph = capture(emulated, groups, lambda: start_all(groups, bound, held))
    kept = []
    for epoch in range(1, 5):
        weights = [make_weights(group) for group in groups]
        kept.append(weights)
        prepare_all(groups, weights, epoch)
        for own, moved in zip(bound, weights, strict=True):
            own.update(moved)
        if epoch % 2:
            emulated.replay(graph)
            emulated.synchronize()
        else:  # an eager call takes the new addresses from the CPU
            synchronize_all(start_all(groups, bound, plan))
        check_bytes(groups, plan, epoch)
    assert all(own.table is table for own, table in zip(bound, tables, strict=True))


def test_table_without_addresses_is_refused(emulated: EmulatedDevice, groups_of: Any) -> None:
    groups = groups_of(2, num_experts=4, slots_per_rank=1)
    plan = emulated.put_plan(uec.Plan.from_slots([[-1], [0]], num_experts=4))
    bound = [group.bind(make_weights(group)) for group in groups]
    for own in bound:
        assert own.table is not None
        own.table.zero_()  # as a kernel that writes addresses might
    works = start_all(groups, bound, plan)
    with pytest.raises(errors.InvalidWeightsError, match=r"no address of segment '.*' of expert 0"):
        works[0].synchronize()
    with pytest.raises(errors.PeerRejectedError):
        works[1].synchronize()


def test_what_a_capture_cannot_hold(emulated: EmulatedDevice, groups_of: Any) -> None:
    groups = groups_of(2, num_experts=4, slots_per_rank=1)
    plan = uec.Plan.from_slots([[-1], [0]], num_experts=4)
    held = emulated.put_plan(plan)
    weights = [make_weights(group) for group in groups]
    bound = [group.bind(w) for group, w in zip(groups, weights, strict=True)]
    emulated.synchronize()
    emulated.begin_capture()
    with pytest.raises(errors.UnsupportedError, match="the plan is on the CPU"):
        start_all(groups[:1], bound, plan)
    with pytest.raises(errors.UnsupportedError, match="addresses of the weights are not on the"):
        start_all(groups[:1], weights, held)
    assert groups[0].bind(weights[0]).table is None
    with pytest.raises(errors.UnsupportedError, match="before the replay"):
        bound[0].update(weights[0])
    with pytest.raises(errors.InvalidArgumentError, match="mode is 'shove'"):
        start_all(groups[:1], bound, held, mode="shove")
    emulated.end_capture()
    # The group still works. A capture that only one rank joined is dropped.
    emulated.begin_capture()
    start_all(groups[:1], bound, held)
    emulated.library.emulated_end_capture(emulated.stream, _nowhere())
    prepare_all(groups, weights, 1)
    graph = capture(emulated, groups, lambda: start_all(groups, bound, held))
    emulated.replay(graph)
    emulated.synchronize()
    check_bytes(groups, plan, 1)


def _nowhere() -> Any:
    import ctypes

    return ctypes.byref(ctypes.c_void_p())


def test_captured_work_is_for_the_capture(emulated: EmulatedDevice, groups_of: Any) -> None:
    groups = groups_of(2, num_experts=4, slots_per_rank=1)
    held = emulated.put_plan(uec.Plan.from_slots([[-1], [0]], num_experts=4))
    weights = [make_weights(group) for group in groups]
    bound = [group.bind(w) for group, w in zip(groups, weights, strict=True)]
    emulated.synchronize()
    emulated.begin_capture()
    works = start_all(groups, bound, held)
    for work in works:
        work.wait()
        with pytest.raises(errors.UnsupportedError, match="part of a CUDA graph and runs in"):
            work.synchronize()
        with pytest.raises(errors.UnsupportedError):
            work.is_completed()
        with pytest.raises(errors.UnsupportedError):
            work.exception()
    emulated.end_capture()


def test_failed_replay_poisons_the_group(emulated: EmulatedDevice, groups_of: Any) -> None:
    groups = groups_of(2, num_experts=4, slots_per_rank=1)
    plan = uec.Plan.from_slots([[-1], [0]], num_experts=4)
    held = emulated.put_plan(plan)
    weights = [make_weights(group) for group in groups]
    bound = [group.bind(w) for group, w in zip(groups, weights, strict=True)]
    emulated.synchronize()
    graph = capture(emulated, groups, lambda: start_all(groups, bound, held))
    done = start_all(groups, weights, plan)
    for work in done:
        work.wait()  # so that the replay is ordered after them
    held.slot_expert[0, 0] = 9
    emulated.replay(graph)
    emulated.synchronize()
    with pytest.raises(errors.GroupClosedError, match="failed in call 2") as raised:
        start_all(groups[:1], weights, plan)
    assert isinstance(raised.value.__cause__, errors.InvalidPlanError)
    for work in done:  # what was finished before stays finished
        work.synchronize()


def test_too_many_ranks_for_a_launch(emulated: EmulatedDevice) -> None:
    with pytest.raises(errors.UnsupportedError, match=r"65 ranks .* at most 64"):
        uec.testing.new_loopback_groups(
            65, num_experts=65, slots_per_rank=1, expert={"w": ((4,), torch.int8)}, engine="cuda"
        )


def test_groups_without_slots_take_plans_of_the_device(
    emulated: EmulatedDevice, groups_of: Any
) -> None:
    groups = groups_of(2, num_experts=4, slots_per_rank=0)
    weights = [make_weights(group) for group in groups]
    load = emulated.put(torch.ones(2, 4, dtype=torch.int32))
    plan = uec.plan_replicas(load, group=groups[0])
    synchronize_all(start_all(groups, weights, plan))
