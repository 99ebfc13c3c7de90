"""What no plan, and no schedule of a plan, can beat; in integers, independent of both planners."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int32] | NDArray[np.int64]
Int64Array = NDArray[np.int64]


def least_max_tokens(load: IntArray, home: IntArray, domains: IntArray, slots: int) -> int:
    """Return tokens that the fullest rank has at least, under any plan inside the domains.

    Let it have t. In each domain of G ranks with S slots each:

    - A rank holds at most t, and at most its own mains and the S largest experts of other ranks.
      The sum of the lesser of the two over the ranks is at least the domain's tokens.
    - A rank above t exports, and each expert relieves it of its own tokens at most. So it needs as
      many replicas as it has to give largest mains to come down to t, and all ranks G * S at most.

    The first implies the mean, rounded up, and, without slots, the fullest rank's mains.

    Args:
        load: ``[E]`` tokens of each expert; their sum times the ranks of a domain is below 2**63.
        home: ``[E]``, in ``[0, G)``.
        domains: ``[G]``; equal for ranks that may hold each other's experts.
        slots: S.
    """
    load = np.asarray(load, dtype=np.int64)
    names, domain = np.unique(domains, return_inverse=True)
    by_load = np.argsort(-load, kind="stable")
    least = 0
    for d in range(len(names)):
        ranks = np.flatnonzero(domain == d)
        inside = by_load[domain[home[by_load]] == d]
        local = np.searchsorted(ranks, home[inside])
        least = max(least, _least_in_domain(load[inside], local, len(ranks), slots))
    return least


def _least_in_domain(load: Int64Array, home: Int64Array, num_ranks: int, slots: int) -> int:
    """Return the bound for one domain; experts by descending load."""
    own = np.zeros(num_ranks, np.int64)
    np.add.at(own, home, load)
    by_home = np.argsort(home, kind="stable")
    place = np.arange(len(load))
    first = np.searchsorted(home[by_home], np.arange(num_ranks))
    others = place.copy()  # of other ranks, with more tokens than this expert
    others[by_home] -= place - first[home[by_home]]

    among = others < slots  # before the last of the S largest of other ranks
    width = slots + np.bincount(home[among], minlength=num_ranks)
    holds = np.append(0, load.cumsum())[np.minimum(width, len(load))]
    np.add.at(holds, home[~among], load[~among])

    mains = load[by_home]
    rest = own.cumsum()[home[by_home]] - mains.cumsum() + mains  # of this and smaller mains
    # A rank gives a main if what it has left before that is above t.
    rest = np.append(np.sort(rest)[::-1], 0)
    total = int(own.sum())
    low = max(-(-total // num_ranks), int(rest[min(slots * num_ranks, len(load))]))
    reached = range(low, int(own.max()))
    return low + bisect_left(reached, True, key=lambda t: bool(np.minimum(t, holds).sum() >= total))


# ---- transfers ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Bottleneck:
    """Why no schedule of a plan is faster than T*; see :func:`find_bottleneck`.

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


def find_bottleneck(slot_expert: IntArray, home: IntArray) -> Bottleneck:
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
    return Bottleneck(
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
