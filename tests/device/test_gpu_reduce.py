"""reduce_expert_grads on a GPU, all ranks in one process: every mode, every bit.

Each test of `engine` runs the kernel on the CPU too, and the host engine: no GPU is needed to know
that the test itself is right.
"""

from __future__ import annotations

import itertools
import random
from functools import partial
from typing import Any

import pytest
import torch
from graphs import MAKERS, on_each
from loopback_ranks import EMULATED_SMS, put_plan, random_slots
from rank_grads import RankGrads
from ranks import assert_mismatch, close_all, start_all, synchronize_all
from tiers import sampled

import ultraep_comm as uec
from ultraep_comm import Segment
from ultraep_comm.engines.cuda import device

F32, BF16 = torch.float32, torch.bfloat16
MODES = ["pull", "direct", "auto"]
# One cut into tiles, one of odd size, and one smaller than a row of a warp.
EXPERT = {"w": Segment((96, 200), BF16), "odd": Segment((33, 47), BF16), "b": Segment((3,), F32)}


def make_groups(engine: str, num_ranks: int, **options: Any) -> list[uec.Group]:
    if engine == "emulated":
        most = max(1, EMULATED_SMS // num_ranks)
        options["num_sms"] = min(options.get("num_sms") or 2, most)
    options = {"expert": EXPERT, "slots_per_rank": 2, "timeout": 30.0, **options}
    return uec.testing.new_loopback_groups(
        num_ranks, engine="cuda" if engine == "emulated" else engine, **options
    )


def random_plan(groups: list[uec.Group], seed: int) -> uec.Plan:
    t = groups[0].topology
    home = t.home.tolist()
    slots = random_slots(seed, t.num_ranks, t.num_experts, t.slots_per_rank, home)
    return uec.Plan.from_slots(slots, num_experts=t.num_experts, home=home)


@pytest.mark.parametrize(
    ("num_ranks", "num_experts", "slots", "options"),
    sampled(
        [
            (2, 5, 1, {}),
            (3, 7, 2, {"num_sms": 1, "tile_bytes": 16384}),
            (5, 11, 3, {"num_sms": 3}),
            (8, 3, 2, {}),  # ranks without mains
            (16, 20, 1, {"num_sms": 8, "tile_bytes": 32768}),
        ],
        lambda case: case[0] in (3, 8),
    ),
)
def test_random_reductions(
    engine: str, num_ranks: int, num_experts: int, slots: int, options: dict[str, Any]
) -> None:
    """Thousands of reductions on a GPU."""
    calls = 100 if engine == "cuda" else 2
    draw = random.Random(num_ranks)
    for slot_dtype, main_dtype in itertools.product((F32, BF16), (F32, BF16)):
        groups = make_groups(
            engine,
            num_ranks,
            num_experts=num_experts,
            slots_per_rank=slots,
            grads=slot_dtype,
            **options,
        )
        grads = RankGrads(groups, dict.fromkeys(EXPERT, main_dtype))
        for seed in range(calls):
            plan = random_plan(groups, seed)
            on_host = engine == "host" or draw.random() < 0.5
            given = plan if on_host else put_plan(groups[0], plan)
            grads.reduce(given, seed, mode=draw.choice(MODES), zero=draw.random() < 0.8)
        close_all(groups)


def test_all_numbers_of_blocks_add_the_same_bits(engine: str) -> None:
    found = []
    for num_sms in (1, 2, 3, 8):
        groups = make_groups(engine, 4, num_experts=6, grads=F32, num_sms=num_sms)
        grads = RankGrads(groups, dict.fromkeys(EXPERT, BF16))
        for mode in MODES:
            grads.reduce(random_plan(groups, 3), 7, mode=mode)
        found.append(torch.cat([t.cpu().flatten() for m in grads.mains for t in m.values()]))
        close_all(groups)
    assert all(torch.equal(found[0], other) for other in found)


def test_large_experts(engine: str) -> None:
    rows = 4096 if engine == "cuda" else 64
    expert = {"w": Segment((rows, 4096), BF16), "b": Segment((4099,), F32)}
    groups = make_groups(engine, 4, num_experts=4, expert=expert, grads=F32)
    grads = RankGrads(groups, dict.fromkeys(expert, F32))
    for mode in MODES:
        grads.reduce(random_plan(groups, 1), 1, mode=mode)
    close_all(groups)


def test_special_numbers(engine: str) -> None:
    """Subnormal numbers, zeros of both signs, infinities and NaNs."""
    special = torch.tensor(
        [0.0, -0.0, 1e-40, -1e-45, 3e38, -3e38, torch.inf, -torch.inf, torch.nan]
    )
    for main_dtype in (F32, BF16):
        groups = make_groups(engine, 3, num_experts=3, grads=F32)
        grads = RankGrads(groups, dict.fromkeys(EXPERT, main_dtype))
        plan = uec.Plan.from_slots([[-1, -1], [0, -1], [0, 1]], num_experts=3)
        for mode in MODES:
            grads.fill(1)
            for i, own in enumerate([*grads.mains, *(group.slot_grads for group in groups)]):
                for tensor in own.values():
                    draw = torch.Generator().manual_seed(i)
                    which = torch.randint(len(special), tensor.shape, generator=draw)
                    tensor.copy_(special[which])
            grads.remember()
            synchronize_all(grads.start(plan, mode=mode))
            grads.check(plan)
        close_all(groups)


def test_a_graph_adds_fresh_gradients(streams: str) -> None:
    groups = make_groups(streams, 4, num_experts=6, grads=F32)
    grads = RankGrads(groups, dict.fromkeys(EXPERT, F32))
    bound = [group.bind_grads(own) for group, own in zip(groups, grads.mains, strict=True)]
    held = put_plan(groups[0], random_plan(groups, 0))
    graphs = MAKERS["torch" if streams == "cuda" else "emulated"]()

    def call(rank: int) -> None:
        uec.reduce_expert_grads(bound[rank], held, group=groups[rank])

    _, replay = graphs.capture(lambda: on_each(graphs, len(groups), call))
    for seed in range(20 if streams == "cuda" else 3):
        plan = random_plan(groups, seed)
        grads.fill(seed)
        held.slot_expert.copy_(plan.slot_expert)
        replay()
        device.find_device().synchronize()
        grads.check(plan)
    close_all(groups)


def test_a_rank_that_calls_differently_is_named(engine: str) -> None:
    groups = make_groups(engine, 3, num_experts=3, grads=F32)
    grads = RankGrads(groups, dict.fromkeys(EXPERT, F32))
    plan = uec.Plan.from_slots([[-1, -1], [0, -1], [0, 1]], num_experts=3)
    works = []
    for rank, group in enumerate(groups):
        call = partial(uec.reduce_expert_grads, zero=rank != 1)
        works += start_all([group], grads.mains, plan, call=call)
    assert_mismatch(works)
    close_all(groups)
