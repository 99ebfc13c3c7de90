"""replicate_experts across real processes: every mode, every byte."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import (
    MIXED,
    RankPool,
    bytes_stored,
    clear_slots,
    expert_bytes,
    fan_out_plan,
    fill_weights,
    make_weights,
    plan_alone,
    random_plan,
    raw,
    wrong_bytes,
)

import ultraep_comm as uec
from ultraep_comm import Segment
from ultraep_comm.engines.options import HOST_TILE_BYTES
from ultraep_comm.plan.schedule import make_schedule
from ultraep_comm.plan.topology import contiguous_home

MODES = ["push", "pull", "direct", "auto"]


def _group(process_group: Any, num_experts: int, slots: int, **options: Any) -> uec.Group:
    options = {"expert": MIXED, "timeout": 20.0, **options}
    return uec.new_group(process_group, num_experts=num_experts, slots_per_rank=slots, **options)


def _plans(num_ranks: int, num_experts: int, slots: int) -> list[uec.Plan]:
    empty = torch.full((num_ranks, slots), -1)
    return [
        fan_out_plan(num_ranks, num_experts, slots),
        *(random_plan(seed, num_ranks, num_experts, slots) for seed in range(4)),
        uec.Plan.from_slots(empty, num_experts=num_experts),
        random_plan(9, num_ranks, num_experts, slots, fill=1.0),
    ]


# ---- every mode, 1 to 8 ranks ----------------------------------------------------------------


def _all_modes(rank: int, process_group: Any, num_experts: int, slots: int, options: Any) -> Any:
    wrong = {}
    with _group(process_group, num_experts, slots, **options) as group:
        weights = group.empty_weights()
        epoch = 0
        for mode in MODES:
            for i, plan in enumerate(_plans(group.num_ranks, num_experts, slots)):
                epoch += 1
                fill_weights(group, weights, epoch)
                clear_slots(group)
                uec.replicate_experts(weights, plan, group=group, mode=mode)
                wrong[mode, i] = wrong_bytes(group, plan, epoch)
    return wrong


@pytest.mark.parametrize(
    "num_ranks, num_experts, slots, options",
    [
        (1, 3, 2, {}),
        (2, 5, 1, {}),
        (3, 7, 2, {"num_sms": 2}),
        (4, 16, 2, {"tile_bytes": 1024}),
        (5, 11, 3, {"tile_bytes": 1 << 20}),
        (8, 13, 2, {"num_sms": 3}),
        (8, 8, 1, {}),
        (8, 3, 2, {}),  # ranks without mains
        (4, 6, 0, {}),  # no slots
        (8, 13, 2, {"domains": [0, 0, 0, 4, 4, 4, 4, 1], "allow_cross_domain": True}),
    ],
)
def test_every_mode_moves_every_byte(
    ranks: RankPool, num_ranks: int, num_experts: int, slots: int, options: dict[str, Any]
) -> None:
    for rank, wrong in enumerate(ranks.run(num_ranks, _all_modes, num_experts, slots, options)):
        assert wrong, rank
        assert not any(wrong.values()), (rank, wrong)


# ---- hubs forward in their own process --------------------------------------------------------


def _stored(rank: int, process_group: Any, domains: list[int] | None) -> Any:
    stored = {}
    options = {"domains": domains, "allow_cross_domain": domains is not None}
    expert = {"w": Segment((1 << 20,), torch.uint8)}
    with _group(process_group, 16, 2, expert=expert, **options) as group:
        weights = group.empty_weights()
        for mode in ("push", "pull", "direct"):
            for i, plan in enumerate(_plans(group.num_ranks, 16, 2)):
                before = bytes_stored(group)
                uec.replicate_experts(weights, plan, group=group, mode=mode)
                stored[mode, i] = bytes_stored(group) - before
    return stored


@pytest.mark.parametrize("domains", [None, [0, 0, 0, 4, 4, 4, 4, 1]], ids=["one", "three"])
def test_each_rank_stores_what_the_schedule_gives_it(
    ranks: RankPool, domains: list[int] | None
) -> None:
    num_ranks, tile = 8, HOST_TILE_BYTES
    stored = ranks.run(num_ranks, _stored, domains)
    home = contiguous_home(16, num_ranks)
    for mode in ("push", "pull", "direct"):
        for i, plan in enumerate(_plans(num_ranks, 16, 2)):
            s = make_schedule(
                plan.slot_expert.numpy(),
                home=home,
                segment_bytes=[1 << 20],
                tile_bytes=tile,
                mode=mode,
                domain=domains,
            )
            expected = np.zeros(num_ranks, np.int64)
            for x in range(s.num_experts):
                replicas = len(list(s.replicas(x)))
                for rank, begin, end in s.hubs(x):
                    size = (end - begin) * tile
                    at_home = rank == s.source_rank[x]
                    # A hub hands its range to every replica; in pull its own copy is a store too.
                    own = mode == "pull" or at_home
                    expected[rank] += size * (replicas if own else replicas - 1)
                    if mode == "push" and not at_home:
                        expected[s.source_rank[x]] += size
            assert [r[mode, i] for r in stored] == expected.tolist(), (mode, i)


# ---- weights of every kind ----------------------------------------------------------------------


def _kinds(rank: int, process_group: Any) -> Any:
    wrong = []
    home = [0, 2, 2, 2, 0, 2, 1]  # uneven: ranks with 2, 1 and 4 mains, and one with none
    with _group(process_group, 7, 2, home=home) as group:
        plan = random_plan(3, group.num_ranks, 7, 2, home=home, fill=1.0)
        stacked = make_weights(group)
        lists = {name: list(tensor.unbind()) for name, tensor in stacked.items()}
        # Parameters that are views into one flat buffer, at odd offsets, rows far apart.
        flat = torch.zeros(4_000_000, dtype=torch.uint8)
        at, views = 1, {}
        for name, segment in group.segments.items():
            rows = []
            for _ in range(group.num_local_experts):
                at += -at % segment.dtype.itemsize
                storage = flat.narrow(0, at, segment.nbytes)
                rows.append(segment.view(storage, 1)[0])
                at += segment.nbytes + 3
            views[name] = rows
        mixed = {n: (lists if i % 2 else views)[n] for i, n in enumerate(group.segments)}
        for epoch, weights in enumerate([stacked, lists, views, mixed, stacked], start=1):
            fill_weights(group, weights, epoch)
            kept = flat.clone()
            clear_slots(group)
            uec.replicate_experts(weights, plan, group=group)
            wrong.append(wrong_bytes(group, plan, epoch) + int((flat != kept).sum()))
        bound = group.bind(views)
        fill_weights(group, views, 77)
        for mode in ("push", "direct"):
            clear_slots(group)
            uec.replicate_experts(bound, plan, group=group, mode=mode)
            wrong.append(wrong_bytes(group, plan, 77))
    return wrong


def test_weights_of_every_kind(ranks: RankPool) -> None:
    for wrong in ranks.run(4, _kinds):
        assert wrong == [0] * 7


def _selected(rank: int, process_group: Any) -> Any:
    wrong = []
    with _group(process_group, 8, 2) as group:
        plan = random_plan(5, group.num_ranks, 8, 2, fill=1.0)
        weights = make_weights(group)
        fill_weights(group, weights, 1)
        for names in (["w13"], ["scale", "w2"], ["bias"], list(MIXED)[::-1]):
            for mode in ("push", "direct"):
                clear_slots(group)
                given = {name: weights[name] for name in names}
                uec.replicate_experts(given, plan, group=group, mode=mode, segments=names)
                wrong.append(wrong_bytes(group, plan, 1, names=names))
    return wrong


def test_a_selection_of_segments_leaves_the_others_untouched(ranks: RankPool) -> None:
    for wrong in ranks.run(4, _selected):
        assert wrong == [0] * 8


# ---- many calls, many groups ----------------------------------------------------------------


def _ahead(rank: int, process_group: Any) -> Any:
    """Calls are submitted ahead while ranks are slow in turn; only each rank's order matters."""
    wrong = 0
    with _group(process_group, 12, 2, expert={"w": Segment((300_000,), torch.uint8)}) as group:
        weights = [group.empty_weights() for _ in range(3)]
        plans = _plans(group.num_ranks, 12, 2)
        for turn in range(12):
            works = []
            for i in range(3):
                fill_weights(group, weights[i], turn * 3 + i)
                if (turn + i) % group.num_ranks == rank:
                    time.sleep(0.003)
                plan = plans[(turn + i) % len(plans)]
                mode = MODES[(turn * 3 + i) % len(MODES)]
                works.append(
                    uec.replicate_experts(weights[i], plan, group=group, async_op=True, mode=mode)
                )
            last = plans[(turn + 2) % len(plans)]
            for work in works:
                work.wait()
                assert work.is_completed()
                assert work.exception() is None
            names = list(group.segments)
            for slot, expert in enumerate(last.slot_expert[rank].tolist()):
                if expert >= 0:
                    segment = group.segments[names[0]]
                    expected = expert_bytes(turn * 3 + 2, expert, 0, segment)
                    wrong += int((raw(group.slots["w"][slot], segment) != expected).sum())
    return wrong


