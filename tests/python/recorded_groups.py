"""Small groups whose calls are recorded, for tests of recorders and of their files."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import torch
from ranks import make_weights, plan_alone, start_all

import ultraep_comm as uec
from ultraep_comm import Segment
from ultraep_comm.plan.topology import Topology
from ultraep_comm.recording.file import Recording
from ultraep_comm.recording.recorder import Recorder

G, E, S = 2, 4, 1
EXPERT = {"w": Segment((8, 4), torch.float32), "s": Segment((3,), torch.uint8)}
W, GRADS = 8 * 4 * 4 + 3, 8 * 4 * 4


def make_groups(**options: Any) -> list[uec.Group]:
    options = {"grads": {"w": torch.float32}, "timeout": 20.0, **options}
    return uec.testing.new_loopback_groups(
        G, num_experts=E, slots_per_rank=S, expert=EXPERT, **options
    )


def make_recorder(rank: int, topology: Topology, **options: Any) -> Recorder:
    """Return a recorder without a group."""
    options = {"capacity": 100, "finished_at": lambda epoch: 0, **options}
    return Recorder(rank=rank, topology=topology, on_stop=lambda: None, **options)


def plan_of(first: int) -> uec.Plan:
    """Return a plan with quotas and load; rank 0 has ``first`` tokens of expert 0."""
    load = torch.tensor([[first, 1, 1, 1], [7, 2, 2, 2]], dtype=torch.int32)
    return plan_alone(load, slots_per_rank=S)


def transfer(groups: list[uec.Group], plans: Any, **options: Any) -> None:
    weights = [make_weights(group) for group in groups]
    for work in start_all(groups, weights, plans, **options):
        work.wait()


def equal(one: Recording, two: Recording) -> bool:
    pairs = [(getattr(one, f.name), getattr(two, f.name)) for f in fields(one)]
    return all(np.array_equal(a, b) for a, b in pairs if not isinstance(a, str))
