"""Saved plans: their handles' life, what ends them, and calls that do not match."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import clear_slots, fill_weights, loopback, make_weights, raised, wrong_bytes

import ultraep_comm as uec
from ultraep_comm import Segment, errors
from ultraep_comm.group.group import session_of

E, S = 4, 1
EXPERT = {"w": Segment((8, 4), torch.bfloat16), "s": Segment((3,), torch.uint8)}
PLANS = [[[2], [0]], [[3], [1]], [[-1], [1]]]  # experts 0 and 1 are rank 0's


def plan_of(index: int) -> uec.Plan:
    return uec.Plan.from_slots(PLANS[index], num_experts=E)


def make_groups(num_ranks: int = 2, **options: Any) -> list[uec.Group]:
    options = {"num_experts": E, "slots_per_rank": S, "expert": EXPERT, "timeout": 20.0, **options}
    return uec.testing.new_loopback_groups(num_ranks, **options)


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


def test_a_saved_plan_is_the_groups_own_copy(groups: list[uec.Group]) -> None:
    load = torch.tensor([[9, 1, 1, 1], [3, 1, 1, 1]], dtype=torch.int32)
    plan = uec.plan_replicas(load, group=groups[0])
    kept = {name: tensor.clone() for name, tensor in plan.tensors().items()}
    handle = groups[0].save(plan)
    for tensor in plan.tensors().values():
        tensor.fill_(1)
    for name, tensor in handle.plan.tensors().items():
        assert torch.equal(tensor, kept[name]), name
    ids = torch.tensor([[0]] * 9 + [[1], [2], [3]])
    expected = uec.reroute(ids, uec.Plan(**kept), group=groups[0])
    assert torch.equal(uec.reroute(ids, handle, group=groups[0]), expected)
    routing = torch.zeros(12, E, dtype=torch.bool)
    routing[torch.arange(12), ids[:, 0]] = True
    found, _ = uec.reroute_map(routing, None, handle, group=groups[0])
    assert torch.equal(found, uec.reroute_map(routing, None, uec.Plan(**kept), group=groups[0])[0])
    handle.release()


def test_each_microbatch_transfers_its_own_plan(groups: list[uec.Group]) -> None:
    weights = [make_weights(group) for group in groups]
    plan = plan_of(0)

    def run(rank: int) -> list[int]:
        group, own = groups[rank], uec.Plan.from_slots(PLANS[0], num_experts=E)
        handles = []
        for index in range(3):  # the caller uses one plan's memory for all
            own.slot_expert.copy_(torch.tensor(PLANS[index]))
            handles.append(group.save(own))
        wrong = []
        for epoch, index in enumerate([2, 0, 1, 0, 2], start=1):
            fill_weights(group, weights[rank], epoch)
            clear_slots(group)
            uec.replicate_experts(weights[rank], handles[index], group=group)
            wrong.append(wrong_bytes(group, plan_of(index), epoch))
        for handle in handles:
            handle.release()
        group.assert_idle()
        return wrong

    assert loopback(2, run) == [[0] * 5] * 2
    assert plan.num_replicas == 2


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
def test_ended_handles_are_refused_and_peers_told(
    groups: list[uec.Group], end: Callable[[uec.PlanHandle], None], text: str
) -> None:
    weights = [make_weights(group) for group in groups]
    handles = [groups[0].save(plan_of(0), layer=5), groups[1].save(plan_of(0), layer=5)]
    newer = groups[0].save(plan_of(0), layer=5)  # an equal plan does not take its place
    end(handles[0])
    clear_slots(groups[0])
    before = session_of(groups[0]).engine.memory[0].local.clone()

    def run(rank: int) -> BaseException | None:
        return raised(
            lambda: uec.replicate_experts(weights[rank], handles[rank], group=groups[rank])
        )

    own, told = loopback(2, run)
    assert isinstance(own, errors.PlanHandleError)
    assert is_named(own, 0, handles[0])
    assert "replicate_experts" in str(own)
    assert text in str(own)
    assert isinstance(told, errors.PeerRejectedError)
    assert told.root == 0
    assert "replicate_experts of layer 5, microbatch 0" in str(told)
    start = session_of(groups[0]).engine.layout.slots_base
    assert torch.equal(session_of(groups[0]).engine.memory[0].local[start:], before[start:])
    assert newer.is_live
    assert not handles[0].is_live


@pytest.mark.parametrize("end, text", ENDS)
def test_ended_handles_give_no_plan(
    groups: list[uec.Group], end: Callable[[uec.PlanHandle], None], text: str
) -> None:
    group = groups[1]
    group.save(plan_of(0), layer=2).release()
    handle = group.save(plan_of(1), layer=2)
    end(handle)
    calls = [
        lambda: handle.plan,
        lambda: uec.reroute(torch.zeros(1, dtype=torch.int64), handle, group=group),
        lambda: uec.reroute_map(torch.zeros(1, E, dtype=torch.bool), None, handle, group=group),
    ]
    for call in calls:
        error = handle_error(call)
        assert is_named(error, 1, handle)
        assert "microbatch 1" in str(error)
        assert text in str(error)
    handle.release()  # harmless, and not what has ended it
    assert text in str(handle_error(calls[0]))
    group.assert_idle()  # reroute and handle.plan are local: the group goes on


def test_handles_of_other_groups_are_refused(groups: list[uec.Group]) -> None:
    others = make_groups()
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


def test_handles_of_closed_groups_are_refused() -> None:
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
        plan: Any = plan_of(index)
        if label is not None:
            plan = group.save(plan, layer=label[0], microbatch=label[1])

        def calls() -> None:
            uec.replicate_experts(weights[rank], plan, group=group)
            uec.replicate_experts(weights[rank], plan, group=group)

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

    def run(rank: int) -> int:
        fill_weights(groups[rank], weights[rank], 1)
        clear_slots(groups[rank])
        with groups[rank].save(plan_of(0), layer=3) as handle:
            uec.replicate_experts(weights[rank], handle, group=groups[rank])
        return wrong_bytes(groups[rank], plan_of(0), 1)

    assert loopback(2, run) == [0, 0]


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
    work.wait()
    other.wait()
    groups[0].assert_idle()


def test_closing_names_live_handles_and_closes() -> None:
    groups = make_groups()
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


def test_leaving_a_group_by_another_error_does_not_mask_it() -> None:
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
