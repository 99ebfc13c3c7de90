"""Planner, schedule and reroute at the size of a rack."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from ultraep_comm import Plan, _core, plan_replicas
from ultraep_comm.bench.skew import generate_load
from ultraep_comm.planner import plan_slots
from ultraep_comm.topology import contiguous_home

G, E, S = 64, 256, 2
TOKENS, TOPK = 4096, 8


@pytest.fixture(scope="module", params=[1.5, 2.0, 3.0], ids="imbalance{}".format)
def load(request: pytest.FixtureRequest) -> torch.Tensor:
    made = generate_load(
        num_ranks=G, num_experts=E, imbalance=request.param, num_tokens=G * TOKENS * TOPK, seed=1
    )
    return torch.from_numpy(made)


def test_planner_core(benchmark: Callable, load: torch.Tensor) -> None:
    total = load.sum(dim=0).numpy()
    home, domain = contiguous_home(E, G), np.zeros(G, np.int32)
    slot_expert, _, _ = benchmark(_core.plan_replicas, total, home, domain, S, False, 1_010_000)
    assert (slot_expert >= 0).any()


def test_planner_api(benchmark: Callable, load: torch.Tensor) -> None:
    plan = benchmark(plan_replicas, load, slots_per_rank=S, num_ranks=G)
    assert plan.imbalance < 1.02


def test_planner_numpy(benchmark: Callable, load: torch.Tensor) -> None:
    slot_expert, _, _ = benchmark(
        plan_slots,
        load.sum(dim=0).numpy(),
        num_ranks=G,
        slots_per_rank=S,
        home=contiguous_home(E, G),
        domain=np.zeros(G, np.int32),
    )
    assert (slot_expert >= 0).any()


@pytest.mark.parametrize("mode", [0, 1, 2], ids=["push", "pull", "direct"])
def test_schedule(benchmark: Callable, load: torch.Tensor, mode: int) -> None:
    plan = plan_replicas(load, slots_per_rank=S, num_ranks=G)
    schedule = benchmark(
        _core.make_schedule,
        slot_expert=plan.slot_expert.flatten().tolist(),
        home=plan.home.tolist(),
        domain=[0] * G,
        slots_per_rank=S,
        allow_cross_domain=False,
        segment_bytes=[25 << 20, 12 << 20],
        tile_bytes=64 << 10,
        mode=mode,
        may_pull=True,
        cost=[80_000, 60_000, 300_000, 10_000_000, G],
    )
    assert schedule["mode"] == mode


def test_reroute(benchmark: Callable) -> None:
    rng = np.random.default_rng(1)
    ids = rng.zipf(1.4, (G, TOKENS, TOPK)) % E
    load = np.stack([np.bincount(row.ravel(), minlength=E) for row in ids]).astype(np.int32)
    plan = plan_replicas(torch.from_numpy(load), slots_per_rank=S, num_ranks=G)
    mine = torch.from_numpy(ids[0])
    out = torch.empty_like(mine)
    status = benchmark(_core.reroute, mine, *_plan_arrays(plan), 0, out)
    assert status.fault is _core.RerouteFault.NONE


def _plan_arrays(plan: Plan) -> list[torch.Tensor]:
    arrays = [plan.load, plan.slot_expert, plan.slot_quota, plan.home_quota, plan.home]
    assert all(array is not None for array in arrays)
    return arrays
