"""Calls beside a framework's own collectives, in any order, and from a background thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankPool

import ultraep_comm as uec

G, E, ROUNDS = 3, 6, 12
EXPERT = {"w": ((4000,), torch.float32)}
PLAN = [[2, 4], [0, 5], [1, 3]]
ENGINES = pytest.mark.parametrize("engine", ["host", "c10d"])


def open_group(pg: Any, engine: str) -> uec.Group:
    return uec.new_group(
        pg, num_experts=E, slots_per_rank=2, expert=EXPERT, engine=engine, timeout=20.0
    )


def fill(weights: torch.Tensor, rank: int, step: int) -> None:
    weights.copy_((torch.arange(2)[:, None] + 2 * rank + 10 * step).expand(2, 4000))


def check(group: uec.Group, step: int) -> None:
    for slot, expert in enumerate(PLAN[group.rank]):
        assert (group.slots["w"][slot] == expert + 10 * step).all()


def all_reduce(pg: Any) -> None:
    total = torch.ones(1000)
    dist.all_reduce(total, group=pg)
    assert (total == pg.size()).all()


def in_orders_of_their_own(rank: int, pg: Any, engine: str) -> None:
    """What waits for nothing may be issued before or after other collectives, by each rank."""
    weights = torch.zeros(2, 4000)
    plan = uec.Plan.from_slots(PLAN, num_experts=E)
    draw = torch.Generator().manual_seed(rank)
    with open_group(pg, engine) as group:
        for step in range(ROUNDS):
            fill(weights, rank, step)
            calls: list[Callable[[], Any]] = [
                lambda: uec.replicate_experts({"w": weights}, plan, group=group, async_op=True),
                lambda: dist.all_reduce(torch.ones(1000), group=pg, async_op=True),
            ]
            order = torch.randperm(2, generator=draw).tolist()
            works = {i: calls[i]() for i in order}
            for i in torch.randperm(2, generator=draw).tolist():  # and waited for in any order
                works[i].wait()
            check(group, step)
            all_reduce(pg)  # no rank writes its weights before all have read them


def from_a_background_thread(rank: int, pg: Any, engine: str) -> None:
    """A thread makes all calls on the group, the main thread others meanwhile."""
    failed: list[BaseException] = []

    def move() -> None:
        try:
            weights = torch.zeros(2, 4000)
            plan = uec.Plan.from_slots(PLAN, num_experts=E)
            with open_group(pg, engine) as group:
                ready.set()
                for step in range(ROUNDS):
                    fill(weights, rank, step)
                    load = uec.gather_load(torch.full((step, 1), rank), group=group)
                    assert load.sum() == G * step
                    uec.replicate_experts({"w": weights}, plan, group=group)
                    check(group, step)
        except BaseException as error:
            failed.append(error)
            ready.set()

    ready = threading.Event()
    mover = threading.Thread(target=move)
    mover.start()
    ready.wait()  # creation is a collective of the process group, as any other
    alive = torch.ones(1)
    while alive > 0:  # until no rank's thread is
        alive.fill_(mover.is_alive())
        dist.all_reduce(alive, group=pg)
    mover.join()
    if failed:
        raise failed[0]


@ENGINES
def test_calls_in_any_order_among_other_collectives(ranks: RankPool, engine: str) -> None:
    ranks.run(G, in_orders_of_their_own, engine)


@ENGINES
def test_a_background_thread(ranks: RankPool, engine: str) -> None:
    ranks.run(G, from_a_background_thread, engine)
