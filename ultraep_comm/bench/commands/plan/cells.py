"""The loads of each size and kind in a run, and the library's plans of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ultraep_comm import _core
from ultraep_comm.bench.commands.plan import TRACE, LoadsSettings, PlanSize
from ultraep_comm.bench.loads import make_loads
from ultraep_comm.bench.options import DEFAULT_TARGET
from ultraep_comm.bench.report import Record, Report
from ultraep_comm.calls.plan import plan_replicas
from ultraep_comm.plan.certificate import PlanCertificate
from ultraep_comm.plan.plan import Plan
from ultraep_comm.plan.planner import target_to_ppm

_REPEATS = 5  # the fastest counts; others were disturbed
Loads = Sequence[NDArray[np.int64]]


def describe_loads(tokens: int, topk: int) -> str:
    """Return the header text about generated loads."""
    return f"loads: {tokens} tokens of each rank to {topk} experts"


def describe_certificates(certificates: Sequence[PlanCertificate]) -> Record:
    """Return how many plans are exact, and at their bound; and each certificate's text."""
    return {
        "exact": sum(one.is_exact for one in certificates),
        "at_bound": sum(one.over_bound == 0 for one in certificates),
        "plans": [str(one) for one in certificates],
    }


def show_certificates(report: Report, records: Sequence[Record]) -> None:
    """Print and keep a line for each plan of `describe_certificates`."""
    for record in records:
        planner = f" {record['planner']}" if "planner" in record else ""
        for i, text in enumerate(record["certified"]["plans"]):
            report.note(f"{record['size']} {record['family']} {i}{planner}: {text}")


def each_cell(
    settings: LoadsSettings, report: Report, make_loads: Callable[..., Loads] = make_loads
) -> Iterator[tuple[PlanSize, str, Loads]]:
    """Yield every size and kind with its loads, if there are any; ``make_loads`` makes them."""
    cells = [(size, family) for size in settings.sizes for family in settings.kinds]
    for i, (size, family) in enumerate(cells):
        report.progress(i, len(cells), f"{size} {family}")
        loads = make_plan_loads(settings, size, family, make_loads)
        if len(loads):
            yield size, family, loads
    report.progress(len(cells), len(cells))


def make_plan_loads(
    settings: LoadsSettings, size: PlanSize, family: str, make_loads: Callable[..., Loads]
) -> Loads:
    """Return the loads ``[E]`` of one size and kind."""
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
    window = {"num_ranks": size.num_ranks, "tokens_per_rank": settings.tokens}
    return [
        trace.load(step=step, layer=layer, **window).sum(axis=0, dtype=np.int64)
        for step in range(trace.num_steps(**window))
        for layer in range(trace.num_layers)
    ]


def plan_load(size: PlanSize, load: NDArray[Any], target: float = DEFAULT_TARGET) -> Plan:
    """Return the library's plan of a load ``[E]`` or ``[G, E]``."""
    return plan_replicas(torch.from_numpy(load.copy()), topology=size.topology, target=target)


def time_core_us(size: PlanSize, load: NDArray[np.int64], target: float) -> float:
    """Return the time of the C++ planner alone."""
    arguments = (load.copy(), size.home, size.domain, size.slots_per_rank, False)
    target_ppm = target_to_ppm(target)
    best = float("inf")
    for _ in range(_REPEATS):
        start = time.perf_counter_ns()
        _core.plan_replicas(*arguments, target_ppm)
        best = min(best, time.perf_counter_ns() - start)
    return best / 1e3
