"""Predictions of the host engine: a calibration makes a machine, whose ranks copy with cores."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_model import make_plan

from ultraep_comm import Plan
from ultraep_comm.calibration import MeasuredCosts
from ultraep_comm.engines.options import HOST_TILE_BYTES
from ultraep_comm.model import Machine, predict

MODES = ("push", "pull", "direct")
W = 1 << 20
COSTS = MeasuredCosts(
    device="a processor",
    ranks=4,
    store_gbps=10.0,
    load_gbps=40.0,
    flag_us=0.5,
    hop_us=5.0,
    parallel=2.0,
    call_us=6.0,
)
HOST = Machine.from_calibration(COSTS)
STORE, READ = W / 10e3, W / 40e3  # microseconds
ONE = make_plan([[-1], [0]], 2)
TWO_ALONE = make_plan([[-1, -1], [0, 1]], 4)  # 0 and 1 are at home on rank 0
THREE = make_plan([[-1], [0], [0], [0]], 4)


def host(**changes: float) -> Machine:
    return Machine.from_calibration(replace(COSTS, **changes))


def time_of(plan: Plan, machine: Machine = HOST, mode: str = "direct", size: int = W) -> float:
    return predict(plan, size, machine, mode).time_us


# ---- by hand ------------------------------------------------------------------------------------


def test_the_shapes_that_are_calibrated() -> None:
    """The predictions are the times that `make_costs` makes such figures of."""
    assert time_of(make_plan([[-1], [-1]], 2)) == pytest.approx(6)
    assert time_of(ONE, size=64) == pytest.approx(6 + 2 * 5, abs=0.01)
    alone = 16 + STORE + READ
    assert time_of(ONE) == pytest.approx(alone)
    both = make_plan([[-1], [0], [0]], 3)
    assert time_of(both) == pytest.approx(alone + STORE)
    ring = make_plan([[3], [0], [1], [2]], 4)
    assert time_of(ring) == pytest.approx(16 + 4 * (STORE + READ) / 2, rel=0.02)


@pytest.mark.parametrize("mode", MODES)
def test_two_ranks_one_way_and_both(mode: str) -> None:
    copy = STORE + READ
    assert time_of(TWO_ALONE, mode=mode) == pytest.approx(16 + 2 * copy)
    each = make_plan([[1], [0]], 2)
    assert time_of(each, mode=mode) == pytest.approx(16 + copy)
    narrow = host(parallel=1.25)
    assert time_of(each, narrow, mode) == pytest.approx(16 + 2 * copy / 1.25, rel=0.02)
    assert time_of(ONE, narrow, mode) == pytest.approx(16 + copy)
    # One way more than the other: what is left over goes alone, at the full rate.
    uneven = make_plan([[4, -1, -1], [0, 1, 2]], 8)
    assert time_of(uneven, host(parallel=1.0), mode) == pytest.approx(16 + 4 * copy, rel=0.02)
    assert time_of(uneven, mode=mode) == pytest.approx(16 + 3 * copy)


def test_a_hub_reads_again_and_hands_on() -> None:
    """Push to two hubs: each reads a half of its own slot and hands it to the other."""
    plan = make_plan([[-1], [0], [0]], 3)
    free = host(parallel=3.0)  # never short of memory
    groups = W // HOST_TILE_BYTES
    found = predict(plan, W, free, "push")
    # The home's core sends one copy in total; the last group takes one more hop, from a hub.
    assert found.egress_us[0] == pytest.approx(STORE + READ)
    assert found.egress_us[1:].sum() == pytest.approx(STORE + READ + groups * 0.5)
    assert found.sent_bytes.tolist() == [W, W // 2, W // 2]
    assert found.time_us > 6 + 3 * 5 + STORE + READ


def test_who_pulls_copies_with_its_own_core() -> None:
    found = predict(THREE, W, host(parallel=4.0), "pull")
    assert found.sent_bytes.sum() == 3 * W
    assert found.received_bytes.ravel().tolist() == [0, W, W, W]
    home, *hubs = found.egress_us
    assert home == 0
    # Each hub reads a third, in whole groups of 16, and stores it to its own slot and two others.
    groups = [5, 6, 5]
    assert hubs == pytest.approx([n / 16 * (3 * STORE + READ) for n in groups], rel=1e-6)


def test_auto_goes_by_the_calibration() -> None:
    assert predict(THREE, W, host(hop_us=1e5)).mode == "direct"
    assert predict(THREE, W, host(hop_us=0.0, flag_us=0.0, parallel=4.0)).mode == "push"
    assert predict(THREE, W, host(hop_us=0.0, parallel=4.0), may_pull=True).mode == "pull"
