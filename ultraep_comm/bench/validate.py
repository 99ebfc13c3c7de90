"""Measured transfers beside predicted ones, on every rank. bench/METRICS.md has the rules."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist

from ultraep_comm.bench.calibrate import MANY_GROUPS, make_costs
from ultraep_comm.bench.calibrate_settings import SHORTER, TINY
from ultraep_comm.bench.device_rounds import slowest
from ultraep_comm.bench.device_transfers import RanksHere, count_wrong_slots, mark_slots
from ultraep_comm.bench.host_meter import HostMeter
from ultraep_comm.bench.launch import GATE_MISSED, WRONG
from ultraep_comm.bench.outputs import write_outputs
from ultraep_comm.bench.payload import Payload
from ultraep_comm.bench.placement import gather_places
from ultraep_comm.bench.progress import show_progress
from ultraep_comm.bench.turns import Filling, count_experts, make_turns
from ultraep_comm.bench.validate_report import (
    Predicted,
    format_validation,
    format_validation_header,
    make_validation_document,
    median_error,
)
from ultraep_comm.bench.validate_settings import PlannedCase, ValidateSettings, make_cases
from ultraep_comm.calibration import MeasuredCosts, device_name
from ultraep_comm.collectives import replicate_experts
from ultraep_comm.model import Machine, predict
from ultraep_comm.options import HOST_TILE_BYTES
from ultraep_comm.plan import Plan

_CALLS = 30  # in a row, of what moves next to nothing
_FEW_CALLS = 3
_BYTES_IN_A_ROW = 16 << 20


@dataclass(kw_only=True, eq=False)
class Timed:
    """One thing to time: calls in a row, with plans that take turns.

    Attributes:
        ranks: whose slots are filled.
        payload: what arrives.
        plans: of one shape.
        mode: of the calls.
        calls: in a row.
        times: one for each round, microseconds of a call on the slowest rank.
    """

    ranks: RanksHere
    payload: Payload
    plans: list[Plan]
    mode: str
    calls: int
    times: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Begin with the first plan."""
        self._turns: Iterator[Plan] = itertools.cycle(self.plans)

    def check(self, epoch: int) -> int:
        """Transfer once; return the wrong bytes of all ranks. Collective."""
        plan = self.plans[0]
        mark_slots(self.ranks.groups)
        self.ranks.fill(plan, self.payload, epoch)
        dist.barrier()
        self.ranks.call(plan, self.mode, self.ranks.bound)
        dist.barrier()
        wrong = count_wrong_slots(self.ranks.groups, plan, self.payload, epoch)
        found = torch.tensor([wrong])
        dist.all_reduce(found)
        return int(found)

    def time(self) -> None:
        """Add a time. Collective."""
        dist.barrier()
        took = self.ranks.meter.time_us(
            lambda: self.ranks.call(next(self._turns), self.mode, self.ranks.bound), self.calls, 1
        )
        self.times.append(slowest(took, loopback=False))

    def took(self) -> str:
        """Return the mode that the library takes. Collective: makes a call."""
        (group,), (bound,) = self.ranks.groups, self.ranks.bound
        work = replicate_experts(bound, self.plans[0], group=group, mode=self.mode, async_op=True)
        assert work is not None
        work.wait()
        return work.mode


class Bench:
    """Groups for every size of expert, and what is timed on them."""

    def __init__(self, settings: ValidateSettings) -> None:
        """Prepare; groups are made when they are first needed."""
        self._settings = settings
        self._made: dict[tuple[int, ...], tuple[RanksHere, Payload, int]] = {}

    def add(self, segments: dict[str, int], filling: Filling, mode: str) -> Timed:
        """Return something to time. Collective."""
        slots, expert_bytes = self._settings.slots, sum(segments.values())
        tiny = max(segments.values()) <= TINY
        key = tuple(segments.values())
        if key not in self._made:
            experts = slots if tiny else count_experts(expert_bytes, slots)
            shape = (self._settings.num_ranks, self._settings.num_ranks * experts)
            ranks = RanksHere(
                HostMeter(),
                np.zeros(shape, np.int32),
                fabric="shm",
                slots=slots,
                segments=segments,
                tile_bytes=HOST_TILE_BYTES,
                num_sms=None,
            )
            for weights in ranks.weights[0].values():
                weights.fill_(1)  # so that there is memory behind it
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
    def ranks(self) -> RanksHere:
        """Return the first group made."""
        return next(iter(self._made.values()))[0]

    def close(self) -> None:
        """Close all groups."""
        for ranks, _, _ in self._made.values():
            ranks.close()


def run(settings: ValidateSettings) -> int:
    """Calibrate, measure, predict; rank 0 prints and writes.

    Returns:
        The exit status, 1: wrong bytes, 3: the median error is above the gate.

    Raises:
        UltraEPError: a group could not be made, a transfer failed, or figures make no sense.
    """
    torch.set_num_threads(1)
    load_average = [os.getloadavg()[0]]
    bench = Bench(settings)
    cases = make_cases(settings)
    primitives = _primitives(bench, settings)
    plans = [bench.add({"w": c.expert_bytes}, c.filling, c.mode) for c in cases]
    timed = [*primitives.values(), *plans]
    speaks = dist.get_rank() == 0
    wrong = 0
    for i, one in enumerate(timed):
        if speaks:
            show_progress(i, len(timed), "checks")
        wrong += one.check(i + 1)
    took = [one.took() for one in plans]
    shuffle = np.random.default_rng(settings.seed)
    for i in range(settings.iters):
        if speaks:
            show_progress(i, settings.iters, "rounds")
        for t in shuffle.permutation(len(timed)):
            timed[t].time()
    places = gather_places(bench.ranks.groups[0])
    bench.close()
    load_average.append(os.getloadavg()[0])
    if speaks:
        show_progress(1, 1, "")
        print(format_validation_header(settings, places, load_average), flush=True)
    if wrong:
        if speaks:
            print(f"# wrong bytes: {wrong}; nothing was predicted", flush=True)
        return WRONG
    times = {name: one.times for name, one in primitives.items()}
    costs = costs_of(settings, times)
    found = [
        _predict(case, plan, took[i], costs, settings.statistic)
        for i, (case, plan) in enumerate(zip(cases, plans, strict=True))
    ]
    missed = settings.max_error is not None and median_error(found) > settings.max_error
    if speaks:
        print(format_validation(settings, costs, found), flush=True)
        document = make_validation_document(settings, costs, times, found, places, load_average)
        write_outputs(document, json_path=settings.json, csv_path=settings.csv)
    return GATE_MISSED if missed else 0


def _primitives(bench: Bench, settings: ValidateSettings) -> dict[str, Timed]:
    """Return what figures are made of, as `calibrate` has it, by name."""
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
    """Return the figures that times of all rounds give; nothing of a plan is in them.

    Raises:
        UnsupportedError: the machine was too busy for its figures to make sense.
    """
    us = {name: _sum_up(values, settings.statistic) for name, values in times.items()}
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


def _predict(
    case: PlannedCase, timed: Timed, took: str, costs: MeasuredCosts, statistic: str
) -> Predicted:
    found = predict(
        timed.plans[0], case.expert_bytes, Machine.from_calibration(costs), took, may_pull=True
    )
    return Predicted(
        case=case,
        took=took,
        calls=timed.calls,
        times_us=timed.times,
        measured_us=_sum_up(timed.times, statistic),
        predicted_us=found.time_us,
    )


def _sum_up(times: list[float], statistic: str) -> float:
    return float(np.min(times) if statistic == "min" else np.median(times))
