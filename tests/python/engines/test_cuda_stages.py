"""Plans and reroutes on the device, from the Python API to the kernels on an emulated device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from emulated_device import EmulatedDevice
from ranks import plan_alone
from stage_cases import EXPERT, FIELDS, Case, assert_same

import ultraep_comm as uec
from ultraep_comm import errors
from ultraep_comm.calls import traced
from ultraep_comm.engines.cuda import stages as stages_module
from ultraep_comm.engines.cuda.device import Device
from ultraep_comm.group.group import session_of


@pytest.fixture
def device(emulated: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> EmulatedDevice:
    monkeypatch.setattr(stages_module, "MIN_RUNS", 4)
    return emulated


def test_what_launches_read_is_kept_for_their_streams(device: EmulatedDevice) -> None:
    """Callers may drop tensors at once, whichever stream they were made on."""
    case = Case(0, num_ranks=2, num_experts=4, slots=1)
    load = case.load(9)
    there, ids, routing = device.put(load), device.put(case.ids(load)), device.put(case.map(load))
    probs = device.put(torch.rand(routing.shape)).requires_grad_()

    def kept(stream: int, *tensors: torch.Tensor | None) -> bool:
        return all(t is not None and device.is_kept(t, stream) for t in tensors)

    with device.on(11):
        plan = uec.plan_replicas(there, group=case.group)
    assert kept(11, there)
    home = device.put(plan.home)
    other = uec.Plan(**{**{name: getattr(plan, name) for name in FIELDS}, "home": home})
    tensors = [getattr(other, name) for name in FIELDS if name != "domains"]
    with device.on(12):
        uec.reroute(ids, other, group=case.group)
    assert kept(12, ids, *tensors)
    with device.on(13):
        uec.reroute_map(routing, probs, other, group=case.group)
    assert kept(13, routing, probs, *tensors)
    with device.on(14):
        handle = case.group.save(other)
        handle.release()
    assert kept(14, plan.slot_expert, plan.slot_quota, plan.home_quota)
    assert not kept(13, ids)
    device.synchronize()
    case.close()


def test_the_allocator_learns_of_each_memory_once(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, other = torch.zeros(8), torch.zeros(3)
    noted: list[tuple[int, object]] = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: f"stream of {index}")
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda self, stream: noted.append((self.data_ptr(), stream))
    )
    device = Device.__new__(Device)
    device.index = 5
    device.keep([other, memory[:2], memory[4:].view(2, 2)])
    assert noted == [(t.data_ptr(), "stream of 5") for t in (other, memory)]


# ---- plans --------------------------------------------------------------------------------------


def test_what_comes_from_the_cpu_is_uploaded(
    device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through page-locked memory: a plain copy of a CPU tensor waits for the stream on a GPU."""
    case, uploads = Case(0, num_ranks=3, num_experts=6, slots=2), []
    monkeypatch.setattr(device, "upload", lambda to, values: uploads.append((to, values)))
    stages: Any = session_of(case.group).engine
    values = torch.arange(6).reshape(2, 3).T
    copy = stages.to_device(values)
    ((to, given),) = uploads
    assert (to.data_ptr(), given.tolist()) == (copy.data_ptr(), values.tolist())
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


