"""What a run on GPUs prints."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ultraep_comm.bench.device_report import DeviceRun, ModeRun, num_processes, sms_needed
from ultraep_comm.bench.figures import time_titles
from ultraep_comm.bench.machine import describe_machine, find_commit
from ultraep_comm.bench.placement import format_places
from ultraep_comm.bench.report_table import describe_limits, describe_sizes, format_verdict
from ultraep_comm.bench.settings import ReplicateSettings
from ultraep_comm.bench.sizes import format_size
from ultraep_comm.bench.table import GrowingTable

_LEAST_WIDTH = 8  # where rows of several sizes are to come


def format_device_header(
    settings: ReplicateSettings, found: DeviceRun, places: Sequence[dict[str, Any]]
) -> str:
    """Return what a reader must know before the figures."""
    device, plan = found.device, found.plan
    memory = format_size(int(device.get("gpu_memory_bytes", 0)))
    smi = [f"{k} {device[k]}" for k in ("driver_version", "clocks_sm", "clocks_mem") if k in device]
    lines = [
        f"ultraep_comm {describe_machine()['ultraep_comm']}, commit {find_commit()}:"
        f" {settings.op}, engine cuda, fabric {settings.fabric}",
        f"device: {device.get('gpu', 'unknown')}, {memory}, {device.get('gpu_sms', '?')} SMs;"
        f" {', '.join(smi) or 'no nvidia-smi'}",
        *format_places(places, engine="cuda", fabric=settings.fabric),
        f"ranks {settings.num_ranks}, experts {settings.num_experts}, slots {settings.slots},"
        f" expert {describe_sizes(settings)}, tiles of {settings.tile_bytes}",
        *([", ".join(f"{k} {v}" for k, v in settings.more.items())] if settings.more else []),
        f"load: {settings.load_source}; imbalance after {plan.imbalance:.3f}",
        f"plan: {plan.num_replicas} replicas, at most {plan.max_exports} exported and"
        f" {plan.max_imports} imported by a rank",
        f"{settings.iters} iterations after {settings.warmup}, interleaved; checked:"
        f" {'every one' if settings.check else 'the last one'}",
        *describe_limits(settings),
    ]
    return "\n".join(f"# {line}" for line in lines)


class DeviceTable:
    """The table: a row for each size, number of SMs and mode, then what they are compared with."""

    def __init__(self, settings: ReplicateSettings) -> None:
        """Choose the columns: those of sweeps, bounds and gates only where there are such."""
        self._settings = settings
        self._bound = settings.link_gbps is not None or settings.gate.max_over_bound is not None
        columns = [
            ("mode", ""),
            *([("size", "(B)")] if settings.sweep else []),
            *(("SMs", ""), ("moved", "(B)")),
            *((title, "(us)") for title in time_titles(settings.times)),
            *(("moved/s", "(GB/s)"), ("egress", "(GB/s)"), ("critbw", "(GB/s)")),
            *([("time", "/bound")] if self._bound else []),
            *(("copy", "/rate"), ("big", "/rate"), ("copies", "/time"), ("nccl", "/time")),
            *(("host", "(us)"), ("unbound", "(us)"), ("#wrong", "(B)")),
            *([("gate", "")] if settings.gate else []),
        ]
        headers = [[title for title, _ in columns], [unit for _, unit in columns]]
        self._table = GrowingTable(headers, _LEAST_WIDTH if settings.sweep else 0)

    def add(self, found: DeviceRun, records: Sequence[dict[str, Any]]) -> str:
        """Return the rows of one size and, below them, fixed costs and SMs."""
        base, fixed = found.baselines, found.fixed
        assert base is not None
        assert fixed is not None
        rows = [self._row(found, m, r) for m, r in zip(found.modes, records, strict=True)]
        rows += [self._baseline_row(found, i) for i in range(len(base.names))]
        tile_us = _show(fixed.tile_us, ".1f")
        lines = [
            self._table.add(rows),
            f"# empty plan {fixed.empty_us:.1f} us, one tile through a hub {tile_us} us;"
            f" host {fixed.host_bound_us:.1f} us a call, {fixed.host_unbound_us:.1f} us unbound",
        ]
        for needed in sms_needed(found.modes):
            goals = ", ".join(
                f"{_show(sms, '.1f')} for {goal} GB/s" for goal, sms in needed["sms"].items()
            )
            lines.append(f"# SMs of a rank, {needed['mode']}: {goals} of egress")
        return "\n".join(lines)

    def _row(self, found: DeviceRun, m: ModeRun, record: dict[str, Any]) -> list[str]:
        return [
            m.mode if m.chosen == m.mode else f"{m.mode} ({m.chosen})",
            *self._size(found),
            *(str(m.num_sms), str(m.traffic.moved)),
            *(f"{m.times.get(name):.1f}" for name in self._settings.times),
            *(f"{record[name]:.1f}" for name in ("moved_gbps", "egress_gbps", "critical_gbps")),
            *([_show(record["over_bound"], ".3f")] if self._bound else []),
            *(f"{record[name]:.3f}" for name in ("over_copy", "over_big_copy")),
            *(_show(record[f"speedup_over_{name}"], ".2f") for name in ("copies", "nccl")),
            *(f"{m.host_bound_us:.1f}", f"{m.host_unbound_us:.1f}", str(m.wrong_bytes)),
            *([format_verdict(record)] if self._settings.gate else []),
        ]

    def _baseline_row(self, found: DeviceRun, i: int) -> list[str]:
        base, processes = found.baselines, num_processes(found.settings)
        assert base is not None
        copied = 2 * base.copied[i] * processes
        moved_gbps = base.copy_gbps(base.names[i], processes) if copied else None
        times = base.times[i]
        return [
            base.names[i],
            *self._size(found),
            *("-", str(copied or "-")),
            *(f"{times.get(name):.1f}" for name in self._settings.times),
            _show(moved_gbps, ".1f"),
            *["-"] * (8 + self._bound),
            str(int(base.wrong_bytes[i])),
            *(["-"] if self._settings.gate else []),
        ]

    def _size(self, found: DeviceRun) -> list[str]:
        return [str(found.settings.expert_bytes)] if self._settings.sweep else []


def _show(value: float | None, form: str) -> str:
    return "-" if value is None or math.isnan(value) else format(value, form)
