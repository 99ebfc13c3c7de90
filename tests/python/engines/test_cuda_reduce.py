"""Gradient reductions of the CUDA engine, from the Python API to the emulated device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from emulated_device import EmulatedDevice
from rank_grads import RankGrads
from ranks import (
    assert_mismatch,
    bytes_stored,
    fan_out_plan,
    random_plan,
    start_all,
    synchronize_all,
)
from reference.reduce_oracle import same_bits

import ultraep_comm as uec
from ultraep_comm import errors

MODES = ["pull", "direct", "auto"]
EXPERT = {
    "w": uec.Segment((65, 128), torch.bfloat16),
    "b": uec.Segment((7,), torch.float32),  # two slots of it: one at an odd address
}
GRADS = {"w": torch.bfloat16, "b": torch.float32}
MAINS = {"w": torch.float32, "b": torch.bfloat16}


@pytest.fixture
def groups_of(emulated: EmulatedDevice, new_groups: Callable[..., Any]) -> Callable[..., Any]:
    options = {"engine": "cuda", "expert": EXPERT, "grads": GRADS, "timeout": 60.0}
    return partial(new_groups, num_sms=2, **options)


start = partial(start_all, call=uec.reduce_expert_grads)


@pytest.mark.parametrize(
    "slot_dtype, main_dtype",
    [
        (torch.float32, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
    ],
)
def test_both_engines_add_the_same_bits(
    emulated: EmulatedDevice, groups_of: Any, slot_dtype: torch.dtype, main_dtype: torch.dtype
) -> None:
    num_ranks, num_experts, slots = 4, 6, 2
    plans = [fan_out_plan(num_ranks, num_experts, slots), random_plan(5, num_ranks, num_experts, 2)]
    options = {"grads": slot_dtype, "tile_bytes": 16384}
    engines = [
        groups_of(num_ranks, num_experts=num_experts, slots_per_rank=slots, engine=name, **options)
        for name in ("cuda", "host")
    ]
    mains = dict.fromkeys(EXPERT, main_dtype)
    seed = 0
    for mode in MODES:
        for plan in plans:
            seed += 1
            found = []
            for i, groups in enumerate(engines):
                grads = RankGrads(groups, mains)
                given = plan if i or seed % 2 else emulated.put_plan(plan)
                grads.reduce(given, seed, mode=mode)
                found.append(grads.mains)
            for here, there in zip(*found, strict=True):
                assert all(same_bits(here[name], there[name]) for name in here)


def test_calls_of_all_kinds_take_turns(emulated: EmulatedDevice, groups_of: Any) -> None:
    """Plans on host and device, zeroing or not, between transfers that reuse the slots."""
    groups = groups_of(3, num_experts=7, slots_per_rank=2)
    grads = RankGrads(groups, MAINS)
    weights = [
        {n: torch.ones((g.num_local_experts, *s.shape), dtype=s.dtype) for n, s in EXPERT.items()}
        for g in groups
    ]
    bound = [group.bind_grads(own) for group, own in zip(groups, grads.mains, strict=True)]
    for seed in range(8):
        plan = random_plan(seed, 3, 7, 2)
        moved = emulated.put_plan(plan)
        for group in groups:
            uec.replicate_experts(weights[group.rank], plan, group=group, async_op=True)
        emulated.settle()
        grads.fill(seed)
        works = []
        for group in groups:
            given = (grads.mains, bound)[(seed + group.rank) % 2]
            own = moved if (seed // 2 + group.rank) % 2 else plan
            works += start([group], given, own, zero=seed % 4 != 0)
        synchronize_all(works)
        grads.check(plan, zero=seed % 4 != 0)
    stored = [bytes_stored(group) for group in groups]
    assert all(stored)


def test_a_graph_adds_fresh_gradients(emulated: EmulatedDevice, groups_of: Any) -> None:
    groups = groups_of(3, num_experts=7, slots_per_rank=2)
    grads = RankGrads(groups, MAINS)
    bound = [group.bind_grads(own) for group, own in zip(groups, grads.mains, strict=True)]
    plan = fan_out_plan(3, 7, 2)
    held = emulated.put_plan(plan)
    emulated.settle()
    emulated.begin_capture()
    for work in grads.start(held, bound):
        work.wait()
    graph = emulated.end_capture()
    for seed in range(4):
        grads.fill(seed)
        plan = random_plan(seed, 3, 7, 2)
        held.slot_expert.copy_(plan.slot_expert)
        if seed % 2:  # the gradients have moved, and graphs follow
            grads.mains[:] = [{n: t.clone() for n, t in own.items()} for own in grads.mains]
            for own, moved in zip(bound, grads.mains, strict=True):
                own.update(moved)
        if seed == 2:  # calls of both kinds take turns
            synchronize_all(grads.start(plan, bound))
        else:
            emulated.replay(graph)
            emulated.settle()
        grads.check(plan)


def test_what_a_capture_cannot_hold(emulated: EmulatedDevice, groups_of: Any) -> None:
    groups = groups_of(2, num_experts=4, slots_per_rank=1)
    plan = uec.Plan.from_slots([[-1], [0]], num_experts=4)
    grads = RankGrads(groups, MAINS)
    bound = [group.bind_grads(own) for group, own in zip(groups, grads.mains, strict=True)]
    held = emulated.put_plan(plan)
    emulated.settle()
    emulated.begin_capture()
    with pytest.raises(errors.UnsupportedError, match=r"^rank 0: .*the plan is on the CPU"):
        start(groups[:1], bound, plan)
    with pytest.raises(
        errors.UnsupportedError, match=r"^rank 0: .* gradients are not .* group.bind_grads\(\)"
    ):
        start(groups[:1], grads.mains, held)
    emulated.end_capture()
    grads.fill(1)
    for work in grads.start(held):  # the group still works
        work.synchronize()
    grads.check(plan)


def test_bad_input_is_refused_and_peers_hear_of_it(
    emulated: EmulatedDevice, groups_of: Any
) -> None:
    plan = uec.Plan.from_slots([[-1], [0]], num_experts=4)

    def fails(what: str, grads: Any, **options: Any) -> None:
        groups = groups_of(2, num_experts=4, slots_per_rank=1)
        mains = RankGrads(groups, MAINS).mains
        (work,) = start(groups[1:], mains, plan)
        with pytest.raises(errors.InvalidWeightsError, match=what):
            start(groups[:1], [grads(mains[0])], plan, **options)
        with pytest.raises(errors.PeerRejectedError, match="rank 0 rejected its own input"):
            work.synchronize()

    fails("lack segment 'b'", lambda own: {"w": own["w"]})
    fails("expected torch.float32 or", lambda own: {**own, "b": own["b"].to(torch.float16)})
    other = groups_of(2, num_experts=4, slots_per_rank=1)
    fails("bound to another group", other[0].bind_grads)


def test_refusals_of_the_device_and_other_calls(emulated: EmulatedDevice, groups_of: Any) -> None:
    groups = groups_of(2, num_experts=4, slots_per_rank=1)
    grads = RankGrads(groups, MAINS)
    legal = uec.Plan.from_slots([[2], [0]], num_experts=4)
    illegal = emulated.put_plan(legal)
    illegal.slot_expert[0, 0] = 1
    works = start(groups[:1], grads.mains, illegal) + start(groups[1:], grads.mains, legal)
    with pytest.raises(errors.InvalidPlanError, match="slot 0 of rank 0 holds expert 1: which is"):
        works[0].synchronize()
    with pytest.raises(errors.PeerRejectedError):
        works[1].synchronize()

    groups = groups_of(2, num_experts=4, slots_per_rank=1)
    grads = RankGrads(groups, MAINS)
    works = start(groups[:1], grads.mains, legal) + start(
        groups[1:], grads.mains, legal, zero=False
    )
    assert_mismatch(works)

    groups = groups_of(2, num_experts=4, slots_per_rank=1)
    weights = {n: torch.zeros((2, *s.shape), dtype=s.dtype) for n, s in EXPERT.items()}
    (reduction,) = start(groups[:1], RankGrads(groups, MAINS).mains, legal)
    transfer = uec.replicate_experts(weights, legal, group=groups[1], async_op=True)
    assert transfer is not None
    with pytest.raises(errors.PlanMismatchError):
        reduction.synchronize()
    with pytest.raises(errors.TransferError):
        transfer.synchronize()

    (without,) = groups_of(1, num_experts=2, slots_per_rank=1, grads=None)
    with pytest.raises(errors.InvalidWeightsError, match="hold no gradients"):
        uec.reduce_expert_grads({}, uec.Plan.from_slots([[-1]], num_experts=2), group=without)
