"""The benchmark of the planner. bench/METRICS.md says what the figures mean."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ultraep_comm import _core
from ultraep_comm.bench.eplb import Rebalance, find_eplb, plan_eplb
from ultraep_comm.bench.families import make_loads
from ultraep_comm.bench.gate import exit_code
from ultraep_comm.bench.outputs import write_outputs
from ultraep_comm.bench.plan_report import (
    Other,
    PlanRow,
    Quality,
    format_plan_header,
    format_plan_table,
    make_plan_document,
)
from ultraep_comm.bench.plan_settings import TRACE, PlanSettings, PlanSize
from ultraep_comm.bench.progress import show_progress
from ultraep_comm.bench.published import plan_published
from ultraep_comm.bench.skew import rank_imbalance
from ultraep_comm.plan import Plan
from ultraep_comm.planner import target_to_ppm
from ultraep_comm.planning import plan_replicas
from ultraep_comm.schedule import transfer_bound

_REPEATS = 5  # the fastest counts: the others were disturbed

Loads = Sequence[NDArray[np.int64]]


def run(settings: PlanSettings) -> int:
    """Plan everything in this process and print; return the exit status, 3: the gate is not met.

    Raises:
        UltraEPError: a load of the trace is none.
    """
    rebalance = find_eplb()
    print(format_plan_header(settings, has_eplb=rebalance is not None), flush=True)
    cells = [(size, family) for size in settings.sizes for family in settings.families]
    rows = []
    for i, (size, family) in enumerate(cells):
        show_progress(i, len(cells), f"{size} {family}")
        loads = make_plan_loads(settings, size, family)
        if len(loads):
            rows.append(measure_row(size, family, loads, settings.target, rebalance))
    show_progress(len(cells), len(cells), "")
    print(format_plan_table(rows), flush=True)
    document = make_plan_document(settings, rows)
    write_outputs(document, json_path=settings.json, csv_path=settings.csv)
    return exit_code(settings.gate, document["records"], 0, speaks=True)


def make_plan_loads(settings: PlanSettings, size: PlanSize, family: str) -> Loads:
    """Return the loads ``[E]`` of one size and family."""
    if family != TRACE:
        return make_loads(
            family,
            num_ranks=size.num_ranks,
            num_experts=size.num_experts,
            num_tokens=size.num_ranks * settings.tokens,
            topk=settings.topk,
            seeds=settings.seeds,
        )
    trace = settings.trace
    if trace is None or trace.num_experts != size.num_experts:
        return []
    num_ranks, tokens = size.num_ranks, settings.tokens
    return [
        trace.load(num_ranks=num_ranks, step=step, layer=layer, tokens_per_rank=tokens).sum(
            axis=0, dtype=np.int64
        )
        for step in range(trace.num_steps(num_ranks=num_ranks, tokens_per_rank=tokens))
        for layer in range(trace.num_layers)
    ]


def measure_row(
    size: PlanSize, family: str, loads: Loads, target: float, rebalance: Rebalance | None
) -> PlanRow:
    """Plan all loads of one size and family with every planner, and time ours."""
    ours, published = [], []
    for load in loads:
        plan = plan_replicas(
            torch.from_numpy(load.copy()),
            slots_per_rank=size.slots_per_rank,
            num_ranks=size.num_ranks,
            home=size.home,
            domains=size.domain,
            target=target,
        )
        ours.append(plan)
        published.append(_plan_published(size, load, target))
    eplb = None
    if rebalance is not None:
        eplb = plan_eplb(
            rebalance,
            np.stack(loads),
            num_ranks=size.num_ranks,
            slots_per_rank=size.slots_per_rank,
        )
    return PlanRow(
        size=size,
        family=family,
        before=np.array([rank_imbalance(load, size.num_ranks) for load in loads]),
        bound=np.array([plan.imbalance_bound for plan in ours]),
        time_us=np.array([time_core_us(size, load, target) for load in loads]),
        ours=_judge(ours),
        published=_judge(published),
        eplb=None if eplb is None else Other(imbalance=eplb[0], replicas=eplb[1]),
    )


def _plan_published(size: PlanSize, load: NDArray[np.int64], target: float) -> Plan:
    slots, slot_quota, home_quota = plan_published(
        load,
        slots_per_rank=size.slots_per_rank,
        home=size.home,
        domain=size.domain,
        target=target,
    )
    return Plan.from_slots(
        torch.from_numpy(slots),
        num_experts=size.num_experts,
        home=size.home,
        slot_quota=torch.from_numpy(slot_quota),
        home_quota=torch.from_numpy(home_quota),
        domains=size.domain,
    )


def _judge(plans: Sequence[Plan]) -> Quality:
    return Quality(
        imbalance=np.array([plan.imbalance for plan in plans]),
        replicas=np.array([plan.num_replicas for plan in plans]),
        exports=np.array([plan.max_exports for plan in plans]),
        imports=np.array([plan.max_imports for plan in plans]),
        transfer=np.array([transfer_bound(plan.slot_expert, home=plan.home) for plan in plans]),
    )


def time_core_us(size: PlanSize, load: NDArray[np.int64], target: float) -> float:
    """Return the core's time for one plan, arguments being ready."""
    arguments = (load.copy(), size.home, size.domain, size.slots_per_rank, False)
    target_ppm = target_to_ppm(target)
    best = float("inf")
    for _ in range(_REPEATS):
        start = time.perf_counter_ns()
        _core.plan_replicas(*arguments, target_ppm)
        best = min(best, time.perf_counter_ns() - start)
    return best / 1e3
