"""Replication by four ranks of one process: an empty plan, and one expert with three replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transfer_ranks import EXPERT, SEGMENT_BYTES, call_all, count_wrong, set_epoch, spread_plan

from ultraep_comm import Group, Plan
from ultraep_comm.testing import new_loopback_groups

G, E, S = 4, 4, 2
ROUNDS = {"64K": 300, "4M": 40}


@pytest.fixture(scope="module")
def groups() -> Iterator[list[Group]]:
    made = new_loopback_groups(G, num_experts=E, slots_per_rank=S, expert=EXPERT)
    yield made
    for group in made:
        group.close()


@pytest.fixture(scope="module")
def weights(groups: list[Group]) -> list[dict[str, torch.Tensor]]:
    """Main weights that peers can read, so that every mode may run."""
    with ThreadPoolExecutor(G) as threads:
        return list(threads.map(Group.empty_weights, groups))


@pytest.mark.benchmark(group="replicate: empty plan")
def test_empty_plan(
    benchmark: Callable, groups: list[Group], weights: list[dict[str, torch.Tensor]]
) -> None:
    before = [group.health().bytes_stored for group in groups]
    benchmark(call_all(groups, weights, Plan.from_slots(torch.full((G, S), -1), num_experts=E)))
    assert [group.health().bytes_stored for group in groups] == before


@pytest.mark.parametrize("mode", ["push", "pull", "direct", "auto"])
@pytest.mark.parametrize(
    "segment",
    [
        pytest.param(name, marks=pytest.mark.benchmark(group=f"replicate: {name}"))
        for name in SEGMENT_BYTES
    ],
)
def test_replicate(
    benchmark: Callable,
    groups: list[Group],
    weights: list[dict[str, torch.Tensor]],
    segment: str,
    mode: str,
) -> None:
    """Every round has different bytes; those of the last are compared."""
    plan, epoch = spread_plan(G, E, S), 0

    def begin() -> None:
        nonlocal epoch
        epoch += 1
        for group, own in zip(groups, weights, strict=True):
            set_epoch(group, own, plan, epoch, segment)

    call = call_all(groups, weights, plan, mode=mode, segments=[segment])
    benchmark.pedantic(call, setup=begin, rounds=ROUNDS[segment], warmup_rounds=3)
    assert [count_wrong(group, plan, epoch, segment) for group in groups] == [0] * G