@pytest.mark.parametrize(
    ("dtype", "values", "text"),
    [
        (torch.int32, {(1, 3): -1}, "entry for expert 3"),
        (torch.int64, {(0, 2): 2**31}, "entry for expert 2"),
        (torch.int64, {(0, 2): 2**32}, "entry for expert 2"),  # 0, in 32 bits
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
    device.synchronize()
    assert plan.num_replicas == 0
    assert plan.imbalance == 1.0
    for other in case.groups:
        if other is not case.group:
            uec.plan_replicas(good, group=other)  # the fault is local: other ranks are not told
    with pytest.raises(errors.InvalidLoadError, match=text):
        uec.plan_replicas(good, group=case.group)
    uec.plan_replicas(good, group=case.group)  # it is raised only once
    case.close()


def test_closing_waits_and_tells_of_too_many_tokens_in_all(device: EmulatedDevice) -> None:
    case = Case(0, num_ranks=1, num_experts=600, slots=1)
    device.delay(50_000)
    uec.plan_replicas(
        device.put(torch.full((600,), 2**31 - 1, dtype=torch.int32)), group=case.group
    )
    with pytest.raises(errors.InvalidLoadError, match="1099511627775 tokens in total"):
        case.group.close()


def test_a_fault_fails_the_next_collective_call_on_every_rank(device: EmulatedDevice) -> None:
    case = Case(0, num_ranks=2, num_experts=2, slots=1)
    uec.plan_replicas(device.put(torch.tensor([-1, 0], dtype=torch.int32)), group=case.groups[0])
    device.synchronize()
    plan = uec.Plan.from_slots([[1], [0]], num_experts=2)
    weights = {"w": torch.zeros(1, 4, dtype=torch.uint8)}
    with pytest.raises(errors.InvalidLoadError):
        uec.replicate_experts(weights, plan, group=case.groups[0])
    with pytest.raises(errors.PeerRejectedError):
        uec.replicate_experts(weights, plan, group=case.groups[1])
    case.close()


def test_groups_that_are_too_large_plan_on_the_cpu(device: EmulatedDevice) -> None:
    launched: list[int] = []

    def handle(name: str, shared_bytes: int) -> int:
        if name == "ultraep_plan":
            launched.append(shared_bytes)
        return int(type(device.kernels).handle(device.kernels, name, shared_bytes))

    small = Case(0, num_ranks=2, num_experts=4, slots=1)
    shape = session_of(small.group).engine._shape  # type: ignore[union-attr]
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
    with pytest.raises(
        errors.UnsupportedError, match=r"has 100; plan on the CPU: plan_rep.*\(load\.cpu"
    ):
        stages.plan(load, 1_010_000, None)
    plan = plan_alone(load.clone(), slots_per_rank=1)
    plan = replace(plan, slot_expert=device.put(plan.slot_expert))  # counts as one on the device
    with pytest.raises(errors.UnsupportedError, match="reroute on the CPU"):
        stages.reroute(device.put(torch.zeros(1, 1, dtype=torch.int32)), plan)


# ---- reroutes -----------------------------------------------------------------------------------


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


def test_inputs_that_are_not_dense_are_copied(device: EmulatedDevice) -> None:
    case = Case(4, num_ranks=2, num_experts=4, slots=1)
    load = case.load(4)
    plan = uec.plan_replicas(device.put(load.T).T, group=case.group)
    on_host = uec.plan_replicas(load, group=case.group)
    ids, routing = case.ids(load), case.map(load)
    wide = device.put(torch.cat([ids, ids], dim=1))
    out = uec.reroute(wide[:, :1], plan, group=case.group)
    found, _ = uec.reroute_map(device.put(routing.T).T, None, plan, group=case.group)
    device.synchronize()
    assert_same(plan, on_host)
    assert torch.equal(out, uec.reroute(ids, on_host, group=case.group))
    assert torch.equal(found, uec.reroute_map(routing, None, on_host, group=case.group)[0])
    case.close()


def _host_error(call: Any) -> str:
    with pytest.raises(errors.InvalidArgumentError) as caught:
        call()
    return f"{type(caught.value).__name__}: {caught.value}"


KINDS = ["id", "count", "slot", "quota", "negative", "map", "home", "home of a map"]


@pytest.mark.parametrize("kind", KINDS)
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
    elif kind.startswith("home"):
        parts["home"][:] = 2 - parts["home"]
        parts["slot_expert"][0, 0] = 9  # which a plan for another home map may be, too
    else:
        routing[0] = ~routing[0]
    plan = uec.Plan(**parts)
    there = uec.Plan(**{name: device.put(tensor) for name, tensor in parts.items()})
    if kind.endswith("map"):
        expected = _host_error(lambda: uec.reroute_map(routing, None, plan, group=case.group))
        uec.reroute_map(device.put(routing), None, there, group=case.group)
    else:
        expected = _host_error(lambda: uec.reroute(ids, plan, group=case.group))
        out = uec.reroute(device.put(ids), there, group=case.group)
        device.synchronize()
        assert int(out.min()) >= -1
        assert int(out.max()) < 3 * 4
    device.synchronize()
    good = uec.plan_replicas(load.clamp(min=0), group=case.groups[1])
    found = _host_error(lambda: uec.reroute(case.ids(load), good, group=case.group))
    assert found == expected
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
    assert not device.is_on_device(out)
    out = uec.reroute(device.put(ids), here, group=case.group)
    found, _ = uec.reroute_map(device.put(routing), None, here, group=case.group)
    device.synchronize()
    assert torch.equal(out, expected)
    assert device.is_on_device(out)
    assert torch.equal(found, uec.reroute_map(routing, None, plan, group=case.group)[0])
    case.close()


def test_memory_grows_with_the_ids(device: EmulatedDevice) -> None:
    case = Case(1, num_ranks=2, num_experts=4, slots=1)
    stages = session_of(case.group).engine
    assert stages is not None
    assert stages._stages.max_runs == 4
    for tokens in (10, 40, 150):  # of each expert
        load = torch.full((2, 4), tokens, dtype=torch.int32)
        plan = uec.plan_replicas(device.put(load), group=case.group)
        ids = case.ids(load)
        out = uec.reroute(device.put(ids), plan, group=case.group)
        device.synchronize()
        on_host = uec.plan_replicas(load, group=case.group)
        assert torch.equal(out, uec.reroute(ids, on_host, group=case.group))
    assert stages._stages.max_runs == 16
    case.close()


# ---- static shapes ------------------------------------------------------------------------------


def test_buffers_are_never_overrun(device: EmulatedDevice) -> None:
    """Ends on the device are the host's, and stay inside; a later call says what went beyond."""
    case = Case(0, num_ranks=3, num_experts=7, slots=2)
    load = case.load(50)
    plan = uec.plan_replicas(device.put(load), group=case.group, target=1.0)
    device.synchronize()
    rows = case.group.topology.token_capacity(load.sum(dim=1).tolist(), 1)
    ends = case.group.instance_offsets(plan, pad_to=rows)
    assert device.is_on_device(plan.slot_expert)
    assert ends.equal(case.group.instance_offsets(plan.cpu(), pad_to=rows))
    case.group.assert_idle()
    tokens = int(ends[-1])
    for _ in range(2):  # once each
        cut = case.group.instance_offsets(plan, pad_to=tokens - 3)
        assert cut.equal(ends.clamp(max=tokens - 3))
        message = (
            rf"rank {case.rank}: the plan gives this rank {tokens} tokens, more than the pad_to"
        )
        with pytest.raises(errors.InvalidPlanError, match=message):
            case.group.instance_offsets(plan, pad_to=rows)
        case.group.assert_idle()
    case.group.instance_offsets(plan, pad_to=1)
    with pytest.raises(errors.InvalidPlanError, match="more than the pad_to of an earlier"):
        case.group.close()
    case.close()


def test_a_rank_without_instances_has_no_rows(device: EmulatedDevice) -> None:
    case = Case(2, num_ranks=2, num_experts=2, slots=0, home=[0, 0], domains=None)
    group = case.groups[1]
    plan = uec.plan_replicas(device.put(case.load(50)), group=group)
    device.synchronize()
    assert group.instance_offsets(plan, pad_to=0).tolist() == []
    case.close()


# ---- operators ----------------------------------------------------------------------------------


def test_operators_stay_on_the_device(device: EmulatedDevice) -> None:
    """A graph may write to what an operator has returned."""
    case, operators = Case(3, num_ranks=3, num_experts=8, slots=2), torch.ops.ultraep_comm
    load, name = device.put(case.load(9)), case.group.name
    plan = uec.plan_replicas(load, group=case.group)
    own = (plan.slot_expert, plan.slot_quota, plan.home_quota, plan.home, plan.domains)
    sizes = (3, 8, 2, 1.01, [])
    made = operators.plan_replicas(load, *sizes, name)
    *in_bank, to_fill = operators.plan_replicas_in_bank(load, *sizes, traced.ORDER, 0, name)
    ids = device.put(torch.zeros(2, 1, dtype=torch.int64) - 1)
    fields = (plan.slot_expert, plan.home, plan.slot_quota, plan.home_quota, plan.load)
    assert device.is_on_device(operators.reroute(ids, *fields, name))
    device.synchronize()
    for tensors in (made, in_bank):
        assert all(map(device.is_on_device, tensors))
        for tensor, eager in zip(tensors, own, strict=True):
            assert torch.equal(tensor, eager)
            assert tensor.data_ptr() != eager.data_ptr()  # type: ignore[union-attr]
    assert torch.equal(to_fill, in_bank[0] >= 0)
    case.group.abort()  # the ids are not those of the load
    case.close()


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

    group, *others = uec.testing.new_loopback_groups(
        2, num_experts=8, slots_per_rank=2, expert=EXPERT, num_sms=1
    )
    where = torch.device("cuda", 0)
    with FakeTensorMode(allow_non_fake_inputs=True), Devices() as devices:
        devices.seen = []
        ids = torch.empty(5, 2, dtype=torch.int64, device=where)
        load = traced.gather_load(ids, "topk_ids", group)
        plan = traced.plan_replicas(load, group, 1.01, None, reuse=True)
        assert plan.slots_to_fill is not None
        assert plan.slots_to_fill.dtype == torch.bool
        plan = traced.plan_replicas(load, group, 1.01, None)
        traced.reroute(ids, plan, group)
        routing = torch.empty(5, 8, dtype=torch.bool, device=where)
        probs = torch.empty(5, 8, device=where)
        traced.reroute_map(routing, probs, plan, group)
        torch.ops.ultraep_comm.reroute_map_backward(
            torch.empty(5, 12, device=where), routing, *traced.fields_of(plan), group.name
        )
    assert any("ultraep_comm.reroute_map" in name for name, _ in devices.seen)
    assert {device for _, device in devices.seen} == {where}
    for each in (group, *others):
        each.close()