def test_calls_submitted_ahead_by_ranks_at_different_speeds(ranks: RankPool) -> None:
    assert ranks.run(4, _ahead) == [0] * 4


def _two_groups(rank: int, process_group: Any) -> Any:
    wrong = 0
    small = {"a": Segment((1000,), torch.uint8)}
    with (
        _group(process_group, 8, 2) as one,
        _group(process_group, 20, 1, expert=small) as two,
    ):
        weights = make_weights(one), make_weights(two)
        for epoch in range(1, 6):
            plans = (
                random_plan(epoch, one.num_ranks, 8, 2),
                random_plan(epoch + 50, two.num_ranks, 20, 1),
            )
            for group, tensors in zip((one, two), weights, strict=True):
                fill_weights(group, tensors, epoch)
                clear_slots(group)
            works = [
                uec.replicate_experts(w, p, group=g, async_op=True)
                for g, w, p in zip((one, two), weights, plans, strict=True)
            ]
            for work in reversed(works):
                work.wait()
            wrong += wrong_bytes(one, plans[0], epoch) + wrong_bytes(two, plans[1], epoch)
    return wrong


def test_two_groups_at_once(ranks: RankPool) -> None:
    assert ranks.run(4, _two_groups) == [0] * 4


# ---- from routing to slots ------------------------------------------------------------------


