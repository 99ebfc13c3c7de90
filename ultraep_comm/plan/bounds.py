"""What no plan, and no schedule of a plan, can beat; in integers, independent of both planners."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from heapq import heappop, heappush
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int32] | NDArray[np.int64]
Int64Array = NDArray[np.int64]


# ---- balance ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TokenBound:
    """Why no plan brings the fullest rank below some tokens; see :func:`find_token_bound`.

    Attributes:
        tokens: of the fullest rank.
        reason: "mean" of all ranks; "domains", if that of one domain is larger; or "slots".
        ranks: all; the domain; or the ranks whose experts find too little room. Ascending.
    """

    tokens: int
    reason: str
    ranks: tuple[int, ...]


def find_token_bound(load: IntArray, home: IntArray, domains: IntArray, slots: int) -> TokenBound:
    """Return how many tokens the fullest rank has at least, under any plan inside the domains.

    Let it have t, in a domain of G ranks with S slots each, and let q of these ranks own experts
    with A tokens. Their experts can be in these ranks, which have t tokens at most each, and in the
    other ranks' (G - q) * S slots. A slot has tokens of one expert, t at most, and all slots of an
    expert have its load L at most: no more than if L was cut into pieces of t and what is left, and
    the largest pieces of all these experts were in the slots. So, with C the sum of these pieces,

        A <= q * t + C

    For q = G that is the mean; without slots and for q = 1, a rank's local experts. t is the lowest
    number for which it holds for the q fullest ranks, for every q. Reaching it is bin packing: some
    loads have no plan that does.

    Takes O(E log E + G log G) for each t that is tried: one if the mean holds, else as many as it
    has bits.

    Args:
        load: ``[E]`` tokens of each expert.
        home: ``[E]``, in ``[0, G)``.
        domains: ``[G]``; equal for ranks that may hold each other's experts.
        slots: S.
    """
    ends = np.bincount(home, minlength=len(domains)).cumsum()
    local_loads = np.split(load[np.argsort(home, kind="stable")], ends[:-1])
    found = TokenBound(tokens=-1, reason="", ranks=())
    for name in np.unique(domains):
        inside = np.flatnonzero(domains == name)
        tokens, ranks = _bound_in_domain([local_loads[r].tolist() for r in inside], slots)
        if tokens > found.tokens:
            reason = "slots" if len(ranks) < len(inside) else "mean"
            found = TokenBound(tokens=tokens, reason=reason, ranks=tuple(inside[ranks].tolist()))
    mean = -(-int(load.sum(dtype=np.int64)) // len(domains))
    if found.tokens == mean:
        return TokenBound(tokens=mean, reason="mean", ranks=tuple(range(len(domains))))
    return replace(found, reason="domains") if found.reason == "mean" else found


def _bound_in_domain(local_loads: list[list[int]], slots: int) -> tuple[int, list[int]]:
    """Return the bound for one domain, and the ranks for which one token less is impossible.

    Args:
        local_loads: the loads of each rank's local experts.
        slots: S.

    Returns:
        Tokens, and positions of ranks; all of them if the bound is their mean.
    """
    own = [sum(loads) for loads in local_loads]
    order = sorted(range(len(own)), key=lambda r: -own[r])

    def breaks(t: int) -> list[int]:
        """Return the q fullest ranks for the lowest q at which t is impossible; empty: none."""
        inside = shed = 0
        pieces: list[int] = []  # heap of the largest
        for q, rank in enumerate(order, 1):
            inside += own[rank]
            for load in local_loads[rank]:
                full, rest = divmod(load, t)
                for piece in (*[t] * full, rest):
                    heappush(pieces, piece)
                shed += load
            while len(pieces) > (len(own) - q) * slots:
                shed -= heappop(pieces)
            if inside > q * t + shed:
                return order[:q]
        return []

    mean = -(-sum(own) // len(own))
    low, high, ranks = mean - 1, max(own), order  # low is impossible, high is not
    tried = mean
    while low + 1 < high:
        broken = breaks(tried)
        low, high, ranks = (tried, high, broken) if broken else (low, tried, ranks)
        tried = (low + high) // 2
    return high, sorted(ranks)


# ---- transfers ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TransferBound:
    """Why no schedule of a plan is faster than T*; see :func:`find_transfer_bound`.

    Attributes:
        experts: T* in units of W / B: experts over one link.
        reason: "exports" of a rank, "imports" of a rank, the "set" of ranks that is to send most
            for its size, or "none": there are no replicas. The first of them that is T*.
        ranks: all that export, or import, as much; or the set. Ascending.
        max_exports: largest number of distinct replicated experts at home on a rank.
        max_imports: largest number of filled slots of a rank.
    """

    experts: Fraction
    reason: str
    ranks: tuple[int, ...]
    max_exports: int
    max_imports: int


def find_transfer_bound(slot_expert: IntArray, home: IntArray) -> TransferBound:
    """Return the exact T* of a plan, and which ranks are why.

    Every slot is filled once, and every replicated expert leaves its home once. And a set of ranks
    that has the home and all n replicas of an expert sends n - 1 copies more, since nobody else
    can. T* is the most that a rank imports, or that a set sends on average over its ranks. Where no
    rank both exports and imports, no set sends more on average than one of its ranks exports or
    imports: linear in filled slots. Otherwise `densest_set`.

    Args:
        slot_expert: ``[G, S]``, a legal plan; -1: empty.
        home: ``[E]``.
    """
    rank, slot = np.nonzero(slot_expert >= 0)
    expert = slot_expert[rank, slot]
    replicated = np.unique(expert)
    num_ranks = len(slot_expert)
    exports = np.bincount(home[replicated], minlength=num_ranks)
    imports = np.bincount(rank, minlength=num_ranks)
    max_exports, max_imports = int(exports.max()), int(imports.max())
    experts, reason = Fraction(max(max_exports, max_imports)), "none"
    ranks: tuple[int, ...] = ()
    if ((exports > 0) & (imports > 0)).any():
        experts, ranks = densest_set(rank, expert, home, num_ranks, above=experts)
    if ranks:
        reason = "set"
    elif experts > 0:
        reason, of = ("exports", exports) if experts == max_exports else ("imports", imports)
        ranks = tuple(np.flatnonzero(of == experts).tolist())
    return TransferBound(
        experts=experts,
        reason=reason,
        ranks=ranks,
        max_exports=max_exports,
        max_imports=max_imports,
    )


def densest_set(
    rank: Int64Array, expert: IntArray, home: IntArray, num_ranks: int, *, above: Fraction
) -> tuple[Fraction, tuple[int, ...]]:
    """Return the set of ranks that is to send most on average, and how many experts that is.

    The maximum, over sets Q of ranks, of the replicated experts at home in Q, plus n - 1 for each
    expert with the home and all n replicas in Q, divided by the ranks of Q; ``(above, ())`` if none
    is above ``above``. By Dinkelbach's method: for the best average so far find the set that
    exceeds it by most, in all its ranks together. Such sets get smaller and smaller, so there are
    at most G rounds; each is one maximum flow.

    Args:
        rank: ``[R]``, of every filled slot.
        expert: ``[R]``, in that slot.
        home: ``[E]``.
        num_ranks: G.
        above: at least the largest number of replicated experts at home on a rank.
    """
    exports = np.bincount(home[np.unique(expert)], minlength=num_ranks).tolist()
    by_expert = np.argsort(expert, kind="stable")
    names, first = np.unique(expert[by_expert], return_index=True)
    spans = pairwise([*first.tolist(), len(expert)])
    instances = [
        [int(home[e]), *rank[by_expert[a:b]].tolist()]
        for e, (a, b) in zip(names, spans, strict=True)
        if b - a > 1
    ]
    best, found = above, set[int]()
    while True:
        scale, rooms = best.denominator, [best.numerator - best.denominator * k for k in exports]
        supply = [scale * (len(ranks) - 2) for ranks in instances]
        exceeding = _exceeding_set(supply, instances, rooms)
        if not exceeding:
            return best, tuple(sorted(found))
        found = exceeding
        sends = sum(exports[r] for r in found)
        sends += sum(len(ranks) - 2 for ranks in instances if found.issuperset(ranks))
        best = Fraction(sends, len(found))


def _exceeding_set(supply: list[int], instances: list[list[int]], room: list[int]) -> set[int]:
    """Return the ranks whose room is exceeded most by the supply that only they can take.

    Empty if all supply finds room. A maximum flow from experts to their instances' ranks, by
    shortest augmenting paths: O(V * R**2) for V experts and ranks and R instances. What is reached
    when there is no path left is the smaller side of a minimum cut. Changes ``supply`` and
    ``room``.
    """
    sent = [dict.fromkeys(ranks, 0) for ranks in instances]
    senders: list[set[int]] = [set() for _ in room]  # experts that have sent to a rank
    while True:
        queue = [e for e, left in enumerate(supply) if left]
        rank_before: dict[int, int] = dict.fromkeys(queue, -1)
        expert_before: dict[int, int] = {}
        end = -1
        for e in queue:
            for r in instances[e]:
                if r in expert_before:
                    continue
                expert_before[r] = e
                if room[r]:
                    end = r
                    break
                for other in senders[r] - rank_before.keys():
                    rank_before[other] = r
                    queue.append(other)
            if end >= 0:
                break
        else:
            return set(expert_before)
        path = [(expert_before[end], end)]  # (expert, rank), back to an expert with supply
        while rank_before[path[-1][0]] >= 0:
            r = rank_before[path[-1][0]]
            path.append((expert_before[r], r))
        back = [(e, rank_before[e]) for e, _ in path[:-1]]
        amount = min(room[end], supply[path[-1][0]], *(sent[e][r] for e, r in back))
        room[end] -= amount
        supply[path[-1][0]] -= amount
        for e, r in path:
            sent[e][r] += amount
            senders[r].add(e)
        for e, r in back:
            sent[e][r] -= amount
            if not sent[e][r]:
                senders[r].discard(e)
