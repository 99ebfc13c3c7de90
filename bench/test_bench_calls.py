"""What a call costs when there is nothing to move, or very little, and what recording it adds."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from ultraep_comm import (
    Group,
    Plan,
    Recorder,
    new_loopback_groups,
    plan_replicas,
    replicate_experts,
)
from ultraep_comm.topology import Topology

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


def test_empty_plan_while_it_is_recorded(benchmark: Callable, groups: list[Group]) -> None:
    recorders = [group.start_recording(64) for group in groups]
    plan = Plan.from_slots(torch.full((G, S), -1), num_experts=E)
    benchmark(call_all(groups, plan, "auto"))
    assert recorders[0].num_calls == groups[0]._engine.epoch


@pytest.mark.parametrize("loads", [False, True])
def test_recorded_line_of_64_ranks(benchmark: Callable, loads: bool) -> None:
    """What a call of 64 ranks and 256 experts pays: its line, its plan, and the end of another."""
    topology = Topology.make(num_ranks=64, num_experts=256, slots_per_rank=2)
    generator = torch.Generator().manual_seed(0)
    load = torch.randint(0, 1000, (64, 256), generator=generator, dtype=torch.int32)
    plan = plan_replicas(load, slots_per_rank=2)
    recorder = Recorder(
        rank=0,
        topology=topology,
        capacity=256,
        loads=loads,
        finished_at=lambda epoch: 1,
        on_stop=lambda: None,
    )

    def call() -> None:
        recorder.enter()
        recorder.add(recorder.num_calls + 1, "replicate_experts", "push", plan, 0, 1)

    benchmark(call)
    assert recorder.recording().slot_expert[-1].max() >= 0
