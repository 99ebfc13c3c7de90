"""The readable definition of the planner on top of residents: experts that slots still hold.

`src/core/plan/resident_planner.hpp` is the fast one; the two agree in every integer. The residents
first: if tokens can flow to them until no rank has too many, nothing moves. Otherwise one expert at
a time moves, to where it relieves the most.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from reference import planner
from reference.planner import Int32Array

from ultraep_comm.plan.planner import PPM

MAX_TRIALS = 5
MAX_SOURCES = 8


class Score(NamedTuple):
    """The objectives of a plan, in order; lower is better."""

    fullest: int  # tokens of the fullest rank, at least the threshold
    transfer: int  # the largest number of moves to a rank, or of experts that leave one
    moves: int
    instances: int  # slots with a quota


class _Source(NamedTuple):
    """An expert that may get another replica. The lowest tuple is the best."""

    supply: int  # minus the tokens that could go to the replica
    need: int  # minus its load, divided by four for each replica that it has
    expert: int


class _Move(NamedTuple):
    """A candidate move. The lowest tuple is the best."""

    left: int  # excess that remains
    price: int  # room that remains, plus the cost of evicting the slot's resident
    expert: int
    slot: int


@dataclass(kw_only=True)
class _Assignment:
    """The expert in every slot, and every instance's quota. Slot s of rank r is r * S + s."""

    tokens: list[int]  # [G]
    home_quota: list[int]  # [E]
    slot_quota: list[int]  # [G * S]
    slot_expert: list[int]  # [G * S]
    slots_of: list[list[int]]  # [E], the most recently filled first

    def copy(self) -> _Assignment:
        return _Assignment(
            tokens=self.tokens[:],
            home_quota=self.home_quota[:],
            slot_quota=self.slot_quota[:],
            slot_expert=self.slot_expert[:],
            slots_of=[slots[:] for slots in self.slots_of],
        )


class _Instance(NamedTuple):
    """An expert's main instance (slot -1), or the one in a slot."""

    expert: int
    slot: int


@dataclass
class _Reach:
    """The ranks that a rank can shift tokens to, in the order of the search."""

    ranks: list[int]
    before: dict[int, int] = field(default_factory=dict)
    given: dict[int, _Instance] = field(default_factory=dict)  # the instance that gives tokens
    taken: dict[int, _Instance] = field(default_factory=dict)  # the instance that takes them


