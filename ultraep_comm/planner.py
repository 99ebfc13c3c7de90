"""The planner, as a short definition: from the load of a microbatch to replicas and quotas.

`src/core/planner.hpp` computes the same, fast; the two agree in every integer. Change this one to
try an idea. Integers decide everything and ties go to the lower id, so that all ranks plan alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

PPM = 1_000_000
MAX_LOAD = 2**31 - 1
MAX_TARGET = 1000.0

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]
Replicas = list[tuple[int, int, int]]
"""(expert, rank, quota), in the order in which slots are filled."""


def target_to_ppm(target: float) -> int:
    """The target imbalance in integer millionths, as both planners take it.

    Raises ValueError unless 1 <= target <= 1000.
    """
    if not (math.isfinite(target) and 1.0 <= target <= MAX_TARGET):
        raise ValueError(f"target imbalance is {target}; expected 1 <= target <= {MAX_TARGET:g}")
    return round(target * PPM)


@dataclass(frozen=True, kw_only=True)
class _Problem:
    """What does not change between probes."""

    load: Int64Array  # [E]
    home: Int64Array  # [E]
    rank_load: Int64Array  # [G] without replicas
    pool: Int64Array  # [G] ranks with equal values may hold each other's experts
    slots_per_rank: int


def plan_slots(
    load: ArrayLike,
    *,
    num_ranks: int,
    slots_per_rank: int,
    home: ArrayLike,
    domain: ArrayLike,
    allow_cross_domain: bool = False,
    target: float = 1.01,
) -> tuple[Int32Array, Int32Array, Int32Array]:
    """Choose the replicas of one microbatch and the quota of every instance.

    A binary search finds the lowest threshold for which `_probe` can bring every rank's quota to
    or below it. It starts at `target` times the mean, and ends at no replication.

    Args:
        load: `[E]` integers, tokens of each expert over all source ranks, each below 2**31.
        num_ranks: G.
        slots_per_rank: S.
        home: `[E]` integers, the rank of each expert's main instance.
        domain: `[G]` integers; ranks with equal values are in one domain.
        allow_cross_domain: let replicas leave the domain of their home.
        target: largest rank quota over the mean that is good enough, from 1 to 1000.

    Returns:
        `(slot_expert, slot_quota, home_quota)`: int32 `[G, S]`, `[G, S]`, `[E]`. An empty slot
        is -1 with quota 0; a rank's slots are filled from 0.

    Raises:
        ValueError: a shape, load, home or target out of range.
    """
    target_ppm = target_to_ppm(target)
    problem = _problem(
        load,
        num_ranks=num_ranks,
        slots_per_rank=slots_per_rank,
        home=home,
        domain=domain,
        allow_cross_domain=allow_cross_domain,
    )
    rank_load = problem.rank_load

    low = -(-int(rank_load.sum()) * target_ppm // (num_ranks * PPM))
    for pool in np.unique(problem.pool):  # no plan can go below the mean of a pool
        members = problem.pool == pool
        low = max(low, -(-int(rank_load[members].sum()) // int(members.sum())))
    high = int(rank_load.max())
    best: Replicas = []
    threshold = low  # the search looks there first: nearly always that is the answer
    while slots_per_rank > 0 and low < high:
        replicas = _probe(problem, threshold)
        if replicas is None:
            low = threshold + 1
        else:
            high, best = threshold, replicas
        threshold = low + (high - low) // 2
    return _fill_slots(problem, best)


def _problem(
    load: ArrayLike,
    *,
    num_ranks: int,
    slots_per_rank: int,
    home: ArrayLike,
    domain: ArrayLike,
    allow_cross_domain: bool,
) -> _Problem:
    load_ = np.asarray(load, dtype=np.int64)
    home_ = np.asarray(home, dtype=np.int64)
    domain_ = np.asarray(domain, dtype=np.int64)
    if num_ranks < 1 or slots_per_rank < 0:
        raise ValueError(
            f"num_ranks is {num_ranks} and slots_per_rank {slots_per_rank}; "
            "expected at least 1 and at least 0"
        )
    if load_.ndim != 1 or home_.shape != load_.shape or domain_.shape != (num_ranks,):
        raise ValueError(
            f"load is {load_.shape}, home {home_.shape} and domain {domain_.shape}; "
            f"expected [E], [E] and [{num_ranks}]"
        )
    _require_range("load", load_, MAX_LOAD)
    _require_range("home", home_, num_ranks - 1)
    rank_load = np.zeros(num_ranks, np.int64)
    np.add.at(rank_load, home_, load_)
    return _Problem(
        load=load_,
        home=home_,
        rank_load=rank_load,
        pool=np.zeros_like(domain_) if allow_cross_domain else domain_,
        slots_per_rank=slots_per_rank,
    )


def _require_range(name: str, values: Int64Array, largest: int) -> None:
    for index in np.flatnonzero((values < 0) | (values > largest))[:1]:
        raise ValueError(f"{name}[{index}] is {values[index]}; expected 0 to {largest}")


def _probe(problem: _Problem, threshold: int) -> Replicas | None:
    """Bring every rank to or below `threshold`, or return None where the greedy finds no room.

    Hot ranks are visited by descending load, their experts likewise, so that each exports as few
    experts as it can. Quota goes to ranks below the threshold. A replica leaves either no need or
    no slack, so no rank can be given the same expert twice, and none gets an expert for nothing.
    """
    slack = np.maximum(threshold - problem.rank_load, 0)
    used = np.zeros(len(slack), np.int64)
    replicas: Replicas = []
    for rank in np.argsort(-problem.rank_load, kind="stable").tolist():
        excess = int(problem.rank_load[rank]) - threshold
        mains = np.flatnonzero(problem.home == rank)
        for expert in mains[np.argsort(-problem.load[mains], kind="stable")].tolist():
            need = min(int(problem.load[expert]), excess)
            excess -= max(need, 0)
            while need > 0:
                legal = np.flatnonzero((problem.pool == problem.pool[rank]) & (slack > 0))
                if legal.size == 0:
                    return None
                chosen = _choose_rank(legal, slack, used, need)
                quota = min(need, int(slack[chosen]))
                replicas.append((expert, chosen, quota))
                need -= quota
                slack[chosen] -= quota
                used[chosen] += 1
                if used[chosen] == problem.slots_per_rank:
                    slack[chosen] = 0
    return replicas


def _choose_rank(legal: Int64Array, slack: Int64Array, used: Int64Array, need: int) -> int:
    """Best fit: the rank with room for all of `need`, fewest replicas, least slack, lowest id.

    That keeps the large gaps for the large needs. Where no rank has room for all of it: the one
    with the most slack, then the fewest replicas, then the lowest id.
    """
    fits = legal[slack[legal] >= need]
    if fits.size:
        return int(fits[np.lexsort((slack[fits], used[fits]))[0]])
    return int(legal[np.lexsort((used[legal], -slack[legal]))[0]])


def _fill_slots(problem: _Problem, replicas: Replicas) -> tuple[Int32Array, Int32Array, Int32Array]:
    num_ranks = len(problem.rank_load)
    slot_expert = np.full((num_ranks, problem.slots_per_rank), -1, np.int32)
    slot_quota = np.zeros((num_ranks, problem.slots_per_rank), np.int32)
    home_quota = problem.load.astype(np.int32)
    used = [0] * num_ranks
    for expert, rank, quota in replicas:
        slot_expert[rank, used[rank]] = expert
        slot_quota[rank, used[rank]] = quota
        home_quota[expert] -= quota
        used[rank] += 1
    return slot_expert, slot_quota, home_quota
