"""Times and bounds of a measured row, as the table and the records say them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ultraep_comm.errors import InvalidArgumentError
from ultraep_comm.plan import Plan
from ultraep_comm.schedule import transfer_bound

_PERCENTILES = {"p50": 50, "p90": 90, "p99": 99, "max": 100}
_OF_RANKS: dict[str, Callable[[NDArray[np.float64]], np.floating[Any]]] = {
    "rank-min": np.min,
    "rank-avg": np.mean,
    "rank-max": np.max,
}
TIMES = (*_PERCENTILES, *_OF_RANKS)
DEFAULT_TIMES = ("p50", "max")


@dataclass(frozen=True, kw_only=True, eq=False)
class Times:
    """Microseconds of one row.

    Attributes:
        iterations: ``[iters]``, of the whole call.
        ranks: ``[ranks]``, the mean over iterations of each rank's own time in the call.
    """

    iterations: NDArray[np.float64]
    ranks: NDArray[np.float64]

    def get(self, name: str) -> float:
        """Return one of TIMES."""
        if name in _PERCENTILES:
            return float(np.percentile(self.iterations, _PERCENTILES[name]))
        return float(_OF_RANKS[name](self.ranks))

    def record(self) -> dict[str, dict[str, float]]:
        """Return what JSON says of them."""
        return {
            "time_us": {name: self.get(name) for name in _PERCENTILES},
            "rank_time_us": {name.removeprefix("rank-"): self.get(name) for name in _OF_RANKS},
        }


def recorded_time(record: Mapping[str, Any], name: str) -> float:
    """Return one of TIMES out of what `Times.record` has made."""
    of_ranks = name.startswith("rank-")
    key = "rank_time_us" if of_ranks else "time_us"
    return float(record[key][name.removeprefix("rank-") if of_ranks else name])


def parse_times(text: str) -> tuple[str, ...]:
    """Return the names in ``"p50,max"``.

    Raises:
        InvalidArgumentError: a name is unknown or there twice.
    """
    names = tuple(part.strip() for part in text.split(","))
    if not set(names) <= set(TIMES) or len(set(names)) < len(names):
        raise InvalidArgumentError(
            f"--times is {text!r}; expected any of {', '.join(TIMES)}, each once"
        )
    return names


def time_titles(names: tuple[str, ...]) -> list[str]:
    """Return the titles of time columns."""
    return [f"time {names[0]}", *names[1:]]


def rate(num_bytes: float, time_us: float) -> float:
    """Return 10^9 bytes a second; 0 without time."""
    return num_bytes / time_us / 1e3 if time_us else 0.0


def critical_bytes(plan: Plan, expert_bytes: int) -> int:
    """Return what the busiest link carries at least."""
    return max(plan.max_exports, plan.max_imports) * expert_bytes


def link_bound_us(plan: Plan, expert_bytes: int, link_gbps: float) -> float:
    """Return T* of a plan over links of so many 10^9 bytes a second, one way."""
    return transfer_bound(plan.slot_expert, home=plan.home) * expert_bytes / link_gbps / 1e3


def check_gated(plan: Plan, gated: bool) -> None:
    """Raise InvalidArgumentError if a gate would look at transfers of nothing."""
    if gated and plan.num_replicas == 0:
        raise InvalidArgumentError(
            "the plan has no replicas, so nothing is moved that could meet a gate; give a larger"
            " --imbalance or --slots, or leave the gate out"
        )
