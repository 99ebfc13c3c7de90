"""Saved plans on every engine: their handles' life, what ends them, and calls that do not match."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from loopback_ranks import finish, hold, put, put_plan
from ranks import (
    loopback,
    make_weights,
    prepare_all,
    raised,
    start_all,
    synchronize_all,
    wrong_bytes,
)

import ultraep_comm as uec
from ultraep_comm import Segment, errors
from ultraep_comm.engines.cuda import device
from ultraep_comm.group.group import is_on_device, session_of

E, S = 4, 1
EXPERT = {"w": Segment((8, 4), torch.bfloat16), "s": Segment((3,), torch.uint8)}
PLANS = [[[2], [0]], [[3], [1]], [[-1], [1]]]  # experts 0 and 1 are rank 0's


def plan_of(index: int) -> uec.Plan:
    return uec.Plan.from_slots(PLANS[index], num_experts=E)


@pytest.fixture
def make_groups(loopback_engine: str, new_groups: Callable[..., Any]) -> Callable[..., Any]:
    engine = "cuda" if loopback_engine == "emulated" else loopback_engine
    options = {"expert": EXPERT, "timeout": 60.0, "num_sms": 2, "engine": engine}
    return partial(new_groups, num_experts=E, slots_per_rank=S, **options)


@pytest.fixture
def groups(make_groups: Callable[..., Any]) -> Any:
    return make_groups(2)


def put_plans(groups: list[uec.Group], index: int) -> uec.Plan:
    """Return a plan on the groups' device."""
    return put_plan(groups[0], plan_of(index))


def write(group: uec.Group, to: torch.Tensor, values: torch.Tensor) -> None:
    """Write in the order of the stream, if there is one."""
    if is_on_device(to, group):
        device.find_device().upload(to, values)
    else:
        to.copy_(values)


def handle_error(call: Callable[[], object]) -> errors.PlanHandleError:
    error = raised(call)
    assert isinstance(error, errors.PlanHandleError), error
    return error


def is_named(error: errors.PlanHandleError, rank: int, handle: uec.PlanHandle) -> bool:
    """Return whether the error has the handle's numbers, in its text and its attributes."""
    numbers = (handle.layer, handle.microbatch, handle.generation)
    text = f"layer {numbers[0]}, microbatch {numbers[1]} (generation {numbers[2]} of group"
    return (
        (error.rank, error.layer, error.microbatch, error.generation) == (rank, *numbers)
        and text in str(error)
        and str(error).startswith(f"rank {rank}: ")
    )


def test_handles_are_numbered_by_layer_microbatch_and_save(groups: list[uec.Group]) -> None:
    group = groups[0]
    given = [(3, None), (4, None), (3, None), (3, 7), (3, None)]
    handles = [group.save(plan_of(0), layer=a, microbatch=b) for a, b in given]
    found = [(h.layer, h.microbatch, h.generation) for h in handles]
    assert found == [(3, 0, 1), (4, 0, 2), (3, 1, 3), (3, 7, 4), (3, 3, 5)]
    assert all(handle.group is group for handle in handles)
    assert len({handle.tag for handle in handles}) == 5
    for handle in handles:
        handle.release()
    assert group.save(plan_of(0), layer=3).generation == 6  # never one that was used
    assert repr(handles[0]).startswith("PlanHandle(layer=3, microbatch=0, generation=1, ")


@pytest.mark.parametrize("bad", [-1, 1 << 31, 1.5, "3"])
def test_layers_are_numbers_from_0_up(groups: list[uec.Group], bad: Any) -> None:
    with pytest.raises(errors.InvalidArgumentError, match="layer"):
        groups[0].save(plan_of(0), layer=bad)
    with pytest.raises(errors.InvalidArgumentError, match=r"microbatch=4294967296; expected \[0,"):
        groups[0].save(plan_of(0), microbatch=1 << 32)
    groups[0].assert_idle()


def test_plans_of_other_groups_are_not_saved(groups: list[uec.Group]) -> None:
    foreign = uec.Plan.from_slots([[-1]] * 3, num_experts=E)
    with pytest.raises(errors.InvalidPlanError, match="for 3 ranks"):
        groups[0].save(foreign)
    handle = groups[0].save(plan_of(0))
    with pytest.raises(errors.InvalidPlanError, match="PlanHandle"):
        groups[0].save(handle)  # type: ignore[arg-type]
    handle.release()


