"""What the planner of `src/core/plan/` takes: limits, targets and costs, in integers."""

from __future__ import annotations

import math
from typing import NamedTuple

PPM = 1_000_000
MAX_LOAD = 2**31 - 1
MAX_TOTAL_LOAD = 2**40 - 1
MAX_TARGET = 1000.0


class Costs(NamedTuple):
    """Integer costs in one unit: per token of the fullest rank, expert of the cap, and replica."""

    per_token: int
    per_transfer: int
    per_replica: int


def target_to_ppm(target: float) -> int:
    """Return the target imbalance in integer millionths.

    Raises ValueError unless 1 <= target <= 1000.
    """
    if not (math.isfinite(target) and 1.0 <= target <= MAX_TARGET):
        raise ValueError(f"target imbalance is {target}; expected 1 <= target <= {MAX_TARGET:g}")
    return round(target * PPM)
