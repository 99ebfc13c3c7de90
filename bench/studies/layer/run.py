"""The measurement of ``layer``. bench/METRICS.md defines the figures."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from studies.layer import LayerSettings, Routing
from studies.options import WORKLOAD_SEED, WORKLOADS
from ultraep_comm.bench.clock import HostClock
from ultraep_comm.bench.measure import Measured, gather, measure
from ultraep_comm.bench.report import Record, Report, describe_rounds
from ultraep_comm.bench.sizes import format_size
from ultraep_comm.bench.table import Column


def run(settings: LayerSettings, report: Report) -> int:
    """Measure on an initialised process group; return the exit status.

    Raises:
        UltraEPError: the group could not be created, or a call failed.
    """
    torch.set_num_threads(1)
    kind = "frameworks" if settings.framework else "native"
    rows_of: Any = importlib.import_module(f"studies.layer.{kind}")
    records, wrong = [], 0
    with rows_of.open_rows(settings) as (group, data, layers):
        report.place(group)
        report.header("layer", _describe(settings))
        for routing in settings.routings:
            data.routing = routing
            label = f", {routing.workload}" if routing.workload else ""
            clock = HostClock(group)
            measured = measure(
                settings, clock, layers, None, fill=data.fill, report=report, label=label
            )
            found = [gather(_figures(layer.found[-settings.iters :]), False) for layer in layers]
            rows = list(zip(measured, found, strict=True))
            records += [
                make_record(settings, routing, rows_of.PHASES, row, rows[0], rows[-1])
                for row in rows
            ]
            wrong += sum(m.wrong for m in measured)
        report.columns(_columns(settings, rows_of.PHASES))
        for record in records:
            report.add([record], gated=record["routing"] == "replicated")
        return report.finish(wrong=wrong, more={"imbalance": settings.mean_imbalance})


def _figures(found: Sequence[Any]) -> NDArray[np.int64]:
    """Return phases, compute_ns, rows and replicas of each step ``[iters, ...]``."""
    return np.array(
        [
            (
                *step.phases_ns,
                step.passed.compute_ns,
                step.passed.num_rows,
                0 if step.plan is None else step.plan.num_replicas,
            )
            for step in found
        ]
    )


def _describe(settings: LayerSettings) -> list[str]:
    expert_bytes = sum(4 * a * b for a, b in settings.shapes.values())
    limit, cores = settings.gate.max_over_bound, len(os.sched_getaffinity(0))
    whose = {
        "": [],
        "transformers": ["layer of transformers: experts of Qwen3-MoE, all_to_all"],
        "megatron": ["layer of megatron-core: MoELayer, alltoall, SequentialMLP"],
    }
    lines = [
        *whose[settings.framework],
        f"ranks {settings.num_ranks}, experts {settings.experts}, slots {settings.slots},"
        f" expert {format_size(expert_bytes)} (hidden {settings.hidden}, inner {settings.inner})",
        f"{settings.tokens} tokens of each rank to {settings.topk} experts; seed {settings.seed}",
        *map(_describe_routing, settings.routings),
        describe_rounds(settings),
    ]
    if limit is not None:
        lines.append(f"gate: replicated at most {limit:g} times balanced")
    if settings.num_ranks > cores:
        lines.append(
            f"{settings.num_ranks} ranks share {cores} cores: busy ranks use idle ranks' cores,"
            " so step times hide the imbalance; compare compute times"
        )
    return lines


def _describe_routing(routing: Routing) -> str:
    name = routing.workload and f"{WORKLOADS[routing.workload]} of seed {WORKLOAD_SEED}, "
    return f"routing: {name}imbalance {routing.imbalance:.3f}"


Ranks = NDArray[np.int64]  # [G, iters, PHASES and compute_ns, rows, replicas]


Row = tuple[Measured, Ranks]


def make_record(
    settings: LayerSettings,
    routing: Routing,
    names: Sequence[str],
    row: Row,
    plain: Row,
    ceiling: Row,
) -> Record:
    """Return the JSON record of one row, compared with others by iteration; ``names``: phases."""
    m, ranks = row
    times_us, replicated = m.times.iterations, m.mode == "replicated"
    last = len(names)
    phases, compute = ranks[:, :, :last].max(axis=0), ranks[:, :, last].max(axis=0)
    rows = ranks[:, :, last + 1]
    share = float(np.median(ceiling[0].times.iterations / times_us))
    record = {
        "op": "layer",
        "framework": settings.framework or None,
        "routing": m.mode,
        "ranks": settings.num_ranks,
        "experts": settings.experts,
        "slots": settings.slots,
        **m.times.record(),
        "workload": routing.workload or None,
        "step_ms": {
            "mean": float(times_us.mean()) / 1e3,
            "p95": float(np.percentile(times_us, 95)) / 1e3,
            "min": float(times_us.min()) / 1e3,
        },
        "tokens_per_s": settings.num_ranks * settings.tokens / m.p50 * 1e6,
        "assignments_per_s": settings.num_ranks * settings.tokens * settings.topk / m.p50 * 1e6,
        "speedup": float(np.median(plain[0].times.iterations / times_us)),
        "share_of_balanced": share,
        "over_bound": 1 / share if replicated else None,
        "compute_us": float(np.median(compute)) / 1e3,
        "compute_share_of_balanced": float(np.median(ceiling[1][:, :, last].max(axis=0) / compute)),
        "imbalance": float(np.median(rows.max(axis=0) / rows.mean(axis=0))),
        "replicas": float(np.mean(ranks[0, :, last + 2])),
        "phases_us": None,
        "phases_share": None,
        "wrong_values": m.wrong,
    }
    if replicated:
        medians = (np.median(phases, axis=0) / 1e3).tolist()
        record["phases_us"] = dict(zip(names, medians, strict=True))
        record["phases_share"] = float(np.median(phases.sum(axis=1) / 1e3 / times_us))
    return record


def _columns(settings: LayerSettings, phases: Sequence[str]) -> list[Column]:
    named = [Column("", "", "workload")] if settings.routings[0].workload else []
    return [
        *named,
        Column("routing", "", "routing"),
        Column("imbalance", "", "imbalance", ".3f"),
        Column("replicas", "", "replicas", ".1f"),
        Column("time p50", "(us)", "time_us.p50", ".0f"),
        Column("max", "(us)", "time_us.max", ".0f"),
        Column("plain", "/time", "speedup", ".3f"),
        Column("balanced", "/time", "share_of_balanced", ".3f"),
        Column("compute", "(us)", "compute_us", ".0f"),
        Column("b. compute", "/compute", "compute_share_of_balanced", ".3f"),
        *(Column(name, "(us)", f"phases_us.{name}", ".0f") for name in phases),
        Column("phases", "/time", "phases_share", ".3f"),
        Column("#wrong", "", "wrong_values"),
    ]
