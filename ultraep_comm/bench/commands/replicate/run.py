"""The measurement of ``replicate``. bench/METRICS.md defines the figures."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from ultraep_comm.bench.baselines import DeviceCopy
from ultraep_comm.bench.clock import Clock, HostClock, Meter, own_meter
from ultraep_comm.bench.commands.replicate import ReplicateSettings, each_size
from ultraep_comm.bench.commands.replicate.reduction import GradRanks
from ultraep_comm.bench.commands.replicate.replication import ReplicateRanks
from ultraep_comm.bench.loads import rank_imbalance
from ultraep_comm.bench.measure import (
    Measured,
    Mode,
    Transfer,
    check_gated,
    critical_bytes,
    describe_link,
    link_bound_us,
    measure,
    paired_ratio,
    rate,
    slowest,
    time_path,
    transfer_bound,
    with_link,
)
from ultraep_comm.bench.ranks import TILE_BYTES
from ultraep_comm.bench.report import Record, Report, describe_rounds
from ultraep_comm.bench.sizes import describe_segments, format_size
from ultraep_comm.bench.table import Column
from ultraep_comm.calls.plan import plan_replicas
from ultraep_comm.plan.certificate import verify_plan
from ultraep_comm.plan.plan import Plan

_MACHINE = ("memcpy", "copy+add")  # baselines on the CPU: the machine's own rate
TimedRanks = ReplicateRanks | GradRanks


def run(settings: ReplicateSettings, report: Report, meter: Meter | None = None) -> int:
    """Measure every size, with each number of workers; return the exit status.

    On a device the baselines are timed once for each size. Collective, but in loopback.

    Raises:
        UltraEPError: there is no device, a group could not be created, or a call failed.
    """
    meter = meter or own_meter(settings.engine)
    on_device = settings.engine == "cuda"
    if on_device:
        settings = dataclasses.replace(settings, tile_bytes=settings.tile_bytes or TILE_BYTES)
        settings = report.settings = with_link(settings, meter)
    wrong = 0
    for one in each_size(settings):
        case = Case(meter, one)
        for num_sms in settings.num_sms or (None,):
            records = case.measure(num_sms, settings, report)
            report.columns(_columns(settings, list(case.baselines)), _least_width(settings))
            report.add(records)
            if not on_device:
                report.add(case.baseline_records(), gated=False)
        if on_device:
            report.add(case.baseline_records(), gated=False)
        wrong += case.wrong
    return report.finish(wrong=wrong)


class Case:
    """The measurements of one size.

    Attributes:
        baselines: of the last number of workers, on a device of the first, by name.
        wrong: bytes, of modes and baselines.
    """

    def __init__(self, meter: Meter, settings: ReplicateSettings) -> None:
        """Prepare; ``settings`` has this size only."""
        self._meter, self._settings = meter, settings
        self._on_device = settings.engine == "cuda"
        self._processes = settings.num_ranks // settings.ranks_here
        self.baselines: dict[str, Measured] = {}
        self.wrong = 0
        self._copied: dict[str, int] = {}  # bytes per process, of plain copies
        self._num_sms: int | None = None
        self._plan: Plan

    def measure(
        self, num_sms: int | None, whole: ReplicateSettings, report: Report
    ) -> list[Record]:
        """Measure with a number of workers; return a JSON record for each mode.

        ``whole`` has the settings of all sizes, for the header.
        """
        settings = self._settings
        if self._on_device:
            num_sms = self._meter.num_sms(num_sms, settings.ranks_here)
        self._num_sms = num_sms
        kind = GradRanks if settings.op == "reduce" else ReplicateRanks
        ranks: TimedRanks = kind(self._meter, settings, num_sms)
        self._plan = plan = begin(whole, ranks, report)
        clock: Clock = (
            ranks.clock(ranks.calls, lined_up=ranks.lined_up)
            if self._on_device
            else HostClock(ranks.groups[0])
        )
        baselines = [] if self._on_device and self.baselines else self._make_baselines(ranks)
        measured = measure(
            settings,
            clock,
            [*(Mode(ranks, plan, mode) for mode in settings.modes), *baselines],
            ranks.make_payload(),
            fill=partial(ranks.fill, plan),
            report=report,
            label=f" of {format_size(settings.expert_bytes)}",
        )
        self.wrong += sum(m.wrong for m in measured)
        modes, compared = measured[: len(settings.modes)], measured[len(settings.modes) :]
        if compared:
            self.baselines = {m.mode: m for m in compared}
        records = [self._record(ranks, m) for m in modes]
        ranks.close()
        return records

    def _make_baselines(self, ranks: TimedRanks) -> list[Transfer]:
        """Return the ranks' own; on a device also copies: of the plan's bytes, and a big one."""
        if not self._on_device:
            return ranks.baselines(self._plan)
        share = self._total_bytes // self._processes
        self._copied = {"copy": max(share, 1), "big copy": self._meter.big_bytes}
        copies = [DeviceCopy(self._meter, name, size) for name, size in self._copied.items()]
        return [*copies, *ranks.baselines(self._plan)]

    # ---- figures --------------------------------------------------------------------------------

    @property
    def _total_bytes(self) -> int:
        return self._plan.num_replicas * self._settings.expert_bytes

    def _copy_gbps(self, name: str, processes: int) -> float:
        """Return loads plus stores of a copy that ``processes`` processes make, in GB/s."""
        return rate(2 * self._copied[name] * processes, self.baselines[name].p50)

    def _over_bound(self, m: Measured) -> tuple[float | None, float | None]:
        """Return the bound in microseconds and the time over it.

        None without replicas or without a known rate. Ranks of one machine share its memory.
        Without a link rate the bound is therefore of the machine's own baseline, if there is one;
        on the CPU the ratio is then paired by iteration.
        """
        settings, plan = self._settings, self._plan
        if not plan.num_replicas:
            return None, None
        if settings.link_gbps is not None:
            bound_us = link_bound_us(plan, settings.expert_bytes, settings.link_gbps)
        elif settings.loopback:
            bound_us = self._total_bytes / (self._copy_gbps("big copy", 1) / 2) / 1e3
        else:
            machine = [self.baselines[name] for name in _MACHINE if name in self.baselines]
            return (machine[0].p50, paired_ratio(machine[0], m)) if machine else (None, None)
        return bound_us, m.p50 / bound_us if bound_us else None

    def _record(self, ranks: TimedRanks, m: Measured) -> Record:
        """Return the JSON record of a mode."""
        settings, plan = self._settings, self._plan
        bound_us, over_bound = self._over_bound(m)
        return {
            **self._shared(m, settings.op),
            "num_sms": self._num_sms,
            "engine": settings.engine,
            "fabric": settings.fabric,
            "chosen": m.chosen,
            "ranks": settings.num_ranks,
            "experts": settings.num_experts,
            "slots": settings.slots,
            "imbalance_before": imbalance_before(settings),
            "imbalance_after": plan.imbalance,
            "critical_gbps": rate(critical_bytes(plan, settings.expert_bytes), m.p50),
            "bound_us": bound_us,
            "over_bound": over_bound,
            **(self._device_fields(ranks, m) if self._on_device else self._host_fields(ranks, m)),
        }

    def _shared(self, m: Measured, op: str) -> Record:
        """Return the fields that modes and baselines share."""
        return {
            "op": op,
            "name": m.name,
            "mode": m.mode,
            "expert_bytes": self._settings.expert_bytes,
            "replicas": self._plan.num_replicas,
            **m.times.record(),
            "wrong_bytes": m.wrong,
        }

    def _host_fields(self, ranks: TimedRanks, m: Measured) -> Record:
        """Return the fields of a mode on the CPU: schedule over model, and the baselines."""
        bound, found = transfer_bound(self._plan), self._delivered(m)
        sent = ranks.traffic(self._plan, m.chosen).critical / self._settings.expert_bytes
        busiest = max(sent, self._plan.max_imports)
        found["over_model"] = busiest / bound if bound else None
        for name, other in self.baselines.items():
            found[_ratio_key(name)] = paired_ratio(m, other)
            if name not in _MACHINE:
                found[f"{name}_time_us"] = other.p50
        return found

    def _delivered(self, m: Measured) -> Record:
        return {"bytes": self._total_bytes, "algbw_gbps": rate(self._total_bytes, m.p50)}

    def _device_fields(self, ranks: TimedRanks, m: Measured) -> Record:
        """Return the fields of a mode on a device: its traffic, the baselines, the host's time."""
        traffic = ranks.traffic(self._plan, m.chosen)
        moved_gbps = rate(traffic.moved, m.p50)
        found: Record = {
            "loads_bytes": int(traffic.loads.sum()),
            "stores_bytes": int(traffic.stores.sum()),
            "moved_bytes": traffic.moved,
            "egress_bytes_max": traffic.critical,
            "moved_gbps": moved_gbps,
            "egress_gbps": rate(traffic.critical, m.p50),
        }
        for name, bound in (("host_bound_us", True), ("host_unbound_us", False)):
            host_us = ranks.host_us(self._plan, m.mode, bound=bound)
            found[name] = slowest(host_us, ranks.loopback)
        for name in ("copy", "big copy"):
            copy = self._copy_gbps(name, self._processes)
            found[f"over_{name.replace(' ', '_')}"] = moved_gbps / copy if copy else 0.0
        for name in ("copies", "nccl"):
            other = self.baselines.get(name)
            found[f"speedup_over_{name}"] = other.p50 / m.p50 if other and m.p50 else None
        return found

    def baseline_records(self) -> list[Record]:
        """Return a JSON record for each baseline; plain copies load and store their bytes."""
        found = []
        for name, m in self.baselines.items():
            if not self._on_device:
                critical = critical_bytes(self._plan, self._settings.expert_bytes)
                more = {"num_sms": self._num_sms, "critical_gbps": rate(critical, m.p50)}
                found.append({**self._shared(m, "baseline"), **more, **self._delivered(m)})
                continue
            copied = self._copied.get(name, 0) * self._processes
            more = {"bytes": copied or self._total_bytes}
            if copied:
                moved_gbps = self._copy_gbps(name, self._processes)
                more |= {"moved_bytes": 2 * copied, "moved_gbps": moved_gbps}
            found.append({**self._shared(m, "baseline"), **more})
        return found