def _layer(rank: int, process_group: Any) -> Any:
    num_experts = 24
    with _group(process_group, num_experts, 2) as group:
        weights = make_weights(group)
        generator = torch.Generator().manual_seed(rank)
        result = []
        for epoch in range(1, 5):
            fill_weights(group, weights, epoch)
            clear_slots(group)
            skewed = torch.rand((200, 4), generator=generator) ** 3 * num_experts
            topk_ids = skewed.to(torch.int64 if epoch % 2 else torch.int32)
            topk_ids[::7, 1] = -1
            load = uec.gather_load(topk_ids, group=group)
            plan = uec.plan_replicas(load, group=group)
            work = uec.replicate_experts(weights, plan, group=group, async_op=True)
            physical = uec.reroute(topk_ids, plan, group=group)
            work.wait()
            own = torch.bincount(topk_ids[topk_ids >= 0].long(), minlength=num_experts)
            assert torch.equal(load[rank].long(), own)
            assert physical.dtype == topk_ids.dtype
            assert torch.equal(physical == -1, topk_ids == -1)
            wrong = wrong_bytes(group, plan, epoch)
            result.append((wrong, load.tolist(), plan.slot_expert.tolist(), physical.tolist()))
    return result


def test_a_layer_from_routing_to_slots(ranks: RankPool) -> None:
    num_ranks, num_experts, slots = 4, 24, 2
    results = ranks.run(num_ranks, _layer)
    for turn in range(4):
        wrongs, loads, plans, physical = zip(*(r[turn] for r in results), strict=True)
        assert wrongs == (0,) * num_ranks
        assert all(load == loads[0] for load in loads)
        assert all(plan == plans[0] for plan in plans)
        # Each instance receives the quota that the plan gives it, over all sources.
        plan = plan_alone(torch.tensor(loads[0]), slots_per_rank=slots)
        assert plan.slot_expert.tolist() == plans[0]
        ids = torch.tensor(physical).flatten()
        stride = num_experts // num_ranks + slots
        got = torch.bincount(ids[ids >= 0], minlength=num_ranks * stride).view(num_ranks, stride)
        mains = plan.home_quota.view(num_ranks, -1)
        assert torch.equal(got, torch.cat([mains, plan.slot_quota], dim=1).long())
        assert plan.imbalance < 1.05


