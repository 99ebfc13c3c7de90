"""What the planner of `src/core/plan/` takes: limits, targets and costs, in integers."""

from __future__ import annotations

from ultraep_comm.errors import InvalidArgumentError

PPM = 1_000_000
MAX_LOAD = 2**31 - 1
MAX_TOTAL_LOAD = 2**40 - 1
MAX_TARGET = 1000.0
# In one unit: per token of the fullest rank, per expert of the cap, and per replica.
Costs = tuple[int, int, int]


def target_to_ppm(target: float) -> int:
    """Return the target imbalance in integer millionths.

    Raises:
        InvalidArgumentError: it is not from 1 to 1000.
    """
    if not 1.0 <= target <= MAX_TARGET:
        raise InvalidArgumentError(
            f"target imbalance is {target}; expected 1 <= target <= {MAX_TARGET:g}"
        )
    return round(target * PPM)
