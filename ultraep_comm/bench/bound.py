"""The yardstick ``T*`` of a plan, and what a schedule takes in the same model.

Both in units of W / B: the time in which one expert crosses one link. See bench/METRICS.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ultraep_comm import _core
from ultraep_comm.plan import Plan
from ultraep_comm.work import MODES

_ENUMERABLE_RANKS = 12


def least_time(plan: Plan) -> float:
    """Return ``T*``: exact up to 12 ranks or without chains, else a lower bound of it.

    The bound is the largest over rank sets. Without chains single ranks decide; with chains all
    sets of up to 12 ranks are tried, and only single ranks beyond.
    """
    single = max(plan.max_exports, plan.max_imports)
    num_ranks = plan.num_ranks
    if not is_chained(plan) or num_ranks > _ENUMERABLE_RANKS:
        return float(single)
    slots, home = plan.slot_expert.numpy(), plan.home.numpy()
    sets = np.arange(1, 1 << num_ranks)
    demand = np.zeros(len(sets), np.int64)
    for expert in np.unique(slots[slots >= 0]):
        ranks = np.flatnonzero((slots == expert).any(axis=1))
        members = (1 << int(home[expert])) | int((1 << ranks).sum())
        demand += (sets >> int(home[expert])) & 1
        demand += np.where(sets & members == members, len(ranks) - 1, 0)
    size = sum((sets >> r) & 1 for r in range(num_ranks))
    return max(float(single), float((demand / size).max()))


def is_chained(plan: Plan) -> bool:
    """Return whether some rank both exports and imports an expert."""
    slots = plan.slot_expert.numpy()
    exporters = set(plan.home.numpy()[slots[slots >= 0]].tolist())
    return any((slots[r] >= 0).any() for r in exporters)


def modelled_time(plan: Plan, mode: str, segment_bytes: Sequence[int], tile_bytes: int) -> float:
    """Return the time of a mode's schedule: the busiest rank's egress or imports."""
    domains = [0] * plan.num_ranks if plan.domains is None else plan.domains.tolist()
    schedule = _core.make_schedule(
        slot_expert=plan.slot_expert.flatten().tolist(),
        home=plan.home.tolist(),
        domain=domains,
        slots_per_rank=plan.slots_per_rank,
        allow_cross_domain=True,
        segment_bytes=list(segment_bytes),
        tile_bytes=tile_bytes,
        mode=MODES.index(mode),
        may_pull=True,
        cost=[0] * 4 + [1],
    )
    egress = max(schedule["egress"], default=0) / (1 << 16)
    return max(egress, float(schedule["max_imports"]))
