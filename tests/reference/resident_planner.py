"""The readable definition of the planner on top of residents: experts that slots still hold.

`src/core/plan/resident_planner.hpp` is the fast one; the two agree in every integer. Tokens first
flow to what is held: if no rank has too many then, nothing moves. Otherwise one expert at a time
moves, by two variants side by side, until one of them leaves no rank with too many tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from reference import planner
from reference.planner import Int32Array

from ultraep_comm.plan.planner import PPM

# Variants of a search: which hot rank is first, that with the most excess (True) or the least; and
# which expert, by tokens that can leave, then load per instance (True), or by all of the main one.
VARIANTS = (True, True), (False, False)
MAX_STEPS, MAX_RISES, MAX_TRIALS = 32, 2, 4
MAX_QUOTA = 2**31 - 1


class Score(NamedTuple):
    """The objectives of a plan, in order; lower is better."""

    over: int  # tokens of the fullest rank above the threshold
    transfer: int  # the largest number of moves to a rank, or of experts that leave one
    moves: int
    instances: int  # slots with a quota


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
    load_, home_ = np.asarray(load, np.int64), np.asarray(home, np.int64)
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
    best = search.run(threshold)
    if best is None:
        expert, quota, _ = from_empty()
        best = search.overlay_empty_plan(threshold, expert.tolist(), quota.tolist())
        extra = search.score(best).over
        second = search.run(threshold + extra) if extra > 0 else None
        if second is not None:
            second.over = [over + extra for over in second.over]
            best = min(best, second, key=search.score)
    return (
        np.array(best.slot_expert, np.int32).reshape(num_ranks, slots),
        np.array(best.slot_quota, np.int32).reshape(num_ranks, slots),
        np.array(best.home_quota, np.int32),
    )


@dataclass
class _Assignment:
    """The expert in every slot, and every instance's quota. Slot s of rank r is r * S + s."""

    over: list[int]  # [G] tokens above the threshold
    home_quota: list[int]  # [E]
    slot_expert: list[int]  # [G * S]
    slot_quota: list[int]  # [G * S]

    def copy(self) -> _Assignment:
        return _Assignment(
            self.over[:], self.home_quota[:], self.slot_expert[:], self.slot_quota[:]
        )

    @property
    def excess(self) -> int:
        return sum(max(over, 0) for over in self.over)


class _Reached(NamedTuple):
    """How tokens get to a rank. An instance is a slot, or ~expert for the main one."""

    given: int  # the instances of the last step
    taken: int
    came_from: int  # rank
    root: int  # the rank from which they come
    limit: int  # tokens


