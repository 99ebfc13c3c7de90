"""What a call costs when there is nothing to move, or very little: ranks in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from ultraep_comm import Group, Plan, new_loopback_groups, replicate_experts

G, E, S, BYTES = 2, 8, 2, 64 << 10


@pytest.fixture
def groups() -> Iterator[list[Group]]:
    made = new_loopback_groups(
        G, num_experts=E, slots_per_rank=S, expert={"w": ((BYTES,), torch.uint8)}
    )
    yield made
    for group in made:
        group.close()


def call_all(groups: list[Group], plan: Plan, mode: str) -> Callable[[], None]:
    """One call on all ranks from this thread: submitted everywhere before the first wait."""
    weights = [torch.zeros(group.num_mains, BYTES, dtype=torch.uint8) for group in groups]
    bound = [group.bind({"w": w}) for group, w in zip(groups, weights, strict=True)]

    def call() -> None:
        works = [
            replicate_experts(b, plan, group=g, mode=mode, async_op=True)
            for g, b in zip(groups, bound, strict=True)
        ]
        for work in works:
            work.wait()

    return call


def test_empty_plan(benchmark: Callable, groups: list[Group]) -> None:
    plan = Plan.from_slots(torch.full((G, S), -1), num_experts=E)
    benchmark(call_all(groups, plan, "auto"))
    assert [group.bytes_stored for group in groups] == [0, 0]


@pytest.mark.parametrize("mode", ["push", "direct"])
def test_one_small_replica(benchmark: Callable, groups: list[Group], mode: str) -> None:
    slot_expert = torch.full((G, S), -1)
    slot_expert[1, 0] = 0
    plan = Plan.from_slots(slot_expert, num_experts=E)
    benchmark(call_all(groups, plan, mode))
    assert groups[0].bytes_stored >= BYTES
