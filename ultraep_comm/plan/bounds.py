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

    For q = G that is the mean; without slots and for q = 1, a rank's mains. t is the least number
    for which it holds for the q fullest ranks, for every q. Reaching it is bin packing: it is a
    bound, and some loads have no plan that reaches it.

    Takes O(E log E + G log G) for each t that is tried: one if the mean holds, else as many as it
    has bits.

    Args:
        load: ``[E]`` tokens of each expert.
        home: ``[E]``, in ``[0, G)``.
        domains: ``[G]``; equal for ranks that may hold each other's experts.
        slots: S.
    """
    ends = np.bincount(home, minlength=len(domains)).cumsum()
    mains = np.split(load[np.argsort(home, kind="stable")], ends[:-1])  # of each rank
    found = TokenBound(tokens=-1, reason="", ranks=())
    for name in np.unique(domains):
        inside = np.flatnonzero(domains == name)
        tokens, ranks = _least_in_domain([mains[r].tolist() for r in inside], slots)
        if tokens > found.tokens:
            reason = "slots" if len(ranks) < len(inside) else "mean"
            found = TokenBound(tokens=tokens, reason=reason, ranks=tuple(inside[ranks].tolist()))
    mean = -(-int(load.sum(dtype=np.int64)) // len(domains))
    if found.tokens == mean:
        return TokenBound(tokens=mean, reason="mean", ranks=tuple(range(len(domains))))
    return replace(found, reason="domains") if found.reason == "mean" else found


def _least_in_domain(mains: list[list[int]], slots: int) -> tuple[int, list[int]]:
    """Return the bound for one domain, and the ranks that break it for one token less.

    Ranks by position; all of them if it is their mean.
    """
    own = [sum(loads) for loads in mains]
    order = sorted(range(len(own)), key=lambda r: -own[r])

    def breaks(t: int) -> list[int]:
        """Return the q fullest ranks, the least q of those for which it does not hold."""
        inside = shed = 0
        pieces: list[int] = []  # the largest, in a heap
        for q, rank in enumerate(order, 1):
            inside += own[rank]
            for load in mains[rank]:
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
    low, high, ranks = mean - 1, max(own), order  # low breaks it, high does not
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
    most_out, most_in = int(exports.max()), int(imports.max())
    most, reason = Fraction(max(most_out, most_in)), "none"
    ranks: tuple[int, ...] = ()
    if ((exports > 0) & (imports > 0)).any():
        most, ranks = densest_set(rank, expert, home, num_ranks, least=most)
    if ranks:
        reason = "set"
    elif most > 0:
        reason, of = ("exports", exports) if most == most_out else ("imports", imports)
        ranks = tuple(np.flatnonzero(of == most).tolist())
    return TransferBound(
        experts=most, reason=reason, ranks=ranks, max_exports=most_out, max_imports=most_in
    )


def densest_set(
    rank: Int64Array, expert: IntArray, home: IntArray, num_ranks: int, *, least: Fraction
) -> tuple[Fraction, tuple[int, ...]]:
    """Return the set of ranks that is to send most on average, and how many experts that is.

    The maximum, over sets Q of ranks, of the replicated experts at home in Q, plus n - 1 for each
    expert with the home and all n replicas in Q, divided by the ranks of Q; ``(least, ())`` if none
    is above ``least``. By Dinkelbach's method: for the best average so far find the set that
    exceeds it by most, in all its ranks together. Such sets get smaller and smaller, so there are
    at most G rounds; each is one maximum flow.

    Args:
        rank: ``[R]``, of every filled slot.
        expert: ``[R]``, in that slot.
        home: ``[E]``.
        num_ranks: G.
        least: at least the most replicated experts at home on a rank.
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
    most, found = least, set[int]()
    while True:
        scale, rooms = most.denominator, [most.numerator - most.denominator * k for k in exports]
        supply = [scale * (len(ranks) - 2) for ranks in instances]
        exceeding = _exceeding_set(supply, instances, rooms)
        if not exceeding:
            return most, tuple(sorted(found))
        found = exceeding
        sends = sum(exports[r] for r in found)
        sends += sum(len(ranks) - 2 for ranks in instances if found.issuperset(ranks))
        most = Fraction(sends, len(found))


def _exceeding_set(supply: list[int], instances: list[list[int]], room: list[int]) -> set[int]:
    """Return ranks with less room than the supply of experts that have no others, by the most.

    Empty if all supply finds room. Experts supply their instances' ranks, by shortest augmenting
    paths: O(V * R**2) for V experts and ranks and R instances. What is reached when there is no
    path left is the smaller side of a minimum cut. ``supply`` and ``room`` are used up.
    """
    sent = [dict.fromkeys(ranks, 0) for ranks in instances]
    at: list[set[int]] = [set() for _ in room]  # experts that have sent to a rank
    while True:
        queue = [e for e, left in enumerate(supply) if left]
        came: dict[int, int] = dict.fromkeys(queue, -1)  # to an expert: from a rank that it sent to
        by: dict[int, int] = {}  # to a rank: from an expert
        end = -1
        for e in queue:
            for r in instances[e]:
                if r in by:
                    continue
                by[r] = e
                if room[r]:
                    end = r
                    break
                for other in at[r] - came.keys():
                    came[other] = r
                    queue.append(other)
            if end >= 0:
                break
        else:
            return set(by)
        path = [(by[end], end)]  # (expert, rank), back to an expert with supply
        while came[path[-1][0]] >= 0:
            r = came[path[-1][0]]
            path.append((by[r], r))
        back = [(e, came[e]) for e, _ in path[:-1]]
        amount = min(room[end], supply[path[-1][0]], *(sent[e][r] for e, r in back))
        room[end] -= amount
        supply[path[-1][0]] -= amount
        for e, r in path:
            sent[e][r] += amount
            at[r].add(e)
        for e, r in back:
            sent[e][r] -= amount
            if not sent[e][r]:
                at[r].discard(e)
