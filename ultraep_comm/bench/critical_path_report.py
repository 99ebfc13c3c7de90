"""What a run of the critical path prints and writes; bench/METRICS.md has the formulas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ultraep_comm.bench.critical_path_settings import PathSettings
from ultraep_comm.bench.figures import Times
from ultraep_comm.bench.machine import describe_machine, find_commit
from ultraep_comm.bench.placement import format_places
from ultraep_comm.bench.report import describe_gate, describe_run
from ultraep_comm.bench.sizes import describe_segments, format_size
from ultraep_comm.bench.table import format_table

BIG_COPY, HOST_PLAN = "big copy", "host plan"
WHOLE_PATH = (
    *("path", "path at once", "path + reroute", "path at once + reroute"),
    *("graph", "graph at once", "graph + reroute", "graph at once + reroute"),
    HOST_PLAN,
)


@dataclass(frozen=True, kw_only=True, eq=False)
class PathRow:
    """One thing that was timed.

    Attributes:
        name: of the row.
        times_us: ``[iters]``, on the device, of the slowest rank.
        rank_times_us: ``[G]``, each rank's own mean; in loopback, with one clock, one entry.
        host_us: ``[iters]`` that submitting kept the host; None: it waited for the device.
        kernels: launched for it, as one rank has them: counted.
        copies: to the device that were enqueued for it, likewise.
        wrong_bytes: of slots, over all ranks and checked iterations.
        wrong_values: integers of loads, plans and ids that are not the host's, over all iterations.
    """

    name: str
    times_us: NDArray[np.float64]
    rank_times_us: NDArray[np.float64]
    host_us: NDArray[np.float64] | None
    kernels: int
    copies: int
    wrong_bytes: int
    wrong_values: int

    @property
    def p50(self) -> float:
        """Return the median in microseconds."""
        return float(np.median(self.times_us))

    @property
    def host_p50(self) -> float | None:
        """Return the host's median in microseconds."""
        return None if self.host_us is None else float(np.median(self.host_us))


@dataclass(frozen=True, kw_only=True, eq=False)
class PathRun:
    """All that was measured; arrays have an entry for each iteration.

    Attributes:
        rows: what was timed.
        before: imbalance without replicas.
        after: under the plan.
        replicas: filled slots.
        transfer: T, in experts over one link.
        copy_bytes: of the row "big copy"; 0: there is none.
        device: what it was measured on.
    """

    rows: list[PathRow]
    before: NDArray[np.float64]
    after: NDArray[np.float64]
    replicas: NDArray[np.float64]
    transfer: NDArray[np.float64]
    copy_bytes: int
    device: Mapping[str, Any] = field(default_factory=dict)

    @property
    def wrong(self) -> int:
        """Return everything that is wrong."""
        return sum(row.wrong_bytes + row.wrong_values for row in self.rows)

    def p50(self, name: str) -> float | None:
        """Return a row's median; None: there is no such row."""
        return next((row.p50 for row in self.rows if row.name == name), None)

    def bound_us(self, settings: PathSettings) -> float | None:
        """Return what no transfer of these plans goes below; None: what a link carries is unknown.

        On one GPU: copying the replicas at the rate of the big copy. Over several: T * W over what
        a link carries. Of the median iteration.
        """
        copied = self.p50(BIG_COPY)
        if copied is not None:
            return (
                float(np.median(self.replicas)) * settings.expert_bytes * copied / self.copy_bytes
            )
        if settings.link_gbps is None:
            return None
        return float(np.median(self.transfer)) * settings.expert_bytes / settings.link_gbps / 1e3


def _over(time_us: float | None, other_us: float | None) -> float | None:
    return time_us / other_us if time_us is not None and other_us else None


def _ratios(row: PathRow, settings: PathSettings, found: PathRun) -> dict[str, float | None]:
    if row.name not in WHOLE_PATH:
        return {"over_bound": None, "speedup_over_host_plan": None}
    return {
        "over_bound": _over(row.p50, found.bound_us(settings)),
        "speedup_over_host_plan": _over(found.p50(HOST_PLAN), row.p50),
    }


