"""replicate_experts across real processes: domains, and recorded routings."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import (
    MIXED,
    RankPool,
    clear_slots,
    fill_weights,
    make_weights,
    wrong_bytes,
)

import ultraep_comm as uec
from ultraep_comm import Segment

MODES = ["push", "pull", "direct", "auto"]


def _group(process_group: Any, num_experts: int, slots: int, **options: Any) -> uec.Group:
    options = {"expert": MIXED, "timeout": 20.0, **options}
    return uec.new_group(process_group, num_experts=num_experts, slots_per_rank=slots, **options)


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
