"""Plans and reroutes on the device, from the Python API to the kernels on an emulated device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cpp_build import CppBuild
from emulated_device import EmulatedDevice
from stage_cases import EXPERT, FIELDS, Case, assert_same, order_gathers

import ultraep_comm as uec
from ultraep_comm import errors, tracing
from ultraep_comm.cuda import device as device_module
from ultraep_comm.cuda import kernels as kernels_module
from ultraep_comm.cuda import stages as stages_module


@pytest.fixture(scope="module")
def library(cpp: CppBuild) -> Path:
    return cpp.build("cpu", "emulated_device") / "tests" / "libemulated_device.so"


@pytest.fixture
def device(library: Path, monkeypatch: pytest.MonkeyPatch) -> EmulatedDevice:
    emulated = EmulatedDevice(library)
    monkeypatch.setattr(device_module, "find_device", lambda: emulated)
    monkeypatch.setattr(kernels_module, "load_kernels", lambda device, nvshmem: emulated.kernels)
    order_gathers(emulated, monkeypatch)
    monkeypatch.setattr(stages_module, "MIN_RUNS", 4)
    return emulated


# ---- plans --------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(24))
def test_plans_are_those_of_the_host(device: EmulatedDevice, seed: int) -> None:
    case = Case(seed)
    for turn in range(4):
        load = case.load(9 if turn % 2 else 5000)
        given = load.sum(dim=0, dtype=torch.int32) if turn == 2 else load
        how: dict[str, Any] = {"target": [1.0, 1.01, 1.2][seed % 3]}
        if turn == 3:
            how = {"cost": uec.PlanCost(token=2e-9, expert_byte=1e-9, replica=3e-9)}
        dtype = torch.int64 if seed % 2 and turn < 2 else torch.int32
        on_device = device.put(given.to(dtype))
        assert on_device.dtype == dtype
        plan = uec.plan_replicas(on_device, group=case.group, **how)
        assert device.holds(plan.slot_expert)
        device.settle()
        assert_same(plan, uec.plan_replicas(given, group=case.group, **how))
        on_device.fill_(77)  # the plan's own load stays
        if turn != 2:
            assert plan.load is not None
            assert torch.equal(plan.load, load)
    case.close()


def test_a_plan_is_in_the_order_of_the_current_stream(device: EmulatedDevice) -> None:
    case = Case(0, num_ranks=3, num_experts=6, slots=2)
    load, fresh = device.put(torch.zeros(3, 6, dtype=torch.int32)), case.load(100)
    device.delay(20_000)
    device.copy(load, fresh)
    plan = uec.plan_replicas(load, group=case.group)
    device.copy(load, device.put(torch.zeros_like(fresh)))
    device.settle()
    assert_same(plan, uec.plan_replicas(fresh, group=case.group))
    case.close()


def test_tensors_of_a_plan_have_one_memory_and_are_aligned(device: EmulatedDevice) -> None:
    case = Case(0, num_ranks=3, num_experts=5, slots=1)
    plan = uec.plan_replicas(device.put(case.load()), group=case.group)
    own = [plan.slot_expert, plan.slot_quota, plan.home_quota, plan.load]
    assert len({t.untyped_storage().data_ptr() for t in own if t is not None}) == 1
    assert all(t is not None and t.storage_offset() % 4 == 0 for t in own)
    again = uec.plan_replicas(device.put(case.load()), group=case.group)
    assert again.home.data_ptr() == plan.home.data_ptr()
    case.close()


def test_loads_that_are_not_dense_are_copied(device: EmulatedDevice) -> None:
    case = Case(0, num_ranks=3, num_experts=5, slots=1)
    load = case.load()
    plan = uec.plan_replicas(device.put(load.T).T, group=case.group)
    device.settle()
    assert_same(plan, uec.plan_replicas(load, group=case.group))
    case.close()


@pytest.mark.parametrize(
    ("dtype", "values", "text"),
    [
        (torch.int32, {(1, 3): -1}, "entry for expert 3"),
        (torch.int64, {(0, 2): 2**31}, "entry for expert 2"),
        (torch.int64, {(0, 2): 2**32}, "entry for expert 2"),  # 0, in 32 bits
        (torch.int64, {(0, 2): -(2**32)}, "entry for expert 2"),
        (torch.int32, {(0, 5): 2**31 - 1, (1, 5): 1}, "more than 2147483647 tokens for expert 5"),
    ],
)
def test_faults_of_a_load_surface_at_the_next_call(
    device: EmulatedDevice,
    dtype: torch.dtype,
    values: dict[tuple[int, int], int],
    text: str,
) -> None:
    case = Case(0, num_ranks=2, num_experts=6, slots=1)
    good = torch.ones(2, 6, dtype=dtype)
    bad = good.clone()
    for at, value in values.items():
        bad[at] = value
    plan = uec.plan_replicas(device.put(bad), group=case.group)
    device.settle()
    assert plan.num_replicas == 0
    assert plan.imbalance == 1.0
    for other in case.groups:
        if other is not case.group:
            uec.plan_replicas(good, group=other)  # its ranks do not hear of it
    with pytest.raises(errors.InvalidLoadError, match=text):
        uec.plan_replicas(good, group=case.group)
    uec.plan_replicas(good, group=case.group)  # once is enough
    uec.plan_replicas(device.put(bad), group=case.group)
    with pytest.raises(errors.InvalidLoadError, match=f"rank {case.rank}: .*{text}"):
        case.group.close()
    case.close()


def test_too_many_tokens_in_all(device: EmulatedDevice) -> None:
    case = Case(0, num_ranks=1, num_experts=600, slots=1)
    uec.plan_replicas(
        device.put(torch.full((600,), 2**31 - 1, dtype=torch.int32)), group=case.group
    )
    with pytest.raises(errors.InvalidLoadError, match="1099511627775 tokens in all"):
        case.group.close()


def test_a_fault_fails_the_next_collective_call_on_every_rank(device: EmulatedDevice) -> None:
    case = Case(0, num_ranks=2, num_experts=2, slots=1)
    uec.plan_replicas(device.put(torch.tensor([-1, 0], dtype=torch.int32)), group=case.groups[0])
    device.settle()
    plan = uec.Plan.from_slots([[1], [0]], num_experts=2)
    weights = {"w": torch.zeros(1, 4, dtype=torch.uint8)}
    with pytest.raises(errors.InvalidLoadError):
        uec.replicate_experts(weights, plan, group=case.groups[0])
    with pytest.raises(errors.PeerRejectedError):
        uec.replicate_experts(weights, plan, group=case.groups[1])
    case.close()


def test_arguments_are_checked_at_once(device: EmulatedDevice) -> None:
    case = Case(0, num_ranks=2, num_experts=4, slots=1)
    load = device.put(torch.ones(2, 4, dtype=torch.int32))
    with pytest.raises(errors.InvalidLoadError, match="shape"):
        uec.plan_replicas(device.put(load[:, :3]), group=case.group)
    with pytest.raises(errors.InvalidLoadError, match="int32 or int64"):
        uec.plan_replicas(device.put(load.float()), group=case.group)
    with pytest.raises(errors.InvalidArgumentError, match="target"):
        uec.plan_replicas(load, group=case.group, target=0.9)
    ids = device.put(torch.zeros(2, 1, dtype=torch.int64))
    sums = uec.plan_replicas(device.put(load.sum(dim=0, dtype=torch.int32)), group=case.group)
    with pytest.raises(errors.InvalidPlanError, match="cannot be rerouted"):
        uec.reroute(ids, sums, group=case.group)
    other = uec.Plan(
        slot_expert=device.put(torch.full((2, 1), -1, dtype=torch.int32)),
        home=device.put(torch.zeros(3, dtype=torch.int32)),
    )
    with pytest.raises(errors.InvalidPlanError, match="2 ranks, 1 slots and 3 experts"):
        uec.reroute(ids, other, group=case.group)
    with pytest.raises(errors.InvalidLoadError, match="int32 or int64"):
        uec.reroute(device.put(ids.float()), sums, group=case.group)
    case.close()


def test_groups_that_are_too_large_plan_on_the_cpu(device: EmulatedDevice) -> None:
    launched: list[int] = []

    def handle(name: str, shared_bytes: int) -> int:
        if name == "ultraep_plan":
            launched.append(shared_bytes)
        return int(type(device.kernels).handle(device.kernels, name, shared_bytes))

    small = Case(0, num_ranks=2, num_experts=4, slots=1)
    shape = small.group._stages._shape  # type: ignore[union-attr]
    small.close()
    device.kernels.handle = handle  # type: ignore[method-assign]
    for warps in (8, 3, 1):
        device.max_shared_bytes = shape.plan_shared_bytes(warps)
        stages_module.CudaStages(device, device.kernels, small.group.topology, 0)
    assert launched == [shape.plan_shared_bytes(n) for n in (8, 3, 1)]
    device.max_shared_bytes = 100
    stages = stages_module.CudaStages(device, device.kernels, small.group.topology, 0)
    assert len(launched) == 3
    load = device.put(torch.ones(2, 4, dtype=torch.int32))
    with pytest.raises(errors.UnsupportedError, match=r"plan on the CPU: plan_replicas\(load\.cpu"):
        stages.plan(load, 1_010_000, None)
    plan = uec.plan_replicas(load.clone(), slots_per_rank=1)
    with pytest.raises(errors.UnsupportedError, match="reroute on the CPU"):
        stages.reroute(device.put(torch.zeros(1, 1, dtype=torch.int32)), plan)


# ---- reroutes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(16))
def test_ids_are_those_of_the_host(device: EmulatedDevice, seed: int) -> None:
    case = Case(seed)
    for _ in range(4):
        load = case.load(case.number(0, 12))
        plan = uec.plan_replicas(device.put(load), group=case.group)
        ids = case.ids(load, [torch.int32, torch.int64][case.number(0, 1)])
        out = uec.reroute(device.put(ids), plan, group=case.group)
        assert device.holds(out)
        assert (out.shape, out.dtype) == (ids.shape, ids.dtype)
        device.settle()
        on_host = uec.plan_replicas(load, group=case.group)
        assert torch.equal(out, uec.reroute(ids, on_host, group=case.group))
    case.close()


@pytest.mark.parametrize("seed", range(12))
def test_maps_are_those_of_the_host(device: EmulatedDevice, seed: int) -> None:
    case = Case(seed)
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn]
    for turn in range(3):
        load = case.load(case.number(0, 6))
        plan = uec.plan_replicas(device.put(load), group=case.group)
        on_host = uec.plan_replicas(load, group=case.group)
        routing = case.map(load)
        probs = None
        if turn != 2:
            probs = torch.rand(routing.shape, generator=case.draw).to(dtypes[seed % 4])
        given = None if probs is None else device.put(probs)
        found, physical = uec.reroute_map(device.put(routing), given, plan, group=case.group)
        device.settle()
        expected, expected_probs = uec.reroute_map(routing, probs, on_host, group=case.group)
        assert device.holds(found)
        assert torch.equal(found, expected)
        assert (physical is None) == (expected_probs is None)
        if physical is not None and expected_probs is not None:
            assert physical.dtype == expected_probs.dtype
            assert torch.equal(physical.view(torch.uint8), expected_probs.view(torch.uint8))
    case.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(4))
def test_gradients_are_those_of_the_host(
    device: EmulatedDevice, seed: int, dtype: torch.dtype
) -> None:
    case = Case(seed)
    load = case.load(5)
    routing = case.map(load)
    probs = torch.rand(routing.shape, generator=case.draw).to(dtype)
    on_host = uec.plan_replicas(load, group=case.group)
    plan = uec.plan_replicas(device.put(load), group=case.group)
    before = probs.clone().requires_grad_()
    _, physical = uec.reroute_map(routing, before, on_host, group=case.group)
    assert physical is not None
    upstream = torch.rand(physical.shape, generator=case.draw).to(dtype)
    physical.backward(upstream)
    own, where = device.put(probs).requires_grad_(), device.put(routing)
    found_map, found = uec.reroute_map(where, own, plan, group=case.group)
    assert found is not None
    assert found.requires_grad
    assert not found_map.requires_grad
    found.backward(upstream)
    assert own.grad is not None
    assert before.grad is not None
    assert torch.equal(own.grad, before.grad)
    # What the operator does: it does not keep where tokens went, and finds it again.
    again = torch.ops.ultraep_comm.reroute_map_backward(
        upstream,
        where,
        *(plan.slot_expert, plan.home, plan.slot_quota, plan.home_quota, plan.load),
        case.group.name,
    )
    assert torch.equal(again, before.grad)
    with torch.no_grad():
        _, plain = uec.reroute_map(where, own, plan, group=case.group)
    assert plain is not None
    assert not plain.requires_grad
    device.settle()
    assert torch.equal(plain, physical.detach())
    case.close()


def test_a_gradient_of_a_gradient(device: EmulatedDevice) -> None:
    case = Case(2, num_ranks=2, num_experts=4, slots=1)
    load = case.load(3)
    routing = device.put(case.map(load))
    plan = uec.plan_replicas(device.put(load), group=case.group)
    probs = device.put(torch.rand(routing.shape)).requires_grad_()
    _, physical = uec.reroute_map(routing, probs, plan, group=case.group)
    assert physical is not None
    upstream = torch.rand(physical.shape, requires_grad=True)
    (grad,) = torch.autograd.grad(physical, probs, upstream, create_graph=True)
    (back,) = torch.autograd.grad(grad.sum(), upstream)
    assert int(back.sum()) == int(routing.sum())
    case.close()


def test_no_tokens(device: EmulatedDevice) -> None:
    case = Case(0, num_ranks=2, num_experts=4, slots=1)
    plan = uec.plan_replicas(device.put(torch.zeros(2, 4, dtype=torch.int32)), group=case.group)
    none = uec.reroute(device.put(torch.zeros(0, 3, dtype=torch.int64)), plan, group=case.group)
    assert none.shape == (0, 3)
    routing = device.put(torch.zeros(0, 4, dtype=torch.bool))
    probs = device.put(torch.zeros(0, 4)).requires_grad_()
    found, physical = uec.reroute_map(routing, probs, plan, group=case.group)
    assert found.shape == (0, 6)
    assert physical is not None
    physical.sum().backward()
    assert probs.grad is not None
    assert probs.grad.shape == (0, 4)
    case.close()


def test_ids_and_maps_that_are_not_dense_are_copied(device: EmulatedDevice) -> None:
    case = Case(4, num_ranks=2, num_experts=4, slots=1)
    load = case.load(4)
    plan = uec.plan_replicas(device.put(load), group=case.group)
    on_host = uec.plan_replicas(load, group=case.group)
    ids, routing = case.ids(load), case.map(load)
    wide = device.put(torch.cat([ids, ids], dim=1))
    out = uec.reroute(wide[:, :1], plan, group=case.group)
    found, _ = uec.reroute_map(device.put(routing.T).T, None, plan, group=case.group)
    device.settle()
    assert torch.equal(out, uec.reroute(ids, on_host, group=case.group))
    assert torch.equal(found, uec.reroute_map(routing, None, on_host, group=case.group)[0])
    case.close()


def _host_error(call: Any) -> str:
    with pytest.raises(errors.InvalidArgumentError) as caught:
        call()
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize("kind", ["id", "count", "slot", "quota", "negative", "map"])
def test_faults_of_a_reroute_have_the_texts_of_the_host(device: EmulatedDevice, kind: str) -> None:
    case = Case(0, num_ranks=3, num_experts=6, slots=2)
    load = case.load(9)
    load[case.rank] += 1
    plan = uec.plan_replicas(load, group=case.group)
    ids, routing = case.ids(load), case.map(load)
    parts = {name: getattr(plan, name).clone() for name in FIELDS}
    if kind == "id":
        ids[-1] = 6
    elif kind == "count":
        ids = ids[1:]
        ids[ids == -1] = 0
    elif kind == "slot":
        parts["slot_expert"][1, 1] = 9
    elif kind == "quota":
        parts["home_quota"][3] += 1
    elif kind == "negative":
        parts["load"][2, 4] = -3
    else:
        routing[0] = ~routing[0]
    plan = uec.Plan(**parts)
    there = uec.Plan(**{name: device.put(tensor) for name, tensor in parts.items()})
    if kind == "map":
        expected = _host_error(lambda: uec.reroute_map(routing, None, plan, group=case.group))
        uec.reroute_map(device.put(routing), None, there, group=case.group)
    else:
        expected = _host_error(lambda: uec.reroute(ids, plan, group=case.group))
        out = uec.reroute(device.put(ids), there, group=case.group)
        device.settle()
        assert int(out.min()) >= -1
        assert int(out.max()) < 3 * 4
    device.settle()
    good = uec.plan_replicas(load.clamp(min=0), group=case.groups[1])
    found = _host_error(lambda: uec.reroute(case.ids(load), good, group=case.group))
    assert found == expected
    case.close()


def test_the_first_fault_stays(device: EmulatedDevice) -> None:
    case = Case(0, num_ranks=2, num_experts=4, slots=1)
    plan = uec.plan_replicas(device.put(torch.zeros(2, 4, dtype=torch.int32)), group=case.group)
    stages = case.group._stages
    assert stages is not None
    for bad in (77, 78):  # the second is made before the first is known
        stages.reroute(device.put(torch.tensor([[bad]])), plan)
    device.settle()
    with pytest.raises(errors.InvalidLoadError, match="id 77"):
        uec.reroute(device.put(torch.tensor([[-1]])), plan, group=case.group)
    case.close()


def test_mixed_inputs_are_copied(device: EmulatedDevice) -> None:
    case = Case(5, num_ranks=3, num_experts=6, slots=1)
    load = case.load(9)
    there, here = device.put(load), uec.plan_replicas(load, group=case.group)
    device.delay(20_000)
    plan = uec.plan_replicas(there, group=case.group)
    ids, routing = case.ids(load), case.map(load)
    expected = uec.reroute(ids, here, group=case.group)
    out = uec.reroute(ids, plan, group=case.group)  # waits for the plan
    assert torch.equal(out, expected)
    assert not device.holds(out)
    out = uec.reroute(device.put(ids), here, group=case.group)
    assert torch.equal(out, expected)
    assert device.holds(out)
    found, _ = uec.reroute_map(device.put(routing), None, here, group=case.group)
    assert torch.equal(found, uec.reroute_map(routing, None, plan, group=case.group)[0])
    case.close()


def test_plans_of_the_device_are_replicated(device: EmulatedDevice) -> None:
    case = Case(0, num_ranks=2, num_experts=2, slots=1)
    load = torch.tensor([[100, 1], [100, 1]], dtype=torch.int32)
    works = []
    for group in case.groups:
        plan = uec.plan_replicas(device.put(load), group=group)
        weights = {"w": torch.full((1, 4), 7 + group.rank, dtype=torch.uint8)}
        works.append(uec.replicate_experts(weights, plan, group=group, async_op=True))
    for work in works:
        assert work is not None
        work.synchronize()
    assert case.groups[1].slots["w"].tolist() == [[7] * 4]
    case.close()


# ---- order --------------------------------------------------------------------------------------


def test_launches_on_any_streams_follow_each_other(device: EmulatedDevice) -> None:
    case = Case(6, num_ranks=3, num_experts=8, slots=2)
    expected, found = [], []
    for turn in range(6):
        device.stream = 100 + turn % 3
        load = case.load(12)
        ids = case.ids(load)
        expected.append(
            uec.reroute(ids, uec.plan_replicas(load, group=case.group), group=case.group)
        )
        there = device.put(load), device.put(ids)
        if turn % 3 == 0:
            device.delay(20_000)  # the streams behind it wait
        plan = uec.plan_replicas(there[0], group=case.group)
        device.stream = 100 + (turn + 1) % 3
        found.append(uec.reroute(there[1], plan, group=case.group))
    device.settle()
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)
    case.close()


def test_closing_waits_for_launches(device: EmulatedDevice) -> None:
    case = Case(0, num_ranks=2, num_experts=4, slots=1)
    device.delay(50_000)
    uec.plan_replicas(device.put(torch.full((4,), -1, dtype=torch.int32)), group=case.group)
    with pytest.raises(errors.InvalidLoadError):
        case.group.close()
    case.close()


def test_memory_grows_and_graphs_keep_theirs(device: EmulatedDevice) -> None:
    case = Case(1, num_ranks=2, num_experts=4, slots=1)
    stages = case.group._stages
    assert stages is not None
    assert stages._stages.max_runs == 4
    for tokens in (10, 40, 150):  # of each expert
        load = torch.full((2, 4), tokens, dtype=torch.int32)
        plan = uec.plan_replicas(device.put(load), group=case.group)
        ids = case.ids(load)
        out = uec.reroute(device.put(ids), plan, group=case.group)
        device.settle()
        on_host = uec.plan_replicas(load, group=case.group)
        assert torch.equal(out, uec.reroute(ids, on_host, group=case.group))
    assert stages._stages.max_runs == 16
    case.close()


# ---- graphs -------------------------------------------------------------------------------------


def test_a_captured_graph_plans_and_reroutes_anew_in_every_replay(device: EmulatedDevice) -> None:
    case = Case(7, num_ranks=3, num_experts=8, slots=2)
    num_ids, num_tokens = 40, 12
    load = device.put(torch.zeros(3, 8, dtype=torch.int32))
    ids = device.put(torch.full((num_ids, 1), -1))
    routing = device.put(torch.zeros(num_tokens, 8, dtype=torch.bool))
    probs = device.put(torch.zeros(num_tokens, 8))
    device.begin_capture()
    plan = uec.plan_replicas(load, group=case.group)
    out = uec.reroute(ids, plan, group=case.group)
    found, physical = uec.reroute_map(routing, probs, plan, group=case.group)
    graph = device.end_capture()
    assert physical is not None
    for _ in range(5):
        fresh = case.load(5).clamp(max=9)
        here = uec.plan_replicas(fresh, group=case.group)
        fresh_ids = case.ids(fresh, torch.int64)[:num_ids]
        kept = torch.bincount(fresh_ids[fresh_ids >= 0], minlength=8).to(torch.int32)
        fresh[case.rank] = kept
        here = uec.plan_replicas(fresh, group=case.group)
        fresh_ids = torch.cat([fresh_ids, fresh_ids.new_full((num_ids - len(fresh_ids), 1), -1)])
        fresh_map = torch.zeros(num_tokens, 8, dtype=torch.bool)
        for expert, count in enumerate(kept.tolist()):
            fresh_map[:count, expert] = True
        keeps_up = int(kept.max()) <= num_tokens
        fresh_probs = torch.rand(num_tokens, 8, generator=case.draw)
        device.copy(load, fresh)
        device.copy(ids, fresh_ids)
        device.copy(routing, fresh_map)
        device.copy(probs, fresh_probs)
        device.replay(graph)
        device.settle()
        assert_same(plan, here)
        assert torch.equal(out, uec.reroute(fresh_ids, here, group=case.group))
        assert keeps_up
        expected = uec.reroute_map(fresh_map, fresh_probs, here, group=case.group)
        assert torch.equal(found, expected[0])
        assert expected[1] is not None
        assert torch.equal(physical, expected[1])
        # Between replays the rank's memory serves other plans.
        other = case.load(3)
        other_ids = case.ids(other)
        eager = uec.reroute(
            device.put(other_ids),
            uec.plan_replicas(device.put(other), group=case.group),
            group=case.group,
        )
        device.settle()
        on_host = uec.plan_replicas(other, group=case.group)
        assert torch.equal(eager, uec.reroute(other_ids, on_host, group=case.group))
    device.copy(load, device.put(torch.full_like(load, -5)))
    device.replay(graph)
    device.settle()
    with pytest.raises(errors.InvalidLoadError, match="expert 0"):
        uec.plan_replicas(torch.ones(3, 8, dtype=torch.int32), group=case.group)
    case.close()


def test_captures_order_their_own_streams_and_no_others(device: EmulatedDevice) -> None:
    case = Case(7, num_ranks=3, num_experts=8, slots=2)
    loads = [case.load(9), case.load(9)]
    ids = [case.ids(load) for load in loads]
    there = [device.put(load) for load in loads]
    ids_there = [device.put(i) for i in ids]
    uec.plan_replicas(there[0], group=case.group)  # outside, on the same stream
    device.begin_capture()
    main = device.stream
    fork = device_events(device, main, 55)
    first = uec.plan_replicas(there[0], group=case.group)
    outs = [uec.reroute(ids_there[0], first, group=case.group)]
    device.stream = 55
    second = uec.plan_replicas(there[1], group=case.group)
    outs.append(uec.reroute(ids_there[1], second, group=case.group))
    device_events(device, 55, main)
    device.stream = main
    graph = device.end_capture()
    assert fork
    outside = uec.plan_replicas(there[1], group=case.group)
    device.replay(graph)
    device.settle()
    for load, i, out in zip(loads, ids, outs, strict=True):
        here = uec.plan_replicas(load, group=case.group)
        assert torch.equal(out, uec.reroute(i, here, group=case.group))
    assert_same(outside, uec.plan_replicas(loads[1], group=case.group))
    case.close()


def device_events(device: EmulatedDevice, before: int, after: int) -> bool:
    """Make one stream wait for another, as a caller's events do."""
    import ctypes

    event = ctypes.c_void_p()
    assert device.library.cuEventCreate(ctypes.byref(event), 0) == 0
    pointer = ctypes.c_void_p
    assert device.library.cuEventRecord(event, pointer(before)) == 0
    assert device.library.cuStreamWaitEvent(pointer(after), event, 0) == 0
    return True


