"""Time several transfers, interleaved. bench/METRICS.md has the rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from ultraep_comm.bench.clock import Clock, Meter
from ultraep_comm.bench.options import Settings
from ultraep_comm.bench.report import Report
from ultraep_comm.errors import InvalidArgumentError
from ultraep_comm.plan.bounds import find_transfer_bound
from ultraep_comm.plan.plan import Plan

Given = TypeVar("Given", bound=Settings)
_PERCENTILES = {"p50": 50, "p90": 90, "p99": 99, "max": 100}
_OF_RANKS: dict[str, Callable[[NDArray[np.float64]], np.floating[Any]]] = {
    "rank-min": np.min,
    "rank-avg": np.mean,
    "rank-max": np.max,
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Times:
    """Times of one row, in microseconds.

    Attributes:
        iterations: ``[iters]``, of the whole call.
        ranks: ``[ranks]``, each rank's own time in the call, mean over iterations.
    """

    iterations: NDArray[np.float64]
    ranks: NDArray[np.float64]

    def get(self, name: str) -> float:
        """Return one of `options.TIMES`."""
        if name in _PERCENTILES:
            return float(np.percentile(self.iterations, _PERCENTILES[name]))
        return float(_OF_RANKS[name](self.ranks))

    def record(self) -> dict[str, dict[str, float]]:
        """Return the JSON fields."""
        return {
            "time_us": {name: self.get(name) for name in _PERCENTILES},
            "rank_time_us": {name.removeprefix("rank-"): self.get(name) for name in _OF_RANKS},
        }


def time_path(name: str) -> str:
    """Return the path of one of `options.TIMES` in `Times.record`."""
    of_ranks = name.startswith("rank-")
    return f"rank_time_us.{name.removeprefix('rank-')}" if of_ranks else f"time_us.{name}"


@dataclass(frozen=True, kw_only=True, eq=False)
class Measured:
    """The result of timing one transfer, over all ranks.

    Attributes:
        mode: requested mode, or name of a baseline.
        chosen: mode that the library chose; "" for a baseline.
        times: of iterations and ranks.
        wrong: bytes, or values, over all ranks and checked iterations.
    """

    mode: str
    chosen: str
    times: Times
    wrong: int

    @property
    def name(self) -> str:
        """Return the mode, and the one that the library chose."""
        return self.mode if self.chosen in ("", self.mode) else f"{self.mode} ({self.chosen})"

    @property
    def p50(self) -> float:
        """Return the median in microseconds."""
        return self.times.get("p50")


class Transfer(Protocol):
    """Delivers the replicas of a plan, or moves as many bytes."""

    name: str

    def run(self) -> None:
        """Transfer, for the ranks of this process; on a device only enqueue."""

    def count_wrong(self, payload: Any, epoch: int) -> int:
        """Return the wrong bytes on these ranks after :meth:`run`."""


class Mode:
    """The library's collective in one mode, with bound tensors."""

    def __init__(self, ranks: Any, plan: Plan, mode: str) -> None:
        """Create the transfer; ``ranks`` make the call and check it."""
        self.name, self._ranks, self._plan = mode, ranks, plan

    def run(self) -> None:
        """Make the call."""
        self._ranks.call(self._plan, self.name)

    def choose(self) -> str:
        """Return the mode that the library chooses for this plan. Collective: makes a call."""
        return str(self._ranks.choose(self._plan, self.name))

    def count_wrong(self, payload: Any, epoch: int) -> int:
        """Return the wrong bytes in what the call has written, and in what it must not change."""
        return int(self._ranks.count_wrong(self._plan, payload, epoch))


@dataclass(frozen=True)
class Turn:
    """One item in one iteration.

    Attributes:
        i: the iteration; negative in the warm-up.
        item: index of the item.
        epoch: from 1; each has different bytes.
        checked: verify the result.
    """

    i: int
    item: int
    epoch: int
    checked: bool


def interleave(
    settings: Settings, items: int, progress: Callable[[int, int, str], None], text: str
) -> Iterator[Turn]:
    """Yield the turns of all items, iteration by iteration.

    The order is shuffled, equally on all ranks, so that no item always inherits the caches of the
    same other item.
    """
    shuffle = np.random.default_rng(settings.seed)
    total, epoch = settings.warmup + settings.iters, 0
    for turn in range(total):
        progress(turn, total, text)
        i = turn - settings.warmup
        checked = settings.check or i == settings.iters - 1
        for item in shuffle.permutation(items).tolist():
            epoch += 1
            yield Turn(i, item, epoch, checked)
    progress(total, total, "")