@dataclass(frozen=True)
class _Search:
    load: list[int]  # [E]
    home: list[int]  # [E]
    pool_of: list[int]  # [G]
    rank_load: list[int]  # [G] without replicas
    residents: list[int]  # [G * S]
    slots: int

    def run(self, threshold: int) -> _Assignment | None:
        """Return the first plan that a variant finds."""
        first = self._start(threshold)
        self._relieve_all(first)
        if first.excess == 0:
            return self._improve(first)
        states, rises = [first.copy() for _ in VARIANTS], [0 for _ in VARIANTS]
        going = list(range(len(VARIANTS)))
        for _ in range(MAX_STEPS):
            for i in going[:]:
                s, before = states[i], states[i].excess
                has_moved = self._step(s, *VARIANTS[i])
                if s.excess >= before:
                    rises[i] += 1
                    if not has_moved or rises[i] > MAX_RISES:
                        going.remove(i)
                if s.excess == 0:
                    return self._improve(s)
        return None

    def overlay_empty_plan(
        self, threshold: int, slot_expert: list[list[int]], slot_quota: list[list[int]]
    ) -> _Assignment:
        """Take the plan made for empty slots, without moving what is in place already."""
        s = self._start(threshold)
        for rank, row in enumerate(slot_expert):
            slots = self._slots_of(rank)
            planned = [(e, q) for e, q in zip(row, slot_quota[rank], strict=True) if e >= 0]
            held = {s.slot_expert[slot]: slot for slot in slots}
            for expert, quota in planned:
                if expert in held:
                    self._give(s, held[expert], quota)
            for expert, quota in planned:
                if expert not in held:
                    free = [(s.slot_expert[i], i) for i in slots if s.slot_quota[i] == 0]
                    at = min((self.load[e] if e >= 0 else -1, i) for e, i in free)[1]
                    self._put(s, at, expert)
                    self._give(s, at, quota)
        return s

    def score(self, s: _Assignment) -> Score:
        moved, _, transfers = self._traffic(s)
        used = sum(quota > 0 for quota in s.slot_quota)
        return Score(max(0, *s.over), max(transfers.values(), default=0), len(moved), used)

    # ---- the assignment

    def _slots_of(self, rank: int) -> range:
        return range(rank * self.slots, (rank + 1) * self.slots)

    def _start(self, threshold: int) -> _Assignment:
        over = [load - threshold for load in self.rank_load]
        return _Assignment(over, self.load[:], self.residents[:], [0] * len(self.residents))

    def _give(self, s: _Assignment, slot: int, tokens: int) -> None:
        """Move tokens of the main instance to a slot that holds the expert."""
        expert = s.slot_expert[slot]
        s.slot_quota[slot] += tokens
        s.over[slot // self.slots] += tokens
        s.home_quota[expert] -= tokens
        s.over[self.home[expert]] -= tokens

    def _put(self, s: _Assignment, slot: int, expert: int) -> None:
        """Put an expert into a slot, whose tokens go home."""
        if s.slot_quota[slot] > 0:
            self._give(s, slot, -s.slot_quota[slot])
        s.slot_expert[slot] = expert

    def _traffic(self, s: _Assignment) -> tuple[list[int], set[int], Counter[int]]:
        """Return the slots that move, their experts, and how many leave or (~rank) enter a rank."""
        moved = [slot for slot, old in enumerate(self.residents) if s.slot_expert[slot] != old]
        sent = {s.slot_expert[slot] for slot in moved}
        at = [self.home[e] for e in sent] + [~(slot // self.slots) for slot in moved]
        return moved, sent, Counter(at)

    # ---- the flow of tokens between ranks that hold the same expert

    def _grow(
        self, s: _Assignment, roots: Collection[int]
    ) -> tuple[dict[int, _Reached], list[int]]:
        """Search breadth first, a tree from each root, up to the first ranks with room.

        The first instance (the main one, then by slot) of the last ranks that has tokens gives an
        expert; a rank takes that of the first slot. Returns what is reached, and these ranks.
        """
        reached = {root: _Reached(0, 0, root, root, s.over[root]) for root in roots}
        held = [(slot, expert) for slot, expert in enumerate(s.slot_expert) if expert >= 0]
        last = list(roots)
        while last:
            givers: dict[int, tuple[int, int, int]] = {}  # instance, rank, tokens
            for slot, e in held:
                home, rank = self.home[e], slot // self.slots
                if home in last and s.home_quota[e] > 0:
                    givers[e] = (~e, home, s.home_quota[e])
                if rank in last and s.slot_quota[slot] > 0:
                    givers.setdefault(e, (slot, rank, s.slot_quota[slot]))
            fresh: dict[int, _Reached] = {}
            for slot, e in held:
                for taker, taken in ((slot // self.slots, slot), (self.home[e], ~e)):
                    if e in givers and not (taker in reached or taker in fresh):
                        given, giver, tokens = givers[e]
                        before = reached[giver]
                        limit = min(before.limit, tokens)
                        fresh[taker] = _Reached(given, taken, giver, before.root, limit)
            reached |= fresh
            last = list(fresh)
            if room := [rank for rank in last if s.over[rank] < 0]:
                return reached, room
        return reached, []

    def _change_quota(self, s: _Assignment, instance: int, tokens: int) -> None:
        if instance < 0:
            s.home_quota[~instance] += tokens
        else:
            s.slot_quota[instance] += tokens

    def _relieve_all(self, s: _Assignment) -> None:
        """Shift tokens from ranks with excess to ranks with room, as many as can be.

        Of the ranks that a tree reaches that with the most room, in powers of two.
        """
        while True:
            reached, ends = self._grow(s, [r for r, over in enumerate(s.over) if over > 0])
            if not ends:
                return
            best: dict[int, int] = {}  # by root
            for end in sorted(ends, key=lambda r: (-min(-s.over[r], MAX_QUOTA).bit_length(), r)):
                best.setdefault(reached[end].root, end)
            for root, end in best.items():
                tokens = min(s.over[root], -s.over[end], reached[end].limit)
                s.over[root] -= tokens
                s.over[end] += tokens
                at = end
                while at != root:
                    self._change_quota(s, reached[at].given, -tokens)
                    self._change_quota(s, reached[at].taken, tokens)
                    at = reached[at].came_from

    # ---- moves

    def _step(self, s: _Assignment, from_end: bool, by_load: bool) -> bool:
        """Move an expert, and let tokens flow; return whether one was found that could help."""
        hot = sorted((over, rank) for rank, over in enumerate(s.over) if over > 0)
        move = self._choose(s, hot[-1 if from_end else 0][1], by_load)
        if move:
            self._put(s, *move)
            self._relieve_all(s)
        return move is not None

    def _choose(self, s: _Assignment, hot: int, by_load: bool) -> tuple[int, int] | None:
        """Return a slot, and the first expert of those that could relieve a hot rank.

        No rank sends more than one expert, or gets more.
        """
        reach, _ = self._grow(s, [hot])
        excess = sum(max(s.over[rank], 0) for rank in reach)
        room = self._shared_room(s)
        _, sent, transfers = self._traffic(s)
        copies, experts = Counter(s.slot_expert), []
        for e, (home, quota) in enumerate(zip(self.home, s.home_quota, strict=True)):
            if quota > 0 and home in reach and (e in sent or transfers[home] == 0):
                need, load = min(quota, excess), self.load[e] >> copies[e]
                experts.append((-need, -load, e) if by_load else (-quota, 0, e))
        if not experts:
            return None
        expert, best = min(experts)[2], []
        for slot, old in enumerate(s.slot_expert):
            rank, quota = slot // self.slots, s.slot_quota[slot]
            here = {e for i in self._slots_of(rank) for e in (s.slot_expert[i], self.residents[i])}
            if room[rank] == 0 or rank in reach or transfers[~rank] > 0:
                continue
            if expert in here or old != self.residents[slot] or self.home[expert] == rank:
                continue
            if self.pool_of[self.home[expert]] == self.pool_of[rank]:
                # What the resident has taken goes home first, where there may be no room for it.
                back = max(quota - max(-s.over[self.home[old]], 0), 0) if old >= 0 else 0
                space = max(quota - s.over[rank], room[rank])
                gain = min(s.home_quota[expert], excess + back, space)
                price = quota + (self.load[old] >> copies[old] - 1 if old >= 0 else -1)
                best.append((excess + back - gain, space - gain + 2 * price, slot))
        return (min(best)[2], expert) if best else None

    def _shared_room(self, s: _Assignment) -> list[int]:
        """Return each rank's room, or that of one to which it can pass tokens in two steps."""
        room = [min(max(-over, 0), MAX_QUOTA) for over in s.over]
        for _ in range(2):
            before = room[:]
            for slot, expert in enumerate(s.slot_expert):
                if expert >= 0:
                    rank, home = slot // self.slots, self.home[expert]
                    room[rank] = max(room[rank], min(s.slot_quota[slot], before[home]))
                    room[home] = max(room[home], min(s.home_quota[expert], before[rank]))
        return room

    # ---- improvements, once no rank has excess

    def _improve(self, s: _Assignment) -> _Assignment:
        """Undo the smallest move that is unnecessary, and those without tokens; empty slots."""
        moved = [slot for slot in self._traffic(s)[0] if s.slot_quota[slot] > 0]
        for slot in sorted(moved, key=lambda i: (s.slot_quota[i], i))[:MAX_TRIALS]:
            trial = s.copy()
            self._put(trial, slot, self.residents[slot])
            self._relieve_all(trial)
            if trial.excess == 0:
                s = trial
                break
        for slot, old in enumerate(self.residents):
            if s.slot_quota[slot] == 0:
                s.slot_expert[slot] = old
            elif s.slot_expert[slot] == old and s.slot_quota[slot] <= -s.over[self.home[old]]:
                self._put(s, slot, old)
        return s