def test_what_cannot_be_captured_says_what_to_do(device: EmulatedDevice) -> None:
    case = Case(0, num_ranks=2, num_experts=4, slots=1)
    load = torch.full((2, 4), 100, dtype=torch.int32)
    there, here = device.put(load), uec.plan_replicas(load, group=case.group)
    ids = case.ids(load)
    ids_there, routing = device.put(ids), device.put(torch.ones(400, 4, dtype=torch.bool))
    device.begin_capture()
    plan = uec.plan_replicas(there, group=case.group)
    match = rf"call reroute\(topk_ids, plan, group=group\) with {ids.numel()} ids once before"
    with pytest.raises(errors.UnsupportedError, match=match):
        uec.reroute(ids_there, plan, group=case.group)
    with pytest.raises(errors.UnsupportedError, match=r"reroute_map\(.* with 400 tokens once"):
        uec.reroute_map(routing, None, plan, group=case.group)
    with pytest.raises(errors.UnsupportedError, match="topk_ids has to be copied"):
        uec.reroute(ids_there, here, group=case.group)
    with pytest.raises(errors.UnsupportedError, match="the plan has to be copied"):
        uec.reroute(ids, plan, group=case.group)
    device.end_capture()
    case.close()


# ---- operators ----------------------------------------------------------------------------------


