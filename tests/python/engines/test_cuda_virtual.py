"""Slots that appear behind other weights in a device's virtual memory: over memfds."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from emulated_device import EmulatedDevice
from ranks import close_all, expert_bytes, fill_weights, raw, start_all, synchronize_all

import ultraep_comm as uec
from ultraep_comm import Segment, errors
from ultraep_comm.engines.cuda import make
from ultraep_comm.engines.cuda.virtual import compose

E, S = 4, 2
EXPERT = {"w": Segment((300, 7), torch.bfloat16), "s": Segment((3,), torch.uint8)}
PLAN = uec.Plan.from_slots([[2, 3], [0, -1]], num_experts=E)


def _groups() -> Any:
    return uec.testing.new_loopback_groups(
        2,
        num_experts=E,
        slots_per_rank=S,
        expert=EXPERT,
        grads=torch.float32,
        instances=True,
        engine="cuda",
        num_sms=4,
        timeout=30.0,
    )


def test_layers_share_the_slots_of_a_bank(emulated: EmulatedDevice) -> None:
    driver, groups = emulated.bindings, _groups()
    layers = [[group.banks[0].empty_instances() for group in groups] for _ in range(3)]
    count = E // 2
    for epoch, layer in enumerate(layers):
        weights = [{name: t[:count] for name, t in own.items()} for own in layer]
        assert not any(t.any() for own in weights for t in own.values())
        for group, own in zip(groups, weights, strict=True):
            fill_weights(group, own, epoch)
        regions = [group.bind(own).region for group, own in zip(groups, weights, strict=True)]
        assert regions == [0 if epoch == 0 else -1] * 2  # others are pushed
        synchronize_all(start_all(groups, weights, PLAN))
        for group in groups:
            for index, (name, segment) in enumerate(EXPERT.items()):
                for slot, expert in enumerate(PLAN.slot_expert[group.rank].tolist()):
                    for shown in layers:
                        found = raw(shown[group.rank][name][count + slot], segment)
                        if expert >= 0:
                            assert torch.equal(found, expert_bytes(epoch, expert, index, segment))
    grads = [groups[0].banks[0].empty_instance_grads()["w"] for _ in range(2)]
    grads[1].fill_(1)
    assert not grads[0][:count].any()
    assert bool((grads[0][count:] == 1).all())
    assert not driver.handles
    close_all(groups)
    del layers, layer, weights, own, shown, found, grads, groups, group
    gc.collect()
    assert not driver.ranges


def test_refusals_are_typed(monkeypatch: pytest.MonkeyPatch, emulated: EmulatedDevice) -> None:
    driver = emulated.bindings
    with monkeypatch.context() as patched:  # one allocation for all, as other fabrics make it
        patched.setattr(make, "compose", lambda device, size, _: compose(device, size, []))
        groups = _groups()
    layer = [group.banks[0].empty_instances() for group in groups]
    why = r"slots lie \d+ bytes into an allocation of \d+ bytes.* a bank for each layer"
    for group in groups:
        with pytest.raises(errors.UnsupportedError, match=why):
            group.banks[0].empty_instances()
    weights = [{name: t[: E // 2] for name, t in own.items()} for own in layer]
    synchronize_all(start_all(groups, weights, PLAN))  # the group goes on
    close_all(groups)
    groups = _groups()
    groups[0].banks[0].empty_instances()
    driver.room = 1
    with pytest.raises(errors.OutOfSharedMemoryError, match="main weights"):
        groups[0].banks[0].empty_instances()
    for group in groups:
        group.abort()
        group.close()
    assert not driver.handles
