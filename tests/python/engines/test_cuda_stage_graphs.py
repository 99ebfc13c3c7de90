"""Plans and reroutes on an emulated device: their order, captured graphs, and operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from emulated_device import EmulatedDevice
from stage_cases import EXPERT, Case, assert_same

import ultraep_comm as uec
from ultraep_comm import errors
from ultraep_comm.calls import traced
from ultraep_comm.group.group import session_of

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
    device.synchronize()
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


# ---- graphs -------------------------------------------------------------------------------------


def test_captures_order_their_own_streams_and_no_others(device: EmulatedDevice) -> None:
    case = Case(7, num_ranks=3, num_experts=8, slots=2)
    loads = [case.load(9), case.load(9)]
    ids = [case.ids(load) for load in loads]
    there = [device.put(load) for load in loads]
    ids_there = [device.put(i) for i in ids]
    uec.plan_replicas(there[0], group=case.group)  # outside, on the same stream
    device.begin_capture()
    main = device.stream
    device.wait_stream(55, main)
    first = uec.plan_replicas(there[0], group=case.group)
    outs = [uec.reroute(ids_there[0], first, group=case.group)]
    device.stream = 55
    second = uec.plan_replicas(there[1], group=case.group)
    outs.append(uec.reroute(ids_there[1], second, group=case.group))
    device.wait_stream(main, 55)
    device.stream = main
    graph = device.end_capture()
    outside = uec.plan_replicas(there[1], group=case.group)
    device.replay(graph)
    device.synchronize()
    for load, i, out in zip(loads, ids, outs, strict=True):
        here = uec.plan_replicas(load, group=case.group)
        assert torch.equal(out, uec.reroute(i, here, group=case.group))
    assert_same(outside, uec.plan_replicas(loads[1], group=case.group))
    case.close()


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
    in_bank = torch.ops.ultraep_comm.plan_replicas_in_bank(
        device.put(load),
        *(t.num_ranks, t.num_experts, t.slots_per_rank, 1.01, []),
        *(traced.ORDER, 0, case.group.name),
    )
    device.synchronize()
    assert all(map(device.is_on_device, in_bank))
    for tensor, constant in zip(in_bank[3:5], (plan.home, plan.domains), strict=True):
        assert torch.equal(tensor, constant)
        assert tensor.data_ptr() != constant.data_ptr()
    assert torch.equal(in_bank[5], in_bank[0] >= 0)
    slot_expert, slot_quota, home_quota, home, _ = made
    ids, routing = case.ids(load), case.map(load)
    fields = (slot_expert, home, slot_quota, home_quota, device.put(load), case.group.name)
    out = torch.ops.ultraep_comm.reroute(device.put(ids), *fields)
    assert device.is_on_device(out)
    width = t.num_ranks * t.instances_per_rank
    physical, found = torch.ops.ultraep_comm.reroute_map(
        device.put(routing), None, *fields[:-1], width, case.group.name
    )
    assert physical.numel() == 0
    device.synchronize()
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
        made_in_bank = torch.ops.ultraep_comm.plan_replicas_in_bank(
            load, 3, 8, 2, 1.01, [], order, 0, "no group"
        )
        assert [t.device for t in made_in_bank] == [where] * 6
        assert made_in_bank[5].dtype == torch.bool
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

    group, *others = uec.testing.new_loopback_groups(
        2, num_experts=8, slots_per_rank=2, expert=EXPERT, num_sms=1
    )
    where = torch.device("cuda", 0)
    with FakeTensorMode(), Devices() as devices:
        devices.seen = []
        load = torch.empty(2, 8, dtype=torch.int32, device=where)
        plan = traced.plan_replicas(load, group, 1.01, None)
        ids = torch.empty(5, 2, dtype=torch.int64, device=where)
        traced.reroute(ids, plan, group)
        routing = torch.empty(5, 8, dtype=torch.bool, device=where)
        traced.reroute_map(routing, torch.empty(5, 8, device=where), plan, group)
    assert any("ultraep_comm.reroute_map" in name for name, _ in devices.seen)
    assert {device for _, device in devices.seen} == {where}
    for each in (group, *others):
        each.close()
