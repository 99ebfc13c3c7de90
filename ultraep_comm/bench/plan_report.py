"""What the benchmark of the planner prints and writes; bench/METRICS.md has the formulas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ultraep_comm.bench.machine import describe_machine, find_commit
from ultraep_comm.bench.plan_settings import PlanSettings, PlanSize
from ultraep_comm.bench.report import describe_gate, describe_run
from ultraep_comm.bench.table import format_table


@dataclass(frozen=True, kw_only=True, eq=False)
class Quality:
    """Figures of one planner's plans, an entry for each load.

    Attributes:
        imbalance: busiest rank's quota over the mean.
        replicas: filled slots.
        exports: max k.
        imports: max in.
        transfer: T, in experts over one link.
    """

    imbalance: NDArray[np.float64]
    replicas: NDArray[np.int64]
    exports: NDArray[np.int64]
    imports: NDArray[np.int64]
    transfer: NDArray[np.float64]

    def record(self) -> dict[str, Any]:
        """Return what the JSON says of it."""
        return {
            "imbalance": _mean_worst(self.imbalance),
            "replicas": float(self.replicas.mean()),
            "max_exports": float(self.exports.mean()),
            "max_imports": float(self.imports.mean()),
            "transfer_bound": float(self.transfer.mean()),
        }


@dataclass(frozen=True, kw_only=True, eq=False)
class Other:
    """Figures of a planner that makes no plans of ours.

    Attributes:
        imbalance: an entry for each load.
        replicas: of every load.
    """

    imbalance: NDArray[np.float64]
    replicas: int


@dataclass(frozen=True, kw_only=True, eq=False)
class PlanRow:
    """One size and family.

    Attributes:
        size: ranks, experts, slots, domains.
        family: of the loads.
        before: imbalance of each load without replicas.
        bound: what no placement inside the domains goes below, for each load.
        time_us: of each load.
        ours: this library's planner.
        published: the paper's.
        eplb: None: not installed, or not possible.
    """

    size: PlanSize
    family: str
    before: NDArray[np.float64]
    bound: NDArray[np.float64]
    time_us: NDArray[np.float64]
    ours: Quality
    published: Quality
    eplb: Other | None

    @property
    def over_bound(self) -> float:
        """Return the worst plan's imbalance over what no placement goes below."""
        return float((self.ours.imbalance / self.bound).max())

    @property
    def transfer_ratio(self) -> float | None:
        """Return the mean of our T over the published planner's, where both replicate."""
        both = (self.ours.transfer > 0) & (self.published.transfer > 0)
        if not both.any():
            return None
        return float((self.ours.transfer[both] / self.published.transfer[both]).mean())

    def record(self) -> dict[str, Any]:
        """Return the row as JSON."""
        eplb = self.eplb
        return {
            "op": "plan",
            "ranks": self.size.num_ranks,
            "experts": self.size.num_experts,
            "slots": self.size.slots_per_rank,
            "domain_size": self.size.domain_size,
            "family": self.family,
            "vectors": len(self.before),
            "imbalance_before": float(self.before.mean()),
            **self.ours.record(),
            "imbalance_bound": float(self.bound.max()),
            "over_bound": self.over_bound,
            "time_us": {
                "p50": float(np.percentile(self.time_us, 50)),
                "p99": float(np.percentile(self.time_us, 99)),
            },
            "published": self.published.record(),
            "transfer_over_published": self.transfer_ratio,
            "eplb": None
            if eplb is None
            else {"imbalance": _mean_worst(eplb.imbalance), "replicas": eplb.replicas},
        }


def _mean_worst(values: NDArray[np.float64]) -> dict[str, float]:
    return {"mean": float(values.mean()), "worst": float(values.max())}


def format_plan_header(settings: PlanSettings, *, has_eplb: bool) -> str:
    """Return what a reader must know before the figures."""
    loads = (
        f"loads: {settings.tokens} tokens of each rank to {settings.topk} experts,"
        f" {settings.seeds} of a family"
    )
    if settings.trace is not None:
        loads += f"; {settings.trace_name}, every step and layer"
    eplb = "eplb: with the exact load, every slot filled, mains moved"
    lines = [
        *describe_run("plan"),
        f"{loads}; target {settings.target:g}",
        eplb if has_eplb else "eplb: not installed, so not compared with",
    ]
    return "\n".join(f"# {line}" for line in lines)


_COLUMNS = (
    ("size", "G/E/S"),
    ("load", ""),
    ("loads", ""),
    ("before", "mean"),
    ("imbal", "mean"),
    ("imbal", "worst"),
    ("bound", "worst"),
    ("replicas", "mean"),
    ("max k", "mean"),
    ("max in", "mean"),
    ("T", "mean"),
    ("time", "p50 us"),
    ("time", "p99 us"),
    ("paper:", "mean"),
    ("imbal", "worst"),
    ("replicas", "mean"),
    ("T", "mean"),
    ("T/T", "mean"),
)
_EPLB_COLUMNS = (("eplb:", "mean"), ("imbal", "worst"), ("replicas", ""))


def format_plan_table(rows: Sequence[PlanRow]) -> str:
    """Return the table; EPLB's columns only where a row has it."""
    has_eplb = any(row.eplb is not None for row in rows)
    columns = (*_COLUMNS, *_EPLB_COLUMNS) if has_eplb else _COLUMNS
    return format_table(list(zip(*columns, strict=True)), [_cells(row, has_eplb) for row in rows])


def _cells(row: PlanRow, has_eplb: bool) -> list[str]:
    record = row.record()
    paper, ratio, eplb = record["published"], record["transfer_over_published"], record["eplb"]
    cells = [
        str(row.size),
        row.family,
        str(record["vectors"]),
        f"{record['imbalance_before']:.2f}",
        f"{record['imbalance']['mean']:.4f}",
        f"{record['imbalance']['worst']:.4f}",
        f"{record['imbalance_bound']:.4f}",
        f"{record['replicas']:.1f}",
        f"{record['max_exports']:.2f}",
        f"{record['max_imports']:.2f}",
        f"{record['transfer_bound']:.3f}",
        f"{record['time_us']['p50']:.1f}",
        f"{record['time_us']['p99']:.1f}",
        f"{paper['imbalance']['mean']:.4f}",
        f"{paper['imbalance']['worst']:.4f}",
        f"{paper['replicas']:.1f}",
        f"{paper['transfer_bound']:.3f}",
        "-" if ratio is None else f"{ratio:.3f}",
    ]
    if has_eplb and eplb is None:
        cells += ["-"] * len(_EPLB_COLUMNS)
    elif has_eplb:
        imbalance = eplb["imbalance"]
        cells += [f"{imbalance['mean']:.4f}", f"{imbalance['worst']:.4f}", str(eplb["replicas"])]
    return cells


def make_plan_document(settings: PlanSettings, rows: Sequence[PlanRow]) -> dict[str, Any]:
    """Return the records with what they were measured on."""
    found = [row.record() for row in rows]
    records = [{**record, "gate": settings.gate.judge(record)} for record in found]
    return {
        "records": records,
        "machine": describe_machine(),
        "commit": find_commit(),
        "gate": describe_gate(settings.gate, records),
        "settings": {
            "sizes": [str(size) for size in settings.sizes],
            "families": list(settings.families),
            "seeds": settings.seeds,
            "tokens": settings.tokens,
            "topk": settings.topk,
            "target": settings.target,
            "trace": settings.trace_name or None,
        },
    }
