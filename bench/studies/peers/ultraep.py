"""Our reading of UltraEP's quota planner (arXiv 2606.04101).

The paper describes a binary search on a threshold tau, from 1.01 times the mean upward. For each
tau a greedy takes overloaded ranks by excess and moves quota to the rank with the most slack. A
replica has at least 1,024 tokens; replicas stay inside the domain, and local_experts do not move.

The paper leaves details open. Of the readings tried, these give it the best plans:

- A rank's experts give quota in order of descending load, until the rank is at tau.
- A replica that would get less than the minimum gets the minimum, so the overloaded rank ends below
  tau. If the expert has fewer tokens left, or the rank with the most slack less room, the expert
  gives no more.
- tau is feasible if every rank ends at or below it; at the highest tau nothing is replicated.
- Ties go to the lower id.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from studies.peers.placement import Ints, Placed, at_home
from ultraep_comm.plan.planner import PPM, target_to_ppm

MIN_QUOTA = 1024

Placement = tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]
Replicas = list[tuple[int, int, int]]
"""(expert, rank, quota)"""


def tokens_ultraep(load: Ints, home: NDArray[np.int32], num_ranks: int, slots: int) -> Placed:
    """Return the plan of a load ``[E]`` with the published settings, in one domain."""
    slot_expert, slot_quota, home_quota = plan_quotas(
        load, slots_per_rank=slots, home=home, domain=np.zeros(num_ranks, np.int32)
    )
    tokens = at_home(home_quota.astype(np.int64), home, num_ranks)
    rank, slot = np.nonzero(slot_expert >= 0)
    np.add.at(tokens, (rank, slot_expert[rank, slot]), slot_quota[rank, slot])
    return Placed(tokens)


def plan_quotas(
    load: NDArray[np.int64],
    *,
    slots_per_rank: int,
    home: NDArray[np.int32],
    domain: NDArray[np.int32],
    target: float = 1.01,
    min_quota: int = MIN_QUOTA,
) -> Placement:
    """Return ``(slot_expert [G, S], slot_quota [G, S], home_quota [E])`` for global sums ``[E]``.

    Args:
        load: tokens of each expert.
        slots_per_rank: S.
        home: ``[E]``, the rank of each expert's main instance.
        domain: ``[G]``; replicas stay among ranks with equal values.
        target: start of the search, as a multiple of the mean.
        min_quota: minimum tokens of a replica, at least 1.
    """
    num_ranks = len(domain)
    rank_load = np.zeros(num_ranks, np.int64)
    np.add.at(rank_load, home, load)
    low = -(-int(load.sum()) * target_to_ppm(target) // (num_ranks * PPM))
    high = int(rank_load.max())
    best: Replicas = []
    tau = low
    while low < high:
        replicas = _probe(load, rank_load, home, domain, slots_per_rank, tau, min_quota)
        if replicas is None:
            low = tau + 1
        else:
            high, best = tau, replicas
        tau = (low + high) // 2

    slot_expert = np.full((num_ranks, slots_per_rank), -1, np.int32)
    slot_quota = np.zeros((num_ranks, slots_per_rank), np.int32)
    home_quota = load.astype(np.int32)
    for expert, rank, quota in best:
        slot = int((slot_expert[rank] >= 0).sum())
        slot_expert[rank, slot], slot_quota[rank, slot] = expert, quota
        home_quota[expert] -= quota
    return slot_expert, slot_quota, home_quota


def _probe(
    load: NDArray[np.int64],
    rank_load: NDArray[np.int64],
    home: NDArray[np.int32],
    domain: NDArray[np.int32],
    slots_per_rank: int,
    tau: int,
    min_quota: int,
) -> Replicas | None:
    """Return replicas that bring every rank to tau or below; None if the greedy fails."""
    slack = np.maximum(tau - rank_load, 0)
    free = np.full(len(rank_load), slots_per_rank)
    replicas: Replicas = []
    for rank in np.argsort(-rank_load, kind="stable"):
        excess = int(rank_load[rank]) - tau
        if excess <= 0:
            break
        local_experts = np.flatnonzero(home == rank)
        for expert in local_experts[np.argsort(-load[local_experts], kind="stable")]:
            left = int(load[expert])
            legal = domain == domain[rank]
            while excess > 0 and left > 0:
                room = np.where(legal & (free > 0), slack, 0)
                to = int(room.argmax())
                quota = min(max(excess, min_quota), left, int(room[to]))
                if quota < min_quota:
                    break
                replicas.append((int(expert), to, quota))
                legal[to] = False  # one instance per rank
                slack[to] -= quota
                free[to] -= 1
                left -= quota
                excess -= quota
        if excess > 0:
            return None
    return replicas
