"""Time planner, counts and reroute on a GPU, and check them against the host."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ultraep_comm import _core
from ultraep_comm.bench.clock import Meter
from ultraep_comm.bench.commands.plan import PlanSettings, PlanSize
from ultraep_comm.bench.commands.plan.cells import (
    Loads,
    describe_loads,
    each_cell,
    plan_load,
    time_core_us,
)
from ultraep_comm.bench.inside import device_stages, gather_together, plans_at_once
from ultraep_comm.bench.measure import figures_of
from ultraep_comm.bench.payload import Payload, count_unequal, count_wrong_plan
from ultraep_comm.bench.ranks import WeightRanks
from ultraep_comm.bench.report import Record, Report
from ultraep_comm.bench.table import Column
from ultraep_comm.calls.gather import gather_load
from ultraep_comm.engines.cuda import device, kernels
from ultraep_comm.engines.cuda.stages import CudaStages
from ultraep_comm.errors import InvalidLoadError
from ultraep_comm.group.group import Group
from ultraep_comm.plan.plan import Plan
from ultraep_comm.plan.planner import target_to_ppm
from ultraep_comm.testing import new_loopback_groups

_WIDTH = 7  # of columns: rows of several sizes follow
PLAN_CALLS = 20  # in a row
_GATHER_CALLS = 3  # and one untimed: the host blocks if more than 4 are pending
FIELDS = ("slot_expert", "slot_quota", "home_quota")
_SEGMENTS = {"w": 16}  # bytes of a tiny expert


def run_device(meter: Meter, settings: PlanSettings, report: Report) -> int:
    """Measure on a device; return the exit status, 1 if a result differs from the host's.

    Raises:
        UltraEPError: there is no device, or a load of the trace is invalid.
    """
    lines = [
        f"{describe_loads(settings.tokens, settings.topk)}; target {settings.target:g}",
        "times: medians over loads, in us; counts without exchange; counts + plan: one launch",
        "schedule: how much longer a transfer takes that makes it; shares: a reroute of padding",
    ]
    report.header("plan, engine cuda", lines, device=meter.describe())
    report.columns(_columns(settings.warps), _WIDTH)
    wrong = 0
    try:
        for size, family, loads in each_cell(settings, report):
            record = measure_row(meter, settings, size, family, loads)
            wrong += record["wrong_values"]
            report.add([record], gated=False)
    finally:  # after Ctrl-C too: they took long
        status = report.finish(wrong=wrong)
    return status


@dataclass(frozen=True, kw_only=True, eq=False)
class Sourced:
    """A load by source, rank 0's ids, and the host's results for them.

    Attributes:
        load: int32 ``[G, E]``.
        ids: int64 ``[N, 1]``, counted by row 0.
        plan: of the load.
        physical: the rerouted ids.
    """

    load: torch.Tensor
    ids: torch.Tensor
    plan: Plan
    physical: torch.Tensor

    @classmethod
    def of(
        cls, total: NDArray[np.int64], size: PlanSize, target: float, draw: np.random.Generator
    ) -> Sourced:
        """Draw the sources of a load's tokens, uniformly; plan and reroute on the host."""
        shares = np.full(size.num_ranks, 1 / size.num_ranks)
        load = np.ascontiguousarray(draw.multinomial(total, shares).T, dtype=np.int32)
        ids = draw.permutation(np.repeat(np.arange(size.num_experts), load[0]))[:, None]
        plan = plan_load(size, load, target)
        slots, slot_quota, home_quota = (getattr(plan, name) for name in FIELDS)
        physical = np.empty_like(ids)
        _core.reroute(ids, load, slots, slot_quota, home_quota, plan.home.numpy(), 0, physical)
        return cls(
            load=torch.from_numpy(load),
            ids=torch.from_numpy(ids),
            plan=plan,
            physical=torch.from_numpy(physical),
        )


