"""Calls beside a framework's own collectives, in any order, and from a background thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankPool, clear_slots, fill_weights, make_weights, wrong_bytes

import ultraep_comm as uec

G, E, ROUNDS = 3, 6, 12
PLAN = uec.Plan.from_slots([[2, 4], [0, 5], [1, 3]], num_experts=E)


def open_group(pg: Any, engine: str) -> tuple[uec.Group, dict[str, torch.Tensor]]:
    expert = {"w": ((4000,), torch.float32)}
    group = uec.new_group(
        pg, num_experts=E, slots_per_rank=2, expert=expert, engine=engine, timeout=20.0
    )
    clear_slots(group)
    return group, make_weights(group)


def in_orders_of_their_own(rank: int, pg: Any, engine: str) -> None:
    """What waits for nothing may be issued before or after other collectives, by each rank."""
    draw = torch.Generator().manual_seed(rank)
    group, weights = open_group(pg, engine)
    with group:
        for step in range(ROUNDS):
            fill_weights(group, weights, step)
            calls: list[Callable[[], Any]] = [
                lambda: uec.replicate_experts(weights, PLAN, group=group, async_op=True),
                lambda: dist.all_reduce(torch.ones(1000), group=pg, async_op=True),
            ]
            works = {i: calls[i]() for i in torch.randperm(2, generator=draw).tolist()}
            for i in torch.randperm(2, generator=draw).tolist():  # and waited for in any order
                works[i].wait()
            assert wrong_bytes(group, PLAN, step) == 0


def from_a_background_thread(rank: int, pg: Any, engine: str) -> None:
    """A thread makes all calls on the group, the main thread others meanwhile."""
    group, weights = open_group(pg, engine)

    def move() -> None:
        with group:
            for step in range(ROUNDS):
                fill_weights(group, weights, step)
                load = uec.gather_load(torch.full((step, 1), rank), group=group)
                assert load.sum() == G * step
                uec.replicate_experts(weights, PLAN, group=group)
                assert wrong_bytes(group, PLAN, step) == 0

    with ThreadPoolExecutor(1) as thread:
        moving, alive = thread.submit(move), torch.ones(1)
        while alive > 0:  # until no rank's thread is
            alive.fill_(not moving.done())
            dist.all_reduce(alive, group=pg)
        moving.result()


@pytest.mark.parametrize("engine", ["host", "c10d"])
@pytest.mark.parametrize("calls", [in_orders_of_their_own, from_a_background_thread])
def test_calls_beside_other_collectives(
    ranks: RankPool, calls: Callable[..., None], engine: str
) -> None:
    ranks.run(G, calls, engine)
