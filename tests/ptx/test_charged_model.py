"""The charged model against the compiled kernels: whole transfers of small groups, by both."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from measure import link_gbps, measure
from ptx_machine import PtxMachine
from tiers import sampled

from ultraep_comm import Plan
from ultraep_comm.model import MACHINES, predict, predict_reduction

pytestmark = pytest.mark.builds("cpu", "ptx", "ptx_kernels_90")

MODES = ("push", "pull", "direct")
# Of measure.cc: replicas, KiB, blocks, KiB of a tile, mode; ranks, experts, KiB, blocks, KiB of a
# tile, plan on the host, mode. The constants come from these and others like them.
TRANSFERS = [
    *(
        f"fan_out:{replicas},{kib},{blocks},32,{mode}"
        for replicas in (1, 2, 7)
        for mode in range(3)
        for kib, blocks in ((1024, 64), (4096, 16))
    ),
    *(f"planned:{size},1536,16,32,0,{mode}" for size in ("4,16", "8,32") for mode in range(3)),
]
# Replicas, KiB of fp32 gradients, blocks, adding warps, mode.
REDUCTIONS = [
    *(f"reduce:{replicas},512,8,16,{mode}" for replicas in (1, 2, 7) for mode in (1, 2)),
    *(f"reduce:2,2048,64,16,{mode}" for mode in (1, 2)),
]
QUICK = TRANSFERS[::17]


@pytest.mark.parametrize(
    "clock,name,transfers",
    sampled(
        [
            ("a", "nvl72", QUICK),
            ("a", "nvl72", TRANSFERS),
            ("a", "nvl72", REDUCTIONS),
            ("b", "gb200", [*TRANSFERS[::3], *REDUCTIONS[::4]]),
        ],
        lambda case: case[2] is QUICK,
    ),
    ids=["a-quick", "a", "a-reductions", "b"],
)
def test_the_model_agrees_with_the_kernels(
    machine: PtxMachine, clock: str, name: str, transfers: list[str], say: Callable[[str], None]
) -> None:
    errors = {
        asked: modelled_us(asked, report["slot_expert"], clock, name) / report["us"] - 1
        for asked, report in measure(machine, clock, transfers).items()
    }
    sizes = [abs(error) for error in errors.values()]
    worst = max(errors, key=lambda asked: abs(errors[asked]))
    say(
        f"model and kernels, clock {clock}: {statistics.median(sizes):.1%} apart in the median of"
        f" {len(sizes)} transfers, {errors[worst]:+.1%} at worst ({worst})"
    )
    assert statistics.median(sizes) < 0.15
    assert max(sizes) < 0.35


def modelled_us(asked: str, slot_expert: list[int], clock: str, name: str) -> float:
    """Return the model's time of one of TRANSFERS or REDUCTIONS, on the clock's links."""
    kind, numbers = asked.split(":")
    of = [int(number) for number in numbers.split(",")]
    ranks, experts = (of[0], of[1]) if kind == "planned" else (of[0] + 1, of[0] + 1)
    kib, blocks = (of[2], of[3]) if kind == "planned" else (of[1], of[2])
    on = replace(
        MACHINES[name],
        egress_gbps=link_gbps(clock),
        ingress_gbps=link_gbps(clock),
        unloaded_gbps=None,
        launch_us=0.0,
        num_sms=blocks,
        tiles_in_flight=4 * blocks,
    )
    slots = torch.tensor(slot_expert or [-1] + [0] * of[0], dtype=torch.int32).reshape(ranks, -1)
    plan, size, mode = Plan.from_slots(slots, num_experts=experts), kib << 10, MODES[of[-1]]
    if kind == "reduce":
        return predict_reduction(plan, size, on, mode).time_us
    segments = [size] if kind == "fan_out" else [size // 3 * 2, size // 3]
    return predict(plan, segments, on, mode).time_us
