"""What the planner's benchmark on a GPU prints and writes; bench/METRICS.md has the formulas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ultraep_comm.bench.machine import describe_machine, find_commit
from ultraep_comm.bench.plan_device_ranks import RanksTimes
from ultraep_comm.bench.plan_settings import PlanSettings, PlanSize
from ultraep_comm.bench.report import describe_run
from ultraep_comm.bench.table import format_table


@dataclass(frozen=True, kw_only=True, eq=False)
class WarpRun:
    """The plan kernel with one number of warps.

    Attributes:
        num_warps: of its block.
        times_us: of each load.
        first_us: of the first launch.
        wrong_values: integers of plans that are not the host's.
    """

    num_warps: int
    times_us: NDArray[np.float64]
    first_us: float
    wrong_values: int


@dataclass(frozen=True, kw_only=True, eq=False)
class DeviceRow:
    """One size and family; arrays have an entry for each load.

    Attributes:
        size: ranks, experts, slots, domains.
        family: of the loads.
        host_us: of the host's core.
        runs: of the plan kernel, for each number of warps that fits.
        gather_us: of counting a rank's ids, without an exchange.
        launch_us: of a kernel with nothing to do.
        ranks: of all ranks on this device; empty: there is no block for each.
        shares_us: of the reroute of a single padding id.
        reroute_us: of the reroute of all ids.
        num_ids: of the rank; mean.
        wrong_values: counts and ids that are not the host's.
    """

    size: PlanSize
    family: str
    host_us: NDArray[np.float64]
    runs: Sequence[WarpRun]
    gather_us: NDArray[np.float64]
    launch_us: NDArray[np.float64]
    ranks: Sequence[RanksTimes]
    shares_us: NDArray[np.float64]
    reroute_us: NDArray[np.float64]
    num_ids: float
    wrong_values: int

    @property
    def wrong(self) -> int:
        """Return everything that is wrong."""
        return self.wrong_values + sum(run.wrong_values for run in self.runs)

    @property
    def schedule_us(self) -> NDArray[np.float64]:
        """Return how much longer a transfer is whose schedule its kernel has to make."""
        return np.array([times.device_us - times.host_us for times in self.ranks])

    @property
    def at_once_us(self) -> NDArray[np.float64]:
        """Return times of counts, exchange and plan in one launch; none where it is not one."""
        return np.array([t.at_once_us for t in self.ranks if t.at_once_us is not None])

    def record(self) -> dict[str, Any]:
        """Return the row as JSON."""
        return {
            "op": "plan",
            "engine": "cuda",
            "ranks": self.size.num_ranks,
            "experts": self.size.num_experts,
            "slots": self.size.slots_per_rank,
            "domain_size": self.size.domain_size,
            "family": self.family,
            "vectors": len(self.host_us),
            "host_us": _percentiles(self.host_us),
            "warps": [
                {
                    "warps": run.num_warps,
                    "time_us": _percentiles(run.times_us),
                    "first_us": run.first_us,
                    "wrong_values": run.wrong_values,
                }
                for run in self.runs
            ],
            "ids": self.num_ids,
            "counts_us": _percentiles(self.gather_us),
            "launch_us": _percentiles(self.launch_us),
            "at_once_us": _percentiles(self.at_once_us),
            "schedule_us": _percentiles(self.schedule_us),
            "tiny_device_plan_us": _percentiles(np.array([t.device_us for t in self.ranks])),
            "tiny_host_plan_us": _percentiles(np.array([t.host_us for t in self.ranks])),
            "shares_us": _percentiles(self.shares_us),
            "reroute_us": _percentiles(self.reroute_us),
            "wrong_values": self.wrong,
        }


def _percentiles(values: NDArray[np.float64]) -> dict[str, float] | None:
    if not len(values):
        return None
    return {"p50": float(np.percentile(values, 50)), "p99": float(np.percentile(values, 99))}


def format_device_header(settings: PlanSettings, device: Mapping[str, Any]) -> str:
    """Return what a reader must know before the figures."""
    lines = [
        *describe_run("plan, engine cuda"),
        f"device: {device.get('gpu', 'unknown')}, {device.get('gpu_sms', '?')} SMs",
        f"loads: {settings.tokens} tokens of each rank to {settings.topk} experts; target"
        f" {settings.target:g}",
        "times: medians over loads, in us; counts without exchange; counts + plan: one launch",
        "schedule: how much longer a transfer takes that makes it; shares: a reroute of nothing",
    ]
    return "\n".join(f"# {line}" for line in lines)


def format_device_table(settings: PlanSettings, rows: Sequence[DeviceRow]) -> str:
    """Return the table, with a column for each number of warps."""
    warps = [str(n) for n in settings.warps]
    headers = [
        ["size", "load", "loads", "host", *["plan"] * len(warps), *["counts", "counts"]],
        ["G/E/S", "", "", "core", *[f"{n} warps" for n in warps], "", "+ plan"],
    ]
    headers[0] += ["launch", "schedule", "shares", "reroute", "ids", "#wrong"]
    headers[1] += ["", "", "", "", "mean", ""]
    return format_table(headers, [_cells(settings, row) for row in rows])


def _cells(settings: PlanSettings, row: DeviceRow) -> list[str]:
    plans = {run.num_warps: f"{np.median(run.times_us):.1f}" for run in row.runs}
    times = (row.gather_us, row.at_once_us, row.launch_us, row.schedule_us, row.shares_us)
    return [
        str(row.size),
        row.family,
        str(len(row.host_us)),
        f"{np.median(row.host_us):.1f}",
        *[plans.get(n, "-") for n in settings.warps],
        *[
            f"{np.median(values):.1f}" if len(values) else "-"
            for values in (*times, row.reroute_us)
        ],
        f"{row.num_ids:.0f}",
        str(row.wrong),
    ]


def make_device_document(
    settings: PlanSettings, rows: Sequence[DeviceRow], device: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the records with what they were measured on."""
    return {
        "records": [row.record() for row in rows],
        "machine": {**describe_machine(), **device},
        "commit": find_commit(),
        "settings": {
            "sizes": [str(size) for size in settings.sizes],
            "families": list(settings.families),
            "seeds": settings.seeds,
            "tokens": settings.tokens,
            "topk": settings.topk,
            "target": settings.target,
            "warps": list(settings.warps),
            "trace": settings.trace_name or None,
        },
    }