def test_a_saved_plan_is_the_groups_own_copy(loopback_engine: str, groups: list[uec.Group]) -> None:
    load = torch.tensor([[9, 1, 1, 1], [3, 1, 1, 1]], dtype=torch.int32)
    ids = torch.tensor([[0]] * 9 + [[1], [2], [3]])
    routing = torch.zeros(12, E, dtype=torch.bool)
    routing[torch.arange(12), ids[:, 0]] = True
    expected = uec.plan_replicas(load, group=groups[0])
    there, handles = put(groups[0], load), []
    for group in groups:
        plan = uec.plan_replicas(there, group=group)
        if loopback_engine in ("cuda", "emulated"):
            hold(loopback_engine)
        handles.append(group.save(plan))
        for name, tensor in plan.tensors().items():
            if name not in ("home", "domains"):  # on a device they are the group's
                write(group, tensor, torch.ones(tensor.shape, dtype=tensor.dtype))
    finish(groups[0])
    for group, handle in zip(groups, handles, strict=True):
        assert is_on_device(handle.plan.slot_expert, group) == is_on_device(there, group)
        for name, tensor in handle.plan.tensors().items():
            assert torch.equal(tensor.cpu(), getattr(expected, name)), name
    if is_on_device(there, groups[0]):
        assert handles[0].plan.home is session_of(groups[0]).engine.home  # known to be the group's
    found = uec.reroute(ids, handles[0], group=groups[0])
    assert torch.equal(found, uec.reroute(ids, expected, group=groups[0]))
    found, _ = uec.reroute_map(routing, None, handles[0], group=groups[0])
    assert torch.equal(found, uec.reroute_map(routing, None, expected, group=groups[0])[0])
    weights = [make_weights(group) for group in groups]
    prepare_all(groups, weights, 1)
    synchronize_all(start_all(groups, weights, handles))
    assert [wrong_bytes(group, expected, 1) for group in groups] == [0, 0]


def test_each_microbatch_transfers_its_own_plan(groups: list[uec.Group]) -> None:
    weights, own, handles = [make_weights(group) for group in groups], put_plans(groups, 0), []
    for index in range(3):  # the caller uses one plan's memory for all
        write(groups[0], own.slot_expert, plan_of(index).slot_expert)
        handles.append([group.save(own) for group in groups])
    handles.append([groups[0].save(plan_of(0)), groups[1].save(put_plans(groups, 0))])
    for epoch, index in enumerate([2, 0, 1, 3, 0, 2], start=1):
        prepare_all(groups, weights, epoch)
        synchronize_all(start_all(groups, weights, handles[index]))
        assert [wrong_bytes(group, plan_of(index % 3), epoch) for group in groups] == [0, 0]
    for each in handles:
        for handle in each:
            handle.release()
    groups[0].assert_idle()


# ---- errors -------------------------------------------------------------------------------------


def spend(handle: uec.PlanHandle) -> None:
    handle.store.consume(handle, on_device=True)


def release(handle: uec.PlanHandle) -> None:
    handle.release()


def leave(handle: uec.PlanHandle) -> None:
    with handle:
        assert handle.is_live


ENDS = [
    (spend, "was reduced already: backward twice on one handle; save the plan once for each"),
    (release, "was released; release a handle after its last use"),
    (leave, "was released; release a handle after its last use"),
]


@pytest.mark.parametrize("end, text", ENDS)
def test_ended_handles_give_no_plan_and_peers_are_told(
    groups: list[uec.Group], end: Callable[[uec.PlanHandle], None], text: str
) -> None:
    weights = [make_weights(group) for group in groups]
    handles = [groups[0].save(plan_of(0), layer=5), groups[1].save(plan_of(0), layer=5)]
    newer = groups[0].save(plan_of(0), layer=5)  # an equal plan does not take its place
    end(handles[0])
    for call in (
        lambda: handles[0].plan,
        lambda: uec.reroute(torch.zeros(1, dtype=torch.int64), handles[0], group=groups[0]),
        lambda: uec.reroute_map(
            torch.zeros(1, E, dtype=torch.bool), None, handles[0], group=groups[0]
        ),
    ):
        error = handle_error(call)
        assert is_named(error, 0, handles[0])
        assert text in str(error)
        handles[0].release()  # harmless, and not what has ended it
    prepare_all(groups, weights, 1)
    (work,) = start_all(groups[1:], weights, handles)
    own = raised(lambda: start_all(groups[:1], weights, handles))  # the group has gone on till here
    told = raised(work.synchronize)
    assert isinstance(own, errors.PlanHandleError)
    assert is_named(own, 0, handles[0])
    assert "replicate_experts" in str(own)
    assert text in str(own)
    assert isinstance(told, errors.PeerRejectedError)
    assert told.root == 0
    assert "replicate_experts of layer 5, microbatch 0" in str(told)
    assert [wrong_bytes(group, plan_of(2), 1) for group in groups[:1]] == [0]  # no slot is written
    assert newer.is_live
    assert not handles[0].is_live