def make_path_records(settings: PathSettings, found: PathRun) -> list[dict[str, Any]]:
    """Return one JSON record for each row; the gate judges whole paths on the device."""
    records = [
        {
            "op": "critical-path",
            "row": row.name,
            "engine": "cuda",
            "fabric": settings.fabric,
            "ranks": settings.num_ranks,
            "experts": settings.num_experts,
            "slots": settings.slots,
            "expert_bytes": settings.expert_bytes,
            "tokens": settings.tokens,
            "topk": settings.topk,
            **Times(iterations=row.times_us, ranks=row.rank_times_us).record(),
            "host_us": row.host_p50,
            "kernels": row.kernels,
            "copies": row.copies,
            **_ratios(row, settings, found),
            "wrong_bytes": row.wrong_bytes,
            "wrong_values": row.wrong_values,
        }
        for row in found.rows
    ]
    judged = set(WHOLE_PATH) - {HOST_PLAN}
    return [
        {**record, "gate": settings.gate.judge(record) if record["row"] in judged else None}
        for record in records
    ]


def make_path_document(
    settings: PathSettings, found: PathRun, places: Sequence[dict[str, Any]] = ()
) -> dict[str, Any]:
    """Return the records with what they were measured on."""
    records = make_path_records(settings, found)
    return {
        "records": records,
        "plans": {
            "imbalance_before": float(np.median(found.before)),
            "imbalance_after": float(np.median(found.after)),
            "replicas": float(np.median(found.replicas)),
            "transfer_bound": float(np.median(found.transfer)),
            "bound_us": found.bound_us(settings),
        },
        "machine": {**describe_machine(), **found.device},
        "topology": list(places),
        "gate": describe_gate(settings.gate, records),
        "commit": find_commit(),
        "settings": {
            "ids": settings.source,
            "segments": settings.segments,
            "mode": settings.mode,
            "num_sms": settings.num_sms,
            "tile_bytes": settings.tile_bytes,
            "link_gbps": settings.link_gbps,
            "iters": settings.iters,
            "warmup": settings.warmup,
            "check": settings.check,
            "seed": settings.seed,
        },
    }


def format_path_header(
    settings: PathSettings, device: Mapping[str, Any], places: Sequence[dict[str, Any]]
) -> str:
    """Return what a reader must know before the figures."""
    memory = format_size(int(device.get("gpu_memory_bytes", 0)))
    lines = [
        *describe_run(f"critical-path, engine cuda, fabric {settings.fabric}"),
        *format_places(places, engine="cuda", fabric=settings.fabric),
        f"device: {device.get('gpu', 'unknown')}, {memory}, {device.get('gpu_sms', '?')} SMs",
        f"ranks {settings.num_ranks}, experts {settings.num_experts}, slots {settings.slots},"
        f" expert {describe_segments(settings.segments)}, mode {settings.mode}",
        f"ids: {settings.tokens} tokens of each rank to {settings.topk} experts, {settings.source}",
        f"{settings.iters} iterations after {settings.warmup}, interleaved, fresh ids in each;"
        f" slots checked: {'in every one' if settings.check else 'in the last one'}",
    ]
    return "\n".join(f"# {line}" for line in lines)


_COLUMNS = {
    "row": "",
    "time p50": "(us)",
    "max": "(us)",
    "host": "(us)",
    "kernels": "",
    "copies": "",
    "bound": "/time",
    "host plan": "/time",
    "#wrong": "(B)",
    "#values": "wrong",
}


def _show(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def format_path_results(settings: PathSettings, found: PathRun) -> str:
    """Return what the plans were like, and the table."""
    rows = []
    for row in found.rows:
        ratios = _ratios(row, settings, found)
        over = ratios["over_bound"]
        rows.append(
            (
                row.name,
                f"{row.p50:.1f}",
                f"{row.times_us.max():.1f}",
                _show(row.host_p50, ".1f"),
                str(row.kernels),
                str(row.copies),
                _show(1 / over if over else None, ".3f"),
                _show(ratios["speedup_over_host_plan"], ".2f"),
                str(row.wrong_bytes),
                str(row.wrong_values),
            )
        )
    bound = _show(found.bound_us(settings), ".1f")
    plans = (
        f"# plans (medians): {np.median(found.replicas):g} replicas, imbalance"
        f" {np.median(found.before):.3f} before, {np.median(found.after):.3f} after, transfer bound"
        f" {np.median(found.transfer):.2f} experts, {bound} us"
    )
    return f"{plans}\n{format_table([list(_COLUMNS), list(_COLUMNS.values())], rows)}"
