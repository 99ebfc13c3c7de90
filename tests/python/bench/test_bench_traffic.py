"""Bytes that a schedule moves, against the model's and against the host engine's stores."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from ranks import bytes_stored, fan_out_plan, loopback, random_plan

import ultraep_comm as uec
from ultraep_comm.bench.traffic import count_traffic
from ultraep_comm.model import MACHINES, predict
from ultraep_comm.plan.schedule import MODES

SIZES = [100_003, 65_536, 37, 1]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tile", [1024, 32768, 1 << 20])
def test_ranks_send_what_the_model_says(mode: str, tile: int) -> None:
    machine = replace(MACHINES["nvl72-links"], tile_bytes=tile)
    plans = [
        fan_out_plan(20, 24, 2),  # more than sixteen replicas: finer groups
        fan_out_plan(3, 4, 1),
        *(random_plan(seed, 6, 13, 3, fill=0.9) for seed in range(4)),
        uec.Plan.from_slots([[-1], [-1]], num_experts=2),
    ]
    for plan in plans:
        found = count_traffic(plan, mode, segment_bytes=SIZES, tile_bytes=tile)
        assert found.egress.tolist() == predict(plan, SIZES, machine, mode).sent_bytes.tolist()
        assert found.stores.sum() == plan.num_replicas * sum(SIZES)
        assert found.moved == found.loads.sum() + found.stores.sum()
        assert found.critical == found.egress.max()


def test_loads_by_hand() -> None:
    """Expert 0 goes from rank 0 to two hubs, a group of 32 KiB for each."""
    plan = uec.Plan.from_slots([[-1], [0], [0]], num_experts=3)
    part = 32 << 10
    for mode, loads in {"push": [2, 1, 1], "pull": [0, 1, 1], "direct": [2, 0, 0]}.items():
        found = count_traffic(plan, mode, segment_bytes=[2 * part], tile_bytes=part)
        assert found.loads.tolist() == [n * part for n in loads]


@pytest.mark.parametrize("mode", MODES)
def test_the_host_engine_stores_what_is_counted(mode: str) -> None:
    tile, num_ranks = 16384, 4
    groups = uec.testing.new_loopback_groups(
        num_ranks,
        num_experts=9,
        slots_per_rank=2,
        expert={f"s{i}": ((size,), torch.uint8) for i, size in enumerate(SIZES)},
        tile_bytes=tile,
        timeout=20.0,
    )
    plan = random_plan(3, num_ranks, 9, 2, fill=1.0)

    def call(rank: int) -> int:
        weights = groups[rank].empty_weights()
        uec.replicate_experts(weights, plan, group=groups[rank], mode=mode)
        return bytes_stored(groups[rank])

    stored = loopback(num_ranks, call)
    for group in groups:
        group.close()
    found = count_traffic(plan, mode, segment_bytes=SIZES, tile_bytes=tile)
    assert stored == found.stores.tolist()
