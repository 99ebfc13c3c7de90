"""reduce_expert_grads: every bit of main + (r1 + ... + rn), in every mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rank_grads import RankGrads
from ranks import RankPool, close_all, loopback, raised, random_plan, start_all
from reference.reduce_oracle import reduced, same_bits

import ultraep_comm as uec
from ultraep_comm import Segment, errors

F32, BF16 = torch.float32, torch.bfloat16
# Two that are cut into tiles, one that is smaller than any, one with a layout of its own, and one
# without gradients.
EXPERT = {
    "w13": Segment((33, 130), BF16),
    "scale": Segment((5,), torch.uint8),
    "bias": Segment((3,), F32),
    "w_t": Segment((40, 24), BF16, (1, 40)),
}
MAINS = dict.fromkeys(("w13", "bias", "w_t"), F32)


def make_values(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return values of very different sizes, so that every order of adding rounds differently."""
    generator = torch.Generator().manual_seed(seed)
    exponent = torch.randint(-12, 12, shape, generator=generator)
    return (torch.randn(shape, generator=generator) * 2.0**exponent).to(dtype)


def expect(
    group: uec.Group, plan: uec.Plan, main: torch.Tensor, slots: list[dict[str, torch.Tensor]]
) -> torch.Tensor:
    """Return this rank's expected main gradients of "w"."""
    wanted = main.clone()
    for i, expert in enumerate(group.topology.local_experts(group.rank)):
        where = (plan.slot_expert == int(expert)).nonzero().tolist()
        wanted[i] = reduced(main[i], [slots[rank]["w"][slot] for rank, slot in where])
    return wanted


def make_groups(num_ranks: int, **options: Any) -> list[uec.Group]:
    options = {
        "num_experts": 7,
        "slots_per_rank": 2,
        "expert": EXPERT,
        "grads": MAINS,
        "timeout": 20.0,
    } | options
    return uec.testing.new_loopback_groups(num_ranks, **options)


def test_many_replicas_of_one_expert() -> None:
    # As many parts as one pass adds and more, and fan-outs with other flag groups.
    for num_ranks in (5, 6, 9, 18, 27):
        slots = torch.zeros((num_ranks, 1), dtype=torch.int32)
        slots[0] = 1
        plan = uec.Plan.from_slots(slots, num_experts=num_ranks)
        groups = make_groups(num_ranks, num_experts=num_ranks, slots_per_rank=1, tile_bytes=1024)
        for mode in ("pull", "direct"):  # each against the sums of the definition
            RankGrads(groups, MAINS).reduce(plan, 3, mode=mode)
        close_all(groups)


def test_main_gradients_may_be_any_memory() -> None:
    groups = make_groups(2, expert={"w": ((5, 3), BF16)}, grads=BF16, num_experts=4)
    plan = uec.Plan.from_slots([[2, 3], [0, 1]], num_experts=4)
    RankGrads(groups, {"w": BF16}).fill(1)
    before = [{"w": group.slot_grads["w"].clone()} for group in groups]
    flat = make_values(1, (200,), BF16)  # rank 0: odd places in a flat buffer, in any order
    listed = [flat[101:116].view(5, 3), flat[7:22].view(5, 3)]
    spaced = make_values(2, (2, 2, 5, 3), F32)[:, 1]  # rank 1: rows with gaps between them
    mains: list[dict[str, Any]] = [{"w": listed}, {"w": spaced}]
    wanted = [expect(groups[0], plan, torch.stack(listed), before)]
    wanted.append(expect(groups[1], plan, spaced, before))
    rest = flat.clone()
    loopback(2, lambda r: uec.reduce_expert_grads(mains[r], plan, group=groups[r]))
    assert same_bits(torch.stack(listed), wanted[0])
    assert same_bits(spaced, wanted[1])
    changed = (flat != rest).nonzero().flatten().tolist()
    assert set(changed) <= {*range(101, 116), *range(7, 22)}
    close_all(groups)


def test_the_chosen_mode_is_told_and_work_can_be_waited_for_later() -> None:
    groups = make_groups(3)
    plan = uec.Plan.from_slots([[-1, -1], [0, -1], [0, -1]], num_experts=7)
    mains = RankGrads(groups, MAINS).mains
    for work in start_all(groups, mains, plan, call=uec.reduce_expert_grads, mode="pull"):
        assert work.mode == "pull"
        work.wait()
        assert work.is_completed()
        assert work.exception() is None
    close_all(groups)


# ---- real processes, with transfers in between --------------------------------------------------


def _train(rank: int, process_group: Any, mode: str) -> Any:
    """Three steps of two layers: replicate, use, reduce. Returns what differs."""
    group = uec.new_group(
        process_group,
        num_experts=9,
        slots_per_rank=2,
        expert={"w": ((300, 40), BF16)},
        grads=F32,
        timeout=20.0,
        num_sms=2,
    )
    wrong = []
    with group:
        weights = {"w": torch.full((group.num_local_experts, 300, 40), 1.0 + rank, dtype=BF16)}
        for step in range(6):
            plan = random_plan(step, group.num_ranks, 9, 2)
            uec.replicate_experts(weights, plan, group=group)
            filled = plan.slot_expert[rank] >= 0
            # As autograd does: added to what the step before has left, which has to be zeros.
            for slot in filled.nonzero().flatten().tolist():
                seed = step * 64 + rank * 8 + slot
                group.slot_grads["w"][slot] += make_values(seed, (300, 40), F32)
            mains = {"w": make_values(step, (group.num_local_experts, 300, 40), BF16)}
            slots = []
            for r in range(group.num_ranks):
                values = [make_values(step * 64 + r * 8 + s, (300, 40), F32) for s in range(2)]
                slots.append({"w": torch.stack(values)})
            wanted = expect(group, plan, mains["w"], slots)
            uec.reduce_expert_grads(mains, plan, group=group, mode=mode)
            if not same_bits(mains["w"], wanted):
                wrong.append((step, "main"))
            if group.slot_grads["w"].any():
                wrong.append((step, "slots"))
    return wrong