def imbalance_before(settings: ReplicateSettings) -> float:
    """Return the busiest rank's tokens over the mean, without replicas."""
    return rank_imbalance(settings.load.sum(axis=0, dtype=np.int64), settings.num_ranks)


# ---- plan and header ----------------------------------------------------------------------------


def begin(settings: ReplicateSettings, ranks: TimedRanks, report: Report) -> Plan:
    """Return the plan of the load; the first time print the header. Collective, but in loopback.

    ``settings`` has all sizes, for the header.

    Raises:
        InvalidArgumentError: there is a gate, but nothing to transfer.
    """
    group = ranks.groups[0]
    plan = plan_replicas(torch.from_numpy(settings.load), group=group)
    if settings.check:
        verify_plan(plan, settings.load, allow_cross_domain=group.topology.allow_cross_domain)
    check_gated(plan, bool(settings.gate))
    if not report.places:
        report.place(group, ranks.meter.describe())
        engine, fabric = settings.engine, settings.fabric
        where = "" if engine == "host" else f", engine {engine}, fabric {fabric}"
        report.header(f"{settings.op}{where}", _header_lines(settings, plan))
    return plan


def _header_lines(settings: ReplicateSettings, plan: Plan) -> list[str]:
    """Return the header lines about settings, plan and limits."""
    gate, limits, tiles = settings.gate, [], settings.tile_bytes
    if gate.min_gbps is not None:
        limits.append(f"critbw at least {gate.min_gbps:g} GB/s")
    if gate.max_over_bound is not None:
        rate_of = "the measured copy rate" if settings.link_gbps is None else "the link's rate"
        limits.append(f"time at most {gate.max_over_bound:g} times its bound at {rate_of}")
    sizes = describe_segments(settings.segments)
    if len(settings.sizes) > 1:
        first, last = (format_size(sum(settings.sizes[i].values())) for i in (0, -1))
        parts = ", ".join(settings.segments)
        sizes = f"{first} to {last}, {len(settings.sizes)} sizes ({parts})"
    gradients = f"gradients: {settings.grad_dtype} in slots, {settings.main_dtype} at home"
    return [
        f"ranks {settings.num_ranks}, experts {settings.num_experts}, slots {settings.slots},"
        f" expert {sizes}" + (f", tiles of {tiles}" if tiles and settings.engine == "cuda" else ""),
        *([gradients] if settings.op == "reduce" else []),
        f"load: {settings.load_source}; imbalance {imbalance_before(settings):.3f} before,"
        f" {plan.imbalance:.3f} after",
        _describe_plan(plan),
        describe_rounds(settings),
        *describe_link(settings),
        *([f"gate: {', '.join(limits)}"] if limits else []),
    ]


