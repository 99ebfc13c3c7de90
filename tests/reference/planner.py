"""The readable definition of the planner: from a microbatch's load to replicas and quotas.

`src/core/plan/planner.hpp` and `src/core/plan/probe.hpp` are the fast one; the two agree in every
integer. Try ideas here first. All decisions are made in integers and ties go to the lower id, so
that every rank computes the same plan.
"""

from __future__ import annotations

from bisect import bisect_left, insort_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ultraep_comm.plan.planner import MAX_LOAD, MAX_TOTAL_LOAD, PPM, Costs, target_to_ppm

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]
Replicas = list[tuple[int, int, int]]  # (expert, rank, quota), in the order of their slots


class Variant(NamedTuple):
    """How a probe chooses ranks; see `_probe`, and `_level` for the last one."""

    style: str
    order: int


VARIANTS = [[Variant(style, order) for order in range(3)] for style in ("tight", "early", "wide")]
VARIANTS.append([Variant("level", 0)])


@dataclass(frozen=True, kw_only=True)
class _Pool:
    """Ranks that may hold each other's experts. Constant during all probes."""

    ranks: list[int]  # by descending load, then id
    rank_load: list[int]  # [G] without replicas; see `_pad`
    local_experts: list[list[int]]  # [G], by descending load, then id
    load: list[int]  # [E]
    largest: int  # tokens of the largest expert
    slots: int

    @property
    def mean(self) -> int:
        """Mean load of the ranks, rounded up: under any plan some rank has at least this."""
        return -(-sum(self.rank_load[r] for r in self.ranks) // len(self.ranks))

    @property
    def fullest(self) -> int:
        """Tokens of the fullest rank without replicas."""
        return self.rank_load[self.ranks[0]]

    @property
    def last_cap(self) -> int:
        """Lowest cap on exports and imports that limits nothing."""
        return max(self.slots, *map(len, self.local_experts))

    def caps(self, first: int = 1) -> Iterator[int]:
        """Iterate over caps: one by one up to the number of slots, then doubling."""
        cap = first
        while cap < 2 * self.last_cap:
            yield cap
            cap = cap + 1 if cap < self.slots else 2 * cap

    def min_cap(self, threshold: int) -> int:
        """Return the lowest cap that lets every rank export its excess over the threshold."""
        cap = 1
        for rank in self.ranks:
            excess, exports = self.rank_load[rank] - threshold, 0
            while excess > 0:
                excess -= self.load[self.local_experts[rank][exports]]
                exports += 1
            cap = max(cap, exports)
        return cap


def plan_slots(
    load: ArrayLike,
    *,
    num_ranks: int,
    slots_per_rank: int,
    home: ArrayLike,
    domain: ArrayLike,
    allow_cross_domain: bool = False,
    target: float = 1.01,
    costs: Costs | None = None,
) -> tuple[Int32Array, Int32Array, Int32Array]:
    """Choose the replicas of one microbatch and the quota of every instance.

    By target: minimise the imbalance, though not below `target`, then the transfer (the most
    experts that a rank exports or imports), then the replicas. By cost: the cheapest of a set of
    plans. A target of 1 is exact in a single pool wherever a probe finds a way, and always with the
    slots of `slots_for_exact`: every rank has the floor or the ceiling of the mean. Elsewhere the
    fullest rank may have some tokens more than with a target just above 1.

    Args:
        load: `[E]` integers, tokens of each expert over all source ranks, each below 2**31 and
            their sum below 2**40.
        num_ranks: G.
        slots_per_rank: S.
        home: `[E]` integers, the rank of each expert's main instance.
        domain: `[G]` integers; ranks with equal values are in one domain.
        allow_cross_domain: let replicas leave the domain of their home.
        target: largest rank quota over the mean that is acceptable, from 1 to 1000.
        costs: used instead of the target.

    Returns:
        `(slot_expert, slot_quota, home_quota)`: int32 `[G, S]`, `[G, S]`, `[E]`. An empty slot
        is -1 with quota 0; a rank's slots are filled from 0.

    Raises:
        ValueError: a shape is wrong, or a load, home or target is out of range.
    """
    target_ppm = target_to_ppm(target)
    load_, home_ = checked(load, home, domain, num_ranks, slots_per_rank)
    pool_of = np.zeros(num_ranks, np.int64) if allow_cross_domain else np.asarray(domain)
    is_exact = target_ppm == PPM and costs is None
    pools = pools_of(load_, home_, pool_of, num_ranks, slots_per_rank, is_exact)
    mean, fullest = max(pool.mean for pool in pools), pools[0].fullest
    wanted = mean
    if costs is None:
        wanted = max(mean, int(load_.sum()) * target_ppm // (num_ranks * PPM))
    replicas: Replicas = []
    if slots_per_rank > 0 and fullest > wanted:
        if costs is None:
            for pool in pools:
                replicas += _plan_by_target(pool, wanted, mean, is_exact)
        else:
            replicas = _plan_by_cost(pools, mean, fullest, costs)
    return _fill_slots(load_, num_ranks, slots_per_rank, replicas)


def _plan_by_target(pool: _Pool, wanted: int, mean: int, is_exact: bool) -> Replicas:
    # Exact plans nearly always exist with one import a rank, and as little transfer.
    pools = [replace(pool, slots=1), pool] if is_exact and pool.slots > 1 else [pool]
    threshold, cap, pool_ = wanted, pool.min_cap(wanted), pools[0]
    found = _fewest(pool_, threshold, cap, VARIANTS[:1])  # suffices for nearly every load
    if found is None:
        threshold = _lowest_threshold(pool, wanted, mean)
        for cap, pool_ in product(pool.caps(pool.min_cap(threshold)), pools):
            found = _fewest(pool_, threshold, cap, VARIANTS)
            if found is not None:
                break
        else:
            return []
    replicas, variant = found
    # Lower the imbalance further where that is free: same cap, no more replicas.
    low, high = mean - 1, threshold
    for _ in range(6 if replicas else 0):
        if high - low <= 1:
            break
        middle = low + (high - low) // 2
        better = _probe(pool_, middle, cap, variant)
        if better is None or len(better) > len(replicas):
            low = middle
        else:
            high, replicas = middle, better
    return replicas


def _plan_by_cost(pools: list[_Pool], mean: int, fullest: int, costs: Costs) -> Replicas:
    min_cost, best = costs.per_token * fullest, Replicas()
    thresholds = [mean + ((fullest - mean) >> i) for i in range(13)] + [mean]
    for cap in pools[0].caps():
        for threshold in thresholds:
            fixed = costs.per_token * threshold + costs.per_transfer * cap
            if fixed >= min_cost or any(pool.min_cap(threshold) > cap for pool in pools):
                continue
            found = [_fewest(pool, threshold, cap, VARIANTS) for pool in pools]
            plans = [plan for plan, _ in filter(None, found)]
            replicas = [replica for plan in plans for replica in plan]
            cost = fixed + costs.per_replica * len(replicas)
            if len(plans) == len(pools) and cost < min_cost:
                min_cost, best = cost, replicas
    return best


def _reaches(pool: _Pool, threshold: int) -> bool:
    variants = (v for style in VARIANTS for v in style)
    return any(_probe(pool, threshold, pool.last_cap, v) is not None for v in variants)


def _lowest_threshold(pool: _Pool, wanted: int, mean: int) -> int:
    """Return the lowest threshold from `wanted` up that a probe reaches: gallop, then bisect.

    More room does not always help a greedy search: the mean may be reached where `wanted` is not.
    """
    unit = max(wanted // 4096, 1)
    low, high, step = wanted - unit, wanted, unit
    if _reaches(pool, high):
        return high
    if mean < wanted and _reaches(pool, mean):
        return mean
    while True:
        low, high, step = high, min(high + step, pool.fullest), 2 * step
        if high == pool.fullest or _reaches(pool, high):  # the fullest rank's load needs no replica
            break
    while high - low > unit:
        middle = low + (high - low) // 2
        low, high = (low, middle) if _reaches(pool, middle) else (middle, high)
    return high


def _fewest(
    pool: _Pool, threshold: int, cap: int, styles: list[list[Variant]]
) -> tuple[Replicas, Variant] | None:
    """Return the plan with the fewest replicas, of the first style that has any.

    Later styles send more.
    """
    for style in styles:
        plans = [(_probe(pool, threshold, cap, v), v) for v in style]
        found = [(plan, v) for plan, v in plans if plan is not None]
        if found:
            return min(found, key=lambda plan: len(plan[0]))
    return None


def _nth_hot(hot: list[int], order: int, n: int) -> int:
    """Return the n-th hot rank: by descending load, by ascending load, or from alternate ends."""
    if order == 0:
        return hot[n]
    if order == 1:
        return hot[-1 - n]
    return hot[-1 - n // 2] if n % 2 else hot[n // 2]


@dataclass
class _CoolRank:
    """A rank below the threshold."""

    slack: int  # tokens that it can still take
    rank: int
    left: int  # replicas that it can still take

    def lost(self, pool: _Pool, quota: int = 0) -> int:
        """Return the room that its last replicas cannot fill, once one more has taken `quota`."""
        return max(self.slack - quota - (self.left - (quota > 0)) * pool.largest, 0)

    def waste_of(self, pool: _Pool, quota: int) -> int:
        """Return how much more room is lost by one more replica that takes `quota`."""
        return self.lost(pool, quota) - self.lost(pool)


def _probe(pool: _Pool, threshold: int, cap: int, variant: Variant) -> Replicas | None:
    """Bring every rank of the pool down to the threshold; None if there is no room.

    A hot rank exports, of its `cap` largest local experts, the one with the most tokens left. What
    it needs to export goes whole to the cool rank with the smallest sufficient slack ("wide": with
    the largest). If that would waste more room than the pool has to waste, a rank's slack is filled
    entirely instead: the largest slack below the need, or one above it, with more than the need. In
    the latter case the exporter drops below the threshold and becomes a cool rank: a chain, which
    moves room from a rank without imports left to one that has some. "tight" chains only if no
    slack is below the need, "early" and "wide" as soon as they can.
    """
    if variant.style == "level":
        return _level(pool, threshold, cap)
    imports = min(cap, pool.slots)
    hot = [r for r in pool.ranks if pool.rank_load[r] > threshold]
    slacks = [(threshold - pool.rank_load[r], r) for r in pool.ranks]
    cool = [_CoolRank(slack, r, imports) for slack, r in slacks if slack > 0]  # by ascending slack
    waste_left = sum(slack for slack, _ in slacks) - sum(c.lost(pool) for c in cool)
    if hot and waste_left < 0:
        return None
    replicas: Replicas = []
    for n in range(len(hot)):
        rank = _nth_hot(hot, variant.order, n)
        excess = pool.rank_load[rank] - threshold
        experts = pool.local_experts[rank][:cap]
        tokens_left = [pool.load[e] for e in experts]
        while excess > 0:
            best = tokens_left.index(max(tokens_left))
            need = min(tokens_left[best], excess)
            above = bisect_left(cool, need, key=lambda c: c.slack)
            room = range(above, len(cool))
            if variant.style == "wide":
                room = room[::-1]
            fits = [i for i in room if cool[i].waste_of(pool, need) <= waste_left]
            if fits:
                at, quota = fits[0], need
            else:
                at = above - 1
                if room and (above == 0 or variant.style != "tight"):
                    brim = min(tokens_left[best], cool[room[0]].slack)
                    at = room[0] if cool[room[0]].waste_of(pool, brim) <= waste_left else at
                if at < 0:
                    return None
                quota = min(tokens_left[best], cool[at].slack)
            waste_left -= cool[at].waste_of(pool, quota)
            c = cool.pop(at)
            replicas.append((experts[best], c.rank, quota))
            tokens_left[best] -= quota
            excess -= quota
            if c.left > 1 and c.slack > quota:
                rest = _CoolRank(c.slack - quota, c.rank, c.left - 1)
                insort_left(cool, rest, key=lambda c: c.slack)
        if excess < 0:
            insort_left(cool, _CoolRank(-excess, rank, imports), key=lambda c: c.slack)
    return replicas


def _level(pool: _Pool, threshold: int, cap: int) -> Replicas | None:
    """Bring every rank of the pool down to the threshold; None if that takes too many slots.

    The fullest rank fills the emptiest one up, from its expert with the most tokens left, until no
    rank is above the threshold. So a rank is filled once, by one rank, which may end up below the
    threshold and is then filled later.

    At the mean, exactly, it takes at most ceil(M (G - 1) / G) slots, where M is the largest number
    of local experts on a rank: `level_probe()` in `core/plan/probe.hpp` has the proof.
    """
    slack = [threshold - pool.rank_load[r] for r in pool.ranks]
    tokens_left = [[pool.load[e] for e in pool.local_experts[r][:cap]] for r in pool.ranks]
    if sum(slack) < 0:
        return None
    replicas: Replicas = []
    while min(slack) < 0:
        fullest, emptiest = slack.index(min(slack)), slack.index(max(slack))
        giver, taker = pool.ranks[fullest], pool.ranks[emptiest]
        for _ in range(min(cap, pool.slots)):
            left = tokens_left[fullest]
            best = left.index(max(left))
            quota = min(left[best], slack[emptiest])
            if quota == 0:
                break
            replicas.append((pool.local_experts[giver][best], taker, quota))
            left[best] -= quota
            slack[fullest] += quota
            slack[emptiest] -= quota
        if slack[emptiest] > 0:
            return None
    return replicas


def checked(
    load: ArrayLike, home: ArrayLike, domain: ArrayLike, num_ranks: int, slots_per_rank: int
) -> tuple[Int64Array, Int64Array]:
    """Return load and home, int64 `[E]` each; raise ValueError as `plan_slots` does."""
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
    for name, values, largest in (("load", load_, MAX_LOAD), ("home", home_, num_ranks - 1)):
        for index in np.flatnonzero((values < 0) | (values > largest))[:1]:
            raise ValueError(f"{name}[{index}] is {values[index]}; expected 0 to {largest}")
    if load_.sum() > MAX_TOTAL_LOAD:
        raise ValueError(f"the loads sum to {load_.sum()}; expected at most {MAX_TOTAL_LOAD}")
    return load_, home_


def _pad(rank_load: Int64Array) -> None:
    """Make the mean a whole number: count one token more on the emptiest ranks.

    A plan that brings all ranks down to this mean leaves each the mean's floor or ceiling.
    """
    missing = -int(rank_load.sum()) % len(rank_load)
    rank_load[np.argsort(-rank_load, kind="stable")[len(rank_load) - missing :]] += 1


def pools_of(
    load: Int64Array,
    home: Int64Array,
    pool_of: Int64Array,
    num_ranks: int,
    slots: int,
    is_exact: bool,
) -> list[_Pool]:
    """Return the pools, in the order of their fullest ranks."""
    rank_load = np.zeros(num_ranks, np.int64)
    np.add.at(rank_load, home, load)
    if is_exact and (pool_of == pool_of[0]).all():
        _pad(rank_load)
    by_load = np.argsort(-rank_load, kind="stable")
    experts = np.argsort(-load, kind="stable")
    local_experts = [experts[home[experts] == r].tolist() for r in range(num_ranks)]
    return [
        _Pool(
            ranks=by_load[pool_of[by_load] == p].tolist(),
            rank_load=rank_load.tolist(),
            local_experts=local_experts,
            load=load.tolist(),
            largest=int(load.max(initial=0)),
            slots=slots,
        )
        for p in dict.fromkeys(pool_of[by_load].tolist())
    ]


def _fill_slots(
    load: Int64Array, num_ranks: int, slots: int, replicas: Replicas
) -> tuple[Int32Array, Int32Array, Int32Array]:
    slot_expert = np.full((num_ranks, slots), -1, np.int32)
    slot_quota = np.zeros((num_ranks, slots), np.int32)
    home_quota = load.astype(np.int32)
    used = [0] * num_ranks
    for expert, rank, quota in replicas:
        slot_expert[rank, used[rank]] = expert
        slot_quota[rank, used[rank]] = quota
        home_quota[expert] -= quota
        used[rank] += 1
    return slot_expert, slot_quota, home_quota