def measure(
    settings: Settings,
    clock: Clock,
    transfers: Sequence[Transfer],
    payload: object,
    *,
    fill: Callable[[Any, int], None],
    report: Report | None = None,
    label: str = "",
) -> list[Measured]:
    """Time transfers of one plan, interleaved iteration by iteration. Collective, but in loopback.

    Args:
        settings: iterations, warm-up, checks and seed.
        clock: times a call.
        transfers: to time.
        payload: expected contents.
        fill: writes the payload of an epoch to the sources.
        report: shows the progress.
        label: for the progress line.
    """
    chosen = [t.choose() if isinstance(t, Mode) else "" for t in transfers]
    spans = np.zeros((2, len(transfers), settings.iters))
    wrong = np.zeros(len(transfers), np.int64)
    progress = report.progress if report is not None else lambda *_: None
    for turn in interleave(settings, len(transfers), progress, f"iterations{label}"):
        fill(payload, turn.epoch)
        span = clock.span(transfers[turn.item].run)
        if turn.checked:
            wrong[turn.item] += transfers[turn.item].count_wrong(payload, turn.epoch)
        if turn.i >= 0:
            spans[:, turn.item, turn.i] = span
    wrong = add_up(wrong, clock.loopback)
    times = times_of(gather(spans, clock.loopback), one_clock=clock.one_clock)
    return [
        Measured(mode=x.name, chosen=chosen[t], times=times[t], wrong=int(wrong[t]))
        for t, x in enumerate(transfers)
    ]


def times_of(spans: NDArray[np.float64], *, one_clock: bool) -> list[Times]:
    """Return the times of each transfer, from starts and ends ``[ranks, 2, transfers, iters]``.

    With one clock an iteration lasts from the first start to the last end; otherwise its time is
    that of the slowest rank.
    """
    starts, ends = spans.swapaxes(0, 1)  # [ranks, transfers, iters]
    own = ends - starts
    whole = ends.max(axis=0) - starts.min(axis=0) if one_clock else own.max(axis=0)
    return [Times(iterations=t, ranks=r) for t, r in zip(whole, own.mean(axis=2).T, strict=True)]


# ---- figures of all ranks -----------------------------------------------------------------------


def gather(mine: NDArray[Any], loopback: bool) -> NDArray[Any]:
    """Return the arrays of all ranks, stacked; in loopback only this one. Else collective."""
    if loopback:
        return mine[None]
    own = torch.from_numpy(np.ascontiguousarray(mine))
    everybody = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, own)
    found: NDArray[Any] = torch.stack(everybody).numpy()
    return found


def add_up(mine: NDArray[np.int64], loopback: bool) -> NDArray[np.int64]:
    """Return the sums over all ranks. Collective, but in loopback."""
    total: NDArray[np.int64] = gather(mine, loopback).sum(axis=0)
    return total


def slowest(value: float, loopback: bool) -> float:
    """Return the largest of the ranks' values. Collective, but in loopback."""
    return float(gather(np.array([value], np.float64), loopback).max())


# ---- rates and bounds ---------------------------------------------------------------------------


def rate(num_bytes: float, time_us: float) -> float:
    """Return GB/s, with 10^9 bytes per GB; 0 if the time is 0."""
    return num_bytes / time_us / 1e3 if time_us else 0.0


def critical_bytes(plan: Plan, expert_bytes: int) -> int:
    """Return the least that the busiest link can carry, in bytes."""
    return max(plan.max_exports, plan.max_imports) * expert_bytes


def with_link(settings: Given, meter: Meter) -> Given:
    """Return settings with the rate of a GPU's links, unless it was given or ranks share a GPU."""
    found = None if settings.loopback or settings.link_gbps else meter.find_link()
    return replace(settings, link_gbps=found[0], link_source=found[1]) if found else settings


def describe_link(settings: Settings) -> list[str]:
    """Return the header line that says which rate a bound over links is of."""
    if settings.link_gbps is None:
        return []
    return [f"bound: over links of {settings.link_gbps:.4g} GB/s, {settings.link_source}"]


def link_bound_us(plan: Plan, expert_bytes: int, link_gbps: float) -> float:
    """Return T* of a plan in microseconds, over links of ``link_gbps`` one way."""
    return transfer_bound(plan) * expert_bytes / link_gbps / 1e3


def transfer_bound(plan: Plan) -> float:
    """Return T* of a plan, in experts over one link."""
    return float(find_transfer_bound(plan.slot_expert.numpy(), plan.home.numpy())[0])


def paired_ratio(ours: Measured, other: Measured) -> float:
    """Return the median over iterations of the other's time over ours."""
    return float(np.median(other.times.iterations / np.maximum(ours.times.iterations, 1e-3)))


def figures_of(values: NDArray[np.float64] | Sequence[float], *names: str) -> dict[str, float]:
    """Return the named statistics: "min", "p50", "p90", "p99", "max", "mean" or "worst"."""
    at = {"min": 0, **_PERCENTILES, "worst": 100}
    return {
        name: float(np.mean(values) if name == "mean" else np.percentile(values, at[name]))
        for name in names
    }


def check_gated(plan: Plan, gated: bool) -> None:
    """Raise InvalidArgumentError if there is a gate but nothing to transfer."""
    if gated and plan.num_replicas == 0:
        raise InvalidArgumentError(
            "the plan has no replicas, so there is no transfer to judge; use a larger --imbalance"
            " or --slots, or no gate"
        )
