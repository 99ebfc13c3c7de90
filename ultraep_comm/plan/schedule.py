"""The readable definition of the schedule: from a plan to the hubs that hand out each expert.

`src/core/schedule/schedule.hpp` is the fast one; the two agree in every integer. The unit
of work is the flag group: a run of tiles with one ready flag. Each group of a replicated expert is
handed to all its replicas by one rank, its hub: the home or a replica. Splitting an expert over
hubs by water-filling keeps the busiest rank's egress close to `transfer_bound`, which no schedule
can beat.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ultraep_comm import _core

MODES = {mode.name.lower(): mode for mode in _core.Mode}  # by the names that users give
EGRESS_UNIT = 1 << 16  # one expert, in the fixed point that egress is counted in
GROUP_BYTES = 32 << 10
Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Schedule:
    """Which rank hands out what. X experts are replicated, by ascending id; R slots are filled.

    Replicas of expert `expert[x]` are entries `first[x]` to `first[x + 1]` of the replica arrays,
    by ascending rank. Its hubs are the home and then the replicas. Hub i of x hands out the flag
    groups `boundary[b + i]` to `boundary[b + i + 1]`, where b is `first[x] + 2 * x`.

    Attributes:
        mode: one of `MODES`.
        expert: int32 `[X]`.
        home: int32 `[X]`, the rank of each expert's main instance.
        first: int32 `[X + 1]`.
        replica_rank: int32 `[R]`.
        replica_slot: int32 `[R]`.
        boundary: int32 `[R + 2 X]`.
        egress: int64 `[G]`, what each rank sends before ranges are rounded to whole flag groups,
            in units of 1 / `EGRESS_UNIT` expert.
    """

    mode: str
    expert: Int32Array
    home: Int32Array
    first: Int32Array
    replica_rank: Int32Array
    replica_slot: Int32Array
    boundary: Int32Array
    egress: Int64Array

    @property
    def num_experts(self) -> int:
        """Return X, the number of replicated experts."""
        return len(self.expert)

    @property
    def max_egress(self) -> float:
        """Return what the busiest rank sends, in experts; compare with `transfer_bound`."""
        return float(self.egress.max()) / EGRESS_UNIT

    def replicas(self, x: int) -> Iterator[tuple[int, int]]:
        """Iterate over (rank, slot) of the replicas of `expert[x]`."""
        span = slice(self.first[x], self.first[x + 1])
        yield from zip(
            self.replica_rank[span].tolist(), self.replica_slot[span].tolist(), strict=True
        )

    def hubs(self, x: int) -> Iterator[tuple[int, int, int]]:
        """Iterate over (rank, begin, end) of the hubs of `expert[x]`, in flag groups.

        The home comes first. A hub whose range is empty has nothing to hand out.
        """
        ranks = [int(self.home[x]), *(rank for rank, _ in self.replicas(x))]
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
) -> Schedule:
    """Choose the hubs of a plan and the range of flag groups that each hands out.

    Args:
        slot_expert: `[G, S]` integers, the expert in each slot of a legal plan; -1: empty.
        home: `[E]` integers, the rank of each expert's main instance.
        segment_bytes: bytes of one expert in each segment that is transferred.
        tile_bytes: the largest tile, at least 1.
        mode: "push" and "pull" share the work among hubs; in "direct" homes do all of it.

    Raises:
        ValueError: the mode is unknown, or `slot_expert` is not two-dimensional.
    """
    if mode not in MODES:
        raise ValueError(f"mode is {mode!r}; expected one of {tuple(MODES)}")
    replicas = _Replicas.of(slot_expert, home)
    if mode == "direct":
        extra = [np.eye(1, n + 1, dtype=np.int64)[0] * (n - 1) * EGRESS_UNIT for n in replicas.num]
    else:
        extra = _share(replicas, passes=4 if replicas.chained else 2)

    groups = num_groups(segment_bytes=segment_bytes, tile_bytes=tile_bytes)
    boundary = [np.zeros(0, np.int64)]
    for n, added in zip(replicas.num, extra, strict=True):
        total = (n - 1) * EGRESS_UNIT
        # Rounded to the nearest group. A single replica gets everything from the home.
        ends = (2 * added.cumsum() * groups + total) // (2 * total) if n > 1 else [groups, groups]
        boundary += [np.zeros(1, np.int64), np.asarray(ends)]
    return Schedule(
        mode=mode,
        expert=replicas.expert.astype(np.int32),
        home=replicas.home.astype(np.int32),
        first=replicas.first.astype(np.int32),
        replica_rank=replicas.rank.astype(np.int32),
        replica_slot=replicas.slot.astype(np.int32),
        boundary=np.concatenate(boundary).astype(np.int32),
        egress=_egress(replicas, extra),
    )


def transfer_bound(slot_expert: ArrayLike, *, home: ArrayLike) -> float:
    """Return a time that no schedule of the plan can beat, in experts sent over one link: T* B / W.

    Each replicated expert leaves its home once and each slot is filled once. Where no rank both
    exports and imports, the larger of the two maxima is the exact bound. Otherwise a set Q of ranks
    must also send, for each expert with home and all n replicas in Q, the n - 1 copies that only
    they can send; their even share is a bound too. The exact bound is its maximum over all Q. This
    tries the k busiest ranks for every k, after many passes of water-filling: always a lower bound,
    and exact where water-filling has converged.
    """
    replicas = _Replicas.of(slot_expert, home)
    bound = float(max(replicas.exports.max(), replicas.imports.max()))
    if not replicas.chained:
        return bound
    egress = _egress(replicas, _share(replicas, passes=64))
    order = np.argsort(-egress, kind="stable")
    place = np.argsort(order)
    must_send = replicas.exports[order]
    for n, ranks in zip(replicas.num, replicas.hubs, strict=True):
        must_send[place[ranks].max()] += n - 1  # from this k on, Q has all of the expert's ranks
    return max(bound, float((must_send.cumsum() / np.arange(1, len(order) + 1)).max()))


@dataclass(frozen=True, kw_only=True)
class _Replicas:
    """The plan by expert, as in `Schedule`; `hubs` has the home and replica ranks of each."""

    expert: Int64Array
    home: Int64Array
    first: Int64Array
    rank: Int64Array
    slot: Int64Array
    num: list[int]
    hubs: list[Int64Array]
    exports: Int64Array  # [G] replicated experts at home on each rank
    imports: Int64Array  # [G] filled slots

    @classmethod
    def of(cls, slot_expert: ArrayLike, home: ArrayLike) -> _Replicas:
        slots = np.asarray(slot_expert, dtype=np.int64)
        if slots.ndim != 2:
            raise ValueError(f"slot_expert has shape {slots.shape}; expected [G, S]")
        rank, slot = np.nonzero(slots >= 0)
        by_expert = np.argsort(slots[rank, slot], kind="stable")
        rank, slot = rank[by_expert], slot[by_expert]
        expert, first = np.unique(slots[rank, slot], return_index=True)
        first = np.append(first, len(rank))
        homes = np.asarray(home, dtype=np.int64)[expert]
        return cls(
            expert=expert,
            home=homes,
            first=first,
            rank=rank,
            slot=slot,
            num=np.diff(first).tolist(),
            hubs=[
                np.append(h, rank[a:b]) for h, (a, b) in zip(homes, pairwise(first), strict=True)
            ],
            exports=np.bincount(homes, minlength=len(slots)),
            imports=(slots >= 0).sum(axis=1),
        )

    @property
    def chained(self) -> bool:
        """Whether some rank both exports and imports."""
        return bool(((self.exports > 0) & (self.imports > 0)).any())


def _share(replicas: _Replicas, *, passes: int) -> list[Int64Array]:
    """Return what each hub of each expert sends beyond the one copy that leaves the home.

    Experts with many replicas go first: they have the most to send, and the most hubs for it.
    """
    extra = [np.zeros(n + 1, np.int64) for n in replicas.num]
    egress = _egress(replicas, extra)
    order = sorted((x for x, n in enumerate(replicas.num) if n > 1), key=lambda x: -replicas.num[x])
    for _ in range(passes):
        for x in order:
            hubs = replicas.hubs[x]
            egress[hubs] -= extra[x]
            extra[x] = _fill(egress[hubs], (replicas.num[x] - 1) * EGRESS_UNIT)
            egress[hubs] += extra[x]
    return extra


def _fill(egress: Int64Array, total: int) -> Int64Array:
    """Distribute `total` over hubs by water-filling: those that get a share end at one level.

    For every k the k lowest hubs get at most `total`, which bounds the level; the least of these
    bounds is the level. The rest goes to the first hubs at the level, one unit each.
    """
    level = ((total + np.sort(egress).cumsum()) // np.arange(1, len(egress) + 1)).min()
    extra: Int64Array = np.maximum(level - egress, 0)
    extra[np.flatnonzero(egress <= level)[: total - extra.sum()]] += 1
    return extra


def _egress(replicas: _Replicas, extra: list[Int64Array]) -> Int64Array:
    egress = replicas.exports * EGRESS_UNIT
    for ranks, added in zip(replicas.hubs, extra, strict=True):
        egress[ranks] += added
    return egress
