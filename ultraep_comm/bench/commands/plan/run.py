"""The measurement of ``plan``. bench/METRICS.md defines the figures."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ultraep_comm.bench.clock import Gpu
from ultraep_comm.bench.commands.plan import PlanSettings, PlanSize
from ultraep_comm.bench.commands.plan.cells import (
    Loads,
    describe_certificates,
    describe_loads,
    each_cell,
    plan_load,
    show_certificates,
    time_core_us,
)
from ultraep_comm.bench.commands.plan.device import run_device
from ultraep_comm.bench.loads import rank_imbalance
from ultraep_comm.bench.measure import figures_of, transfer_bound
from ultraep_comm.bench.report import Record, Report
from ultraep_comm.bench.table import Column
from ultraep_comm.plan.certificate import verify_plan
from ultraep_comm.plan.plan import Plan


def run(settings: PlanSettings, report: Report) -> int:
    """Plan loads, or time kernels; return the exit status.

    Raises:
        UltraEPError: there is no device, or a load of the trace is invalid.
    """
    if settings.engine == "cuda":
        return run_device(Gpu(), settings, report)
    seeds = f", {settings.seeds} of a family"
    if settings.trace_file is not None:
        seeds += f"; {settings.trace_file.name}, every step and layer"
    report.header(
        "plan",
        [f"{describe_loads(settings.tokens, settings.topk)}{seeds}; target {settings.target:g}"],
    )
    report.columns(_COLUMNS + (_CERTIFIED_COLUMNS if settings.certify else ()))
    records = [
        measure_row(size, family, loads, settings.target, certify=settings.certify)
        for size, family, loads in each_cell(settings, report)
    ]
    report.add(records)
    if settings.certify:
        show_certificates(report, records)
    return report.finish()


def measure_row(
    size: PlanSize, family: str, loads: Loads, target: float, *, certify: bool = False
) -> Record:
    """Plan all loads of one size and family; return the JSON record.

    ``certify`` adds certificates. Our plans are verified with and without.
    """
    ours = [plan_load(size, load, target) for load in loads]
    certificates = [verify_plan(plan, load) for plan, load in zip(ours, loads, strict=True)]
    times = [time_core_us(size, load, target) for load in loads]
    before = [rank_imbalance(load, size.num_ranks) for load in loads]
    bound = np.array([plan.imbalance_bound for plan in ours])
    return {
        "op": "plan",
        **size.describe(),
        "family": family,
        "vectors": len(loads),
        "imbalance_before": float(np.mean(before)),
        **_describe(ours),
        "imbalance_bound": float(bound.max()),
        "over_bound": float((np.array([plan.imbalance for plan in ours]) / bound).max()),
        "certified": describe_certificates(certificates) if certify else None,
        "time_us": figures_of(times, "p50", "p99"),
    }


def _describe(plans: Sequence[Plan]) -> Record:
    """Return the figures of plans."""
    return {
        "imbalance": figures_of([plan.imbalance for plan in plans], "mean", "worst"),
        "replicas": float(np.mean([plan.num_replicas for plan in plans])),
        "max_exports": float(np.mean([plan.max_exports for plan in plans])),
        "max_imports": float(np.mean([plan.max_imports for plan in plans])),
        "transfer_bound": float(np.mean([transfer_bound(plan) for plan in plans])),
    }


_COLUMNS = (
    Column("size", "G/E/S", "size"),
    Column("load", "", "family"),
    Column("loads", "", "vectors"),
    Column("before", "mean", "imbalance_before", ".2f"),
    Column("imbal", "mean", "imbalance.mean", ".4f"),
    Column("imbal", "worst", "imbalance.worst", ".4f"),
    Column("bound", "worst", "imbalance_bound", ".4f"),
    Column("replicas", "mean", "replicas", ".1f"),
    Column("max k", "mean", "max_exports", ".2f"),
    Column("max in", "mean", "max_imports", ".2f"),
    Column("T", "mean", "transfer_bound", ".3f"),
    Column("time", "p50 us", "time_us.p50", ".1f"),
    Column("time", "p99 us", "time_us.p99", ".1f"),
)
_CERTIFIED_COLUMNS = (
    Column("plans:", "exact", "certified.exact"),
    Column("", "at bound", "certified.at_bound"),
)
