"""Modelled gradient reductions: who loads what, and what workers spend."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from ultraep_comm import Plan
from ultraep_comm.errors import InvalidArgumentError, UnsupportedError
from ultraep_comm.model import MACHINES, Machine, predict, predict_reduction

LINKS = MACHINES["nvl72-links"]
W = 8 << 20


def fan_in(replicas: int) -> Plan:
    """Expert 0 of rank 0, with replicas on the ranks behind it."""
    slots = torch.full((replicas + 1, 1), -1, dtype=torch.int32)
    slots[1:] = 0
    return Plan.from_slots(slots, num_experts=replicas + 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_what_ranks_send(replicas: int, dtype: torch.dtype) -> None:
    direct = predict_reduction(fan_in(replicas), W, LINKS, "direct", grads=dtype)
    assert direct.sent_bytes.tolist() == [0] + [W] * replicas
    pull = predict_reduction(fan_in(replicas), W, LINKS, "pull", grads=dtype)
    # A hub loads its range from all others; the home loads the sums, which are fp32.
    sums = W * 4 // dtype.itemsize if replicas > 1 else W
    between = (replicas - 1) * W
    assert int(pull.sent_bytes.sum()) == between + sums
    for found in (direct, pull):
        assert found.time_us >= found.bound_us
        assert found.received_bytes.sum() == 0


def test_one_replica_takes_its_bytes_and_the_latencies() -> None:
    found = predict_reduction(fan_in(1), W, LINKS, "direct")
    latencies = LINKS.flag_us + LINKS.load_us + LINKS.flag_us
    assert found.time_us == pytest.approx(W / 710e3 + latencies, rel=0.1)
    assert found.bound_us == predict(fan_in(1), W, LINKS).bound_us


@pytest.mark.parametrize(
    "name", ["launch_us", "call_us", "leave_us", "gather_us", "add_us", "clear_us", "publish_us"]
)
def test_what_workers_spend_takes_time(name: str) -> None:
    slower = dataclasses.replace(LINKS, **{name: 5.0})
    free, charged = (predict_reduction(fan_in(3), W, on, "pull") for on in (LINKS, slower))
    assert charged.time_us >= free.time_us + 4.5
    assert charged.sent_bytes.tolist() == free.sent_bytes.tolist()


def test_who_does_not_clear_saves_that() -> None:
    on = dataclasses.replace(LINKS, clear_us=50.0)
    cleared, kept = (predict_reduction(fan_in(1), W, on, zero=z).time_us for z in (True, False))
    assert cleared > kept + 40


def test_a_device_plan_costs_its_schedule() -> None:
    on, plan = MACHINES["nvl72"], fan_in(2)
    more = predict_reduction(plan, W, device_plan=True).time_us - predict_reduction(plan, W).time_us
    assert more == pytest.approx(on.schedule_us + 2 * on.schedule_replica_us)


def test_slots_without_quota_have_no_gradient() -> None:
    """A bank's slots keep experts that get no tokens."""
    slots = [[-1, -1], [0, 2], [0, 3], [0, -1]]
    quota = torch.tensor([[0, 0], [5, 0], [3, 0], [0, 0]])
    plan = Plan.from_slots(
        slots, num_experts=4, slot_quota=quota, home_quota=torch.tensor([4, 1, 7, 1])
    )
    used = Plan.from_slots([[-1, -1], [0, -1], [0, -1], [-1, -1]], num_experts=4)
    for mode in ("pull", "direct", "auto"):
        found, expected = (
            predict_reduction(p, W, mode=mode, device_plan=True) for p in (plan, used)
        )
        assert found.time_us == expected.time_us
        assert found.bound_us == expected.bound_us
        assert np.array_equal(found.sent_bytes, expected.sent_bytes)
    everything = Plan.from_slots(slots, num_experts=4)
    assert predict_reduction(everything, W).time_us > predict_reduction(plan, W).time_us


def test_bad_input() -> None:
    plan = fan_in(1)
    with pytest.raises(InvalidArgumentError, match="mode is 'push'"):
        predict_reduction(plan, W, mode="push")
    with pytest.raises(InvalidArgumentError, match=r"torch\.float16"):
        predict_reduction(plan, W, grads=torch.float16)
    cores = Machine(egress_gbps=10.0, ingress_gbps=10.0, parallel=2.0)
    with pytest.raises(UnsupportedError, match="copies with cores"):
        predict_reduction(plan, W, cores)
