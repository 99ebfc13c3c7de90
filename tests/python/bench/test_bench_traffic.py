"""Bytes that a schedule moves, against a count by tile and against the host engine's stores."""

from __future__ import annotations

import pytest
import torch
from ranks import bytes_stored, fan_out_plan, loopback, random_plan
from reference.schedule import make_schedule

import ultraep_comm as uec
from ultraep_comm.bench.traffic import count_traffic
from ultraep_comm.plan.schedule import MODES

SIZES = [100_003, 65_536, 37, 1]


def _tiles(sizes: list[int], tile: int) -> list[int]:
    """Return the sizes of an expert's tiles, in order."""
    return [min(tile, size - at) for size in sizes for at in range(0, size, tile)]


def _count(plan: uec.Plan, sizes: list[int], tile: int, mode: str) -> dict[str, list[int]]:
    """Follow every tile from its home to every slot."""
    schedule = make_schedule(
        plan.slot_expert, home=plan.home, segment_bytes=sizes, tile_bytes=tile, mode=mode
    )
    slots, home = plan.slot_expert.tolist(), plan.home.tolist()
    num_ranks = len(slots)
    loads, stores, egress = ([0] * num_ranks for _ in range(3))

    def copy(size: int, *, by: int, source: int, to: list[int]) -> None:
        loads[by] += size
        if source != by:
            egress[source] += size
        for rank in to:
            stores[by] += size
            if rank != by:
                egress[by] += size

    for x, expert in enumerate(schedule.expert.tolist()):
        replicas = [r for r in range(num_ranks) if expert in slots[r]]
        step = max(1, 32768 // tile)
        for i, size in enumerate(_tiles(sizes, tile)):
            (hub,) = [h for h, begin, end in schedule.hubs(x) if begin <= i // step < end]
            if hub == home[expert]:
                copy(size, by=hub, source=hub, to=replicas)
            elif mode == "push":
                copy(size, by=home[expert], source=home[expert], to=[hub])
                copy(size, by=hub, source=hub, to=[r for r in replicas if r != hub])
            else:
                copy(size, by=hub, source=home[expert], to=replicas)
    return {"loads": loads, "stores": stores, "egress": egress}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tile", [1024, 16384, 32768, 1 << 20])
def test_traffic_is_what_following_every_tile_gives(mode: str, tile: int) -> None:
    plans = [
        fan_out_plan(20, 24, 2),  # more than sixteen replicas: finer groups
        fan_out_plan(3, 4, 1),
        *(random_plan(seed, 6, 13, 3, fill=0.9) for seed in range(4)),
        uec.Plan.from_slots([[-1], [-1]], num_experts=2),
    ]
    for plan in plans:
        found = count_traffic(plan, mode, segment_bytes=SIZES, tile_bytes=tile)
        expected = _count(plan, SIZES, tile, mode)
        for name, values in expected.items():
            assert getattr(found, name).tolist() == values, name
        assert found.moved == sum(expected["loads"]) + sum(expected["stores"])
        assert found.critical == max(expected["egress"])
        assert sum(expected["egress"]) == plan.num_replicas * sum(SIZES)


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