@pytest.mark.parametrize("mode", ["auto", "pull", "direct"])
def test_processes_train(ranks: RankPool, mode: str) -> None:
    for rank, wrong in enumerate(ranks.run(4, _train, mode)):
        assert wrong == [], rank


# ---- bad input ----------------------------------------------------------------------------------


def test_segments_with_one_gradient() -> None:
    segment = ((5, 4), F32)
    (group,) = make_groups(1, num_experts=2, expert={"gate": segment, "up": segment}, grads=F32)
    grads = torch.zeros(2, 5, 4)
    with pytest.raises(errors.InvalidGradientsError, match=r"rows of grads\['up'\] share memory"):
        group.bind_grads({"gate": grads, "up": grads})
    group.close()


@pytest.mark.parametrize("mode", ["push", "hubs"])
def test_modes_that_there_are_not(mode: str) -> None:
    (group,) = make_groups(1)
    plan = uec.Plan.from_slots([[-1, -1]], num_experts=7)
    with pytest.raises(errors.InvalidArgumentError, match=r"expected 'auto' or one of \['pull'"):
        uec.reduce_expert_grads(RankGrads([group], MAINS).mains[0], plan, group=group, mode=mode)


@pytest.mark.parametrize(
    "grads, part",
    [
        (torch.float16, "float16"),
        ({"v": F32}, "'v'"),
        ({}, "expected a dtype"),
        ("float32", "expected a dtype"),
        ({"w13": torch.int32}, "int32"),
    ],
)
def test_gradients_that_a_group_cannot_have(grads: Any, part: str) -> None:
    with pytest.raises(errors.InvalidArgumentError) as caught:
        make_groups(1, grads=grads)
    assert part in str(caught.value)


# ---- saved plans --------------------------------------------------------------------------------


def test_a_handle_ends_with_its_reduction() -> None:
    groups = make_groups(2, num_experts=4)
    plan = uec.Plan.from_slots([[2, -1], [0, -1]], num_experts=4)
    handles = [group.save(plan, layer=3, microbatch=5) for group in groups]
    grads = RankGrads(groups, MAINS)
    grads.fill(1)

    def call(rank: int) -> BaseException | None:
        return raised(
            lambda: uec.reduce_expert_grads(grads.mains[rank], handles[rank], group=groups[rank])
        )

    assert loopback(2, call) == [None, None]
    grads.check(plan)
    for group in groups:
        group.assert_idle()
    again = loopback(2, call)
    assert isinstance(again[0] or again[1], errors.PlanHandleError)
    for error in again:
        assert isinstance(error, errors.PlanHandleError | errors.GroupClosedError)
        if isinstance(error, errors.PlanHandleError):
            assert "layer 3, microbatch 5" in str(error)
            assert "backward twice" in str(error)
    close_all(groups)


@pytest.mark.parametrize("operation", ["reduce_expert_grads", "replicate_experts"])
def test_bad_input_names_the_saved_plan(operation: str) -> None:
    groups = make_groups(2, num_experts=4)
    plan = uec.Plan.from_slots([[2, -1], [0, -1]], num_experts=4)
    handles = [group.save(plan, layer=3, microbatch=5) for group in groups]

    def call(rank: int) -> BaseException | None:
        mains = RankGrads(groups, MAINS).mains[rank]
        tensors = {name: tensor.to(torch.int16) for name, tensor in mains.items()}
        made = getattr(uec, operation)
        return raised(lambda: made(tensors, handles[rank], group=groups[rank]))

    found = loopback(2, call)
    assert any(isinstance(error, errors.InvalidArgumentError) for error in found)
    for rank, error in enumerate(found):
        if isinstance(error, errors.InvalidArgumentError):
            assert str(error).startswith(f"rank {rank}: ")
            assert str(error).endswith(f" (in {operation} of layer 3, microbatch 5)")
    for handle, group in zip(handles, groups, strict=True):
        handle.release()
        group.close()


def test_layers_reduced_in_another_order_do_not_match() -> None:
    groups = make_groups(2, num_experts=4)
    plan = uec.Plan.from_slots([[2, -1], [0, -1]], num_experts=4)  # the same for both layers
    handles = [[group.save(plan, layer=layer) for layer in (3, 4)] for group in groups]
    mains = RankGrads(groups, MAINS).mains

    def call(rank: int) -> BaseException | None:
        return raised(
            lambda: uec.reduce_expert_grads(mains[rank], handles[rank][rank], group=groups[rank])
        )

    for rank, error in enumerate(loopback(2, call)):
        assert isinstance(error, errors.PlanMismatchError | errors.TransferAbortedError)
        assert f"rank {rank}: reduce_expert_grads of layer {3 + rank}, microbatch 0" in str(error)
    close_all(groups)
