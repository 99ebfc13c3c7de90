"""What a run on GPUs prints and writes; bench/METRICS.md has the formulas."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ultraep_comm.bench.machine import describe_machine, find_commit
from ultraep_comm.bench.settings import ReplicateSettings
from ultraep_comm.bench.sizes import describe_segments, format_size
from ultraep_comm.bench.skew import rank_imbalance
from ultraep_comm.bench.table import format_table
from ultraep_comm.bench.traffic import Traffic, interpolate_sms
from ultraep_comm.plan import Plan

EGRESS_GOALS = (450, 900)  # GB/s of a rank: one direction of NVLink 4 and of NVLink 5


@dataclass(frozen=True, kw_only=True, eq=False)
class ModeRun:
    """One mode with one number of SMs.

    Attributes:
        mode: as asked for.
        chosen: what the library made of it.
        num_sms: blocks of a rank.
        times_us: ``[iters]``, on the device, of one call.
        wrong_bytes: over all ranks and all checked iterations.
        traffic: what the call moves.
        host_bound_us: median time that a call keeps the host, with bound weights or gradients.
        host_unbound_us: the same with ones that are checked in every call.
    """

    mode: str
    chosen: str
    num_sms: int
    times_us: NDArray[np.float64]
    wrong_bytes: int
    traffic: Traffic
    host_bound_us: float
    host_unbound_us: float

    @property
    def p50(self) -> float:
        """Return the median in microseconds."""
        return float(np.median(self.times_us))

    @property
    def moved_gbps(self) -> float:
        """Return loads plus stores of all ranks, in 10^9 bytes a second."""
        return rate(self.traffic.moved, self.p50)

    @property
    def egress_gbps(self) -> float:
        """Return what leaves the busiest rank, in 10^9 bytes a second."""
        return rate(self.traffic.critical, self.p50)


@dataclass(frozen=True, kw_only=True, eq=False)
class Baselines:
    """What modes are compared with.

    Attributes:
        names: of the transfers.
        times_us: ``[transfers, iters]``.
        wrong_bytes: ``[transfers]``.
        copied: bytes that one process copies; 0: the plan's.
    """

    names: list[str]
    times_us: NDArray[np.float64]
    wrong_bytes: NDArray[np.int64]
    copied: list[int]

    def p50(self, name: str) -> float | None:
        """Return a transfer's median; None: it was not possible."""
        if name not in self.names:
            return None
        return float(np.median(self.times_us[self.names.index(name)]))

    def copy_gbps(self, name: str, processes: int) -> float:
        """Return what a copy moves in all processes: twice its bytes."""
        copied = self.copied[self.names.index(name)]
        return rate(2 * copied * processes, self.p50(name) or 0.0)


@dataclass(frozen=True, kw_only=True)
class FixedCosts:
    """Microseconds of calls with next to nothing to move.

    Attributes:
        empty_us: on the device, with a plan without replicas.
        tile_us: on the device, with one tile through a hub; None: fewer than three ranks.
        host_bound_us: of the host, for the empty plan and bound weights or gradients.
        host_unbound_us: the same with ones that are checked in every call.
    """

    empty_us: float
    tile_us: float | None
    host_bound_us: float
    host_unbound_us: float


@dataclass(kw_only=True, eq=False)
class DeviceRun:
    """All that was measured."""

    plan: Plan
    device: dict[str, Any]
    modes: list[ModeRun] = field(default_factory=list)
    baselines: Baselines | None = None
    fixed: FixedCosts | None = None

    @property
    def wrong_bytes(self) -> int:
        """Return those of modes and baselines."""
        others = 0 if self.baselines is None else int(self.baselines.wrong_bytes.sum())
        return sum(m.wrong_bytes for m in self.modes) + others


def rate(num_bytes: float, time_us: float) -> float:
    """Return 10^9 bytes a second; 0 without time."""
    return num_bytes / time_us / 1e3 if time_us else 0.0


