"""The benchmark of the planner on a GPU, and of what stands beside it: counts and reroutes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ultraep_comm import _core
from ultraep_comm.bench.gpu import Gpu, Meter
from ultraep_comm.bench.outputs import write_outputs
from ultraep_comm.bench.plan import make_plan_loads, time_core_us
from ultraep_comm.bench.plan_device_ranks import FIELDS, AllRanks, differ, ids_of
from ultraep_comm.bench.plan_device_report import (
    DeviceRow,
    WarpRun,
    format_device_header,
    format_device_table,
    make_device_document,
)
from ultraep_comm.bench.plan_settings import PlanSettings, PlanSize
from ultraep_comm.bench.progress import show_progress
from ultraep_comm.collectives import gather_load
from ultraep_comm.creation import new_loopback_groups
from ultraep_comm.cuda import device, kernels
from ultraep_comm.cuda.stages import CudaStages
from ultraep_comm.errors import InvalidLoadError
from ultraep_comm.group import Group
from ultraep_comm.plan import Plan
from ultraep_comm.planner import target_to_ppm
from ultraep_comm.planning import plan_replicas
from ultraep_comm.topology import Topology

PLAN_CALLS = 20  # in a row
GATHER_CALLS = 3  # four can be under way without blocking the host


def run(settings: PlanSettings) -> int:
    """Measure and print; return the exit code, 1: a plan, a count or an id is not the host's.

    Raises:
        UltraEPError: there is no device, or a load of the trace is none.
    """
    return run_on(Gpu(), settings)


def run_on(meter: Meter, settings: PlanSettings) -> int:
    """Measure on a device: see :func:`run`."""
    found = meter.describe()
    print(format_device_header(settings, found), flush=True)
    rows: list[DeviceRow] = []
    try:
        _measure_rows(meter, settings, rows)
    except BaseException:  # Ctrl-C too
        if rows:  # which took their time
            _report(settings, rows, found)
        raise
    _report(settings, rows, found)
    return 1 if any(row.wrong for row in rows) else 0


def _measure_rows(meter: Meter, settings: PlanSettings, rows: list[DeviceRow]) -> None:
    cells = [(size, family) for size in settings.sizes for family in settings.families]
    for i, (size, family) in enumerate(cells):
        show_progress(i, len(cells), f"{size} {family}")
        loads = make_plan_loads(settings, size, family)
        if len(loads):
            rows.append(measure_row(meter, settings, size, family, loads))
    show_progress(len(cells), len(cells), "")


def _report(settings: PlanSettings, rows: list[DeviceRow], found: dict[str, Any]) -> None:
    print(format_device_table(settings, rows), flush=True)
    document = make_device_document(settings, rows, found)
    write_outputs(document, json_path=settings.json, csv_path=settings.csv)


@dataclass(frozen=True, kw_only=True, eq=False)
class Sourced:
    """A load by source, its plan by the host, and what rank 0 routes.

    Attributes:
        load: int32 ``[G, E]``.
        ids: int64 ``[N, 1]``, which row 0 counts.
        plan: of the load.
        physical: where the ids go.
        host_us: the core's time for the plan.
    """

    load: torch.Tensor
    ids: torch.Tensor
    plan: Plan
    physical: torch.Tensor
    host_us: float

    @classmethod
    def of(
        cls, total: NDArray[np.int64], size: PlanSize, target: float, draw: np.random.Generator
    ) -> Sourced:
        """Deal a load's tokens out to sources that are alike."""
        shares = np.full(size.num_ranks, 1 / size.num_ranks)
        load = np.ascontiguousarray(draw.multinomial(total, shares).T, dtype=np.int32)
        ids = draw.permutation(np.repeat(np.arange(size.num_experts), load[0]))[:, None]
        plan = plan_replicas(
            torch.from_numpy(load),
            slots_per_rank=size.slots_per_rank,
            num_ranks=size.num_ranks,
            home=size.home,
            domains=size.domain,
            target=target,
        )
        slots, slot_quota, home_quota = (getattr(plan, name) for name in FIELDS)
        physical = np.empty_like(ids)
        _core.reroute(ids, load, slots, slot_quota, home_quota, plan.home, 0, physical)
        return cls(
            load=torch.from_numpy(load),
            ids=torch.from_numpy(ids),
            plan=plan,
            physical=torch.from_numpy(physical),
            host_us=time_core_us(size, total, target),
        )


