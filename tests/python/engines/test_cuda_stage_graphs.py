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
    with device.capturing() as replay:
        main = device.stream
        device.wait_stream(55, main)
        first = uec.plan_replicas(there[0], group=case.group)
        outs = [uec.reroute(ids_there[0], first, group=case.group)]
        device.stream = 55
        second = uec.plan_replicas(there[1], group=case.group)
        outs.append(uec.reroute(ids_there[1], second, group=case.group))
        device.wait_stream(main, 55)
        device.stream = main
    outside = uec.plan_replicas(there[1], group=case.group)
    replay()
    device.synchronize()
    for load, i, out in zip(loads, ids, outs, strict=True):
        here = uec.plan_replicas(load, group=case.group)
        assert torch.equal(out, uec.reroute(i, here, group=case.group))
    assert_same(outside, uec.plan_replicas(loads[1], group=case.group))
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
