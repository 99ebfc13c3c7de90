"""A planner for empty and held slots in one: the definition that the core is to follow next.

Until then `planner.py` and `resident_planner.py` define what the core does.

From empty slots greedy probes are asked over a fixed grid of thresholds, and the least plan wins.
On held slots tokens first flow to what is held; then, one at a time, experts move into slots, by
four variants side by side, until one leaves no rank with too many tokens. Try ideas here first. All
decisions are made in integers and ties go to the lower id, so that all ranks have the same plan.
"""

from __future__ import annotations

from bisect import bisect_left, insort_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, product

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ultraep_comm.plan.planner import PPM, target_to_ppm

Replicas = list[tuple[int, int, int]]  # (expert, rank, quota), in the order of their slots
STYLES = "tight", "early", "wide", "level"
GRID, COARSE = 16, 5  # thresholds of a grid; of one with three orders for each


@dataclass(frozen=True)
class _Pool:
    """Ranks that may hold each other's experts."""

    ranks: list[int]  # by descending load, then id
    rank_load: list[int]  # [G] without replicas; if plans are to be exact, with padding
    local_experts: list[list[int]]  # [G], by descending load, then id
    load: list[int]  # [E]
    slots: int

    @property
    def mean(self) -> int:
        return -(-sum(self.rank_load[r] for r in self.ranks) // len(self.ranks))

    @property
    def fullest(self) -> int:
        return self.rank_load[self.ranks[0]]

    @property
    def last_cap(self) -> int:
        """Lowest cap on exports and imports that limits nothing."""
        return max(self.slots, *map(len, self.local_experts))

    def caps(self, threshold: int) -> Iterator[int]:
        """Iterate over caps, from the lowest that lets all ranks shed their excess."""
        cap = 1
        for rank in self.ranks:
            sums = accumulate(self.load[e] for e in self.local_experts[rank])
            cap = max(cap, sum(s < self.rank_load[rank] - threshold for s in sums) + 1)
        while cap < 2 * self.last_cap:
            yield cap
            cap = cap + 1 if cap < self.slots else 2 * cap


def plan_slots(
    load: ArrayLike,
    *,
    residents: ArrayLike,
    home: ArrayLike,
    domain: ArrayLike,
    allow_cross_domain: bool = False,
    target: float = 1.01,
    costs: tuple[int, int, int] | None = None,
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
    """Choose every slot's expert and every instance's quota for one microbatch.

    By target: the least imbalance, though not below `target`; then transfer (the most experts that
    leave a rank, or slots of one that are written), then slots written, then slots in use. By cost
    (per token of the fullest rank, expert of the transfer, replica), as if slots were empty: the
    cheapest. `residents` [G, S]: the expert in each slot, or -1. One that is not needed stays, with
    quota 0. Returns `(slot_expert, slot_quota, home_quota)`.
    """
    load_, home_, held = (np.asarray(a, np.int64) for a in (load, home, residents))
    pool_of = np.zeros(len(held), np.int64) if allow_cross_domain else np.asarray(domain)
    ppm = target_to_ppm(target)
    is_exact = ppm == PPM and costs is None
    pools = _pools_of(load_, home_, pool_of, held.shape[1], is_exact)
    mean = max(pool.mean for pool in pools)
    wanted = mean if costs else max(mean, int(load_.sum()) * ppm // (len(held) * PPM))

    def from_empty() -> Replicas:
        if held.shape[1] == 0 or pools[0].fullest <= wanted:
            return []
        if costs:
            return _plan_by_cost(pools, mean, *costs)
        return [r for pool in pools for r in _plan_by_target(pool, wanted, mean, is_exact)]

    experts = np.full_like(held, -1) if costs else held
    search = _Held(pools[0], home_.tolist(), pool_of.tolist(), experts.reshape(-1).tolist())
    if (experts < 0).all():
        plan = search.lay_over(from_empty(), 0)
    else:
        plan = search.plan(wanted, from_empty)
    expert, quota = (np.array(a, np.int32).reshape(held.shape) for a in (plan.expert, plan.quota))
    return expert, quota, np.array(plan.home_quota, np.int32)


def _pools_of(
    load: NDArray[np.int64],
    home: NDArray[np.int64],
    pool_of: NDArray[np.int64],
    slots: int,
    is_exact: bool,
) -> list[_Pool]:
    """Return the pools, in the order of their fullest ranks.

    For exact plans of one pool the emptiest ranks count one token more, so that the mean is whole.
    """
    num_ranks = len(pool_of)
    rank_load = np.bincount(home, load, num_ranks).astype(np.int64)
    if is_exact and (pool_of == pool_of[0]).all():
        missing = -int(load.sum()) % num_ranks
        rank_load[np.argsort(-rank_load, kind="stable")[num_ranks - missing :]] += 1
    ranks, experts = (np.argsort(-a, kind="stable") for a in (rank_load, load))
    local = [experts[home[experts] == r].tolist() for r in range(num_ranks)]
    members = [ranks[pool_of[ranks] == p].tolist() for p in dict.fromkeys(pool_of[ranks].tolist())]
    return [_Pool(m, rank_load.tolist(), local, load.tolist(), slots) for m in members]


# ---- from empty slots: probes over a grid


def _plan_by_target(pool: _Pool, wanted: int, mean: int, is_exact: bool) -> Replicas:
    """Return the least plan: by threshold above `wanted`, cap, style, replicas, threshold."""

    def search(pool: _Pool, top: int, cap: int, styles: Sequence[str]) -> Replicas:
        span = max(top - mean, 0)
        asked = [top - span * i // (COARSE - 1) for i in range(COARSE)]
        found, step = _fewest(pool, asked, cap, styles), span // (COARSE - 1)
        for _ in range(2 if found else 0):  # as few, and less imbalance
            assert found is not None  # the winner is asked again
            _, best, order, style, _ = found
            asked, step = [best - step * i // GRID for i in range(GRID)], -(-step // GRID)
            found = _fewest(pool, asked, cap, [style], [order])
        return found[4] if found else []

    # Exact plans nearly always exist with one import a rank, and as little transfer.
    pools = [replace(pool, slots=1), pool] if is_exact and pool.slots > 1 else [pool]
    found = search(pools[0], wanted, next(pool.caps(wanted)), STYLES[:1])
    if not found:  # rare
        top = _lowest_threshold(pool, wanted, mean)
        tries = product(pool.caps(top), pools)
        found = next(filter(None, (search(p, top, cap, STYLES) for cap, p in tries)), found)
    return found


def _lowest_threshold(pool: _Pool, wanted: int, mean: int) -> int:
    """Return the lowest threshold that is reached, of a grid from `wanted` up, refined thrice.

    More room does not always help a greedy search: the mean may be reached where `wanted` is not.
    """

    def reached(threshold: int) -> bool:
        return threshold >= pool.fullest or _fewest(pool, [threshold], pool.last_cap) is not None

    for threshold in (wanted, min(mean, wanted)):
        if reached(threshold):
            return threshold
    low, high = wanted, pool.fullest
    grid = [low + ((high - low) >> i) for i in reversed(range(GRID))]
    for _ in range(4):
        first = next(i for i, threshold in enumerate([*grid, high]) if reached(threshold))
        low, high = [low, *grid][first], [*grid, high][first]
        grid = [low + (high - low) * (i + 1) // GRID for i in range(GRID)]
    return high


def _plan_by_cost(
    pools: list[_Pool], mean: int, per_token: int, per_transfer: int, per_replica: int
) -> Replicas:
    fullest = pools[0].fullest
    min_cost, best = per_token * fullest, Replicas()
    grid = [mean + ((fullest - mean) >> i) for i in range(13)] + [mean]
    for cap, threshold in product(pools[0].caps(fullest), grid):
        fixed = per_token * threshold + per_transfer * cap
        if fixed >= min_cost or any(next(pool.caps(threshold)) > cap for pool in pools):
            continue
        plans = [_fewest(pool, [threshold], cap) for pool in pools]
        replicas = [replica for plan in plans if plan for replica in plan[4]]
        cost = fixed + per_replica * len(replicas)
        if None not in plans and cost < min_cost:
            min_cost, best = cost, replicas
    return best


def _fewest(
    pool: _Pool,
    thresholds: Sequence[int],
    cap: int,
    styles: Sequence[str] = STYLES,
    orders: Sequence[int] = range(3),
) -> tuple[int, int, int, str, Replicas] | None:
    """Return the plan with the fewest replicas, of the first style that has any, and its key.

    Later styles send more. Among equals: the one for the lowest threshold, then order.
    """
    for style in styles:
        found = []
        for at, order in product(dict.fromkeys(thresholds), orders if style != "level" else [0]):
            plan = _probe(pool, at, cap, style, order)
            found += [] if plan is None else [(len(plan), at, order, style, plan)]
        if found:
            return min(found)
    return None


def _probe(pool: _Pool, threshold: int, cap: int, style: str, order: int) -> Replicas | None:
    """Bring every rank of the pool down to the threshold; None if there is no room.

    A hot rank exports, of its `cap` largest local experts, the one with the most tokens left. What
    it needs to export goes whole to the cool rank with the smallest sufficient slack ("wide": with
    the largest). If that would waste more room than the pool has to waste, a rank's slack is filled
    entirely instead: the largest slack below the need, or one above it, with more than the need. In
    the latter case the exporter drops below the threshold and becomes a cool rank: a chain, which
    moves room from a rank without imports left to one that has some. "tight" chains only if no
    slack is below the need, "early" and "wide" as soon as they can.
    """
    if style == "level":
        return _level(pool, threshold, cap)
    imports, largest = min(cap, pool.slots), max(pool.load)

    def waste(slack: int, left: int, quota: int) -> int:
        """Return how much more room the last replicas cannot fill, once one has this quota."""
        before = max(slack - left * largest, 0)
        return max(slack - quota - (left - 1) * largest, 0) - before

    slacks = [(threshold - pool.rank_load[r], r) for r in pool.ranks]
    hot = [r for slack, r in slacks if slack < 0]
    if order:  # the least loaded first, or from alternate ends
        ends = [~(n // 2) if n % 2 else n // 2 for n in range(len(hot))]
        hot = hot[::-1] if order == 1 else [hot[n] for n in ends]
    # Cool ranks by ascending slack, each with the replicas that it can still take.
    cool = [(slack, r, imports) for slack, r in slacks if slack > 0]
    spare = sum(s for s, _ in slacks) - sum(max(s - imports * largest, 0) for s, *_ in cool)
    if hot and spare < 0:
        return None
    replicas: Replicas = []
    for rank in hot:
        excess, experts = pool.rank_load[rank] - threshold, pool.local_experts[rank][:cap]
        left = [pool.load[e] for e in experts]
        while excess > 0:
            best = left.index(max(left))
            quota = need = min(left[best], excess)
            above = bisect_left(cool, need, key=lambda c: c[0])
            room = range(above, len(cool))[:: -1 if style == "wide" else 1]
            fits = (i for i in room if waste(cool[i][0], cool[i][2], need) <= spare)
            at = next(fits, -1)
            if at < 0:
                at, quota = above - 1, left[best]
                if room and (above == 0 or style != "tight"):
                    slack, _, takes = cool[room[0]]
                    at = room[0] if waste(slack, takes, min(quota, slack)) <= spare else at
            if at < 0 or quota == 0:
                return None
            slack, taker, takes = cool.pop(at)
            quota = min(quota, slack)
            spare -= waste(slack, takes, quota)
            replicas.append((experts[best], taker, quota))
            left[best] -= quota
            excess -= quota
            if takes > 1 and slack > quota:
                insort_left(cool, (slack - quota, taker, takes - 1), key=lambda c: c[0])
        if excess < 0:
            insort_left(cool, (-excess, rank, imports), key=lambda c: c[0])
    return replicas


def _level(pool: _Pool, threshold: int, cap: int) -> Replicas | None:
    """Bring every rank of the pool down to the threshold; None if that takes too many slots.

    The fullest rank fills the emptiest one up, from its expert with the most tokens left, until no
    rank is above the threshold: at the mean it takes ceil(M (G - 1) / G) slots at most, of M local
    experts (`level_probe()` of `core/plan/probe.hpp` has the proof).
    """
    slack = [threshold - pool.rank_load[r] for r in pool.ranks]
    left = [[pool.load[e] for e in pool.local_experts[r][:cap]] for r in pool.ranks]
    replicas: Replicas = []
    while sum(slack) >= 0 and min(slack) < 0:
        giver, taker = slack.index(min(slack)), slack.index(max(slack))
        for _ in range(min(cap, pool.slots)):
            best = left[giver].index(max(left[giver]))
            quota = min(left[giver][best], slack[taker])
            if quota > 0:
                expert = pool.local_experts[pool.ranks[giver]][best]
                replicas.append((expert, pool.ranks[taker], quota))
            left[giver][best] -= quota
            slack[giver] += quota
            slack[taker] -= quota
        if slack[taker] > 0:
            return None
    return replicas if sum(slack) >= 0 else None


# ---- on held slots: tokens flow to what is held, then experts move


@dataclass
class _State:
    """The expert in every slot, and every instance's quota. Slot s of rank r is r * S + s."""

    over: list[int]  # [G] tokens above the threshold
    home_quota: list[int]  # [E]
    expert: list[int]  # [G * S]
    quota: list[int]  # [G * S]

    def copy(self) -> _State:
        return _State(self.over[:], self.home_quota[:], self.expert[:], self.quota[:])

    @property
    def excess(self) -> int:
        return sum(max(over, 0) for over in self.over)


# Variants of a search: which hot rank is first, that with the least excess or (True) with the most;
# and which of its experts, by tokens left or (True) by load per instance.
VARIANTS = (False, True), (True, True), (False, False), (True, False)
MAX_STEPS, MAX_RISES = 32, 2
FIRST_PHASES, PHASES = 16, 2  # of a flow


@dataclass(frozen=True)
class _Held:
    """A search on top of what slots hold."""

    pool: _Pool  # any: loads are of all ranks
    home: list[int]  # [E]
    pool_of: list[int]  # [G]
    residents: list[int]  # [G * S]

    def plan(self, wanted: int, from_empty: Callable[[], Replicas]) -> _State:
        best = self.search(wanted)
        if best is not None and self.score(best)[1] <= 1:
            return best
        laid = self.lay_over(from_empty(), wanted)
        fullest = max(0, *laid.over)
        second = self.search(wanted + fullest) if fullest > 0 else None
        if second is not None:
            second.over = [over + fullest for over in second.over]
        return min((s for s in (best, laid, second) if s is not None), key=self.score)

    def slots_of(self, rank: int) -> range:
        return range(rank * self.pool.slots, (rank + 1) * self.pool.slots)

    def start(self, threshold: int) -> _State:
        over = [load - threshold for load in self.pool.rank_load]
        return _State(over, self.pool.load[:], self.residents[:], [0] * len(self.residents))

    def give(self, s: _State, slot: int, tokens: int) -> None:
        """Move tokens of the main instance to a slot that holds the expert."""
        expert = s.expert[slot]
        s.quota[slot] += tokens
        s.over[slot // self.pool.slots] += tokens
        s.home_quota[expert] -= tokens
        s.over[self.home[expert]] -= tokens

    def put(self, s: _State, slot: int, expert: int) -> None:
        """Put an expert into a slot, whose tokens go home."""
        if s.quota[slot]:
            self.give(s, slot, -s.quota[slot])
        s.expert[slot] = expert

    def instances(self, s: _State) -> list[tuple[int, int, int]]:
        """Return rank, expert and quota of every instance."""
        held = enumerate(zip(s.expert, s.quota, strict=True))
        replicas = [(slot // self.pool.slots, e, quota) for slot, (e, quota) in held if e >= 0]
        return [*zip(self.home, range(len(self.home)), s.home_quota, strict=True), *replicas]

    def traffic(self, s: _State) -> tuple[list[int], set[int], Counter[int]]:
        """Return the slots that move, their experts, and how many leave or (~rank) enter a rank."""
        moved = [slot for slot, old in enumerate(self.residents) if s.expert[slot] != old]
        sent = {s.expert[slot] for slot in moved}
        at = [self.home[e] for e in sent] + [~(slot // self.pool.slots) for slot in moved]
        return moved, sent, Counter(at)

    def score(self, s: _State) -> tuple[int, int, int, int]:
        """Return tokens of the fullest rank above the threshold, transfer, moves, slots in use."""
        moved, _, transfers = self.traffic(s)
        transfer = max(transfers.values(), default=0)
        return max(0, *s.over), transfer, len(moved), sum(q > 0 for q in s.quota)

    # ---- the flow of tokens between ranks that hold the same expert

    def links(self, s: _State) -> list[set[int]]:
        """Return, for each rank, those that can take tokens of it."""
        holders: list[set[int]] = [set() for _ in self.home]
        for rank, expert, _ in self.instances(s):
            holders[expert].add(rank)
        links: list[set[int]] = [set() for _ in s.over]
        for rank, expert, quota in self.instances(s):
            links[rank] |= holders[expert] if quota > 0 else set()
        return links

    def offer(self, s: _State, giver: int, taker: int) -> tuple[int, int, int] | None:
        """Return the first slots (-1: main instance) to give and to take, and what there is."""
        takes = self.slots_of(taker)
        for slot, to in [*product([-1], takes), *product(self.slots_of(giver), [-1, *takes])]:
            expert = s.expert[to if slot < 0 else slot]
            quota = s.home_quota[expert] if slot < 0 else s.quota[slot]
            if expert < 0 or quota == 0 or (slot < 0 and self.home[expert] != giver):
                continue
            if self.home[expert] == taker if to < 0 else s.expert[to] == expert:
                return slot, to, quota
        return None

    def flow(self, s: _State, phases: int) -> None:
        """Shift excess to ranks with room, in phases: always one step closer to them."""
        for _ in range(phases):
            links, rows = self.links(s), [{r for r, over in enumerate(s.over) if over < 0}]
            level = dict.fromkeys(rows[0], 0)
            while rows[-1] and any(over > 0 and r not in level for r, over in enumerate(s.over)):
                near = {r for r, to in enumerate(links) if r not in level and to & rows[-1]}
                level |= dict.fromkeys(near, len(rows))
                rows.append(near)
            while self.pulse(s, links, level, rows):
                pass
            if s.excess == 0:
                break

    def pulse(
        self, s: _State, links: list[set[int]], level: dict[int, int], rows: list[set[int]]
    ) -> bool:
        """Shift excess one step, all at a time; return whether there was any that could.

        Each rank with excess picks the lowest rank that can take any, and each rank takes from the
        lowest that has picked it.
        """
        takers: dict[int, tuple[int, int, int, int]] = {}
        for giver in [r for r, over in enumerate(s.over) if over > 0 and r in level]:
            for taker in sorted(links[giver] & rows[level[giver] - 1]):
                offer = self.offer(s, giver, taker)
                if offer and (level[taker] or s.over[taker] < 0):
                    takers.setdefault(taker, (giver, *offer))
                    break
        over = s.over[:]
        for taker, (giver, slot, to, quota) in takers.items():
            tokens = min(over[giver], quota, quota if level[taker] else -over[taker])
            if slot >= 0:
                self.give(s, slot, -tokens)
            if to >= 0:
                self.give(s, to, tokens)
        return bool(takers)

    # ---- moves

    def search(self, threshold: int) -> _State | None:
        """Search step by step in all variants, and return the best of the first plans."""
        first = self.start(threshold)
        self.flow(first, FIRST_PHASES)
        if first.excess == 0:
            return self.undo(first)
        states, rises = [first.copy() for _ in VARIANTS], [0] * len(VARIANTS)
        going = list(range(len(VARIANTS)))
        for _ in range(MAX_STEPS):
            for i in going[:]:
                s, before = states[i], states[i].excess
                moves = self.step(s, *VARIANTS[i])
                if s.excess >= before:
                    rises[i] += 1
                    if not moves or rises[i] > MAX_RISES:
                        going.remove(i)
            if done := [states[i] for i in going if states[i].excess == 0]:
                return self.undo(min(done, key=self.score))
        return None

    def step(self, s: _State, from_end: bool, by_load: bool) -> bool:
        """Move an expert, and let tokens flow; return whether one was found that could help."""
        hot = sorted((over, rank) for rank, over in enumerate(s.over) if over > 0)
        move = self.choose(s, hot[-1 if from_end else 0][1], by_load)
        if move:
            self.put(s, *move)
        self.flow(s, PHASES)
        return move is not None

    def choose(self, s: _State, hot: int, by_load: bool) -> tuple[int, int] | None:
        """Return a slot, and the first expert of those that could relieve a hot rank.

        No rank sends more than one expert, or gets more.
        """
        links, reach, size = self.links(s), {hot}, 0
        while len(reach) > size:
            size, reach = len(reach), reach.union(*(links[rank] for rank in reach))
        room = [max(-over, 0) for over in s.over]  # or a rank's to which it can pass tokens
        for _ in range(2):
            most = [0 for _ in self.home]
            for rank, e, _ in self.instances(s):
                most[e] = max(most[e], room[rank])
            for rank, e, quota in self.instances(s):
                room[rank] = max(room[rank], min(quota, most[e]))
        _, sent, transfers = self.traffic(s)
        copies, excess = Counter(s.expert), sum(max(s.over[rank], 0) for rank in reach)
        experts = []
        for e, (home, quota) in enumerate(zip(self.home, s.home_quota, strict=True)):
            if quota > 0 and home in reach and (e in sent or transfers[home] == 0):
                need, load = min(quota, excess), self.pool.load[e] >> copies[e]
                experts.append((-need, -load, e) if by_load else (-quota, 0, e))
        if not experts:
            return None
        expert, best = min(experts)[2], []
        for slot, old in enumerate(s.expert):
            rank, quota = slot // self.pool.slots, s.quota[slot]
            here = {e for i in self.slots_of(rank) for e in (s.expert[i], self.residents[i])}
            if room[rank] == 0 or rank in reach or transfers[~rank] > 0:
                continue
            if expert in here or old != self.residents[slot] or self.home[expert] == rank:
                continue
            if self.pool_of[self.home[expert]] == self.pool_of[rank]:
                back = max(quota - max(-s.over[self.home[old]], 0), 0)
                space = max(quota - s.over[rank], room[rank])
                left = excess + back - min(s.home_quota[expert], excess + back, space)
                price = quota + (self.pool.load[old] >> copies[old] - 1 if old >= 0 else -1)
                best.append((left, space - (excess + back - left) + 2 * price, slot))
        return (min(best)[2], expert) if best else None

    def undo(self, s: _State) -> _State:
        """Undo the smallest move that is unnecessary, and those without tokens; empty slots."""
        moved = [slot for slot in self.traffic(s)[0] if s.quota[slot] > 0]
        for slot in sorted(moved, key=lambda i: (s.quota[i], i))[: len(VARIANTS)]:
            trial = s.copy()
            self.put(trial, slot, self.residents[slot])
            self.flow(trial, PHASES)
            if trial.excess == 0:
                s = trial
                break
        for slot, old in enumerate(self.residents):
            if s.quota[slot] == 0:
                s.expert[slot] = old
            elif s.expert[slot] == old and s.quota[slot] <= -s.over[self.home[old]]:
                self.put(s, slot, old)
        return s

    def lay_over(self, replicas: Replicas, threshold: int) -> _State:
        """Return a plan made for empty slots, without moving what is in place already."""
        s, load = self.start(threshold), self.pool.load
        held = {(slot // self.pool.slots, e): slot for slot, e in enumerate(s.expert)}
        for expert, rank, quota in sorted(replicas, key=lambda x: (x[1], x[0]) not in held):
            slot = held.get((rank, expert), -1)
            if slot < 0:
                free = [(s.expert[i], i) for i in self.slots_of(rank) if s.quota[i] == 0]
                slot = min((load[e] if e >= 0 else -1, i) for e, i in free)[1]
                self.put(s, slot, expert)
            self.give(s, slot, quota)
        return s