def sms_needed(modes: list[ModeRun]) -> list[dict[str, Any]]:
    """Return for each mode the SMs at which the busiest rank sends at each of the goals."""
    names = dict.fromkeys(m.mode for m in modes)
    return [
        {
            "mode": name,
            "curve": [[m.num_sms, m.egress_gbps] for m in modes if m.mode == name],
            "sms": {
                str(goal): interpolate_sms(
                    [(m.num_sms, m.egress_gbps) for m in modes if m.mode == name], goal
                )
                for goal in EGRESS_GOALS
            },
        }
        for name in names
    ]


def _processes(settings: ReplicateSettings) -> int:
    return 1 if settings.fabric == "loopback" else settings.num_ranks


def _over(run: ModeRun, base: Baselines, name: str, processes: int) -> float:
    copy = base.copy_gbps(name, processes)
    return run.moved_gbps / copy if copy else 0.0


def _speedup(run: ModeRun, base: Baselines, name: str) -> float | None:
    other = base.p50(name)
    return None if other is None or not run.p50 else other / run.p50


def make_device_records(settings: ReplicateSettings, found: DeviceRun) -> list[dict[str, Any]]:
    """Return one JSON record for each mode and number of SMs."""
    base, processes = found.baselines, _processes(settings)
    assert base is not None
    home_load = settings.load.sum(axis=0, dtype=np.int64)
    return [
        {
            "op": settings.op,
            "engine": "cuda",
            "fabric": settings.fabric,
            "mode": m.mode,
            "chosen": m.chosen,
            "num_sms": m.num_sms,
            "ranks": settings.num_ranks,
            "experts": settings.num_experts,
            "slots": settings.slots,
            "expert_bytes": settings.expert_bytes,
            "replicas": found.plan.num_replicas,
            "imbalance_before": rank_imbalance(home_load, settings.num_ranks),
            "imbalance_after": found.plan.imbalance,
            "time_us": {
                "p50": m.p50,
                "p99": float(np.percentile(m.times_us, 99)),
                "max": float(m.times_us.max()),
            },
            "loads_bytes": int(m.traffic.loads.sum()),
            "stores_bytes": int(m.traffic.stores.sum()),
            "moved_bytes": m.traffic.moved,
            "egress_bytes_max": m.traffic.critical,
            "moved_gbps": m.moved_gbps,
            "egress_gbps": m.egress_gbps,
            "over_copy": _over(m, base, "copy", processes),
            "over_big_copy": _over(m, base, "big copy", processes),
            "speedup_over_copies": _speedup(m, base, "copies"),
            "speedup_over_nccl": _speedup(m, base, "nccl"),
            "host_bound_us": m.host_bound_us,
            "host_unbound_us": m.host_unbound_us,
            "wrong_bytes": m.wrong_bytes,
        }
        for m in found.modes
    ]


def make_device_document(settings: ReplicateSettings, found: DeviceRun) -> dict[str, Any]:
    """Return the records with what they were measured on and compared with."""
    base, fixed, processes = found.baselines, found.fixed, _processes(settings)
    assert base is not None
    assert fixed is not None
    return {
        "records": make_device_records(settings, found),
        "baselines": {
            name: {
                "p50_us": base.p50(name),
                "bytes": base.copied[i] * processes
                or found.plan.num_replicas * settings.expert_bytes,
                "moved_gbps": base.copy_gbps(name, processes) if base.copied[i] else None,
                "wrong_bytes": int(base.wrong_bytes[i]),
            }
            for i, name in enumerate(base.names)
        },
        "fixed_cost": {
            "empty_plan_us": fixed.empty_us,
            "one_tile_through_a_hub_us": fixed.tile_us,
            "host_bound_us": fixed.host_bound_us,
            "host_unbound_us": fixed.host_unbound_us,
        },
        "sms_needed": sms_needed(found.modes),
        "machine": {**describe_machine(), **found.device},
        "commit": find_commit(),
        "settings": {
            "load": settings.load_source,
            "segments": settings.segments,
            "tile_bytes": settings.tile_bytes,
            "num_sms": list(settings.num_sms),
            "fabric": settings.fabric,
            "iters": settings.iters,
            "warmup": settings.warmup,
            "check": settings.check,
            "seed": settings.seed,
            **settings.more,
        },
    }


def write_device_json(path: Path, settings: ReplicateSettings, found: DeviceRun) -> None:
    """Write the document."""
    path.write_text(json.dumps(make_device_document(settings, found), indent=2) + "\n")


