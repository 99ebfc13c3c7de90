"""The reduction by four ranks of one process: an expert with replicas on the three others."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from transfer_ranks import spread_plan

from ultraep_comm import Group, reduce_expert_grads
from ultraep_comm.bench.payload import MAIN, GradPayload, count_different
from ultraep_comm.testing import new_loopback_groups

G, E, S = 4, 4, 1
PLAN = spread_plan(G, E, S)
ELEMENTS = {"64K": 16 << 10, "4M": 1 << 20}  # fp32: bytes of the gradients of an expert
ROUNDS = {"64K": 300, "4M": 40}


@pytest.fixture(
    params=[
        pytest.param(name, marks=pytest.mark.benchmark(group=f"reduce: {name}"))
        for name in ELEMENTS
    ]
)
def size(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def groups(size: str) -> Iterator[list[Group]]:
    expert = {"w": ((ELEMENTS[size],), torch.float32)}
    made = new_loopback_groups(
        G, num_experts=E, slots_per_rank=S, expert=expert, grads=torch.float32
    )
    yield made
    for group in made:
        group.close()


@pytest.mark.parametrize("mode", ["pull", "direct", "auto"])
def test_reduce(benchmark: Callable, groups: list[Group], size: str, mode: str) -> None:
    """Other gradients in every round; the sum of the last is compared, bit for bit."""
    payload = GradPayload(
        1, {"w": ELEMENTS[size]}, E, grad_dtype=torch.float32, main_dtype=torch.float32
    )
    mains = [torch.zeros(group.num_local_experts, ELEMENTS[size]) for group in groups]
    bound = [group.bind_grads({"w": main}) for group, main in zip(groups, mains, strict=True)]
    epoch = 0

    def begin() -> None:
        nonlocal epoch
        epoch += 1
        payload.fill(mains[0][0], epoch=epoch, expert=0, rank=MAIN, segment="w")
        for group in groups[1:]:
            slot = group.slot_grads["w"][0]
            payload.fill(slot, epoch=epoch, expert=0, rank=group.rank, segment="w")

    def call() -> None:
        works = [
            reduce_expert_grads(own, PLAN, group=group, async_op=True, mode=mode)
            for group, own in zip(groups, bound, strict=True)
        ]
        for work in works:
            work.wait()

    benchmark.pedantic(call, setup=begin, rounds=ROUNDS[size], warmup_rounds=3)
    wanted = payload.reduced(epoch=epoch, expert=0, ranks=range(1, G), segment="w")
    assert count_different(mains[0][0], wanted) == 0
    assert not any(group.slot_grads["w"].any() for group in groups[1:])
