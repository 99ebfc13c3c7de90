"""The size of a rack, its loads and plans, for benchmarks of what every rank computes."""

from __future__ import annotations

import torch

from ultraep_comm import Plan, plan_replicas
from ultraep_comm.bench.loads import generate_load
from ultraep_comm.plan.topology import Topology

G, E, S = 64, 256, 2
TOKENS, TOPK = 4096, 8
EXPERT_BYTES = (25_165_824, 12_582_912)  # of two segments
IMBALANCES = (1.5, 2.0, 3.0)


def make_load(imbalance: float) -> torch.Tensor:
    """Return a load ``[G, E]`` whose busiest rank has ``imbalance`` times the mean."""
    made = generate_load(
        num_ranks=G, num_experts=E, imbalance=imbalance, num_tokens=G * TOKENS * TOPK, seed=1
    )
    return torch.from_numpy(made)


def make_plan(imbalance: float) -> Plan:
    """Return the plan of the load of :func:`make_load`."""
    topology = Topology.make(num_ranks=G, num_experts=E, slots_per_rank=S)
    return plan_replicas(make_load(imbalance), topology=topology)
