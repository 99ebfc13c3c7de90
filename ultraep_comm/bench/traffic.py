"""The exact bytes that each rank loads, stores and sends under a schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ultraep_comm import _core
from ultraep_comm.plan.plan import Plan
from ultraep_comm.plan.schedule import MODES

Int64Array = NDArray[np.int64]
GROUP_BYTES = 32 << 10  # of a flag group, if tiles are no larger
_COST = [0, 0, 0, 0, 100]  # of a cost model that is not asked: the mode is given


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


def make_schedule(
    plan: Plan, mode: str, *, segment_bytes: Sequence[int], tile_bytes: int
) -> dict[str, Any]:
    """Return the core's schedule of a plan in one domain, by field."""
    return _core.make_schedule(
        plan.slot_expert.flatten().tolist(),
        plan.home.tolist(),
        [0] * plan.num_ranks,
        plan.slots_per_rank,
        False,
        list(segment_bytes),
        tile_bytes,
        MODES[mode],
        False,
        _COST,
    )


def list_hubs(schedule: dict[str, Any]) -> list[list[tuple[int, int, int]]]:
    """Return the hubs of each entry: (rank, begin, end), in flag groups; first the source.

    The others are the ranks of its replicas. An empty range has nothing to hand out.
    """
    found = []
    for x, (first, last) in enumerate(pairwise(schedule["first"])):
        ranks = [schedule["source_rank"][x], *schedule["replica_rank"][first:last]]
        bounds = schedule["boundary"][first + 2 * x : last + 2 * x + 2]
        found.append([(r, *span) for r, span in zip(ranks, pairwise(bounds), strict=True)])
    return found


def count_traffic(
    plan: Plan, mode: str, *, segment_bytes: Sequence[int], tile_bytes: int
) -> Traffic:
    """Count what every rank loads, stores and sends under a schedule.

    A hub loads its range once for all replicas. In push the source stores the range into the slot
    of a hub other than itself, and the hub loads it from there. In pull the hub loads the range
    from the source and stores it to every replica, including its own.
    """
    loads, stores, egress = (np.zeros(plan.num_ranks, np.int64) for _ in range(3))
    offsets = group_offsets(segment_bytes, tile_bytes)
    schedule = make_schedule(plan, mode, segment_bytes=segment_bytes, tile_bytes=tile_bytes)
    for hubs in list_hubs(schedule):
        source, num = hubs[0][0], len(hubs) - 1
        for hub, begin, end in hubs:
            size = int(offsets[end] - offsets[begin])
            loads[hub] += size
            if hub == source:
                stores[hub] += num * size
                egress[hub] += num * size
                continue
            egress[hub] += (num - 1) * size
            egress[source] += size  # stored by the source, or loaded from it
            if mode == "push":
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
) -> Traffic:
    """Count what every rank loads and stores in a reduction, and what it loads from peers.

    In pull, replica i of n > 1 adds the i-th part of an expert's flag groups in fp32, and the home
    rank loads the sums; otherwise the home rank loads everything. The home rank loads and stores
    gradients at home, and owners clear their slots. `egress` here counts bytes that enter the rank.

    Args:
        plan: the plan.
        mode: "pull" or "direct".
        segment_bytes: bytes of one expert's gradients in a slot, by segment.
        tile_bytes: the largest tile.
        grad_bytes, main_bytes: of an element, in slots and of gradients at home.
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
        at_home = size // grad_bytes * main_bytes
        loads[home] += came + at_home
        enters[home] += came
        stores[home] += at_home
        stores[ranks] += size  # cleared
    return Traffic(loads=loads, stores=stores, egress=enters)