def test_handles_of_other_groups_are_refused(
    groups: list[uec.Group], make_groups: Callable[..., Any]
) -> None:
    others = make_groups(2)
    handle = others[0].save(plan_of(0), layer=6, microbatch=2)
    error = handle_error(
        lambda: uec.replicate_experts(make_weights(groups[0]), handle, group=groups[0])
    )
    assert is_named(error, 0, handle)
    assert f"belongs to group '{others[0].name}', not to group '{groups[0].name}'" in str(error)
    # Handles of another rank in this process belong to another group too.
    error = handle_error(
        lambda: uec.reroute(torch.zeros(1, dtype=torch.int64), handle, group=others[1])
    )
    assert is_named(error, 1, handle)
    handle.release()
    for group in others:
        group.close()


def test_handles_of_closed_groups_are_refused(make_groups: Callable[..., Any]) -> None:
    (group,) = make_groups(1)
    handle = group.save(uec.Plan.from_slots([[-1]], num_experts=E), layer=1, microbatch=9)
    weights = make_weights(group)
    with pytest.raises(errors.GroupBusyError):
        group.close()
    for call in (
        lambda: handle.plan,
        lambda: uec.replicate_experts(weights, handle, group=group),
    ):
        error = handle_error(call)
        assert is_named(error, 0, handle)
        assert "belongs to a group that is closed; create a new group" in str(error)
    assert not handle.is_live
    handle.release()
    with pytest.raises(errors.GroupClosedError, match="save on a group that is closed"):
        group.save(plan_of(0))
    with pytest.raises(errors.GroupClosedError):
        group.assert_idle()


def test_handles_cannot_be_copied(groups: list[uec.Group]) -> None:
    handle = groups[0].save(plan_of(0))
    with pytest.raises(TypeError, match="counts its uses"):
        copy.deepcopy(handle)
    handle.release()


# ---- order --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "labels",
    [((3, 1), (4, 1)), ((3, 0), (3, 1)), ((3, 1), None)],
    ids=["layers", "microbatches", "no handle"],
)
@pytest.mark.parametrize("index", [0, 2], ids=["full", "half"])
def test_handles_in_another_order_do_not_match(
    groups: list[uec.Group], labels: tuple[Any, Any], index: int
) -> None:
    weights = [make_weights(group) for group in groups]

    def run(rank: int) -> BaseException | None:
        group, label = groups[rank], labels[rank]
        plan: Any = put_plans(groups, index)
        if label is not None:
            plan = group.save(plan, layer=label[0], microbatch=label[1])

        def calls() -> None:
            for _ in range(2):  # who has nothing to do may learn of it in the second call
                (work,) = start_all([group], {rank: weights[rank]}, plan)
                work.synchronize()

        return raised(calls)

    found = loopback(2, run)
    for rank, error in enumerate(found):
        assert isinstance(error, errors.TransferError), error
        assert str(error).startswith(f"rank {rank}: replicate_experts")
        if labels[rank] is not None:
            layer, microbatch = labels[rank]
            assert f"of layer {layer}, microbatch {microbatch} (call" in str(error)
    mismatches = [error for error in found if isinstance(error, errors.PlanMismatchError)]
    assert mismatches  # a rank may hear of the other's error first
    assert "another operation, layer, microbatch, plan" in str(mismatches[0])


def test_equal_labels_match_whatever_else_a_rank_has_saved(groups: list[uec.Group]) -> None:
    weights = [make_weights(group) for group in groups]
    groups[1].save(plan_of(1), layer=8).release()
    prepare_all(groups, weights, 1)
    handles = [group.save(plan_of(0), layer=3) for group in groups]
    synchronize_all(start_all(groups, weights, handles))
    assert [wrong_bytes(group, plan_of(0), 1) for group in groups] == [0, 0]


