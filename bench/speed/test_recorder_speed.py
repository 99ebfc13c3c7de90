"""The time that recording adds to a call."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transfer_ranks import call_all

from ultraep_comm import Plan, Recorder, plan_replicas
from ultraep_comm.plan.topology import Topology
from ultraep_comm.testing import new_loopback_groups


@pytest.mark.benchmark(group="replicate: empty plan")
def test_empty_plan_while_it_is_recorded(benchmark: Callable) -> None:
    plan = Plan.from_slots(torch.full((4, 2), -1), num_experts=8)
    groups = new_loopback_groups(
        4, num_experts=8, slots_per_rank=2, expert={"w": ((64 << 10,), torch.uint8)}
    )
    weights = [{"w": torch.zeros(2, 64 << 10, dtype=torch.uint8)} for _ in groups]
    recorders = [group.start_recording(64) for group in groups]
    benchmark(call_all(groups, weights, plan))
    assert recorders[0].num_calls == groups[0].health().epoch
    for group in groups:
        group.close()


@pytest.mark.benchmark(group="recorder: a line of 64 ranks")
@pytest.mark.parametrize("loads", [False, True])
def test_recorded_line_of_64_ranks(benchmark: Callable, loads: bool) -> None:
    """Entry and plan of a call of 64 ranks and 256 experts, and the end of an earlier call."""
    topology = Topology.make(num_ranks=64, num_experts=256, slots_per_rank=2)
    generator = torch.Generator().manual_seed(0)
    load = torch.randint(0, 1000, (64, 256), generator=generator, dtype=torch.int32)
    plan = plan_replicas(load, topology=topology)
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
