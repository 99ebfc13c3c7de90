"""What the planner of `src/core/plan/` takes: limits, targets and costs, in integers."""

from __future__ import annotations

import math

PPM = 1_000_000
MAX_LOAD = 2**31 - 1
MAX_TOTAL_LOAD = 2**40 - 1
MAX_TARGET = 1000.0
# In one unit: per token of the fullest rank, per expert of the cap, and per replica.
Costs = tuple[int, int, int]


def target_to_ppm(target: float) -> int:
    """Return the target imbalance in integer millionths.

    Raises ValueError unless 1 <= target <= 1000.
    """
    if not (math.isfinite(target) and 1.0 <= target <= MAX_TARGET):
        raise ValueError(f"target imbalance is {target}; expected 1 <= target <= {MAX_TARGET:g}")
    return round(target * PPM)