def _describe_plan(plan: Plan) -> str:
    if plan.num_replicas == 0:
        return "plan: no replicas; nothing to transfer"
    slots = plan.slot_expert
    experts = len(set(slots[slots >= 0].tolist()))
    return (
        f"plan: {plan.num_replicas} replicas of {experts} experts, at most"
        f" {plan.max_exports} exported and {plan.max_imports} imported by a rank; T* ="
        f" {transfer_bound(plan):.4g} experts over one link"
    )


# ---- table --------------------------------------------------------------------------------------


def _least_width(settings: ReplicateSettings) -> int:
    """Return the minimum width of a column, where rows of several sizes follow."""
    return 9 if len(settings.sizes) > 1 or len(settings.num_sms) > 1 else 0


def _ratio_key(baseline: str) -> str:
    """Return the JSON key of a baseline's time over that of a mode."""
    key = f"over_{baseline.replace('+', '_')}"
    return key if baseline in _MACHINE else f"speedup_{key}"


def _columns(settings: ReplicateSettings, baselines: Sequence[str]) -> list[Column]:
    """Return the columns of modes, and of baselines with these names."""
    on_device, times = settings.engine == "cuda", settings.times
    bounded = settings.link_gbps is not None or settings.gate.max_over_bound is not None
    titles = [f"time {times[0]}", *times[1:]]
    time_columns = [
        Column(title, "(us)", time_path(name), ".1f")
        for title, name in zip(titles, times, strict=True)
    ]
    over_bound = [Column("time", "/bound", "over_bound", ".3f")] * bounded
    columns = [
        Column("mode", "", "name"),
        *([Column("size", "(B)", "expert_bytes")] * (len(settings.sizes) > 1)),
        *([Column("SMs", "", "num_sms")] * (on_device or len(settings.num_sms) > 1)),
    ]
    if on_device:
        columns += [
            Column("moved", "(B)", "moved_bytes"),
            *time_columns,
            Column("moved/s", "(GB/s)", "moved_gbps", ".1f"),
            Column("egress", "(GB/s)", "egress_gbps", ".1f"),
            Column("critbw", "(GB/s)", "critical_gbps", ".1f"),
            *over_bound,
            Column("copy", "/rate", "over_copy", ".3f"),
            Column("big", "/rate", "over_big_copy", ".3f"),
            Column("copies", "/time", "speedup_over_copies", ".2f"),
            Column("nccl", "/time", "speedup_over_nccl", ".2f"),
            Column("host", "(us)", "host_bound_us", ".1f"),
            Column("unbound", "(us)", "host_unbound_us", ".1f"),
        ]
    else:
        columns += [
            Column("replicas", "", "replicas"),
            Column("bytes", "(B)", "bytes"),
            *time_columns,
            Column("algbw", "(GB/s)", "algbw_gbps", ".2f"),
            Column("critbw", "(GB/s)", "critical_gbps", ".2f"),
            Column("model", "/T*", "over_model", ".3f"),
            *over_bound,
            *(
                Column(name, "/time", _ratio_key(name), ".2f")
                for name in sorted(baselines, key=lambda name: name not in _MACHINE)
            ),
        ]
    columns.append(Column("#wrong", "(B)", "wrong_bytes"))
    return columns + [Column("gate", "", "gate")] * bool(settings.gate)
