"""What a run of the layer benchmark prints and writes; bench/METRICS.md has the formulas."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ultraep_comm.bench.figures import Times
from ultraep_comm.bench.layer_settings import LayerSettings
from ultraep_comm.bench.machine import describe_machine, find_commit
from ultraep_comm.bench.placement import format_places
from ultraep_comm.bench.report import describe_gate, describe_run
from ultraep_comm.bench.sizes import format_size
from ultraep_comm.bench.table import format_table

PHASES = ("plan", "replicate", "reroute", "reduce")


@dataclass(frozen=True, kw_only=True)
class LayerRow:
    """One routing's figures over all ranks.

    Attributes:
        routing: "plain", "replicated" or "balanced".
        times: int64 ``[iters]`` nanoseconds of a step.
        rank_times: ``[G]`` nanoseconds, each rank's own mean over iterations.
        phases: int64 ``[iters, 4]`` nanoseconds of PHASES on the rank that took longest.
        compute: int64 ``[iters]`` nanoseconds on a core in the experts, of the busiest rank.
        imbalance: ``[iters]`` rows of the busiest rank over the mean.
        replicas: int64 ``[iters]``.
        wrong_values: over all ranks and all checked iterations.
    """

    routing: str
    times: NDArray[np.int64]
    rank_times: NDArray[np.float64]
    phases: NDArray[np.int64]
    compute: NDArray[np.int64]
    imbalance: NDArray[np.float64]
    replicas: NDArray[np.int64]
    wrong_values: int

    def share_of(self, ceiling: LayerRow) -> float:
        """Return the throughput over the ceiling's, the median over iterations."""
        return float(np.median(ceiling.times / self.times))

    @property
    def phases_us(self) -> dict[str, float]:
        """Return the median time of each phase."""
        return dict(zip(PHASES, (np.median(self.phases, axis=0) / 1e3).tolist(), strict=True))

    @property
    def phases_share(self) -> float:
        """Return the share of the step that all phases take, the median over iterations."""
        return float(np.median(self.phases.sum(axis=1) / self.times))


def make_layer_records(settings: LayerSettings, rows: Sequence[LayerRow]) -> list[dict[str, Any]]:
    """Return one JSON record for each routing; the last one is the ceiling."""
    records = []
    for row in rows:
        times = Times(iterations=row.times / 1e3, ranks=row.rank_times / 1e3)
        share, replicated = row.share_of(rows[-1]), row.routing == "replicated"
        record = {
            "op": "layer",
            "routing": row.routing,
            "ranks": settings.num_ranks,
            "experts": settings.num_experts,
            "slots": settings.slots,
            **times.record(),
            "tokens_per_s": settings.num_ranks * settings.tokens / times.get("p50") * 1e6,
            "share_of_balanced": share,
            "over_bound": 1 / share if replicated else None,
            "compute_us": float(np.median(row.compute)) / 1e3,
            "compute_share_of_balanced": float(np.median(rows[-1].compute / row.compute)),
            "imbalance": float(np.median(row.imbalance)),
            "replicas": float(np.mean(row.replicas)),
            "phases_us": row.phases_us,
            "phases_share": row.phases_share,
            "wrong_values": row.wrong_values,
        }
        verdict = settings.gate.judge(record) if replicated else None
        records.append({**record, "gate": verdict})
    return records


def make_layer_document(
    settings: LayerSettings, rows: Sequence[LayerRow], places: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Return the records with what they were measured on."""
    records = make_layer_records(settings, rows)
    names = ("tokens", "topk", "hidden", "inner", "imbalance", "iters", "warmup", "check", "seed")
    return {
        "records": records,
        "machine": describe_machine(),
        "topology": list(places),
        "commit": find_commit(),
        "gate": describe_gate(settings.gate, records),
        "settings": {name: getattr(settings, name) for name in names},
    }


def format_layer_header(settings: LayerSettings, places: Sequence[dict[str, Any]]) -> str:
    """Return what a reader must know before the figures."""
    expert_bytes = sum(4 * a * b for a, b in settings.shapes.values())
    lines = [
        *describe_run("layer"),
        *format_places(places, engine=settings.engine, fabric=settings.fabric),
        f"ranks {settings.num_ranks}, experts {settings.num_experts}, slots {settings.slots},"
        f" expert {format_size(expert_bytes)} (hidden {settings.hidden}, inner {settings.inner})",
        f"{settings.tokens} tokens of each rank to {settings.topk} experts; imbalance"
        f" {settings.imbalance:.3f}, seed {settings.seed}",
        f"{settings.iters} iterations after {settings.warmup}, interleaved; checked:"
        f" {'every one' if settings.check else 'the last one'}",
    ]
    if settings.gate.max_over_bound is not None:
        lines.append(f"gate: replicated at most {settings.gate.max_over_bound:g} times balanced")
    cores = len(os.sched_getaffinity(0))
    if settings.num_ranks > cores:
        lines.append(
            f"{settings.num_ranks} ranks share {cores} cores: idle ranks lend theirs to busy ones,"
            " so step times show little of the imbalance; read compute"
        )
    return "\n".join(f"# {line}" for line in lines)


_COLUMNS = {
    "routing": "",
    "imbalance": "",
    "replicas": "",
    "time p50": "(us)",
    "max": "(us)",
    "balanced": "/time",
    "compute": "(us)",
    "b. compute": "/compute",
    **dict.fromkeys(PHASES, "(us)"),
    "phases": "/time",
    "#wrong": "",
}


def format_layer_results(settings: LayerSettings, rows: Sequence[LayerRow]) -> str:
    """Return the table: a row for each routing, the ceiling last."""
    cells = []
    for row, record in zip(rows, make_layer_records(settings, rows), strict=True):
        phases = [f"{us:.0f}" for us in row.phases_us.values()]
        cells.append(
            (
                row.routing,
                f"{record['imbalance']:.3f}",
                f"{record['replicas']:.1f}",
                f"{record['time_us']['p50']:.0f}",
                f"{record['time_us']['max']:.0f}",
                f"{record['share_of_balanced']:.3f}",
                f"{record['compute_us']:.0f}",
                f"{record['compute_share_of_balanced']:.3f}",
                *(phases if row.routing == "replicated" else ["-"] * len(phases)),
                f"{row.phases_share:.3f}" if row.routing == "replicated" else "-",
                str(row.wrong_values),
            )
        )
    return format_table([list(_COLUMNS), list(_COLUMNS.values())], cells)
