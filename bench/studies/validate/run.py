"""The measurements and predictions of ``validate``. bench/METRICS.md has the rules."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from studies.validate import ValidateSettings
from ultraep_comm.bench.clock import Meter
from ultraep_comm.bench.commands.calibrate import SHORTER, TINY
from ultraep_comm.bench.commands.calibrate.run import MANY_GROUPS, make_costs
from ultraep_comm.bench.launch import GATE_MISSED, WRONG
from ultraep_comm.bench.measure import figures_of, interleave, rate, slowest
from ultraep_comm.bench.payload import Payload
from ultraep_comm.bench.ranks import Filling, WeightRanks, count_experts, make_turns
from ultraep_comm.bench.report import Record, Report
from ultraep_comm.bench.sizes import format_size
from ultraep_comm.bench.table import Column
from ultraep_comm.calibration import MeasuredCosts, device_name
from ultraep_comm.engines.options import HOST_TILE_BYTES
from ultraep_comm.model import Machine, predict
from ultraep_comm.plan.plan import Plan

MODES = ("auto", "push", "pull", "direct")
_CALLS = 30  # in a row, for tiny experts
_FEW_CALLS = 3
_BYTES_IN_A_ROW = 16 << 20


def run(settings: ValidateSettings, report: Report) -> int:
    """Calibrate, measure and predict; return the exit status, 3 if the gate is missed.

    Raises:
        UltraEPError: a group could not be created, a transfer failed, or the calibration times are
            inconsistent.
    """
    torch.set_num_threads(1)
    load_average = [os.getloadavg()[0]]
    bench = Bench(settings)
    cases = make_cases(settings)
    primitives = _primitives(bench, settings)
    plans = [bench.add({"w": c.expert_bytes}, c.filling, c.mode) for c in cases]
    timed = [*primitives.values(), *plans]
    wrong = 0
    for i, one in enumerate(timed):
        report.progress(i, len(timed), "checks")
        wrong += one.check(i + 1)
    took = [one.ranks.choose(one.plans[0], one.mode) for one in plans]
    for turn in interleave(settings, len(timed), report.progress, "rounds"):
        timed[turn.item].time()
    report.place(bench.ranks.groups[0])
    bench.close()
    load_average.append(os.getloadavg()[0])
    report.header("validate", _describe(settings, load_average))
    if wrong:
        report.show(f"# wrong bytes: {wrong}; nothing was predicted")
        return WRONG
    times = {name: one.times for name, one in primitives.items()}
    costs = costs_of(settings, times)
    records = [
        make_record(case, plan, took[i], costs, settings.statistic)
        for i, (case, plan) in enumerate(zip(cases, plans, strict=True))
    ]
    summed = sum_up(settings, costs, times, records)
    figures = [f"{k} {v:.4g}" for k, v in asdict(costs).items() if isinstance(v, float)]
    report.show(f"# calibrated: {', '.join(figures)}")
    report.columns(_COLUMNS)
    report.add(records, gated=False)
    report.note(*describe_errors(summed, len(records)))
    more = {
        **summed,
        "wrong_bytes": 0,  # else there is no document
        "load_average": {"before": load_average[0], "after": load_average[-1]},
    }
    report.finish(more=more)
    return GATE_MISSED if summed["gate"] is not None and not summed["gate"]["met"] else 0


def _describe(settings: ValidateSettings, load_average: Sequence[float]) -> list[str]:
    sizes = settings.sizes
    return [
        f"{settings.plans} plans, experts of {format_size(sizes[0])} to {format_size(sizes[-1])},"
        f" {settings.slots} slots, seed {settings.seed}; sources are in no cache",
        f"{settings.iters} rounds of all measurements, shuffled; {settings.statistic} of measured"
        " and of calibrated times",
        f"other load: load average {load_average[0]:.2f} before, {load_average[-1]:.2f} after",
    ]


# ---- the plans ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PlannedCase:
    """One of the plans.

    Attributes:
        mode: requested mode.
        expert_bytes: W.
        filling: experts in each rank's slots, with indices below S.
    """

    mode: str
    expert_bytes: int
    filling: Filling

    @property
    def replicas(self) -> int:
        """Return the number of filled slots."""
        return sum(map(len, self.filling))

    @property
    def imports(self) -> list[int]:
        """Return the number of filled slots of each rank."""
        return [len(row) for row in self.filling]


def make_cases(settings: ValidateSettings) -> list[PlannedCase]:
    """Draw the plans: sizes and modes in equal numbers, each rank with 0 to S filled slots."""
    rng = np.random.default_rng(settings.seed)
    every = [(size, mode) for mode in MODES for size in settings.sizes]
    dealt = [every[i % len(every)] for i in range(settings.plans)]
    # Neighbours in `every` differ in size; modes alternate too, so that few plans have all modes.
    dealt = [(size, MODES[i % len(MODES)]) for i, (size, _) in enumerate(dealt)]
    return [
        PlannedCase(mode=mode, expert_bytes=size, filling=_draw_filling(settings, rng))
        for size, mode in dealt
    ]


def _draw_filling(settings: ValidateSettings, rng: np.random.Generator) -> Filling:
    while True:
        rows = []
        for rank in range(settings.num_ranks):
            others = [r for r in range(settings.num_ranks) if r != rank]
            possible = [(home, number) for home in others for number in range(settings.slots)]
            count = int(rng.integers(0, settings.slots + 1))
            taken = rng.choice(len(possible), size=count, replace=False)
            rows.append([possible[i] for i in sorted(taken.tolist())])
        if any(rows):
            return rows


# ---- measurements -------------------------------------------------------------------------------


@dataclass(kw_only=True, eq=False)
class Timed:
    """One item to time: calls in a row that rotate over plans.

    Attributes:
        ranks: that call.
        payload: expected contents.
        plans: of one shape.
        mode: of the calls.
        calls: in a row.
        times: one for each round, microseconds of a call on the slowest rank.
    """

    ranks: WeightRanks
    payload: Payload
    plans: list[Plan]
    mode: str
    calls: int
    times: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Start with the first plan."""
        self._turns: Iterator[Plan] = itertools.cycle(self.plans)

    def check(self, epoch: int) -> int:
        """Transfer once; return the wrong bytes of all ranks. Collective."""
        return self.ranks.check(self.plans[0], self.mode, self.payload, epoch)

    def time(self) -> None:
        """Add a time. Collective."""
        clock = self.ranks.clock(self.calls)
        took = clock.time_us(lambda: self.ranks.call(next(self._turns), self.mode))
        self.times.append(slowest(took, loopback=False))