def test_operators_stay_on_the_device(device: EmulatedDevice) -> None:
    case = Case(3, num_ranks=3, num_experts=8, slots=2)
    load = case.load(9)
    t = case.group.topology
    made = torch.ops.ultraep_comm.plan_replicas(
        device.put(load), t.num_ranks, t.num_experts, t.slots_per_rank, 1.01, [], case.group.name
    )
    plan = uec.plan_replicas(device.put(load), group=case.group)
    # A graph may write to what an operator has returned.
    assert made[3].data_ptr() != plan.home.data_ptr()
    assert made[4].data_ptr() != plan.domains.data_ptr()  # type: ignore[union-attr]
    slot_expert, slot_quota, home_quota, home, _ = made
    ids, routing = case.ids(load), case.map(load)
    fields = (slot_expert, home, slot_quota, home_quota, device.put(load), case.group.name)
    out = torch.ops.ultraep_comm.reroute(device.put(ids), *fields)
    assert device.holds(out)
    width = t.num_ranks * t.instances_per_rank
    physical, found = torch.ops.ultraep_comm.reroute_map(
        device.put(routing), None, *fields[:-1], width, case.group.name
    )
    assert physical.numel() == 0
    device.settle()
    here = uec.plan_replicas(load, group=case.group)
    assert torch.equal(out, uec.reroute(ids, here, group=case.group))
    assert torch.equal(found, uec.reroute_map(routing, None, here, group=case.group)[0])
    case.close()


