"""The exact bytes that each rank loads, stores and sends under a schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ultraep_comm.plan.plan import Plan
from ultraep_comm.plan.schedule import GROUP_BYTES, Schedule

Int64Array = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Traffic:
    """Bytes of one call, by rank.

    Attributes:
        loads: int64 ``[G]``, read by the rank from its own memory or a peer's.
        stores: int64 ``[G]``, written by the rank to its own memory or a peer's.
        egress: int64 ``[G]``, sent by the rank: its stores to peers, and peers' loads from it.
    """

    loads: Int64Array
    stores: Int64Array
    egress: Int64Array

    @property
    def moved(self) -> int:
        """Return loads plus stores of all ranks. A plain copy of n bytes moves 2 n."""
        return int(self.loads.sum() + self.stores.sum())

    @property
    def critical(self) -> int:
        """Return the egress of the busiest rank."""
        return int(self.egress.max(initial=0))


def group_offsets(segment_bytes: Sequence[int], tile_bytes: int) -> Int64Array:
    """Return the byte offsets of an expert's flag groups, and the end of the last one.

    Segments are concatenated and each is cut into tiles; consecutive tiles form groups.
    """
    tiles = [0]
    for size in segment_bytes:
        begin = tiles[-1]
        tiles += [begin + min(at, size) for at in range(tile_bytes, size + tile_bytes, tile_bytes)]
    step = max(1, GROUP_BYTES // tile_bytes)
    inner = tiles[:-1:step]
    return np.array([*inner, tiles[-1]], np.int64)


def count_traffic(
    schedule: Schedule, *, num_ranks: int, segment_bytes: Sequence[int], tile_bytes: int
) -> Traffic:
    """Count what every rank loads, stores and sends under a schedule.

    A hub loads its range once for all replicas. In push the source stores the range into the slot
    of a hub other than itself, and the hub loads it from there. In pull the hub loads the range
    from the source and stores it to every replica, including its own.
    """
    loads, stores, egress = (np.zeros(num_ranks, np.int64) for _ in range(3))
    offsets = group_offsets(segment_bytes, tile_bytes)
    for x in range(schedule.num_experts):
        source, num = int(schedule.source_rank[x]), len(list(schedule.replicas(x)))
        for hub, begin, end in schedule.hubs(x):
            size = int(offsets[end] - offsets[begin])
            loads[hub] += size
            if hub == source:
                stores[hub] += num * size
                egress[hub] += num * size
                continue
            egress[hub] += (num - 1) * size
            egress[source] += size  # stored by the source, or loaded from it
            if schedule.mode == "push":
                loads[source] += size
                stores[source] += size
                stores[hub] += (num - 1) * size
            else:
                stores[hub] += num * size
    return Traffic(loads=loads, stores=stores, egress=egress)


def count_reduction_traffic(
    plan: Plan,
    mode: str,
    *,
    segment_bytes: Sequence[int],
    tile_bytes: int,
    grad_bytes: int,
    main_bytes: int,
    zero: bool,
) -> Traffic:
    """Count what every rank loads and stores in a reduction, and what it loads from peers.

    In pull, replica i of n > 1 adds the i-th part of an expert's flag groups in fp32, and the home
    rank loads the sums; otherwise the home rank loads everything. The home rank loads and stores
    main gradients, and owners clear their slots. `egress` here counts bytes that enter the rank.

    Args:
        plan: the plan.
        mode: "pull" or "direct".
        segment_bytes: bytes of one expert's gradients in a slot, by segment.
        tile_bytes: the largest tile.
        grad_bytes, main_bytes: of an element, in slots and of main gradients.
        zero: whether slots are cleared.
    """
    slots = plan.slot_expert.numpy()
    loads, stores, enters = (np.zeros(len(slots), np.int64) for _ in range(3))
    size = sum(segment_bytes)
    offsets = group_offsets(segment_bytes, tile_bytes)
    for expert in np.unique(slots[slots >= 0]).tolist():
        ranks, home = (slots == expert).any(axis=1).nonzero()[0], int(plan.home[expert])
        n = len(ranks)
        if mode == "pull" and n > 1:
            bounds = offsets[np.arange(n + 1) * (len(offsets) - 1) // n]
            part = np.diff(bounds)
            loads[ranks] += n * part
            enters[ranks] += (n - 1) * part
            stores[ranks] += part // grad_bytes * 4
            came = size // grad_bytes * 4
        else:
            came = n * size
        mains = size // grad_bytes * main_bytes
        loads[home] += came + mains
        enters[home] += came
        stores[home] += mains
        stores[ranks] += size if zero else 0
    return Traffic(loads=loads, stores=stores, egress=enters)


def interpolate_sms(points: ArrayLike, wanted: float) -> float | None:
    """Return the number of SMs at which a measured rate reaches ``wanted``; None if none does.

    Interpolates linearly between the points ``(num_sms, rate)``, without extrapolation: if the
    point with the fewest SMs reaches the rate, its number is returned.
    """
    line = sorted((float(sms), float(rate)) for sms, rate in np.asarray(points).reshape(-1, 2))
    before: tuple[float, float] | None = None
    for sms, rate in line:
        if rate >= wanted:
            if before is None:
                return sms
            return before[0] + (sms - before[0]) * (wanted - before[1]) / (rate - before[1])
        before = (sms, rate)
    return None
