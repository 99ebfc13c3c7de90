"""Small groups whose calls are recorded, for tests of recorders and of their files."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import torch
from ranks import make_weights

import ultraep_comm as uec
from ultraep_comm import Segment
from ultraep_comm.recording.file import Recording

G, E, S = 2, 4, 1
EXPERT = {"w": Segment((8, 4), torch.float32), "s": Segment((3,), torch.uint8)}
W, GRADS = 8 * 4 * 4 + 3, 8 * 4 * 4


def make_groups(**options: Any) -> list[uec.Group]:
    options = {"grads": {"w": torch.float32}, "timeout": 20.0, **options}
    return uec.new_loopback_groups(G, num_experts=E, slots_per_rank=S, expert=EXPERT, **options)


def plan_of(first: int) -> uec.Plan:
    """A plan with quotas and load; rank 0 has so many tokens of expert 0."""
    load = torch.tensor([[first, 1, 1, 1], [7, 2, 2, 2]], dtype=torch.int32)
    return uec.plan_replicas(load, slots_per_rank=S)


def transfer(groups: list[uec.Group], plans: Any, **options: Any) -> None:
    works = []
    for group in groups:
        plan = plans[group.rank] if isinstance(plans, list) else plans
        weights = make_weights(group)
        work = uec.replicate_experts(weights, plan, group=group, async_op=True, **options)
        assert work is not None
        works.append(work)
    for work in works:
        work.wait()


def equal(one: Recording, two: Recording) -> bool:
    pairs = [(getattr(one, f.name), getattr(two, f.name)) for f in fields(one)]
    return all(np.array_equal(a, b) for a, b in pairs if not isinstance(a, str))