def test_fake_operators_give_tensors_where_their_inputs_are() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    where = torch.device("cuda", 0)
    with FakeTensorMode():
        load = torch.empty(3, 8, dtype=torch.int32, device=where)
        order = torch.empty(1, dtype=torch.int64)
        topk_ids = torch.empty(5, 2, dtype=torch.int64, device=where)
        gathered = torch.ops.ultraep_comm.gather_load(topk_ids, 3, 8, order, "no group")
        assert gathered.device == where
        made = torch.ops.ultraep_comm.plan_replicas(load, 3, 8, 2, 1.01, [], "no group")
        assert [t.device for t in made] == [where] * 5
        slot_expert, slot_quota, home_quota, home, _ = made
        fields = (slot_expert, home, slot_quota, home_quota, load)
        ids = torch.empty(5, 2, dtype=torch.int64, device=where)
        assert torch.ops.ultraep_comm.reroute(ids, *fields, "no group").device == where
        routing = torch.empty(5, 8, dtype=torch.bool, device=where)
        probs = torch.empty(5, 8, device=where)
        moved = torch.ops.ultraep_comm.reroute_map(routing, probs, *fields, 15, "no group")
        assert [t.device for t in moved] == [where] * 2
        grad = torch.ops.ultraep_comm.reroute_map_backward(
            torch.empty(5, 15, device=where), routing, *fields, "no group"
        )
        assert grad.device == where


def test_traced_calls_copy_nothing_to_the_cpu() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode

    class Devices(TorchDispatchMode):
        seen: list[tuple[str, torch.device]]

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            for value in result if isinstance(result, (tuple, list)) else [result]:
                if isinstance(value, torch.Tensor):
                    self.seen.append((str(func), value.device))
            return result

    group, *others = uec.new_loopback_groups(
        2, num_experts=8, slots_per_rank=2, expert=EXPERT, num_sms=1
    )
    where = torch.device("cuda", 0)
    with FakeTensorMode(), Devices() as devices:
        devices.seen = []
        load = torch.empty(2, 8, dtype=torch.int32, device=where)
        plan = tracing.plan_replicas(load, group, 1.01, None)
        ids = torch.empty(5, 2, dtype=torch.int64, device=where)
        tracing.reroute(ids, plan, group)
        routing = torch.empty(5, 8, dtype=torch.bool, device=where)
        tracing.reroute_map(routing, torch.empty(5, 8, device=where), plan, group)
    assert any("ultraep_comm.reroute_map" in name for name, _ in devices.seen)
    assert {device for _, device in devices.seen} == {where}
    for each in (group, *others):
        each.close()