def measure_row(
    meter: Meter, settings: PlanSettings, size: PlanSize, family: str, totals: Loads
) -> Record:
    """Time and check plan, counts and reroute of one size and family; return the JSON record."""
    draw = np.random.default_rng(0)
    cases = [Sourced.of(total, size, settings.target, draw) for total in totals]
    runs = []
    for num_warps in settings.warps:
        stages = _make_stages(size, num_warps)
        if stages.plan_warps == num_warps:  # else shared memory limits the number
            runs.append(_measure_plans(meter, settings, stages, cases))
    (group,) = new_loopback_groups(
        1,
        num_experts=size.num_experts,
        slots_per_rank=1,
        expert={"w": ((16,), torch.uint8)},
        engine="cuda",
        num_sms=1,
    )
    stages = _make_stages(size, None)
    figures = [_measure_others(meter, stages, group, case) for case in cases]
    stages.raise_fault()
    group.close()
    every = AllRanks.of(meter, size)
    if every is not None:
        for case, own in zip(cases, figures, strict=True):
            ids = ids_of(case.load)
            found, wrong = every.measure(case.load, case.plan, ids, settings.target)
            own.update(found, wrong_values=own["wrong_values"] + wrong)
        every.ranks.close()
    times = (
        *("counts_us", "launch_us", "at_once_us", "schedule_us", "tiny_device_plan_us"),
        *("tiny_host_plan_us", "shares_us", "reroute_us"),
    )
    return {
        "op": "plan",
        "engine": "cuda",
        **size.describe(),
        "family": family,
        "vectors": len(cases),
        "host_us": _percentiles([time_core_us(size, t, settings.target) for t in totals]),
        "warps": {str(one["warps"]): one for one in runs},
        "ids": float(np.mean([len(case.ids) for case in cases])),
        **{name: _percentiles([one[name] for one in figures if name in one]) for name in times},
        "wrong_values": sum(int(one["wrong_values"]) for one in (*figures, *runs)),
    }


def _percentiles(values: Sequence[float]) -> dict[str, float] | None:
    return figures_of(values, "p50", "p99") if len(values) else None


def _columns(warps: Sequence[int]) -> list[Column]:
    """Return the columns, with one for each number of warps."""
    return [
        Column("size", "G/E/S", "size"),
        Column("load", "", "family"),
        Column("loads", "", "vectors"),
        Column("host", "core", "host_us.p50", ".1f"),
        *(Column("plan", f"{n} warps", f"warps.{n}.time_us.p50", ".1f") for n in warps),
        Column("counts", "", "counts_us.p50", ".1f"),
        Column("counts", "+ plan", "at_once_us.p50", ".1f"),
        Column("launch", "", "launch_us.p50", ".1f"),
        Column("schedule", "", "schedule_us.p50", ".1f"),
        Column("shares", "", "shares_us.p50", ".1f"),
        Column("reroute", "", "reroute_us.p50", ".1f"),
        Column("ids", "mean", "ids", ".0f"),
        Column("#wrong", "", "wrong_values"),
    ]


def _make_stages(size: PlanSize, num_warps: int | None) -> CudaStages:
    """Return the local stages of rank 0, which need no peers."""
    found = device.find_device()
    loaded = kernels.load_kernels(found, None)
    return CudaStages(found, loaded, size.topology, 0, plan_warps=num_warps)


def _measure_plans(
    meter: Meter, settings: PlanSettings, stages: CudaStages, cases: Sequence[Sourced]
) -> Record:
    target_ppm = target_to_ppm(settings.target)
    times, wrong = [], 0
    for case in cases:
        load = stages.to_device(case.load)
        plans: list[Plan] = []
        meter.synchronize()

        def plan(load: torch.Tensor = load, plans: list[Plan] = plans) -> None:
            plans[:] = [stages.plan(load, target_ppm, None)]

        times.append(meter.time_us(plan, PLAN_CALLS, 1))
        meter.synchronize()
        wrong += count_wrong_plan(plans[0], case.plan)
    stages.raise_fault()
    return {
        "warps": stages.plan_warps,
        "time_us": figures_of(times, "p50", "p99"),
        "wrong_values": wrong,
    }


