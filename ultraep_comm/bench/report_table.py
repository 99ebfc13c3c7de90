"""What a run of replicate or reduce on the CPU prints."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ultraep_comm.bench.figures import critical_bytes, rate, time_titles
from ultraep_comm.bench.placement import format_places
from ultraep_comm.bench.report import (
    Measurement,
    SizeRun,
    describe_run,
    imbalance_before,
    paired_ratio,
)
from ultraep_comm.bench.settings import ReplicateSettings
from ultraep_comm.bench.sizes import describe_segments, format_size
from ultraep_comm.bench.table import GrowingTable
from ultraep_comm.plan import Plan
from ultraep_comm.schedule import transfer_bound

_LEAST_WIDTH = 9  # where rows of several sizes are to come


def format_header(settings: ReplicateSettings, plan: Plan, places: Sequence[dict[str, Any]]) -> str:
    """Return what a reader must know before the figures."""
    lines = [
        *describe_run(settings.op),
        *format_places(places, engine=settings.engine, fabric=settings.fabric),
        f"ranks {settings.num_ranks}, experts {settings.num_experts}, slots {settings.slots},"
        f" expert {describe_sizes(settings)}",
        *([", ".join(f"{k} {v}" for k, v in settings.more.items())] if settings.more else []),
        f"load: {settings.load_source}; imbalance {imbalance_before(settings):.3f} before,"
        f" {plan.imbalance:.3f} after",
        _describe_plan(plan),
        f"{settings.iters} iterations after {settings.warmup}, interleaved; checked:"
        f" {'every one' if settings.check else 'the last one'}",
        *describe_limits(settings),
    ]
    return "\n".join(f"# {line}" for line in lines)


def describe_sizes(settings: ReplicateSettings) -> str:
    """Return the one size and its segments, or the range."""
    if not settings.sweep:
        return describe_segments(settings.segments)
    first, last = (sum(settings.sizes[i].values()) for i in (0, -1))
    parts = ", ".join(settings.segments)
    return f"{format_size(first)} to {format_size(last)}, {len(settings.sizes)} sizes ({parts})"


def describe_limits(settings: ReplicateSettings) -> list[str]:
    """Return the line that names the gate, and nothing where there is none."""
    gate, parts = settings.gate, []
    if gate.min_gbps is not None:
        parts.append(f"critbw at least {gate.min_gbps:g} GB/s")
    if gate.max_over_bound is not None:
        rate_of = "the measured copy rate" if settings.link_gbps is None else "the link's rate"
        parts.append(f"time at most {gate.max_over_bound:g} times its bound at {rate_of}")
    return [f"gate: {', '.join(parts)}"] if parts else []


def _describe_plan(plan: Plan) -> str:
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


class ResultTable:
    """The table: a row for each size and mode, then what they are compared with."""

    def __init__(self, settings: ReplicateSettings) -> None:
        """Choose the columns: those of sweeps, bounds and gates only where there are such."""
        self._settings = settings
        self._sizes, self._workers = bool(settings.sweep), len(settings.num_sms) > 1
        self._bound = settings.link_gbps is not None or settings.gate.max_over_bound is not None
        self._table: GrowingTable | None = None

    def add(self, run: SizeRun, records: Sequence[dict[str, Any]]) -> str:
        """Return the rows of one size, the first time with the titles before them."""
        if self._table is None:
            columns = self._columns(run)
            several = self._sizes or self._workers
            headers = [[title for title, _ in columns], [unit for _, unit in columns]]
            self._table = GrowingTable(headers, _LEAST_WIDTH if several else 0)
        rows = [self._row(run, m, record) for m, record in zip(run.modes, records, strict=True)]
        rows += [self._row(run, m, None) for m in (run.user, run.machine)]
        return self._table.add(rows)

    def _columns(self, run: SizeRun) -> list[tuple[str, str]]:
        return [
            ("mode", ""),
            *([("size", "(B)")] if self._sizes else []),
            *([("SMs", "")] if self._workers else []),
            *(("replicas", ""), ("bytes", "(B)")),
            *((title, "(us)") for title in time_titles(self._settings.times)),
            *(("algbw", "(GB/s)"), ("critbw", "(GB/s)"), ("model", "/T*")),
            *([("time", "/bound")] if self._bound else []),
            *((run.machine.mode, "/time"), (run.user.mode, "/time"), ("#wrong", "(B)")),
            *([("gate", "")] if self._settings.gate else []),
        ]

    def _row(self, run: SizeRun, m: Measurement, record: dict[str, Any] | None) -> list[str]:
        plan, p50, ours = run.plan, m.time_us(50), record is not None
        relayed = f"{m.mode} ({m.chosen})" if ours and m.chosen != m.mode else m.mode
        over = record["over_bound"] if record else None
        critical = critical_bytes(plan, run.settings.expert_bytes)
        return [
            relayed,
            *([str(run.settings.expert_bytes)] if self._sizes else []),
            *([str(run.num_sms)] if self._workers else []),
            str(plan.num_replicas),
            str(run.total_bytes),
            *(f"{m.in_us.get(name):.1f}" for name in self._settings.times),
            f"{rate(run.total_bytes, p50):.2f}",
            f"{rate(critical, p50):.2f}",
            _show(_modelled(run, m) if ours else math.nan, ".3f"),
            *([_show(math.nan if over is None else over, ".3f")] if self._bound else []),
            f"{paired_ratio(m, run.machine):.2f}" if ours else "-",
            f"{paired_ratio(m, run.user):.2f}" if ours else "-",
            str(m.wrong_bytes),
            *([format_verdict(record)] if self._settings.gate else []),
        ]


def format_verdict(record: dict[str, Any] | None) -> str:
    """Return the cell of the column `gate`."""
    if record is None:
        return "-"
    return "ok" if record["gate"] == "met" else f"FAIL:{record['gate']}"


def _modelled(run: SizeRun, m: Measurement) -> float:
    bound = transfer_bound(run.plan.slot_expert, home=run.plan.home)
    if not bound:
        return math.nan
    return max(run.settings.busiest_rank(run.plan, m.chosen), run.plan.max_imports) / bound


def _show(value: float, form: str) -> str:
    return "-" if math.isnan(value) else format(value, form)
