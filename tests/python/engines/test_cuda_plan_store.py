"""Saved plans on an emulated device: their memory, its reuse, and captures into graphs."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from emulated_device import EmulatedDevice
from ranks import make_weights, prepare_all, raised, start_all, synchronize_all, wrong_bytes

import ultraep_comm as uec
from ultraep_comm import Segment, errors
from ultraep_comm.group.group import session_of
from ultraep_comm.nn.hooks import ExpertPass, restore_replicas

E, S = 4, 1
EXPERT = {"w": Segment((40, 4), torch.bfloat16)}
PLANS = [[[2], [0]], [[3], [1]], [[-1], [1]]]  # experts 0 and 1 are rank 0's


@pytest.fixture
def groups(emulated: EmulatedDevice, new_groups: Callable[..., Any]) -> Any:
    options = {"expert": EXPERT, "timeout": 60.0, "num_sms": 2}
    return new_groups(2, num_experts=E, slots_per_rank=S, engine="cuda", **options)


def plan_of(index: int) -> uec.Plan:
    return uec.Plan.from_slots(PLANS[index], num_experts=E)


def test_entries_are_used_again_when_their_calls_have_finished(
    emulated: EmulatedDevice, groups: list[uec.Group]
) -> None:
    weights = [make_weights(group) for group in groups]
    plans = [emulated.put_plan(plan_of(index)) for index in range(2)]
    handles = [group.save(plans[0]) for group in groups]
    at = handles[0].plan.slot_expert.data_ptr()
    works = start_all(groups[:1], weights, handles)  # which does not end before rank 1 calls
    handles[0].release()
    other = groups[0].save(plans[1])
    assert other.plan.slot_expert.data_ptr() != at  # a call still has to read it
    synchronize_all(works + start_all(groups[1:], weights, handles))
    again = groups[0].save(plans[1])
    assert again.plan.slot_expert.data_ptr() == at
    assert (other.generation, again.generation) == (2, 3)
    error = raised(lambda: handles[0].plan)
    assert isinstance(error, errors.PlanHandleError)
    assert error.generation == 1


# ---- graphs -------------------------------------------------------------------------------------


def test_replays_save_the_plan_that_is_there(
    emulated: EmulatedDevice, groups: list[uec.Group]
) -> None:
    weights = [make_weights(group) for group in groups]
    bound = [group.bind(w) for group, w in zip(groups, weights, strict=True)]
    given = emulated.put_plan(plan_of(0))
    with emulated.capturing() as replay:
        handles = [group.save(given, layer=3) for group in groups]
        emulated.upload(given.slot_expert, torch.full((2, 1), -1, dtype=torch.int32))
        for work in start_all(groups, bound, handles):
            work.wait()
        for handle in handles:
            handle.release()
    taken = handles[0].stored.slot_expert.data_ptr()
    for epoch in range(1, 4):
        index = epoch % 3
        emulated.upload(given.slot_expert, plan_of(index).slot_expert)
        prepare_all(groups, weights, epoch)
        replay()
        emulated.synchronize()
        assert [wrong_bytes(group, plan_of(index), epoch) for group in groups] == [0, 0]
        for group in groups:  # other plans do not get the graph's memory
            with group.save(given) as other:  # and none was in use
                assert other.plan.slot_expert.data_ptr() != taken
    handles[0].release()  # the graph is gone


def test_captured_handles_in_another_order_do_not_match(
    emulated: EmulatedDevice, groups: list[uec.Group]
) -> None:
    bound = [group.bind(make_weights(group)) for group in groups]
    plan = emulated.put_plan(plan_of(0))
    with emulated.capturing():
        handles = [group.save(plan, layer=3 + group.rank) for group in groups]
        error = raised(lambda: [work.wait() for work in start_all(groups, bound, handles)])
    assert isinstance(error, errors.PlanMismatchError)
    assert "replicate_experts of layer 3, microbatch 0" in str(error)


def test_a_capture_has_memory_of_its_graph(
    emulated: EmulatedDevice, groups: list[uec.Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    group = groups[0]
    plan = emulated.put_plan(plan_of(0))
    with group.save(plan):  # an entry of the store, which is free again
        pass
    monkeypatch.setattr(session_of(group).plans, "_unused_marks", iter((0, 1)))
    with emulated.capturing():
        with monkeypatch.context() as patch:
            patch.setattr(emulated, "has_graph_pool", lambda: False)
            with pytest.raises(
                errors.UnsupportedError, match=r"rank 0: save .* with torch\.cuda\.graph"
            ):
                group.save(plan)
        held = [group.save(plan, layer=layer) for layer in (1, 2)]
        with pytest.raises(errors.UnsupportedError, match="CUDA graphs have saved"):
            group.save(plan, layer=3)
        held[0].release()  # in the capture: the memory stays with the graph
        with pytest.raises(errors.UnsupportedError, match="CUDA graphs have saved"):
            group.save(plan, layer=3)
    assert held[1].is_live
    held[0].release()
    with emulated.capturing():
        again = group.save(plan, layer=3)
    assert [handle.generation for handle in (*held, again)] == [2, 3, 4]
    assert again.mark is held[0].mark
    with pytest.raises(errors.GroupBusyError, match="2 saved plans"):
        group.assert_idle()
    for handle in (held[1], again):
        handle.release()
    group.assert_idle()


def test_handles_of_outside_are_refused_in_a_capture(
    emulated: EmulatedDevice, groups: list[uec.Group]
) -> None:
    """The graph would read whatever is saved to their memory next."""
    bound = [group.bind(make_weights(group)) for group in groups]
    plan = emulated.put_plan(plan_of(0))
    ids = emulated.put(torch.zeros(3, 1, dtype=torch.int64))
    routing = emulated.put(torch.zeros(3, E, dtype=torch.bool))
    handles = [group.save(plan, layer=3) for group in groups]
    with emulated.capturing():
        group, handle = groups[0], handles[0]
        calls: dict[str, Callable[[], object]] = {
            "replicate_experts": lambda: uec.replicate_experts(bound[0], handle, group=group),
            "reduce_expert_grads": lambda: uec.reduce_expert_grads({}, handle, group=group),
            "reroute": lambda: uec.reroute(ids, handle, group=group),
            "reroute_map": lambda: uec.reroute_map(routing, None, handle, group=group),
            "PlanHandle.plan": lambda: handle.plan,
        }
        for name, call in calls.items():
            match = f"rank 0: {name} in a capture .* of layer 3, microbatch 0, .* save the plan in"
            with pytest.raises(errors.UnsupportedError, match=match):
                call()
    synchronize_all(start_all(groups, bound, handles))  # the group and its peers still work
    for each in handles:
        each.release()


@pytest.mark.parametrize("other_capture", [False, True], ids=["outside", "in another capture"])
def test_a_pass_that_is_dropped_leaves_its_entry_to_the_graph(
    emulated: EmulatedDevice, groups: list[uec.Group], other_capture: bool
) -> None:
    group = groups[0]
    given, other = emulated.put_plan(plan_of(0)), emulated.put_plan(plan_of(1))
    with emulated.capturing() as replay:
        handle = group.save(given)
        run = ExpertPass(handle, {})
    with emulated.capturing() if other_capture else nullcontext():
        del run
        gc.collect()
    assert handle.is_live
    eager = group.save(other)
    replay()
    emulated.synchronize()
    assert eager.plan.slot_expert.tolist() == PLANS[1]
    assert handle.plan.slot_expert.tolist() == PLANS[0]
    eager.release()
    handle.release()


def test_a_pass_that_is_dropped_in_a_capture_is_no_part_of_it(
    emulated: EmulatedDevice, groups: list[uec.Group]
) -> None:
    handle = groups[0].save(emulated.put_plan(plan_of(0)))
    run = ExpertPass(handle, {})
    with emulated.capturing():
        launches = emulated.launches()
        del run
        gc.collect()
        assert emulated.launches() == launches
    assert not handle.is_live


def test_a_save_that_is_refused_keeps_no_entry(
    emulated: EmulatedDevice, groups: list[uec.Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    group = groups[0]
    plan = emulated.put_plan(plan_of(0))
    with group.save(plan) as handle:
        at = handle.plan.slot_expert.data_ptr()

    def refuse(*_: object) -> None:
        raise errors.DeviceError("refused")

    for captured in (False, True):
        with emulated.capturing() if captured else nullcontext():
            with monkeypatch.context() as patch:
                patch.setattr(session_of(group).engine, "save", refuse)
                for _ in range(2):
                    with pytest.raises(errors.DeviceError, match="refused"):
                        group.save(plan)
            with group.save(plan) as handle:
                assert captured or handle.plan.slot_expert.data_ptr() == at
        if captured:
            handle.release()


@pytest.mark.parametrize("other", [0, 1], ids=["alike", "another"])
def test_plans_of_passes_with_one_number_are_compared_on_the_device(
    emulated: EmulatedDevice, groups: list[uec.Group], other: int
) -> None:
    weights = [make_weights(group) for group in groups]
    prepare_all(groups, weights, 1)
    first, second = (
        [group.save(emulated.put_plan(plan_of(index)), layer=2) for group in groups]
        for index in (0, other)
    )
    synchronize_all(start_all(groups, weights, first))
    synchronize_all(start_all(groups, weights, second))
    runs = [ExpertPass(handle, given) for handle, given in zip(first, weights, strict=True)]
    for run in runs:
        restore_replicas(torch.ones(1, requires_grad=True), run)
    works = start_all(groups, weights, first)
    found = [raised(work.synchronize) for work in works]
    if other == 0:
        assert found == [None, None]
        return
    for error in found:
        assert isinstance(error, errors.InvalidPlanError)
        assert "had different plans: the recomputed forward pass routed differently" in str(error)