def _measure_others(
    meter: Meter, stages: CudaStages, group: Group, case: Sourced
) -> dict[str, float]:
    """Return the times of counts, an empty launch, reroutes of padding and of ids; wrong values."""
    ids, padding = stages.to_device(case.ids), stages.to_device(torch.full((1, 1), -1))
    plan = stages.plan(stages.to_device(case.load), 1_000_000, None)
    meter.synchronize()
    for name in FIELDS:  # use the host's plan, whatever the target
        getattr(plan, name).copy_(getattr(case.plan, name))
    found: dict[str, torch.Tensor] = {}

    def time_us(name: str, calls: int, call: Callable[[], torch.Tensor]) -> float:
        return meter.time_us(lambda: found.update({name: call()}), calls, 1)

    counts_us = time_us("counts", _GATHER_CALLS, lambda: gather_load(ids, group=group))
    launch_us = meter.time_us(lambda: stages.save([], None, 0, 0), PLAN_CALLS, 1)
    shares_us = time_us("padding", PLAN_CALLS, lambda: stages.reroute(padding, plan))
    meter.synchronize()
    with suppress(InvalidLoadError):  # padding was not counted in the load
        stages.raise_fault()
    reroute_us = time_us("ids", PLAN_CALLS, lambda: stages.reroute(ids, plan))
    meter.synchronize()
    wrong = count_unequal(found["counts"], case.load[:1])
    return {
        "counts_us": counts_us,
        "launch_us": launch_us,
        "shares_us": shares_us,
        "reroute_us": reroute_us,
        "wrong_values": wrong + count_unequal(found["ids"], case.physical),
    }


class AllRanks:
    """A loopback group of a size on one GPU, with one block for each rank and tiny experts."""

    def __init__(self, meter: Meter, size: PlanSize) -> None:
        self.ranks = WeightRanks(
            meter,
            num_ranks=size.num_ranks,
            num_experts=size.num_experts,
            slots=size.slots_per_rank,
            fabric="loopback",
            segments=_SEGMENTS,
            domains=size.domain,
            num_sms=1,
        )
        self._payload, self._epoch = Payload(0, _SEGMENTS), 0

    @classmethod
    def of(cls, meter: Meter, size: PlanSize) -> AllRanks | None:
        """Return the ranks; None if the device, or a launch, has no block for each."""
        most = min(device.find_device().num_sms, _core.CUDA_MAX_LAUNCH_RANKS)
        return cls(meter, size) if size.num_ranks <= most else None

    def measure(
        self, load: torch.Tensor, plan: Plan, ids: Sequence[torch.Tensor], target: float
    ) -> tuple[dict[str, float], int]:
        """Time calls with the host's plan of a load for a target; return times and wrong values.

        ``ids`` are int64 tensors on the CPU; each rank's row of the load counts its tensor. The
        times are of transfers of tiny experts, with plan and schedule made on the device or on the
        CPU, and of a replayed `gather_and_plan` where it is one launch.
        """
        groups, meter = self.ranks.groups, self.ranks.meter
        stages = device_stages(groups[0])
        on_device = Plan(
            slot_expert=stages.to_device(plan.slot_expert),
            home=stages.home,
            slot_quota=stages.to_device(plan.slot_quota),  # type: ignore[arg-type]
            home_quota=stages.to_device(plan.home_quota),  # type: ignore[arg-type]
        )
        times, wrong = {}, 0
        for name, given in {"tiny_device_plan_us": on_device, "tiny_host_plan_us": plan}.items():
            self._epoch += 1
            self.ranks.mark_slots()
            self.ranks.fill(plan, self._payload, self._epoch)
            meter.synchronize()
            run = functools.partial(self.ranks.call, given, "auto")
            times[name] = meter.time_us(run, _GATHER_CALLS, len(groups))
            meter.synchronize()
            wrong += self.ranks.count_wrong(plan, self._payload, self._epoch)
        # The extra time of a transfer whose kernel makes the schedule.
        times["schedule_us"] = times["tiny_device_plan_us"] - times["tiny_host_plan_us"]
        if plans_at_once(groups[0]):
            own = [stages.to_device(i) for i in ids]
            gather_together(groups, own, target)  # allocates, so that it can be captured
            meter.synchronize()
            made: list[tuple[list[torch.Tensor], list[Plan]]] = []
            # Replayed: without capture, a call of all ranks enqueues as many events as ranks.
            replay = meter.capture(lambda: made.append(gather_together(groups, own, target)))
            times["at_once_us"] = meter.time_us(replay, _GATHER_CALLS, len(groups))
            meter.synchronize()
            loads, plans = made[0]
            wrong += sum(count_unequal(found, load) for found in loads)
            wrong += sum(count_wrong_plan(found, plan) for found in plans)
        return times, wrong


def ids_of(load: torch.Tensor) -> list[torch.Tensor]:
    """Return int64 ids ``[N, 1]`` for each row of a load, sorted by expert."""
    experts = np.arange(load.shape[1])
    return [torch.from_numpy(np.repeat(experts, row)[:, None]) for row in load.numpy()]
