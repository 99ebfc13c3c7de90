"""The planner at the size of a rack: the core and the call."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from rack import IMBALANCES, E, G, S, make_load

from ultraep_comm import _core, plan_replicas
from ultraep_comm.plan.topology import Topology, contiguous_home


@pytest.fixture(scope="module", params=IMBALANCES, ids="imbalance{}".format)
def load(request: pytest.FixtureRequest) -> torch.Tensor:
    return make_load(request.param)


@pytest.mark.benchmark(group="plan: core")
def test_planner_core(benchmark: Callable, load: torch.Tensor) -> None:
    total = load.sum(dim=0).numpy()
    home, domain = contiguous_home(E, G), np.zeros(G, np.int32)
    slot_expert, _, _ = benchmark(_core.plan_replicas, total, home, domain, S, False, 1_010_000)
    assert (slot_expert >= 0).any()


@pytest.mark.benchmark(group="plan: plan_replicas")
def test_planner_api(benchmark: Callable, load: torch.Tensor) -> None:
    topology = Topology.make(num_ranks=G, num_experts=E, slots_per_rank=S)
    plan = benchmark(plan_replicas, load, topology=topology)
    assert plan.imbalance < 1.02
