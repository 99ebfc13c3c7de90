"""Prefetch for a forecast of the load: the exact plan moves what it missed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bank_cases import (
    E,
    S,
    check_residents,
    filled_weights,
    new_groups,
    plan_of,
    replicate,
    stored,
)
from ranks import close_all, raised, random_plan, start_all, synchronize_all

import ultraep_comm as uec
from ultraep_comm import errors


def _loads(num_ranks: int, steps: int, seed: int = 3) -> list[torch.Tensor]:
    """Return loads of one layer that drift."""
    generator = torch.Generator().manual_seed(seed)
    level = torch.randn(E, generator=generator)
    loads = []
    for _ in range(steps):
        level = 0.95 * level + 0.3 * torch.randn(E, generator=generator)
        share = torch.softmax(2 * level, 0)
        noise = torch.randint(0, 20, (num_ranks, E), generator=generator)
        loads.append((share * 4000).int()[None] + noise.int())
    return loads


@pytest.mark.parametrize("method", ["last", "mean", lambda loads: loads[-1].flip(0)])
def test_the_exact_plan_moves_what_the_forecast_missed(method: Any) -> None:
    num_ranks = 4
    groups = new_groups(num_ranks)
    weights = filled_weights(groups, 0)
    forecasts = [uec.LoadForecast(method) for _ in groups]
    fetched, missed = [], []
    for step, load in enumerate(_loads(num_ranks, 8)):
        other = random_plan(step, num_ranks, E, S).slot_expert.tolist()
        replicate(groups, weights, plan_of(other, bank=1))  # another layer shares the bank
        before = stored(groups)
        works = [
            uec.prefetch_experts(weights[r], forecasts[r], bank=1, group=groups[r], async_op=True)
            for r in range(num_ranks)
        ]
        plans = [uec.plan_replicas(load, group=group, bank=1, reuse=True) for group in groups]
        exact = start_all(groups, weights, plans)  # while the prefetch is under way
        synchronize_all(exact)
        for work in works:
            assert (work is None) == (not fetched)
            assert work is None or work.is_completed()
        missed.append(plans[0].num_slots_to_fill)
        fetched.append(stored(groups) - before - missed[-1])
        assert plans[0].imbalance <= max(1.01, uec.plan_replicas(load, group=groups[0]).imbalance)
        for group in groups:
            check_residents(group.banks[1], group.rank)
        for forecast in forecasts:
            forecast.update(load)
    assert fetched[0] == 0
    assert sum(fetched) > 0
    close_all(groups)


def test_a_forecast_that_comes_true_leaves_nothing_to_move() -> None:
    groups = new_groups(4)
    weights, (load,) = filled_weights(groups, 0), _loads(4, 1)
    for group in groups:
        own = weights[group.rank]
        uec.prefetch_experts(own, load, bank=group.banks[0], group=group, async_op=True)
    plan = uec.plan_replicas(load, group=groups[0], reuse=True)
    assert plan.num_slots_to_fill == 0
    assert plan.num_replicas > 0
    replicate(groups, weights, plan)
    assert stored(groups) == plan.num_replicas  # by the prefetch
    close_all(groups)


def test_a_bad_forecast_is_told_to_the_peers() -> None:
    groups = new_groups(2)
    weights = filled_weights(groups, 0)
    load = torch.tensor([900] + [1] * (E - 1))  # rank 1 is to have expert 0
    work = uec.prefetch_experts(weights[1], load, bank=0, group=groups[1], async_op=True)
    with pytest.raises(errors.InvalidLoadError, match="shape"):
        uec.prefetch_experts(weights[0], torch.ones(E + 1).int(), bank=0, group=groups[0])
    assert work is not None
    with pytest.raises(errors.PeerRejectedError):
        work.synchronize()
    for group in groups:
        raised(group.close)