def plan_slots_with_residents(
    load: ArrayLike,
    *,
    home: ArrayLike,
    domain: ArrayLike,
    residents: ArrayLike,
    allow_cross_domain: bool = False,
    target: float = 1.01,
) -> tuple[Int32Array, Int32Array, Int32Array]:
    """Choose the replicas of one microbatch and every quota, given what the slots hold.

    Minimises, in this order: the imbalance, though not below `target`; the transfer of the moves
    (slots whose expert is not the resident); the moves; the instances in use. The fullest rank has
    no more tokens than the target allows, or than `planner.plan_slots` leaves it.

    Args:
        load: `[E]` integers, as for `planner.plan_slots`.
        home: `[E]` integers, the rank of each expert's main instance.
        domain: `[G]` integers; ranks with equal values are in one domain.
        residents: `[G, S]` integers, the expert in each slot or -1: never at home, never twice on
            a rank, only where a replica may be.
        allow_cross_domain: let replicas leave the domain of their home.
        target: largest rank quota over the mean that is acceptable, from 1 to 1000.

    Returns:
        `(slot_expert, slot_quota, home_quota)`: int32 `[G, S]`, `[G, S]`, `[E]`. A resident that is
        not needed stays, with quota 0, unless its slot is. A slot that moves has a quota. Without
        residents, the plan of `planner.plan_slots`.

    Raises:
        ValueError: as `planner.plan_slots`.
    """
    residents_ = np.asarray(residents, np.int64)
    num_ranks, slots = residents_.shape

    def from_empty() -> tuple[Int32Array, Int32Array, Int32Array]:
        return planner.plan_slots(
            load,
            num_ranks=num_ranks,
            slots_per_rank=slots,
            home=home,
            domain=domain,
            allow_cross_domain=allow_cross_domain,
            target=target,
        )

    if (residents_ < 0).all():
        return from_empty()
    target_ppm = planner.target_to_ppm(target)
    load_, home_ = planner.checked(load, home, domain, num_ranks, slots)
    pool_of = np.zeros(num_ranks, np.int64) if allow_cross_domain else np.asarray(domain)
    pools = planner.pools_of(load_, home_, pool_of, num_ranks, slots, target_ppm == PPM)
    mean = max(pool.mean for pool in pools)
    threshold = max(mean, int(load_.sum()) * target_ppm // (num_ranks * PPM))
    search = _Search(
        load=load_.tolist(),
        home=home_.tolist(),
        pool_of=pool_of.tolist(),
        rank_load=pools[0].rank_load,
        residents=residents_.reshape(-1).tolist(),
        slots=slots,
    )
    if not search.repair(threshold) or search.score.transfer > 1:
        slot_expert, slot_quota, _ = from_empty()
        search.overlay_empty_plan(threshold, slot_expert.tolist(), slot_quota.tolist())
        if search.score.fullest > threshold:
            search.repair(search.score.fullest)
    best = search.best
    return (
        np.array(best.slot_expert, np.int32).reshape(num_ranks, slots),
        np.array(best.slot_quota, np.int32).reshape(num_ranks, slots),
        np.array(best.home_quota, np.int32),
    )


@dataclass(kw_only=True)
class _Search:
    load: list[int]  # [E]
    home: list[int]  # [E]
    pool_of: list[int]  # [G]
    rank_load: list[int]  # [G] without replicas
    residents: list[int]  # [G * S]
    slots: int
    threshold: int = 0
    now: _Assignment = field(init=False)
    best: _Assignment = field(init=False)
    score: Score = field(init=False)
    imports: list[int] = field(init=False)  # [G] moves to a rank
    exported: list[set[int]] = field(init=False)  # [G] local experts that move

    def __post_init__(self) -> None:
        ranks = range(len(self.rank_load))
        self.local_experts = [[e for e, home in enumerate(self.home) if home == r] for r in ranks]
        self.score = Score(2**62, 0, 0, 0)

    def repair(self, threshold: int) -> bool:
        """Keep the residents, and make the moves that bring every rank down to the threshold.

        Returns whether that is possible; the cap on transfers is the lowest that allows it.
        """
        self.threshold = threshold
        last_cap = max(self.slots, *map(len, self.local_experts))
        cap = 1
        while cap < 2 * last_cap:
            for is_retry in (False, True):
                self._reset_to_residents()
                if self._move_all(cap, is_retry):
                    self._undo_needless()
                    self._empty_slots()
                    self._keep_better()
                    return True
            cap = cap + 1 if cap < self.slots else 2 * cap
        return False

    def overlay_empty_plan(
        self, threshold: int, slot_expert: list[list[int]], slot_quota: list[list[int]]
    ) -> None:
        """Take the plan made for empty slots, without moving what is in place already."""
        self.threshold = threshold
        self._reset_to_residents()
        now = self.now
        for rank, row in enumerate(slot_expert):
            slots = self._slots_of_rank(rank)
            planned = [(e, q) for e, q in zip(row, slot_quota[rank], strict=True) if e >= 0]
            held = {now.slot_expert[slot]: slot for slot in slots}
            for expert, quota in planned:
                if expert in held:
                    self._give(held[expert], quota)
            for expert, quota in planned:
                if expert not in held:
                    free = [slot for slot in slots if now.slot_quota[slot] == 0]
                    at = min(free, key=lambda slot: (self._eviction_cost(slot), slot))
                    self._replace(at, expert)
                    self._give(at, quota)
        self._keep_better()

    # ---- the assignment

    def _slots_of_rank(self, rank: int) -> range:
        return range(rank * self.slots, (rank + 1) * self.slots)

    def _has_moved(self, slot: int) -> bool:
        return self.now.slot_expert[slot] != self.residents[slot]

    def _eviction_cost(self, slot: int) -> int:
        """Return the load of the slot's expert, halved for each other replica; -1: empty."""
        expert = self.now.slot_expert[slot]
        if expert < 0:
            return -1
        return self.load[expert] >> min(len(self.now.slots_of[expert]) - 1, 32)

    def _reset_to_residents(self) -> None:
        ranks = range(len(self.rank_load))
        self.imports = [0 for _ in ranks]
        self.exported = [set() for _ in ranks]
        slots_of: list[list[int]] = [[] for _ in self.load]
        for slot, expert in enumerate(self.residents):
            if expert >= 0:
                slots_of[expert].append(slot)
        self.now = _Assignment(
            tokens=self.rank_load[:],
            home_quota=self.load[:],
            slot_quota=[0] * len(self.residents),
            slot_expert=self.residents[:],
            slots_of=slots_of,
        )

    def _give(self, slot: int, tokens: int) -> None:
        """Move tokens of the main instance to a slot that holds the expert."""
        expert = self.now.slot_expert[slot]
        self.now.slot_quota[slot] += tokens
        self.now.home_quota[expert] -= tokens
        self.now.tokens[slot // self.slots] += tokens
        self.now.tokens[self.home[expert]] -= tokens

    def _replace(self, slot: int, expert: int) -> int | None:
        """Put an expert into a slot, whose tokens go home; return that home."""
        old = self.now.slot_expert[slot]
        if old >= 0:
            self._give(slot, -self.now.slot_quota[slot])
            self.now.slots_of[old].remove(slot)
        self.now.slot_expert[slot] = expert
        if expert >= 0:
            self.now.slots_of[expert].insert(0, slot)
        return self.home[old] if old >= 0 else None

    # ---- the flow of tokens between ranks that hold the same expert

    def _room(self, rank: int) -> int:
        return self.threshold - self.now.tokens[rank]

    def _excess(self, rank: int) -> int:
        return max(-self._room(rank), 0)

    def _total_excess(self) -> int:
        return sum(map(self._excess, range(len(self.rank_load))))

    def _quota(self, instance: _Instance) -> int:
        if instance.slot < 0:
            return self.now.home_quota[instance.expert]
        return self.now.slot_quota[instance.slot]

    def _change_quota(self, instance: _Instance, tokens: int) -> None:
        if instance.slot < 0:
            self.now.home_quota[instance.expert] += tokens
        else:
            self.now.slot_quota[instance.slot] += tokens

    def _offers(self, rank: int) -> list[tuple[_Instance, _Instance]]:
        """Return pairs of instances: one of this rank with tokens, and one that can take them."""
        now = self.now
        offers = []
        for expert in self.local_experts[rank]:
            if now.home_quota[expert] > 0:
                main = _Instance(expert, -1)
                offers += [(main, _Instance(expert, to)) for to in now.slots_of[expert]]
        for slot in self._slots_of_rank(rank):
            if now.slot_quota[slot] > 0:
                expert = now.slot_expert[slot]
                others = [-1] + [to for to in now.slots_of[expert] if to != slot]
                offers += [(_Instance(expert, slot), _Instance(expert, to)) for to in others]
        return offers

    def _search(self, start: int, stuck: set[int]) -> tuple[_Reach, int | None]:
        """Search breadth first, and return the first rank with room."""
        reach = _Reach([start])
        for rank in reach.ranks:  # grows in the loop
            for given, taken in self._offers(rank):
                to = self.home[taken.expert] if taken.slot < 0 else taken.slot // self.slots
                if to == start or to in reach.before or to in stuck:
                    continue
                reach.ranks.append(to)
                reach.before[to], reach.given[to], reach.taken[to] = rank, given, taken
                if self._room(to) > 0:
                    return reach, to
        return reach, None

    def _relieve(self, rank: int, stuck: set[int] | None = None) -> _Reach | None:
        """Shift a rank's excess to ranks with room; return its reach if some excess remains.

        The ranks in reach then have no room.
        """
        while self._excess(rank) > 0:
            reach, end = self._search(rank, stuck or set())
            if end is None:
                return reach
            path = [end]
            while path[-1] != rank:
                path.append(reach.before[path[-1]])
            path.pop()
            tokens = min(self._excess(rank), self._room(end))
            tokens = min(tokens, *(self._quota(reach.given[r]) for r in path))
            for r in path:
                self._change_quota(reach.given[r], -tokens)
                self._change_quota(reach.taken[r], tokens)
            self.now.tokens[rank] -= tokens
            self.now.tokens[end] += tokens
        return None

    def _supplies(self, reach: _Reach) -> dict[int, int]:
        """Return how many tokens could leave each rank in reach to relieve those with excess."""
        supply = {reach.ranks[0]: self._excess(reach.ranks[0])}
        for r in reach.ranks[1:]:
            passed = min(supply[reach.before[r]], self._quota(reach.given[r]))
            supply[r] = passed + self._excess(r)
        return supply

    # ---- moves

    def _move_all(self, cap: int, is_retry: bool) -> bool:
        """Relieve the hot ranks one after the other, those with the least excess first.

        A retry takes those with the most first, and considers more experts for each.
        """
        stuck: set[int] = set()
        for rank in range(len(self.rank_load)):
            reach = self._relieve(rank, stuck)
            stuck |= set(reach.ranks if reach else ())
        while self._total_excess() > 0:
            hot_ranks = [r for r in range(len(self.rank_load)) if self._excess(r) > 0]
            sign = -1 if is_retry else 1
            hot = min(hot_ranks, key=lambda r: sign * self._excess(r))
            reach = self._relieve(hot)
            if reach is None:
                continue
            sources = self._find_sources(reach, cap, MAX_SOURCES if is_retry else 1)
            # A rank without room may still pass tokens on to others of its group.
            own_room = list(map(self._room, range(len(self.rank_load))))
            if not any(
                self._try_moves(reach, sources, cap, room)
                for room in (self._group_room(), own_room)
            ):
                return False
        return True

    def _find_sources(self, reach: _Reach, cap: int, count: int) -> list[_Source]:
        """Return the best ``count`` experts of which ranks in reach have tokens.

        All ranks with such tokens, and the expert's home, are in reach.
        """
        now = self.now
        supply = self._supplies(reach)
        excess = sum(map(self._excess, reach.ranks))
        sources = []
        for rank in reach.ranks:
            for expert in self.local_experts[rank]:
                if len(self.exported[rank]) >= cap and expert not in self.exported[rank]:
                    continue
                replicas = now.slots_of[expert]
                tokens = min(supply[rank], now.home_quota[expert]) + sum(
                    min(supply.get(slot // self.slots, 0), now.slot_quota[slot])
                    for slot in replicas
                )
                if tokens > 0:
                    need = self.load[expert] >> min(2 * len(replicas), 32)
                    sources.append(_Source(-min(tokens, excess), -need, expert))
        return sorted(sources)[:count]

    def _group_room(self) -> list[int]:
        """Return the room of each rank's group: the ranks that can shift tokens to each other."""
        now = self.now
        group = list(range(len(self.rank_load)))
        for expert, slots in enumerate(now.slots_of):
            ranks = [slot // self.slots for slot in slots if now.slot_quota[slot] > 0]
            ranks += [self.home[expert]] if now.home_quota[expert] > 0 else []
            joined = {group[r] for r in ranks}
            group = [min(joined) if g in joined else g for g in group]
        room = [0] * len(group)
        for rank, g in enumerate(group):
            room[g] += max(self._room(rank), 0)
        return [room[g] for g in group]

    def _try_moves(
        self, reach: _Reach, sources: list[_Source], cap: int, shared_room: list[int]
    ) -> bool:
        """Make a move that relieves the ranks in reach; return whether there is one.

        Of the best candidates, the first that relieves as much as predicted, else the one that
        relieves most.
        """
        hot = [r for r in reach.ranks if self._excess(r) > 0]
        excess, total = sum(map(self._excess, hot)), self._total_excess()
        max_gain, best = 0, None
        before = self.now
        for move in self._find_moves(reach, sources, cap, shared_room):
            self.now = before.copy()
            self._make(move, hot)
            gain = total - self._total_excess()
            if gain > 0 and gain >= excess - move.left:
                self._record(move.slot, move.expert)
                return True
            if gain > max_gain:
                max_gain, best = gain, move
        self.now = before
        if best is None:
            return False
        self._make(best, hot)
        self._record(best.slot, best.expert)
        return True

    def _make(self, move: _Move, hot: list[int]) -> None:
        home = self._replace(move.slot, move.expert)
        for rank in hot:
            self._relieve(rank)
        if home is not None:
            self._relieve(home)

    def _record(self, slot: int, expert: int) -> None:
        self.imports[slot // self.slots] += 1
        self.exported[self.home[expert]].add(expert)

    def _find_moves(
        self, reach: _Reach, sources: list[_Source], cap: int, shared_room: list[int]
    ) -> list[_Move]:
        now = self.now
        excess = sum(map(self._excess, reach.ranks))
        moves = []
        for rank, shared in enumerate(shared_room):
            if shared <= 0 or self.imports[rank] >= cap or rank in reach.ranks:
                continue
            slots = self._slots_of_rank(rank)
            empty = [slot for slot in slots if now.slot_expert[slot] < 0]
            for slot in slots:
                if self._has_moved(slot) or slot in empty[1:]:
                    continue
                # The resident's tokens go back to its home, which may lack room for them.
                quota, old = now.slot_quota[slot], now.slot_expert[slot]
                back = max(quota - max(self._room(self.home[old]), 0), 0) if quota > 0 else 0
                room = max(self._room(rank) + quota, shared)
                price = 2 * (quota + self._eviction_cost(slot))
                for source in sources:
                    expert = source.expert
                    here = {self.residents[i] for i in slots}
                    if self._may_hold(expert, rank) and expert not in here:
                        gain = min(-source.supply, room)
                        left = excess - gain + back
                        moves.append(_Move(left, room - gain + price, expert, slot))
        return sorted(moves)[:MAX_TRIALS]

    def _may_hold(self, expert: int, rank: int) -> bool:
        home = self.home[expert]
        return home != rank and self.pool_of[home] == self.pool_of[rank]

    # ---- improvements, once no rank has excess

    def _undo_needless(self) -> None:
        """Undo moves that later ones have made unnecessary.

        A move whose quota is large next to all ranks' room hardly ever is: it is not tried.
        """
        all_room = sum(map(self._room, range(len(self.rank_load))))
        for slot, resident in enumerate(self.residents):
            if self._has_moved(slot) and 4 * self.now.slot_quota[slot] <= all_room:
                before = self.now.copy()
                home = self._replace(slot, resident)
                assert home is not None  # the slot held an expert
                if self._relieve(home) is not None:
                    self.now = before

    def _empty_slots(self) -> None:
        """Return residents' tokens to homes that have room, so that fewer slots are in use."""
        for slot, quota in enumerate(self.now.slot_quota):
            if quota == 0 or self._has_moved(slot):
                continue
            if self._room(self.home[self.now.slot_expert[slot]]) >= quota:
                self._give(slot, -quota)

    def _keep_better(self) -> None:
        score = self._score()
        if score < self.score:
            self.score, self.best = score, self.now

    def _score(self) -> Score:
        ranks = range(len(self.rank_load))
        self.imports, self.exported = [0 for _ in ranks], [set() for _ in ranks]
        moved = [slot for slot in range(len(self.residents)) if self._has_moved(slot)]
        for slot in moved:
            self._record(slot, self.now.slot_expert[slot])
        return Score(
            fullest=max(self.threshold, *self.now.tokens),
            transfer=max(*self.imports, *map(len, self.exported)),
            moves=len(moved),
            instances=sum(quota > 0 for quota in self.now.slot_quota),
        )
