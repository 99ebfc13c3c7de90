"""Plans and reroutes on a GPU: every integer as on the host.

Each test of `streams` runs the kernels on the CPU too, with fewer and smaller cases: no GPU is
needed to know that the test itself is right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from stage_cases import Case, assert_same, order_gathers

import ultraep_comm as uec
from ultraep_comm import errors
from ultraep_comm.engines.cuda import device
from ultraep_comm.group.group import session_of

Shape = dict[str, Any]


@pytest.fixture(autouse=True)
def _gathers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.getfixturevalue("streams") == "emulated":
        found: Any = device.find_device()
        order_gathers(found, monkeypatch)


def put(case: Case, tensor: torch.Tensor) -> torch.Tensor:
    stages = session_of(case.group).engine
    assert stages is not None
    return stages.to_device(tensor)


def settle() -> None:
    device.find_device().synchronize()


def check(case: Case, most: int) -> None:
    """A load, its plan, ids and a map, in one go: the host looks when all is launched."""
    load = case.load(most)
    probs_type = [torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn]
    how: dict[str, Any] = {"target": [1.0, 1.01, 1.2][case.number(0, 2)]}
    if case.number(0, 3) == 0:
        how = {"cost": uec.PlanCost(token=2e-9, expert_byte=1e-9, replica=3e-9)}
    ids = case.ids(load, [torch.int32, torch.int64][case.number(0, 1)])
    routing = case.map(load)
    probs = torch.rand(routing.shape, generator=case.draw).to(probs_type[case.number(0, 3)])
    there = [put(case, tensor) for tensor in (load, ids, routing, probs)]
    plan = uec.plan_replicas(there[0], group=case.group, **how)
    out = uec.reroute(there[1], plan, group=case.group)
    found, physical = uec.reroute_map(there[2], there[3], plan, group=case.group)
    settle()
    here = uec.plan_replicas(load, group=case.group, **how)
    assert_same(plan, here)
    assert torch.equal(out.cpu(), uec.reroute(ids, here, group=case.group))
    expected, expected_probs = uec.reroute_map(routing, probs, here, group=case.group)
    assert physical is not None
    assert expected_probs is not None
    assert torch.equal(found.cpu(), expected)
    assert torch.equal(physical.cpu().view(torch.uint8), expected_probs.view(torch.uint8))


@pytest.mark.parametrize("block", range(4))
def test_random_groups(streams: str, block: int) -> None:
    groups, loads = (50, 20) if streams == "cuda" else (3, 2)
    for seed in range(block * groups, (block + 1) * groups):
        case = Case(seed)
        for turn in range(loads):
            check(case, 9 if turn % 2 else 40)
        case.close()


@pytest.mark.parametrize(
    ("num_ranks", "num_experts", "slots", "most"),
    [(8, 64, 2, 400), (64, 256, 2, 90), (32, 128, 1, 600), (16, 384, 3, 200)],
)
def test_sizes_of_real_groups(
    streams: str, num_ranks: int, num_experts: int, slots: int, most: int
) -> None:
    if streams == "emulated":
        num_ranks, num_experts, most = min(num_ranks, 16), num_experts // 8, 3
    case = Case(0, num_ranks=num_ranks, num_experts=num_experts, slots=slots)
    for _ in range(200 if streams == "cuda" else 2):
        check(case, most)
    case.close()


def test_more_ids_than_a_window_of_runs_has(streams: str) -> None:
    case = Case(0, num_ranks=4, num_experts=32, slots=2)
    for most in (12_000, 40_000) if streams == "cuda" else (8,):
        load = case.load(most)
        ids = case.ids(load)
        plan = uec.plan_replicas(put(case, load), group=case.group)
        out = uec.reroute(put(case, ids), plan, group=case.group)
        settle()
        here = uec.plan_replicas(load, group=case.group)
        assert torch.equal(out.cpu(), uec.reroute(ids, here, group=case.group))
    case.close()


def test_gradients(streams: str) -> None:
    case = Case(5, num_ranks=4, num_experts=12, slots=2)
    for _ in range(20 if streams == "cuda" else 2):
        load = case.load(12)
        routing = case.map(load)
        probs = torch.rand(routing.shape, generator=case.draw)
        here = uec.plan_replicas(load, group=case.group)
        plan = uec.plan_replicas(put(case, load), group=case.group)
        grads = []
        upstream = torch.rand(
            routing.shape[0],
            case.num_ranks * case.group.topology.instances_per_rank,
            generator=case.draw,
        )
        for own, given, where in (
            (probs.clone(), routing, here),
            (put(case, probs), put(case, routing), plan),
        ):
            own.requires_grad_()
            _, physical = uec.reroute_map(given, own, where, group=case.group)
            assert physical is not None
            physical.backward(upstream.to(physical.device))
            assert own.grad is not None
            grads.append(own.grad.cpu())
        assert torch.equal(*grads)
    case.close()


def _capture(streams: str, call: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
    """Return what the captured call returned, and how to replay it."""
    if streams == "emulated":
        found: Any = device.find_device()
        found.begin_capture()
        result = call()
        captured = found.end_capture()
        return result, lambda: found.replay(captured)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return result, graph.replay


def test_a_graph_plans_and_reroutes_anew_in_every_replay(streams: str) -> None:
    case = Case(7, num_ranks=4, num_experts=16, slots=2)
    most = 90 if streams == "cuda" else 4
    # Room for the heaviest source.
    load = put(case, torch.zeros(4, 16, dtype=torch.int32))
    ids = put(case, torch.full((16 * 3 * most + 3, 1), -1))

    def call() -> tuple[uec.Plan, torch.Tensor]:
        plan = uec.plan_replicas(load, group=case.group)
        return plan, uec.reroute(ids, plan, group=case.group)

    call()  # there is working memory from now on
    settle()
    (plan, out), replay = _capture(streams, call)
    for _ in range(50 if streams == "cuda" else 5):
        fresh = case.load(most)
        fresh_ids = case.ids(fresh, torch.int64)
        fresh_ids = torch.cat([fresh_ids, fresh_ids.new_full((len(ids) - len(fresh_ids), 1), -1)])
        load.copy_(fresh)
        ids.copy_(fresh_ids)
        replay()
        settle()
        here = uec.plan_replicas(fresh, group=case.group)
        assert_same(plan, here)
        assert torch.equal(out.cpu(), uec.reroute(fresh_ids, here, group=case.group))
        check(case, 5)  # between replays the memory serves other plans
    load.fill_(-1)
    replay()
    settle()
    with pytest.raises(errors.InvalidLoadError, match="expert 0"):
        uec.plan_replicas(fresh, group=case.group)
    case.close()


def test_faults_surface_and_leave_nothing_behind(streams: str) -> None:
    case = Case(0, num_ranks=2, num_experts=4, slots=1)
    load = case.load(9)
    ids = case.ids(load)
    bad = ids.clone()
    bad[0] = 5
    plan = uec.plan_replicas(put(case, load), group=case.group)
    out = uec.reroute(put(case, bad), plan, group=case.group)
    settle()
    assert int(out[0]) == -1
    with pytest.raises(errors.InvalidLoadError, match="id 5 at position 0"):
        uec.reroute(put(case, ids), plan, group=case.group)
    check(case, 9)
    uec.plan_replicas(put(case, torch.full_like(load, -1)), group=case.group)
    with pytest.raises(errors.InvalidLoadError, match="expert 0"):
        case.group.close()
    case.close()
