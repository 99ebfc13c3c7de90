"""Physical ids of a rank's tokens: from ids, and from a routing map."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from rack import TOPK, E, G, S

from ultraep_comm import Plan, _core, plan_replicas, reroute_map
from ultraep_comm.plan.topology import Topology
from ultraep_comm.testing import new_loopback_groups

ROUTED = 8192  # tokens of the rank that reroutes


@pytest.fixture(scope="module")
def routing_map() -> torch.Tensor:
    """TOPK of E experts for each token, expert e with a weight of (1 + e) ** -0.5."""
    rng = np.random.default_rng(1)
    keys = rng.gumbel(size=(ROUTED, E)) - 0.5 * np.log1p(np.arange(E))
    chosen = torch.from_numpy(keys).topk(TOPK).indices
    return torch.zeros((ROUTED, E), dtype=torch.bool).scatter_(1, chosen, True)


def _plan_for(routing_map: torch.Tensor) -> Plan:
    """Plan for ranks that all have the same load."""
    load = routing_map.sum(dim=0).expand(G, E)
    topology = Topology.make(num_ranks=G, num_experts=E, slots_per_rank=S)
    return plan_replicas(load, topology=topology)


@pytest.mark.benchmark(group="reroute: ids")
@pytest.mark.parametrize("rank", [0, G - 1])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_reroute(
    benchmark: Callable, routing_map: torch.Tensor, dtype: torch.dtype, rank: int
) -> None:
    order = np.random.default_rng(2).permuted(np.tile(np.arange(TOPK), (ROUTED, 1)), axis=1)
    experts = routing_map.nonzero()[:, 1].view(ROUTED, TOPK)
    ids = experts.gather(1, torch.from_numpy(order)).to(dtype).numpy()
    out = np.empty_like(ids)
    arrays = _plan_arrays(_plan_for(routing_map))
    status = benchmark(_core.reroute, ids, *arrays, rank, out)
    assert status.fault is _core.RerouteFault.NONE


@pytest.mark.benchmark(group="reroute: shares")
def test_reroute_shares_alone(benchmark: Callable, routing_map: torch.Tensor) -> None:
    plan = _plan_for(routing_map)
    nothing = np.empty(0, np.int32)
    status = benchmark(_core.reroute, nothing, *_plan_arrays(plan), G - 1, nothing)
    assert status.fault is _core.RerouteFault.COUNT_MISMATCH  # found last


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Torch on one core, for steady figures."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.benchmark(group="reroute: map")
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16], ids=str)
def test_reroute_map(
    benchmark: Callable, routing_map: torch.Tensor, dtype: torch.dtype | None
) -> None:
    probs = None if dtype is None else torch.rand(routing_map.shape).to(dtype)
    plan = _plan_for(routing_map)
    groups = new_loopback_groups(
        G, num_experts=E, slots_per_rank=S, expert={"w": ((1,), torch.float32)}
    )
    physical_map, _ = benchmark(reroute_map, routing_map, probs, plan, group=groups[0])
    assert physical_map.sum() == ROUTED * TOPK
    for group in groups:
        group.close()


def _plan_arrays(plan: Plan) -> list[np.ndarray]:
    arrays = [plan.load, plan.slot_expert, plan.slot_quota, plan.home_quota, plan.home]
    return [array.numpy() for array in arrays if array is not None]
