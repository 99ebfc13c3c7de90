"""Plans and reroutes on a GPU: every integer as on the host.

Each test of `streams` runs the kernels on the CPU too, with fewer and smaller cases: no GPU is
needed to know that the test itself is right.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graphs import MAKERS
from loopback_ranks import put
from stage_cases import Case, assert_same

import ultraep_comm as uec
from ultraep_comm import errors
from ultraep_comm.engines.cuda import device
from ultraep_comm.group.group import is_on_device

Shape = dict[str, Any]


def synchronize() -> None:
    device.find_device().synchronize()


def check(case: Case, most: int) -> None:
    """A load, its plan, ids and a map, in one go: the host looks when all is launched."""
    load = case.load(most)
    probs_type = [torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn]
    how: dict[str, Any] = {"target": [1.0, 1.01, 1.2][case.number(0, 2)]}
    if case.number(0, 3) == 0:
        how = {"cost": uec.PlanCost(token=2e-9, expert_byte=1e-9, replica=3e-9)}
    types = [torch.int32, torch.int64]
    ids = case.ids(load, types[case.number(0, 1)])
    routing = case.map(load)
    probs = torch.rand(routing.shape, generator=case.draw).to(probs_type[case.number(0, 3)])
    there = [put(case.group, tensor) for tensor in (load.to(types[most % 2]), ids, routing, probs)]
    sums = load.sum(dim=0, dtype=torch.int32)
    for_all = uec.plan_replicas(put(case.group, sums), group=case.group, **how)
    plan = uec.plan_replicas(there[0], group=case.group, **how)
    out = uec.reroute(there[1], plan, group=case.group)
    found, physical = uec.reroute_map(there[2], there[3], plan, group=case.group)
    alone, nothing = uec.reroute_map(there[2], None, plan, group=case.group)
    synchronize()
    there[0].fill_(77)  # the plan's own load stays
    here = uec.plan_replicas(load, group=case.group, **how)
    assert_same(plan, here)
    assert_same(for_all, uec.plan_replicas(sums, group=case.group, **how))
    for tensor in (plan.slot_expert, out, found):
        assert is_on_device(tensor, case.group)
    assert (out.shape, out.dtype) == (ids.shape, ids.dtype)
    assert torch.equal(out.cpu(), uec.reroute(ids, here, group=case.group))
    expected, expected_probs = uec.reroute_map(routing, probs, here, group=case.group)
    assert physical is not None
    assert expected_probs is not None
    assert nothing is None
    assert torch.equal(found.cpu(), expected)
    assert torch.equal(alone, found)
    assert physical.dtype == probs.dtype
    assert torch.equal(physical.cpu().view(torch.uint8), expected_probs.view(torch.uint8))


@pytest.mark.parametrize("block", range(4))
def test_random_groups(streams: str, block: int) -> None:
    groups, loads = (50, 20) if streams == "cuda" else (6, 2)
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
        plan = uec.plan_replicas(put(case.group, load), group=case.group)
        out = uec.reroute(put(case.group, ids), plan, group=case.group)
        synchronize()
        here = uec.plan_replicas(load, group=case.group)
        assert torch.equal(out.cpu(), uec.reroute(ids, here, group=case.group))
    case.close()


def test_gradients(streams: str) -> None:
    case = Case(5, num_ranks=4, num_experts=12, slots=2)
    for turn in range(20 if streams == "cuda" else 4):
        load = case.load(12)
        routing = case.map(load)
        dtype = (torch.float32, torch.bfloat16)[turn % 2]
        probs = torch.rand(routing.shape, generator=case.draw).to(dtype)
        here = uec.plan_replicas(load, group=case.group)
        plan = uec.plan_replicas(put(case.group, load), group=case.group)
        grads = []
        upstream = torch.rand(
            routing.shape[0],
            case.num_ranks * case.group.topology.instances_per_rank,
            generator=case.draw,
        ).to(dtype)
        for own, given, where in (
            (probs.clone(), routing, here),
            (put(case.group, probs), put(case.group, routing), plan),
        ):
            own.requires_grad_()
            found, physical = uec.reroute_map(given, own, where, group=case.group)
            assert physical is not None
            assert (found.requires_grad, physical.requires_grad) == (False, True)
            physical.backward(upstream.to(physical.device))
            assert own.grad is not None
            grads.append(own.grad.cpu())
            with torch.no_grad():
                _, plain = uec.reroute_map(given, own, where, group=case.group)
            assert plain is not None
            assert not plain.requires_grad
        assert torch.equal(*grads)
        # The operator's backward recomputes where tokens went.
        again = torch.ops.ultraep_comm.reroute_map_backward(
            upstream.to(plain.device),
            given,
            *(plan.slot_expert, plan.home, plan.slot_quota, plan.home_quota, plan.load),
            case.group.name,
        )
        synchronize()
        assert torch.equal(again.cpu(), grads[0])
        assert torch.equal(plain, physical.detach())
    case.close()


def test_a_graph_plans_and_reroutes_anew_in_every_replay(streams: str) -> None:
    case = Case(7, num_ranks=4, num_experts=16, slots=2)
    most = 90 if streams == "cuda" else 4
    # Room for the heaviest source.
    load = put(case.group, torch.zeros(4, 16, dtype=torch.int32))
    ids = put(case.group, torch.full((16 * 3 * most + 3, 1), -1))
    routing = put(case.group, torch.zeros(3 * most + 3, 16, dtype=torch.bool))
    probs = put(case.group, torch.zeros(routing.shape))

    def call() -> tuple[uec.Plan, torch.Tensor, torch.Tensor, torch.Tensor]:
        plan = uec.plan_replicas(load, group=case.group)
        out = uec.reroute(ids, plan, group=case.group)
        found, physical = uec.reroute_map(routing, probs, plan, group=case.group)
        assert physical is not None
        return plan, out, found, physical

    call()  # there is working memory from now on
    synchronize()
    graphs = MAKERS["torch" if streams == "cuda" else "emulated"]()
    (plan, out, found, physical), replay = graphs.capture(call)
    for _ in range(50 if streams == "cuda" else 5):
        fresh = case.load(most)
        fresh_ids = case.ids(fresh, torch.int64)
        fresh_ids = torch.cat([fresh_ids, fresh_ids.new_full((len(ids) - len(fresh_ids), 1), -1)])
        fresh_map = torch.zeros(routing.shape, dtype=torch.bool)
        for expert, count in enumerate(fresh[case.rank].tolist()):
            fresh_map[:count, expert] = True
        fresh_probs = torch.rand(probs.shape, generator=case.draw)
        load.copy_(fresh)
        ids.copy_(fresh_ids)
        routing.copy_(fresh_map)
        probs.copy_(fresh_probs)
        replay()
        synchronize()
        here = uec.plan_replicas(fresh, group=case.group)
        assert_same(plan, here)
        assert torch.equal(out.cpu(), uec.reroute(fresh_ids, here, group=case.group))
        expected = uec.reroute_map(fresh_map, fresh_probs, here, group=case.group)
        assert torch.equal(found.cpu(), expected[0])
        assert torch.equal(physical.cpu(), expected[1])
        check(case, 5)  # between replays the memory serves other plans
    load.fill_(-1)
    replay()
    synchronize()
    with pytest.raises(errors.InvalidLoadError, match="expert 0"):
        uec.plan_replicas(fresh, group=case.group)
    case.close()


def test_faults_surface_and_leave_nothing_behind(streams: str) -> None:
    case = Case(0, num_ranks=2, num_experts=4, slots=1)
    load = case.load(9)
    ids = case.ids(load)
    bad = ids.clone()
    bad[0] = 5
    plan = uec.plan_replicas(put(case.group, load), group=case.group)
    out = uec.reroute(put(case.group, bad), plan, group=case.group)
    synchronize()
    assert int(out[0]) == -1
    with pytest.raises(errors.InvalidLoadError, match="id 5 at position 0"):
        uec.reroute(put(case.group, ids), plan, group=case.group)
    check(case, 9)
    uec.plan_replicas(put(case.group, torch.full_like(load, -1)), group=case.group)
    with pytest.raises(errors.InvalidLoadError, match="expert 0"):
        case.group.close()
    case.close()
