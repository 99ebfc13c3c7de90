"""What no plan, and no schedule of a plan, can beat; in integers, independent of both planners."""

from __future__ import annotations

from fractions import Fraction
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int32] | NDArray[np.int64]
Int64Array = NDArray[np.int64]


# ---- balance ------------------------------------------------------------------------------------


def find_token_bound(
    load: IntArray, home: IntArray, domains: IntArray, slots: int
) -> tuple[int, str, tuple[int, ...]]:
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

    Returns:
        Tokens of the fullest rank; the reason: "mean" of all ranks, "domains" if that of one domain
        is larger, or "slots"; and, ascending, all ranks, the domain, or the ranks whose experts
        find too little room.
    """
    ends = np.bincount(home, minlength=len(domains)).cumsum()
    local_loads = np.split(load[np.argsort(home, kind="stable")], ends[:-1])
    max_tokens, reason, found = -1, "", tuple[int, ...]()
    for name in np.unique(domains):
        inside = np.flatnonzero(domains == name)
        tokens, ranks = _bound_in_domain([local_loads[r].tolist() for r in inside], slots)
        if tokens > max_tokens:
            reason = "slots" if len(ranks) < len(inside) else "domains"
            max_tokens, found = tokens, tuple(inside[ranks].tolist())
    mean = -(-int(load.sum(dtype=np.int64)) // len(domains))
    if max_tokens == mean:
        return mean, "mean", tuple(range(len(domains)))
    return max_tokens, reason, found


def _bound_in_domain(local_loads: list[list[int]], slots: int) -> tuple[int, list[int]]:
    """Return the bound for one domain, and the ranks for which one token less is impossible.

    Ranks are positions in ``local_loads``, the loads of each rank's local experts; all of them if
    the bound is their mean.
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


def list_transfers(
    slot_expert: IntArray, home: IntArray, residents: IntArray | None = None
) -> list[tuple[list[int], list[int]]]:
    """Return the ranks that hold each expert to be sent, and the ranks that it is sent to.

    Args:
        slot_expert: ``[G, S]``, a legal plan; -1: empty.
        home: ``[E]``.
        residents: ``[G, S]``, the expert that each slot holds already, so that it is not filled if
            that is the plan's, and may send it; -1, or None: none.
    """
    filled = slot_expert >= 0
    keeps = filled & (slot_expert == (-1 if residents is None else residents))
    targets: dict[int, list[int]] = {}
    for rank, slot in np.argwhere(filled & ~keeps).tolist():
        targets.setdefault(int(slot_expert[rank, slot]), []).append(rank)
    holders = {expert: [int(home[expert])] for expert in targets}
    for rank, slot in np.argwhere(keeps).tolist():
        if slot_expert[rank, slot] in holders:
            holders[int(slot_expert[rank, slot])].append(rank)
    return [(holders[expert], targets[expert]) for expert in sorted(targets)]


def count_ends(
    transfers: list[tuple[list[int], list[int]]], num_ranks: int
) -> tuple[Int64Array, Int64Array]:
    """Return the experts that only a rank can send, and those sent to it, ``[G]`` each."""
    exports, imports = np.zeros(num_ranks, np.int64), np.zeros(num_ranks, np.int64)
    for holders, targets in transfers:
        exports[holders] += len(holders) == 1
        imports[targets] += 1
    return exports, imports


def find_transfer_bound(
    slot_expert: IntArray, home: IntArray, residents: IntArray | None = None
) -> tuple[Fraction, str, tuple[int, ...]]:
    """Return the exact T* of a plan, and which ranks are why.

    Every slot without its expert is filled once, and every such expert leaves its holders once. And
    a set of ranks that has all holders and all n ranks to fill sends n - 1 copies more, since
    nobody else can. T* is the most that a rank imports, or that a set sends on average over its
    ranks. Where homes are the only holders, and no rank both exports and imports, no set sends more
    on average than one of its ranks exports or imports: linear in filled slots. Otherwise
    `find_busiest_set`.

    Args:
        slot_expert, home, residents: as in `list_transfers`.

    Returns:
        T* in units of W / B: experts over one link; the reason: "exports" of a rank, "imports" of a
        rank, the "set" of ranks that is to send most for its size, or "none": nothing is sent, the
        first of them that is T*; and, ascending, all ranks that export, or import, as much, or the
        set.
    """
    transfers = list_transfers(slot_expert, home, residents)
    exports, imports = count_ends(transfers, len(slot_expert))
    experts = Fraction(int(max(exports.max(), imports.max())))
    if ((exports > 0) & (imports > 0)).any() or any(len(held) > 1 for held, _ in transfers):
        experts, ranks = find_busiest_set(transfers, exports, above=experts)
        if ranks:
            return experts, "set", ranks
    if not transfers:
        return experts, "none", ()
    reason, of = ("exports", exports) if experts == exports.max() else ("imports", imports)
    return experts, reason, tuple(np.flatnonzero(of == experts).tolist())


def find_busiest_set(
    transfers: list[tuple[list[int], list[int]]], exports: Int64Array, *, above: Fraction
) -> tuple[Fraction, tuple[int, ...]]:
    """Return how many experts a rank has to send, on average over the busiest set of ranks, and it.

    The maximum, over sets Q of ranks, of the experts with all holders in Q, plus n - 1 for each
    with all n targets in Q too, divided by the ranks of Q; ``(above, ())`` if none is above
    ``above``. By Dinkelbach's method: for the best average so far find the set that exceeds it by
    most, in all its ranks together. Such sets get smaller and smaller, so there are at most G
    rounds; each is one maximum flow.

    Args:
        transfers: of `list_transfers`.
        exports: ``[G]``, of `count_ends`.
        above: at least the largest of these.
    """
    copies = [(len(to) - 1, [*held, *to]) for held, to in transfers if len(to) > 1]
    copies += [(1, held) for held, _ in transfers if len(held) > 1]
    instances = [ranks for _, ranks in copies]
    best, found = above, set[int]()
    while True:
        room = [best.numerator - best.denominator * k for k in exports.tolist()]
        exceeding = _exceeding_set([best.denominator * n for n, _ in copies], instances, room)
        if not exceeding:
            return best, tuple(sorted(found))
        found = exceeding
        sends = int(exports[list(found)].sum())
        sends += sum(n for n, ranks in copies if found.issuperset(ranks))
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