def measure_row(
    meter: Meter,
    settings: PlanSettings,
    size: PlanSize,
    family: str,
    totals: Sequence[NDArray[np.int64]],
) -> DeviceRow:
    """Plan, count and reroute all loads of one size and family, and check all of it."""
    draw = np.random.default_rng(0)
    cases = [Sourced.of(total, size, settings.target, draw) for total in totals]
    runs = []
    for num_warps in settings.warps:
        stages = _make_stages(size, num_warps)
        if stages.plan_warps == num_warps:  # else as many do not fit
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
    others = [_measure_others(meter, stages, group, case) for case in cases]
    stages.raise_fault()
    group.close()
    gather_us, launch_us, shares_us, reroute_us, wrong = np.array(others).T
    every = AllRanks.of(size)
    of_ranks = []
    if every is not None:
        for case in cases:
            given = (case.load, case.plan, ids_of(case.load), settings.target)
            of_ranks.append(every.measure(meter, *given))
        every.close()
    return DeviceRow(
        size=size,
        family=family,
        host_us=np.array([case.host_us for case in cases]),
        runs=runs,
        gather_us=gather_us,
        launch_us=launch_us,
        ranks=of_ranks,
        shares_us=shares_us,
        reroute_us=reroute_us,
        num_ids=float(np.mean([len(case.ids) for case in cases])),
        wrong_values=int(wrong.sum()) + sum(times.wrong_values for times in of_ranks),
    )


def _make_stages(size: PlanSize, num_warps: int | None) -> CudaStages:
    """Return rank 0 of so many: it plans by itself."""
    topology = Topology.make(
        num_ranks=size.num_ranks,
        num_experts=size.num_experts,
        slots_per_rank=size.slots_per_rank,
        home=size.home,
        domains=size.domain,
    )
    found = device.find_device()
    return CudaStages(found, kernels.load_kernels(found, None), topology, 0, plan_warps=num_warps)


def _measure_plans(
    meter: Meter, settings: PlanSettings, stages: CudaStages, cases: Sequence[Sourced]
) -> WarpRun:
    target_ppm = target_to_ppm(settings.target)
    times, first, wrong = [], 0.0, 0
    for i, case in enumerate(cases):
        load = stages.put(case.load)
        plans: list[Plan] = []
        meter.settle()

        def plan(load: torch.Tensor = load, plans: list[Plan] = plans) -> None:
            plans[:] = [stages.plan(load, target_ppm, None)]

        if i == 0:
            first = meter.time_us(plan, 1, 1, line_up=lambda: None)
        times.append(meter.time_us(plan, PLAN_CALLS, 1))
        meter.settle()
        wrong += sum(differ(getattr(plans[0], name), getattr(case.plan, name)) for name in FIELDS)
    stages.raise_fault()
    return WarpRun(
        num_warps=stages.plan_warps,
        times_us=np.array(times),
        first_us=first,
        wrong_values=wrong,
    )


def _measure_others(
    meter: Meter, stages: CudaStages, group: Group, case: Sourced
) -> tuple[float, float, float, float, int]:
    """Return the times of counts, nothing, a reroute of padding, and of all ids; what is wrong."""
    ids, padding = stages.put(case.ids), stages.put(torch.full((1, 1), -1))
    plan = stages.plan(stages.put(case.load), 1_000_000, None)
    meter.settle()
    for name in FIELDS:  # the host's, whatever the target
        getattr(plan, name).copy_(getattr(case.plan, name))
    found: dict[str, torch.Tensor] = {}

    def keep(name: str, call: Callable[[], torch.Tensor]) -> Callable[[], None]:
        return lambda: found.update({name: call()})

    gather = keep("counts", lambda: gather_load(ids, group=group))
    shares = keep("padding", lambda: stages.reroute(padding, plan))
    reroute = keep("ids", lambda: stages.reroute(ids, plan))
    gather_us = meter.time_us(gather, GATHER_CALLS, 1)
    launch_us = meter.time_us(lambda: stages.save([], None), PLAN_CALLS, 1)
    shares_us = meter.time_us(shares, PLAN_CALLS, 1)
    meter.settle()
    with suppress(InvalidLoadError):  # padding is not what was counted, and the shares are the same
        stages.raise_fault()
    reroute_us = meter.time_us(reroute, PLAN_CALLS, 1)
    meter.settle()
    wrong = differ(found["counts"], case.load[:1]) + differ(found["ids"], case.physical)
    return gather_us, launch_us, shares_us, reroute_us, wrong
