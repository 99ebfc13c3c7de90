"""Replication between this process and another, over shared memory."""

from __future__ import annotations

import multiprocessing as mp
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transfer_ranks import EXPERT, SEGMENT_BYTES, count_wrong, set_epoch, spread_plan

from ultraep_comm import Group, new_group, replicate_experts

E, S = 4, 1
PLAN = spread_plan(2, E, S)
ROUNDS = {"64K": 300, "4M": 40}


def make_group(store: Path, rank: int) -> Group:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    return new_group(num_experts=E, slots_per_rank=S, expert=EXPERT)


def make_weights(group: Group) -> dict[str, torch.Tensor]:
    return {
        name: torch.zeros(group.num_local_experts, size, dtype=torch.uint8)
        for name, size in SEGMENT_BYTES.items()
    }


def serve(store: Path, orders: Connection) -> None:
    """Run rank 1: fill, call or compare on each order, until an empty one."""
    with make_group(store, 1) as group:
        weights = make_weights(group)
        bound = group.bind(weights)
        while order := orders.recv():
            todo, segment, epoch = order
            if todo == "fill":
                set_epoch(group, weights, PLAN, epoch, segment)
                orders.send(0)
            elif todo == "replicate":
                replicate_experts(bound, PLAN, group=group, segments=[segment])
            else:
                orders.send(count_wrong(group, PLAN, epoch, segment))
    dist.destroy_process_group()


@dataclass
class Pair:
    group: Group  # rank 0
    orders: Connection  # to rank 1


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    store = tmp_path_factory.mktemp("pair") / "store"
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(store, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        with make_group(store, 0) as group:
            yield Pair(group, ours)
            ours.send(())
        process.join(60)
        assert process.exitcode == 0
    finally:
        process.kill()
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "segment",
    [
        pytest.param(name, marks=pytest.mark.benchmark(group=f"replicate, 2 processes: {name}"))
        for name in SEGMENT_BYTES
    ],
)
def test_replicate(benchmark: Callable, pair: Pair, segment: str) -> None:
    """Time of rank 0, including the message on which rank 1 starts."""
    weights, epoch = make_weights(pair.group), 0
    bound = pair.group.bind(weights)

    def begin() -> None:
        nonlocal epoch
        epoch += 1
        set_epoch(pair.group, weights, PLAN, epoch, segment)
        pair.orders.send(("fill", segment, epoch))
        pair.orders.recv()

    def call() -> None:
        pair.orders.send(("replicate", segment, epoch))
        replicate_experts(bound, PLAN, group=pair.group, segments=[segment])

    benchmark.pedantic(call, setup=begin, rounds=ROUNDS[segment], warmup_rounds=3)
    pair.orders.send(("compare", segment, epoch))
    assert pair.orders.recv() == 0
    assert count_wrong(pair.group, PLAN, epoch, segment) == 0