class Bench:
    """The groups for each size of expert, and the items to time on them."""

    def __init__(self, settings: ValidateSettings) -> None:
        """Prepare; groups are created on first use."""
        self._settings = settings
        self._made: dict[tuple[int, ...], tuple[WeightRanks, Payload, int]] = {}

    def add(self, segments: dict[str, int], filling: Filling, mode: str) -> Timed:
        """Return an item to time. Collective."""
        slots, expert_bytes = self._settings.slots, sum(segments.values())
        tiny = max(segments.values()) <= TINY
        key = tuple(segments.values())
        if key not in self._made:
            experts = slots if tiny else count_experts(expert_bytes, slots)
            ranks = WeightRanks(
                Meter(),
                num_ranks=self._settings.num_ranks,
                num_experts=self._settings.num_ranks * experts,
                fabric="shm",
                slots=slots,
                segments=segments,
                tile_bytes=HOST_TILE_BYTES,
                num_sms=None,
            )
            ranks.touch_weights()
            self._made[key] = ranks, Payload(self._settings.seed, segments), experts
        ranks, payload, experts = self._made[key]
        replicas = sum(map(len, filling))
        in_a_row = _BYTES_IN_A_ROW // max(replicas * expert_bytes, 1)
        return Timed(
            ranks=ranks,
            payload=payload,
            plans=make_turns(filling, slots=slots, experts=experts, in_a_turn=slots),
            mode=mode,
            calls=_CALLS if tiny else min(max(in_a_row, _FEW_CALLS), _CALLS),
        )

    @property
    def ranks(self) -> WeightRanks:
        """Return the ranks that were created first."""
        return next(iter(self._made.values()))[0]

    def close(self) -> None:
        """Close all groups."""
        for ranks, _, _ in self._made.values():
            ranks.close()


