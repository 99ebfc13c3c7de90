"""Published transfer times, and plans similar to the measured ones.

The measured plans are unknown: one release states the number of replicas, the most replicas of an
expert, and the times. docs/model.md has the source.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import cycle

import numpy as np
import torch

from ultraep_comm.plan.plan import Plan

EXPERT_BYTES = 37_748_736
NUM_RANKS, NUM_EXPERTS, SLOTS_PER_RANK = 64, 256, 2


@dataclass(frozen=True, kw_only=True)
class PublishedRun:
    """One published measurement on 64 ranks with 4 experts and 2 slots each.

    Attributes:
        imbalance: of the load, without replicas.
        num_replicas: of the plan.
        max_replicas: of one expert.
        direct_us: time of direct fan-out.
        relay_us: time with relays.
    """

    imbalance: float
    num_replicas: int
    max_replicas: int
    direct_us: float
    relay_us: float

    def make_plan(self) -> Plan:
        """Return a plan with these numbers: homes export one expert, ranks import at most one."""
        return spread_plan(self.num_replicas, self.max_replicas)


PUBLISHED_RUNS = (
    PublishedRun(imbalance=1.51, num_replicas=38, max_replicas=4, direct_us=214.0, relay_us=194.0),
    PublishedRun(imbalance=2.01, num_replicas=46, max_replicas=5, direct_us=265.0, relay_us=195.0),
    PublishedRun(imbalance=3.03, num_replicas=51, max_replicas=6, direct_us=317.0, relay_us=188.0),
)


def spread_plan(num_replicas: int, max_replicas: int) -> Plan:
    """Return a plan with ``num_replicas``: one expert has ``max_replicas``, the others 4 or 3.

    The experts' homes are the first ranks; the replicas are on the last ranks.
    """
    counts, usual = [max_replicas], cycle((4, 4, 4, 3))
    while sum(counts) < num_replicas:
        counts.append(min(next(usual), num_replicas - sum(counts)))
    experts = np.repeat(np.arange(len(counts)) * (NUM_EXPERTS // NUM_RANKS), counts)
    slots = np.full((NUM_RANKS, SLOTS_PER_RANK), -1)
    slots[NUM_RANKS - num_replicas :, 0] = experts[::-1]
    return Plan.from_slots(torch.from_numpy(slots), num_experts=NUM_EXPERTS)