@pytest.mark.parametrize("prefetched", [False, True])
@pytest.mark.parametrize("layers", [(3, 3), (3, 4), (3, None)])
def test_layers_are_compared_without_handles_too(
    groups: list[uec.Group], layers: Any, prefetched: bool
) -> None:
    load = torch.tensor([9, 1, 1, 1])
    weights = [make_weights(group) for group in groups]
    works = []
    for group, own, layer in zip(groups, weights, layers, strict=True):
        how: Any = {"group": group, "layer": layer, "async_op": True}
        if prefetched:
            works.append(uec.prefetch_experts(own, load, bank=0, **how))
        else:
            works.append(uec.replicate_experts(own, put_plans(groups, 0), **how))
    found = {type(raised(work.synchronize)) for work in works}
    if layers[0] == layers[1]:
        assert found == {type(None)}
    else:  # who is told first does not compare
        assert errors.PlanMismatchError in found
        assert found <= {errors.PlanMismatchError, errors.TransferAbortedError}


def test_a_layer_is_that_of_the_handle(groups: list[uec.Group]) -> None:
    group, handle = groups[0], groups[0].save(plan_of(2), layer=3)
    with pytest.raises(errors.InvalidArgumentError, match="layer=2 and a handle of layer 3"):
        uec.replicate_experts(make_weights(group), handle, group=group, layer=2)
    handle.release()


# ---- idle groups --------------------------------------------------------------------------------


def test_assert_idle_names_live_handles_a_few_at_most(groups: list[uec.Group]) -> None:
    group = groups[1]
    group.assert_idle()
    handles = [group.save(plan_of(0), layer=layer) for layer in (3, 3, 4, 5, 6, 7)]
    with pytest.raises(errors.GroupBusyError) as caught:
        group.assert_idle()
    text = str(caught.value)
    assert text.startswith("rank 1: assert_idle with 6 saved plans")
    assert "layer 3, microbatch 0; layer 3, microbatch 1; layer 4, microbatch 0" in text
    assert "layer 5, microbatch 0; and 2 more" in text
    assert "layer 6" not in text
    assert (caught.value.rank, caught.value.live[1]) == (1, (3, 1))
    for handle in handles[:-1]:
        handle.release()
    with pytest.raises(
        errors.GroupBusyError, match="1 saved plan not reduced or released: layer 7"
    ):
        group.assert_idle()
    handles[-1].store.consume(handles[-1], on_device=True)
    group.assert_idle()


def test_assert_idle_is_told_of_calls_under_way(groups: list[uec.Group]) -> None:
    weights = [make_weights(group) for group in groups]
    work = uec.replicate_experts(weights[0], plan_of(0), group=groups[0], async_op=True)
    assert work is not None
    with pytest.raises(errors.GroupBusyError, match="rank 0: assert_idle before call 1 "):
        groups[0].assert_idle()
    other = uec.replicate_experts(weights[1], plan_of(0), group=groups[1], async_op=True)
    assert other is not None
    work.synchronize()
    other.synchronize()
    groups[0].assert_idle()


def test_closing_names_live_handles_and_closes(groups: list[uec.Group]) -> None:
    handles = [groups[0].save(plan_of(0), layer=layer) for layer in (2, 9)]
    with pytest.raises(
        errors.GroupBusyError,
        match=r"rank 0: .*closed with 2 saved plans .*: layer 2, microbatch 0; layer 9, microb",
    ):
        groups[0].close()
    groups[0].close()  # harmless
    assert "closed" in repr(groups[0])
    assert not handles[0].is_live
    with groups[1], groups[1].save(plan_of(0)):
        pass


def test_leaving_a_group_by_another_error_does_not_mask_it(
    make_groups: Callable[..., Any],
) -> None:
    def leave(error: Exception | None) -> None:
        with make_groups(1)[0] as group:
            group.save(uec.Plan.from_slots([[-1]], num_experts=E))
            if error is not None:
                raise error

    with pytest.raises(KeyError, match="mine"):
        leave(KeyError("mine"))
    with pytest.raises(errors.GroupBusyError):
        leave(None)


def test_a_failed_group_closes_without_a_word_of_handles(groups: list[uec.Group]) -> None:
    handle = groups[0].save(plan_of(0))
    with pytest.raises(errors.InvalidArgumentError):
        uec.replicate_experts(make_weights(groups[0]), handle, group=groups[0], mode="sideways")
    groups[0].close()