# ---- domains --------------------------------------------------------------------------------


def _domains(rank: int, process_group: Any) -> Any:
    home = [0, 0, 1, 1, 2, 2, 3, 3]
    with _group(process_group, 8, 1, home=home, domains=[0, 0, 7, 7]) as group:
        weights = make_weights(group)
        fill_weights(group, weights, 1)
        load = torch.tensor([[90, 10, 5, 5, 80, 10, 5, 5]] * 4, dtype=torch.int32)
        plan = uec.plan_replicas(load, group=group)
        clear_slots(group)
        uec.replicate_experts(weights, plan, group=group)
        return wrong_bytes(group, plan, 1), plan.slot_expert.tolist()


def test_replicas_stay_inside_their_domain(ranks: RankPool) -> None:
    for wrong, slots in ranks.run(4, _domains):
        assert wrong == 0
        assert slots == [[-1], [0], [-1], [4]]


# ---- recorded routing -----------------------------------------------------------------------


def _trace(rank: int, process_group: Any, folder: str) -> Any:
    """Layers of the gpt-oss trace: 32 experts, 8 sources regrouped to this number of ranks."""
    counts = np.load(Path(folder) / "gptoss20b_counts_G8_tok4096_topic.npz", allow_pickle=False)
    loads = counts["counts_src"]
    wrong, replicas, before, after = 0, 0, [], []
    expert = {"w13": Segment((96, 40), torch.bfloat16), "w2": Segment((40, 49), torch.bfloat16)}
    with _group(process_group, loads.shape[-1], 2, expert=expert) as group:
        weights = group.empty_weights()
        epoch = 0
        for step, layer in itertools.product(range(0, loads.shape[0], 2), range(0, 24, 5)):
            load = loads[step, layer].reshape(group.num_ranks, -1, 32).sum(axis=1)
            plan = uec.plan_replicas(torch.from_numpy(load.astype(np.int32)), group=group)
            homes = load.sum(axis=0).reshape(group.num_ranks, -1).sum(axis=1)
            before.append(homes.max() / homes.mean())
            after.append(plan.imbalance)
            replicas += plan.num_replicas
            for mode in MODES:
                epoch += 1
                fill_weights(group, weights, epoch)
                clear_slots(group)
                uec.replicate_experts(weights, plan, group=group, mode=mode)
                wrong += wrong_bytes(group, plan, epoch)
    return wrong, replicas, float(np.mean(before)), float(np.mean(after))


@pytest.mark.trace
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_recorded_routing_replicates(ranks: RankPool, traces_dir: Path, num_ranks: int) -> None:
    for wrong, replicas, before, after in ranks.run(num_ranks, _trace, str(traces_dir)):
        assert wrong == 0
        assert replicas > 0
        assert after < 1.03 < before
