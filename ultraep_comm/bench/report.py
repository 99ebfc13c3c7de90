"""What a run of replicate or reduce prints and writes; bench/METRICS.md has the formulas."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ultraep_comm.bench.machine import describe_machine, find_commit
from ultraep_comm.bench.settings import ReplicateSettings
from ultraep_comm.bench.sizes import describe_segments, format_size
from ultraep_comm.bench.skew import rank_imbalance
from ultraep_comm.bench.table import format_table
from ultraep_comm.plan import Plan
from ultraep_comm.schedule import transfer_bound


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One transfer's figures over all ranks.

    Attributes:
        mode: as asked for.
        chosen: what the library made of it.
        times: int64 ``[iters]`` nanoseconds.
        wrong_bytes: over all ranks and all checked iterations.
    """

    mode: str
    chosen: str
    times: NDArray[np.int64]
    wrong_bytes: int

    def time_us(self, percentile: float) -> float:
        """Return a percentile of the iteration times in microseconds."""
        return float(np.percentile(self.times, percentile)) / 1e3


def _ratio(ours: Measurement, other: Measurement) -> float:
    """Return the median over iterations of the other's time over ours."""
    return float(np.median(other.times / np.maximum(ours.times, 1)))


def _key(baseline: Measurement) -> str:
    return baseline.mode.replace("+", "_")


def _rate(num_bytes: float, time_us: float) -> float:
    return num_bytes / time_us / 1e3 if time_us else 0.0


def _critical_bytes(settings: ReplicateSettings, plan: Plan) -> int:
    return max(plan.max_exports, plan.max_imports) * settings.expert_bytes


def make_records(
    settings: ReplicateSettings, plan: Plan, measured: Sequence[Measurement]
) -> list[dict[str, Any]]:
    """Return one JSON record for each mode of the library.

    The last two measured are what a user would do, and what the machine can do.
    """
    *modes, user, machine = measured
    total = plan.num_replicas * settings.expert_bytes
    records = []
    for m in modes:
        p50 = m.time_us(50)
        records.append(
            {
                "op": settings.op,
                "mode": m.mode,
                "ranks": settings.num_ranks,
                "experts": settings.num_experts,
                "slots": settings.slots,
                "expert_bytes": settings.expert_bytes,
                "replicas": plan.num_replicas,
                "imbalance_before": _imbalance_before(settings),
                "imbalance_after": plan.imbalance,
                "time_us": {"p50": p50, "p99": m.time_us(99), "max": m.time_us(100)},
                "algbw_gbps": _rate(total, p50),
                "critical_gbps": _rate(_critical_bytes(settings, plan), p50),
                "wrong_bytes": m.wrong_bytes,
                f"over_{_key(machine)}": _ratio(m, machine),
                f"{_key(user)}_time_us": user.time_us(50),
                f"speedup_over_{_key(user)}": _ratio(m, user),
            }
        )
    return records


def _imbalance_before(settings: ReplicateSettings) -> float:
    return rank_imbalance(settings.load.sum(axis=0, dtype=np.int64), settings.num_ranks)


def write_json(
    path: Path, settings: ReplicateSettings, plan: Plan, measured: Sequence[Measurement]
) -> None:
    """Write the records with what they were measured on."""
    document = {
        "records": make_records(settings, plan, measured),
        "machine": describe_machine(),
        "commit": find_commit(),
        "settings": {
            "load": settings.load_source,
            "segments": settings.segments,
            "tile_bytes": settings.tile_bytes,
            "iters": settings.iters,
            "warmup": settings.warmup,
            "check": settings.check,
            "seed": settings.seed,
            **settings.more,
        },
    }
    path.write_text(json.dumps(document, indent=2) + "\n")


def describe_run(command: str) -> list[str]:
    """Return the first lines of a header: the version, the command and the machine."""
    machine = describe_machine()
    memory = format_size(int(machine["memory_bytes"]))
    return [
        f"ultraep_comm {machine['ultraep_comm']}, commit {find_commit()}: {command}",
        f"machine: {machine['cpu']}, {machine['cores']} cores, {memory}, {machine['kernel']};"
        f" Python {machine['python']}, torch {machine['torch']}",
    ]


def format_header(settings: ReplicateSettings, plan: Plan) -> str:
    """Return what a reader must know before the figures."""
    lines = [
        *describe_run(settings.op),
        f"ranks {settings.num_ranks}, experts {settings.num_experts}, slots {settings.slots},"
        f" expert {describe_segments(settings.segments)}",
        *([", ".join(f"{k} {v}" for k, v in settings.more.items())] if settings.more else []),
        f"load: {settings.load_source}; imbalance {_imbalance_before(settings):.3f} before,"
        f" {plan.imbalance:.3f} after",
        _describe_plan(settings, plan),
        f"{settings.iters} iterations after {settings.warmup}, interleaved; checked:"
        f" {'every one' if settings.check else 'the last one'}",
    ]
    return "\n".join(f"# {line}" for line in lines)


def _describe_plan(settings: ReplicateSettings, plan: Plan) -> str:
    if plan.num_replicas == 0:
        return "plan: no replicas; nothing to transfer"
    slots = plan.slot_expert
    experts = len(set(slots[slots >= 0].tolist()))
    bound = transfer_bound(plan.slot_expert, home=plan.home)
    return (
        f"plan: {plan.num_replicas} replicas of {experts} experts, at most"
        f" {plan.max_exports} exported and {plan.max_imports} imported by a rank; T* = {bound:.4g}"
        " experts over one link"
    )


_COLUMNS = {
    "mode": "",
    "replicas": "",
    "bytes": "(B)",
    "time p50": "(us)",
    "max": "(us)",
    "algbw": "(GB/s)",
    "critbw": "(GB/s)",
    "model": "/T*",
    "machine": "/time",
    "user": "/time",
    "#wrong": "(B)",
}


def format_results(settings: ReplicateSettings, plan: Plan, measured: Sequence[Measurement]) -> str:
    """Return the table: a row for each mode, then what they are compared with."""
    *modes, user, machine = measured
    total = plan.num_replicas * settings.expert_bytes
    bound = transfer_bound(plan.slot_expert, home=plan.home)
    rows = []
    for m in measured:
        p50, ours = m.time_us(50), m in modes
        relayed = f"{m.mode} ({m.chosen})" if ours and m.chosen != m.mode else m.mode
        model = math.nan
        if ours and bound:
            busiest = settings.busiest_rank(plan, m.chosen)
            model = max(busiest, plan.max_imports) / bound
        rows.append(
            (
                relayed,
                str(plan.num_replicas),
                str(total),
                f"{p50:.1f}",
                f"{m.time_us(100):.1f}",
                f"{_rate(total, p50):.2f}",
                f"{_rate(_critical_bytes(settings, plan), p50):.2f}",
                "-" if math.isnan(model) else f"{model:.3f}",
                f"{_ratio(m, machine):.2f}" if ours else "-",
                f"{_ratio(m, user):.2f}" if ours else "-",
                str(m.wrong_bytes),
            )
        )
    names = {"machine": machine.mode, "user": user.mode}
    titles = [names.get(column, column) for column in _COLUMNS]
    return format_table([titles, list(_COLUMNS.values())], rows)
