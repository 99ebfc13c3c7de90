"""The readable definition of the schedule: from a plan to the hubs that hand out each expert.

`src/core/schedule/schedule.hpp` is the fast one; the two agree in every integer. The unit
of work is the flag group: a run of tiles with one ready flag. Each group of a replicated expert is
handed to all its replicas by one rank, its hub: the source or a replica. The source is the home, or
a rank that holds the expert in a slot since an earlier call. Splitting an expert over hubs by
water-filling keeps the busiest rank's egress close to T*, which no schedule can beat.

Links between domains are slow, so an expert crosses them once for each domain that needs it, and is
handed on inside. An entry of the schedule is an expert and one of the domains that its replicas lie
in; where plans stay inside domains, that is an expert. The source is in that domain if anyone there
holds the expert. Otherwise the entry is foreign: if it has several replicas, these alone are hubs,
and the source sends each group once, to its hub.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ultraep_comm.plan.schedule import MODES

EGRESS_UNIT = 1 << 16  # one expert, in fixed point
GROUP_BYTES = 32 << 10
MAIN_SLOT = -1  # the source is the home's main weights, not a slot
Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Schedule:
    """Which rank hands out which flag groups. There are X entries, and R slots are filled.

    An entry is a replicated expert, by ascending id, or, where plans cross domains, an expert and a
    domain: once for each domain with replicas of it, by ascending number. Slots that hold their
    expert already are not filled, and are no replicas here. Replicas of entry x are at `first[x]`
    to `first[x + 1]` of the replica arrays, by ascending rank. Its hubs are the source and then the
    replicas. Hub i of x hands out the flag groups `boundary[b + i]` to `boundary[b + i + 1]`, where
    b is `first[x] + 2 * x`.

    Attributes:
        mode: one of `MODES`.
        expert: int32 `[X]`; an expert with replicas in several domains is there several times.
        source_rank: int32 `[X]`, the rank that sends each entry.
        source_slot: int32 `[X]`, its slot that holds the expert; `MAIN_SLOT`: it is the home, and
            sends its main weights.
        first: int32 `[X + 1]`.
        replica_rank: int32 `[R]`.
        replica_slot: int32 `[R]`.
        boundary: int32 `[R + 2 X]`.
        egress: int64 `[G]`, what each rank sends before ranges are rounded to whole flag groups,
            in units of 1 / `EGRESS_UNIT` expert.
    """

    mode: str
    expert: Int32Array
    source_rank: Int32Array
    source_slot: Int32Array
    first: Int32Array
    replica_rank: Int32Array
    replica_slot: Int32Array
    boundary: Int32Array
    egress: Int64Array

    @property
    def num_experts(self) -> int:
        """Return X, the number of entries: replicated experts, once for each domain."""
        return len(self.expert)

    @property
    def max_egress(self) -> float:
        """Return what the busiest rank sends, in experts."""
        return float(self.egress.max()) / EGRESS_UNIT

    def replicas(self, x: int) -> Iterator[tuple[int, int]]:
        """Iterate over (rank, slot) of the replicas of entry x."""
        span = slice(self.first[x], self.first[x + 1])
        yield from zip(
            self.replica_rank[span].tolist(), self.replica_slot[span].tolist(), strict=True
        )

    def hubs(self, x: int) -> Iterator[tuple[int, int, int]]:
        """Iterate over (rank, begin, end) of the hubs of entry x, in flag groups.

        The source comes first. A hub whose range is empty has nothing to hand out.
        """
        ranks = [int(self.source_rank[x]), *(rank for rank, _ in self.replicas(x))]
        bounds = self.boundary[self.first[x] + 2 * x :][: len(ranks) + 1].tolist()
        for rank, (begin, end) in zip(ranks, pairwise(bounds), strict=True):
            yield rank, begin, end


def num_groups(*, segment_bytes: Sequence[int], tile_bytes: int) -> int:
    """Return the number of flag groups of an expert.

    Segments are cut into tiles; consecutive tiles, also of different segments, form groups.
    """
    num_tiles = sum(-(-size // tile_bytes) for size in segment_bytes)
    return -(-num_tiles // max(1, GROUP_BYTES // tile_bytes))


def make_schedule(
    slot_expert: ArrayLike,
    *,
    home: ArrayLike,
    segment_bytes: Sequence[int],
    tile_bytes: int,
    mode: str,
    residents: ArrayLike | None = None,
    domain: ArrayLike | None = None,
) -> Schedule:
    """Choose the hubs of a plan and the range of flag groups that each hands out.

    Args:
        slot_expert: `[G, S]` integers, the expert in each slot of a legal plan; -1: empty.
        home: `[E]` integers, the rank of each expert's main instance.
        segment_bytes: bytes of one expert in each segment that is transferred.
        tile_bytes: the largest tile, at least 1.
        mode: "push" and "pull" share the work among hubs; in "direct" sources do all of it, also
            across domains.
        residents: `[G, S]` integers, the expert that each slot holds since earlier calls; -1:
            none. Slots that hold what the plan has there are not filled, and may be sources.
            None: all slots are empty.
        domain: `[G]` integers, the domain of each rank of a group whose plans may cross domains.
            None: all ranks are in one.

    Raises:
        ValueError: the mode is unknown, `slot_expert` is not two-dimensional, or `residents` or
            `domain` has another shape.
    """
    if mode not in MODES:
        raise ValueError(f"mode is {mode!r}; expected one of {tuple(MODES)}")
    replicas = _Replicas.of(slot_expert, home, residents, domain)
    source_rank, source_slot = _choose_sources(replicas)
    hubs = [np.append(r, at) for r, at in zip(source_rank, replicas.ranks, strict=True)]
    exports = np.bincount(source_rank, minlength=len(replicas.imports))
    if mode == "direct":
        extra = [np.eye(1, n + 1, dtype=np.int64)[0] * (n - 1) * EGRESS_UNIT for n in replicas.num]
    else:
        chained = ((exports > 0) & (replicas.imports > 0)).any()
        is_foreign = (
            replicas.domain[source_rank] != replicas.domain[replicas.rank[replicas.first[:-1]]]
        )
        # The source of a foreign entry is no hub.
        skipped = is_foreign.astype(np.int64)
        senders = [ranks[k:] for ranks, k in zip(hubs, skipped, strict=True)]
        copies = [n - 1 for n in replicas.num]
        shares = _share(exports, senders, copies, passes=4 if chained else 2)
        extra = [np.append(np.zeros(k, np.int64), s) for s, k in zip(shares, skipped, strict=True)]

    groups = num_groups(segment_bytes=segment_bytes, tile_bytes=tile_bytes)
    boundary = [np.zeros(0, np.int64)]
    for n, added in zip(replicas.num, extra, strict=True):
        total = (n - 1) * EGRESS_UNIT
        # Rounded to the nearest group. A single replica gets everything from the source.
        ends = (2 * added.cumsum() * groups + total) // (2 * total) if n > 1 else [groups, groups]
        boundary += [np.zeros(1, np.int64), np.asarray(ends)]
    return Schedule(
        mode=mode,
        expert=replicas.expert.astype(np.int32),
        source_rank=source_rank.astype(np.int32),
        source_slot=source_slot.astype(np.int32),
        first=replicas.first.astype(np.int32),
        replica_rank=replicas.rank.astype(np.int32),
        replica_slot=replicas.slot.astype(np.int32),
        boundary=np.concatenate(boundary).astype(np.int32),
        egress=_egress(exports, hubs, extra),
    )


@dataclass(frozen=True, kw_only=True)
class _Replicas:
    """The slots to be filled by entry, as in `Schedule`, and who has each expert already."""

    expert: Int64Array
    home: Int64Array
    first: Int64Array
    rank: Int64Array
    slot: Int64Array
    ranks: list[Int64Array]  # of each entry's replicas
    # Ranks that may send each entry: the home, then those with a slot that keeps the expert. Only
    # those in the replicas' domain, if there are any.
    holders: list[Int64Array]
    holding: list[Int64Array]  # their slots that hold it, or `MAIN_SLOT`
    imports: Int64Array  # [G] slots to be filled
    domain: Int64Array  # [G]

    @classmethod
    def of(
        cls,
        slot_expert: ArrayLike,
        home: ArrayLike,
        residents: ArrayLike | None,
        domain: ArrayLike | None = None,
    ) -> _Replicas:
        slots = np.asarray(slot_expert, dtype=np.int64)
        if slots.ndim != 2:
            raise ValueError(f"slot_expert has shape {slots.shape}; expected [G, S]")
        held = np.full_like(slots, -1) if residents is None else np.asarray(residents, np.int64)
        if held.shape != slots.shape:
            raise ValueError(f"residents has shape {held.shape}; expected {slots.shape}")
        domains = np.zeros(len(slots), np.int64) if domain is None else np.asarray(domain, np.int64)
        if domains.shape != slots.shape[:1]:
            raise ValueError(f"domain has shape {domains.shape}; expected {slots.shape[:1]}")
        keeps = (slots >= 0) & (held == slots)
        filled = (slots >= 0) & ~keeps
        rank, slot = np.nonzero(filled)
        by_entry = np.lexsort((domains[rank], slots[rank, slot]))  # stable: by ascending rank
        rank, slot = rank[by_entry], slot[by_entry]
        entries, first = np.unique(
            np.stack([slots[rank, slot], domains[rank]]), axis=1, return_index=True
        )
        expert, first = entries[0], np.append(first, len(rank))
        homes = np.asarray(home, dtype=np.int64)[expert]
        holders, holding = [], []
        for e, at, d in zip(expert, homes, entries[1], strict=True):
            ranks, kept = np.nonzero(keeps & (slots == e))
            ranks, kept = np.append(at, ranks), np.append(MAIN_SLOT, kept)
            inside = domains[ranks] == d
            holders.append(ranks[inside] if inside.any() else ranks)
            holding.append(kept[inside] if inside.any() else kept)
        return cls(
            expert=expert,
            home=homes,
            first=first,
            rank=rank,
            slot=slot,
            ranks=[rank[a:b] for a, b in pairwise(first)],
            holders=holders,
            holding=holding,
            imports=filled.sum(axis=1),
            domain=domains,
        )

    @property
    def num(self) -> list[int]:
        """Replicas of each entry."""
        counts: list[int] = np.diff(self.first).tolist()
        return counts


def _choose_sources(replicas: _Replicas) -> tuple[Int64Array, Int64Array]:
    """Return the rank and the slot, or `MAIN_SLOT`, that each entry is sent from.

    A rank's load is 2 for each entry that it sends, and 1 for each of its slots that is filled
    with an entry of several replicas, whose hub it may be. All start at the experts' homes. Twice,
    in order, an entry goes to another holder, the one with the least load, if that is at most its
    source's without it, or if its source is none of its holders: to the home before slots, and to
    the first of these. Steps sideways, and a second pass, let one entry make room for another.
    """
    load = 2 * np.bincount(replicas.home, minlength=len(replicas.imports))
    for n, ranks in zip(replicas.num, replicas.ranks, strict=True):
        load[ranks] += n > 1
    source_rank = replicas.home.copy()
    source_slot = np.full_like(source_rank, MAIN_SLOT)
    for _ in range(2):
        for x, holders in enumerate(replicas.holders):
            source = source_rank[x]
            load[source] -= 2
            others = [i for i, rank in enumerate(holders) if rank != source]
            best = min(others, key=lambda i: load[holders[i]], default=-1)
            if best >= 0 and (source not in holders or load[holders[best]] <= load[source]):
                source_rank[x], source_slot[x] = holders[best], replicas.holding[x][best]
            load[source_rank[x]] += 2
    return source_rank, source_slot


def _share(
    exports: Int64Array, senders: Sequence[Int64Array], copies: Sequence[int], *, passes: int
) -> list[Int64Array]:
    """Return how much of each entry's copies each of its senders sends, besides the exports.

    Entries with the most copies go first: they have the most to send, and the most hubs.
    """
    shares = [np.zeros(len(ranks), np.int64) for ranks in senders]
    egress = _egress(exports, senders, shares)
    order = sorted((i for i, n in enumerate(copies) if n), key=lambda i: -copies[i])
    for _ in range(passes):
        for i in order:
            ranks = senders[i]
            egress[ranks] -= shares[i]
            shares[i] = _fill(egress[ranks], copies[i] * EGRESS_UNIT)
            egress[ranks] += shares[i]
    return shares


def _fill(egress: Int64Array, total: int) -> Int64Array:
    """Distribute `total` over hubs by water-filling: those that get a share end at one level.

    For every k, the k lowest hubs get at most `total`, which bounds the level; the lowest of these
    bounds is the level. What remains goes to the first hubs at the level, one unit each.
    """
    level = ((total + np.sort(egress).cumsum()) // np.arange(1, len(egress) + 1)).min()
    extra: Int64Array = np.maximum(level - egress, 0)
    extra[np.flatnonzero(egress <= level)[: total - extra.sum()]] += 1
    return extra


def _egress(
    exports: Int64Array, senders: Sequence[Int64Array], shares: Sequence[Int64Array]
) -> Int64Array:
    egress = exports * EGRESS_UNIT
    for ranks, share in zip(senders, shares, strict=True):
        egress[ranks] += share
    return egress