def format_device_header(settings: ReplicateSettings, found: DeviceRun) -> str:
    """Return what a reader must know before the figures."""
    device, plan = found.device, found.plan
    memory = format_size(int(device.get("gpu_memory_bytes", 0)))
    smi = [f"{k} {device[k]}" for k in ("driver_version", "clocks_sm", "clocks_mem") if k in device]
    lines = [
        f"ultraep_comm {describe_machine()['ultraep_comm']}, commit {find_commit()}:"
        f" {settings.op}, engine cuda, fabric {settings.fabric}",
        f"device: {device.get('gpu', 'unknown')}, {memory}, {device.get('gpu_sms', '?')} SMs;"
        f" {', '.join(smi) or 'no nvidia-smi'}",
        f"ranks {settings.num_ranks}, experts {settings.num_experts}, slots {settings.slots},"
        f" expert {describe_segments(settings.segments)}, tiles of {settings.tile_bytes}",
        *([", ".join(f"{k} {v}" for k, v in settings.more.items())] if settings.more else []),
        f"load: {settings.load_source}; imbalance after {plan.imbalance:.3f}",
        f"plan: {plan.num_replicas} replicas, at most {plan.max_exports} exported and"
        f" {plan.max_imports} imported by a rank",
        f"{settings.iters} iterations after {settings.warmup}, interleaved; checked:"
        f" {'every one' if settings.check else 'the last one'}",
    ]
    return "\n".join(f"# {line}" for line in lines)


_COLUMNS = {
    "mode": "",
    "SMs": "",
    "moved": "(B)",
    "time p50": "(us)",
    "max": "(us)",
    "moved/s": "(GB/s)",
    "egress": "(GB/s)",
    "copy": "/rate",
    "big": "/rate",
    "copies": "/time",
    "nccl": "/time",
    "host": "(us)",
    "unbound": "(us)",
    "#wrong": "(B)",
}


def _show(value: float | None, form: str) -> str:
    return "-" if value is None or math.isnan(value) else format(value, form)


def format_device_results(settings: ReplicateSettings, found: DeviceRun) -> str:
    """Return the table and, below it, fixed costs and SMs."""
    base, fixed, processes = found.baselines, found.fixed, _processes(settings)
    assert base is not None
    assert fixed is not None
    rows: list[Sequence[str]] = [
        (
            m.mode if m.chosen == m.mode else f"{m.mode} ({m.chosen})",
            str(m.num_sms),
            str(m.traffic.moved),
            f"{m.p50:.1f}",
            f"{m.times_us.max():.1f}",
            f"{m.moved_gbps:.1f}",
            f"{m.egress_gbps:.1f}",
            f"{_over(m, base, 'copy', processes):.3f}",
            f"{_over(m, base, 'big copy', processes):.3f}",
            _show(_speedup(m, base, "copies"), ".2f"),
            _show(_speedup(m, base, "nccl"), ".2f"),
            f"{m.host_bound_us:.1f}",
            f"{m.host_unbound_us:.1f}",
            str(m.wrong_bytes),
        )
        for m in found.modes
    ]
    for i, name in enumerate(base.names):
        copied = 2 * base.copied[i] * processes
        moved_gbps = base.copy_gbps(name, processes) if copied else None
        row = [name, "-", str(copied or "-"), _show(base.p50(name), ".1f")]
        row += [f"{base.times_us[i].max():.1f}", _show(moved_gbps, ".1f"), *["-"] * 7]
        rows.append((*row, str(int(base.wrong_bytes[i]))))
    tile_us = _show(fixed.tile_us, ".1f")
    lines = [
        format_table([list(_COLUMNS), list(_COLUMNS.values())], rows),
        f"# empty plan {fixed.empty_us:.1f} us, one tile through a hub {tile_us} us;"
        f" host {fixed.host_bound_us:.1f} us a call, {fixed.host_unbound_us:.1f} us unbound",
    ]
    for needed in sms_needed(found.modes):
        goals = ", ".join(
            f"{_show(sms, '.1f')} for {goal} GB/s" for goal, sms in needed["sms"].items()
        )
        lines.append(f"# SMs of a rank, {needed['mode']}: {goals} of egress")
    return "\n".join(lines)