def _primitives(bench: Bench, settings: ValidateSettings) -> dict[str, Timed]:
    """Return the calibration transfers, as in ``calibrate``, by name."""
    num_ranks, largest = settings.num_ranks, settings.sizes[-1]
    one: Filling = [[(0, 0)] if rank == 1 else [] for rank in range(num_ranks)]
    ring: Filling = [[((rank - 1) % num_ranks, 0)] for rank in range(num_ranks)]
    many = {f"s{i}": TINY for i in range(MANY_GROUPS)}
    shapes: dict[str, tuple[dict[str, int], Filling, str]] = {
        "empty": ({"w": TINY}, [[] for _ in range(num_ranks)], "direct"),
        "short": ({"w": largest // SHORTER}, one, "direct"),
        "alone": ({"w": largest}, one, "direct"),
        "together": ({"w": largest}, ring, "direct"),
        "few": ({"w": TINY}, one, "push"),
        "many": (many, one, "push"),
    }
    if num_ranks > 2:
        two: Filling = [[(0, 0)] if rank in (1, 2) else [] for rank in range(num_ranks)]
        shapes["both"] = ({"w": largest}, two, "direct")
    return {name: bench.add(*shape) for name, shape in shapes.items()}


def costs_of(settings: ValidateSettings, times: dict[str, list[float]]) -> MeasuredCosts:
    """Return the calibration from the times of all rounds, without those of plans.

    Raises:
        UnsupportedError: the times are inconsistent, because the machine was too busy.
    """
    us = {name: _statistic(values, settings.statistic) for name, values in times.items()}
    return make_costs(
        device=device_name("host") or "",
        ranks=settings.num_ranks,
        copy_bytes=settings.sizes[-1],
        short_bytes=settings.sizes[-1] // SHORTER,
        empty_us=us["empty"],
        short_us=us["short"],
        alone_us=us["alone"],
        both_us=us.get("both"),
        together_us=us["together"],
        flag_us=(us["many"] - us["few"]) / (MANY_GROUPS - 1),
    )


# ---- figures ------------------------------------------------------------------------------------


def make_record(
    case: PlannedCase, timed: Timed, took: str, costs: MeasuredCosts, statistic: str
) -> Record:
    """Return the JSON record of a plan, measured and predicted.

    The error is predicted / measured - 1; negative if the transfer took longer than predicted.
    """
    found = predict(
        timed.plans[0], case.expert_bytes, Machine.from_calibration(costs), took, may_pull=True
    )
    measured_us = _statistic(timed.times, statistic)
    return {
        "op": "validate",
        "name": case.mode if case.mode == took else f"{case.mode} ({took})",
        "mode": case.mode,
        "chosen": took,
        "expert_bytes": case.expert_bytes,
        "replicas": case.replicas,
        "bytes": case.replicas * case.expert_bytes,
        "imports": "+".join(map(str, case.imports)),
        "filling": [" ".join(f"{h}/{n}" for h, n in row) for row in case.filling],
        "calls": timed.calls,
        "time_us": figures_of(timed.times, "min", "p50", "max"),
        "measured_us": measured_us,
        "measured_gbps": rate(case.replicas * case.expert_bytes, measured_us),
        "predicted_us": found.time_us,
        "error": found.time_us / measured_us - 1,
    }


def _statistic(times: Sequence[float], statistic: str) -> float:
    return float(np.min(times) if statistic == "min" else np.median(times))


def sum_up(
    settings: ValidateSettings,
    costs: MeasuredCosts,
    times: Mapping[str, Sequence[float]],
    records: Sequence[Record],
) -> dict[str, Any]:
    """Return the errors over all plans, the gate, and the calibration."""
    errors = [abs(record["error"]) for record in records]
    median, limit = float(np.median(errors)), settings.max_error
    return {
        "median_error": median,
        "worst_error": max(errors),
        "calibration": asdict(costs),
        "calibration_times_us": {
            name: figures_of(us, "min", "p50", "max") for name, us in times.items()
        },
        "gate": None if limit is None else {"max_error": limit, "met": median <= limit},
    }


_COLUMNS = (
    Column("mode", "", "name"),
    Column("size", "B", "expert_bytes"),
    Column("imports", "of ranks", "imports"),
    Column("bytes", "B", "bytes"),
    Column("measured", "us", "measured_us", ".1f"),
    Column("predicted", "us", "predicted_us", ".1f"),
    Column("error", "", "error", "+.1%"),
    Column("measured", "GB/s", "measured_gbps", ".2f"),
)


def describe_errors(summed: Mapping[str, Any], num_plans: int) -> Iterator[str]:
    """Yield lines about the errors of all plans, and the gate."""
    median, worst, gate = (summed[name] for name in ("median_error", "worst_error", "gate"))
    yield f"error: median {100 * median:.1f}%, worst {100 * worst:.1f}%, of {num_plans} plans"
    if gate is not None:
        verdict = "met" if gate["met"] else "not met"
        yield f"gate {verdict}: median error at most {100 * gate['max_error']:g}%"
