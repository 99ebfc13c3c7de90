"""The CUDA engine from the Python API to the kernels, which run on an emulated device."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from emulated_device import EmulatedDevice
from ranks import (
    MIXED,
    close_all,
    expert_bytes,
    fill_weights,
    make_weights,
    random_plan,
    raw,
    start_all,
    synchronize_all,
)

import ultraep_comm as uec

MODES = ["push", "pull", "direct", "auto"]


@pytest.fixture
def device(emulated: EmulatedDevice) -> EmulatedDevice:
    return emulated


def _groups(num_ranks: int, num_experts: int, slots: int, **options: Any) -> list[uec.Group]:
    options = {"expert": MIXED, "timeout": 60.0, "num_sms": 2, **options}
    return uec.testing.new_loopback_groups(
        num_ranks, num_experts=num_experts, slots_per_rank=slots, engine="cuda", **options
    )


@pytest.mark.parametrize("on_device", [False, True])
def test_instances_of_each_bank(device: EmulatedDevice, on_device: bool) -> None:
    groups = _groups(3, 6, 2, banks=2, instances=True)
    layers = [[group.banks[bank].empty_instances() for group in groups] for bank in range(2)]
    mains = [[{name: t[:2] for name, t in own.items()} for own in layer] for layer in layers]
    last = [0, 0]
    for epoch, (mode, bank) in enumerate(itertools.product(MODES, range(2)), 1):
        drawn = random_plan(epoch, 3, 6, 2)
        plan = uec.Plan.from_slots(drawn.slot_expert, num_experts=6, bank=bank, reuse=True)
        for group in groups:
            fill_weights(group, mains[bank][group.rank], epoch)
        last[bank] = epoch
        given = device.put_plan(plan) if on_device else plan
        works = start_all(groups, mains[bank], given, mode=mode, version=epoch)
        synchronize_all(works)
        for group, own in zip(groups, layers[bank], strict=True):
            held = plan.slot_expert[group.rank].tolist()
            for index, (name, segment) in enumerate(MIXED.items()):
                for slot, expert in enumerate(held):
                    found = raw(own[name][2 + slot], segment)
                    if expert >= 0:
                        assert torch.equal(found, expert_bytes(epoch, expert, index, segment))
                for other, layer in enumerate(layers):
                    for i, expert in enumerate(group.topology.local_experts(group.rank).tolist()):
                        found = raw(layer[group.rank][name][i], segment)
                        wanted = expert_bytes(last[other], expert, index, segment)
                        assert torch.equal(found, wanted) or last[other] == 0
    close_all(groups)


def test_calls_come_between_the_work_of_the_callers_stream(device: EmulatedDevice) -> None:
    expert = {"w": uec.Segment((40_000,), torch.uint8)}
    groups = _groups(2, 2, 1, expert=expert)
    plan = uec.Plan.from_slots([[1], [0]], num_experts=2)
    weights = [make_weights(group) for group in groups]
    for epoch in range(1, 4):
        fresh, seen, works = [], [], []
        for group in groups:
            device.stream = 100 + group.rank
            own = expert_bytes(epoch, group.rank, 0, expert["w"])
            fresh.append(own)
            device.delay(200_000)  # the weights come late,
            device.copy(raw(weights[group.rank]["w"][0], expert["w"]), own)
            works += start_all([group], weights, plan)
        for group, work in zip(groups, works, strict=True):
            device.stream = 100 + group.rank
            work.wait()  # orders the stream, and returns at once
            assert not work.is_completed()
            seen.append(torch.empty(40_000, dtype=torch.uint8))
            device.copy(seen[-1], raw(group.slots["w"][0], expert["w"]))
            device.copy(weights[group.rank]["w"], torch.zeros_like(weights[group.rank]["w"]))
        device.synchronize()
        assert torch.equal(seen[0], fresh[1])
        assert torch.equal(seen[1], fresh[0])
    close_all(groups)
