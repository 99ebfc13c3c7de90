"""A command that times one collective on one plan, size by size, on the CPU or on GPUs.

bench/METRICS.md has the formulas.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from ultraep_comm.bench.baselines import DeviceCopy
from ultraep_comm.bench.clock import DeviceClock, HostClock, HostMeter, Meter, own_gpu
from ultraep_comm.bench.commands.replicate import ReplicateSettings, each_size
from ultraep_comm.bench.loads import rank_imbalance
from ultraep_comm.bench.measure import (
    Measured,
    Transfer,
    check_gated,
    critical_bytes,
    link_bound_us,
    measure,
    paired_ratio,
    rate,
    slowest,
    time_path,
)
from ultraep_comm.bench.ranks import TILE_BYTES, TIMED_CALLS, Mode, Ranks
from ultraep_comm.bench.report import Record, Report, describe_rounds
from ultraep_comm.bench.sizes import describe_segments, format_size
from ultraep_comm.bench.table import Column, RecordTable
from ultraep_comm.bench.traffic import Traffic, interpolate_sms
from ultraep_comm.calls.plan import plan_replicas
from ultraep_comm.plan.plan import Plan
from ultraep_comm.plan.schedule import transfer_bound

EGRESS_GOALS = (450, 900)  # GB/s of a rank: one direction of NVLink 4 and of NVLink 5
_HOST_WIDTH, _DEVICE_WIDTH = 9, 8  # of columns where rows of several sizes are to come


class Collective(Protocol):
    """What is timed.

    Attributes:
        calls: on a device, in a row.
        lined_up: behind something else that lines up the ranks.
        empty_mode: of calls with nothing to move.
    """

    calls: int
    lined_up: bool
    empty_mode: str

    def make_ranks(self, meter: Meter, settings: Any, num_sms: int | None) -> Any:
        """Make the groups, `Ranks` that know what is right. Collective, but in loopback."""

    def make_payload(self, settings: Any) -> Any:
        """Return what is moved."""

    def host_baselines(self, ranks: Any, plan: Plan) -> list[Transfer]:
        """Return what a user would do, and what the machine can do."""

    def device_baselines(self, ranks: Any, plan: Plan) -> list[Transfer]:
        """Return what there is besides copies of as many and of many bytes."""

    def busiest_rank(self, settings: Any, plan: Plan, mode: str) -> float:
        """Return what the rank that moves most takes over its link in a mode, in experts."""

    def traffic(self, settings: Any, plan: Plan, mode: str) -> Traffic:
        """Return what a call on a device moves."""

    def tile_us(self, meter: Meter, settings: Any, num_sms: int) -> float | None:
        """Return the time of one tile that takes the longest way; None: there is none."""


def run_one_plan(collective: Collective, settings: ReplicateSettings, report: Report) -> int:
    """Measure on what the settings name; return the exit status. Collective, but in loopback.

    Raises:
        UltraEPError: there is no device, a group could not be made, or a call failed.
    """
    if settings.engine == "host":
        return run_host(collective, settings, report)
    return run_device(own_gpu(), collective, settings, report)


# ---- on the CPU ---------------------------------------------------------------------------------


def run_host(collective: Collective, settings: ReplicateSettings, report: Report) -> int:
    """Measure with processes, interleaved with what a user would do and the machine can do."""
    torch.set_num_threads(1)
    wrong = 0
    table: RecordTable | None = None
    records: list[Record] = []
    baselines: list[Record] = []
    for one, num_sms in (
        (one, count) for one in each_size(settings) for count in settings.num_sms or (None,)
    ):
        ranks = collective.make_ranks(HostMeter(), one, num_sms)
        group = ranks.groups[0]
        plan = plan_replicas(torch.from_numpy(one.load), group=group)
        check_gated(plan, bool(settings.gate))
        if not records:
            report.place(group)
            report.header(settings.op, _describe(settings, plan))
        compared = collective.host_baselines(ranks, plan)
        *modes, user, machine = measure(
            one,
            HostClock(group),
            [*(Mode(ranks, plan, mode) for mode in one.modes), *compared],
            collective.make_payload(one),
            fill=partial(ranks.fill, plan),
            report=report,
            label=f" of {format_size(one.expert_bytes)}",
        )
        ranks.close()
        row = HostRow(collective, one, plan, num_sms, user, machine)
        found = [report.judge(row.record(m)) for m in modes]
        others = [row.moved(m) for m in (user, machine)]
        wrong += sum(m.wrong for m in (*modes, user, machine))
        records += found
        baselines += others
        if table is None:
            gate = settings.gate.describe(())
            table = host_table(describe_settings(settings), gate, [user.mode, machine.mode])
        report.show(table.add([*found, *others]))
    return report.finish(
        records,
        describe_settings(settings),
        wrong=wrong,
        more={"baselines": baselines},
        header=True,
    )


@dataclasses.dataclass(frozen=True)
class HostRow:
    """One size with one number of workers: what its records share."""

    collective: Collective
    settings: ReplicateSettings
    plan: Plan
    num_sms: int | None
    user: Measured
    machine: Measured

    def record(self, m: Measured) -> Record:
        """Return the JSON record of a mode of the library."""
        settings, plan = self.settings, self.plan
        user, machine = baseline_key(self.user.mode), baseline_key(self.machine.mode)
        bound_us, over_bound = self._over_bound(m)
        return {
            "op": settings.op,
            "engine": settings.engine,
            "fabric": settings.fabric,
            "mode": m.mode,
            "chosen": m.chosen,
            "ranks": settings.num_ranks,
            "experts": settings.num_experts,
            "slots": settings.slots,
            "imbalance_before": imbalance_before(settings),
            "imbalance_after": plan.imbalance,
            **self.moved(m),
            "over_model": self._over_model(m),
            "bound_us": bound_us,
            "over_bound": over_bound,
            f"over_{machine}": paired_ratio(m, self.machine),
            f"{user}_time_us": self.user.p50,
            f"speedup_over_{user}": paired_ratio(m, self.user),
        }

    def moved(self, m: Measured) -> Record:
        """Return what a record says of a row, whoever moves the bytes."""
        expert_bytes, plan = self.settings.expert_bytes, self.plan
        return {
            "mode": m.mode,
            "num_sms": self.num_sms,
            "expert_bytes": expert_bytes,
            "replicas": plan.num_replicas,
            **m.times.record(),
            "algbw_gbps": rate(plan.num_replicas * expert_bytes, m.p50),
            "critical_gbps": rate(critical_bytes(plan, expert_bytes), m.p50),
            "wrong_bytes": m.wrong,
        }

    def _over_bound(self, m: Measured) -> tuple[float | None, float | None]:
        """Return the bound in microseconds and the time over it; None: there is nothing to move.

        Ranks of one machine share its memory, so without a link's rate the bound is the time of
        ``machine``, and the ratio is paired by iterations.
        """
        link_gbps = self.settings.link_gbps
        if not self.plan.num_replicas:
            return None, None
        if link_gbps is None:
            return self.machine.p50, paired_ratio(self.machine, m)
        bound = link_bound_us(self.plan, self.settings.expert_bytes, link_gbps)
        return bound, m.p50 / bound

    def _over_model(self, m: Measured) -> float | None:
        """Return the schedule's time in the model over its bound; None: there is nothing to move.

        bench/METRICS.md, "The model and its bound".
        """
        bound = transfer_bound(self.plan.slot_expert, home=self.plan.home)
        if not bound:
            return None
        busiest = self.collective.busiest_rank(self.settings, self.plan, m.chosen)
        return max(busiest, self.plan.max_imports) / bound


def baseline_key(mode: str) -> str:
    """Return the name of a baseline in the names of figures."""
    return mode.replace("+", "_")


def imbalance_before(settings: ReplicateSettings) -> float:
    """Return the busiest rank's tokens over the mean, without replicas."""
    return rank_imbalance(settings.load.sum(axis=0, dtype=np.int64), settings.num_ranks)


def describe_settings(settings: ReplicateSettings) -> Record:
    """Return what JSON says of the arguments; ``segments`` are those of the first size."""
    return {
        "load": settings.load_source,
        "segments": settings.segments,
        "sizes": [sum(segments.values()) for segments in settings.sizes],
        "tile_bytes": settings.tile_bytes,
        "num_sms": list(settings.num_sms),
        **settings.describe("fabric", "link_gbps"),
        "times": list(settings.times),
        **settings.describe("iters", "warmup", "check", "seed"),
        **settings.more,
    }


def _describe(settings: ReplicateSettings, plan: Plan) -> list[str]:
    """Return the lines of a header that are about the plan and the limits."""
    gate, limits, tiles = settings.gate, [], settings.tile_bytes
    if gate.min_gbps is not None:
        limits.append(f"critbw at least {gate.min_gbps:g} GB/s")
    if gate.max_over_bound is not None:
        rate_of = "the measured copy rate" if settings.link_gbps is None else "the link's rate"
        limits.append(f"time at most {gate.max_over_bound:g} times its bound at {rate_of}")
    return [
        f"ranks {settings.num_ranks}, experts {settings.num_experts}, slots {settings.slots},"
        f" expert {_describe_sizes(settings)}"
        + (f", tiles of {tiles}" if tiles and settings.engine == "cuda" else ""),
        *([", ".join(f"{k} {v}" for k, v in settings.more.items())] if settings.more else []),
        f"load: {settings.load_source}; imbalance {imbalance_before(settings):.3f} before,"
        f" {plan.imbalance:.3f} after",
        _describe_plan(plan),
        describe_rounds(settings),
        *([f"gate: {', '.join(limits)}"] if limits else []),
    ]


def _describe_sizes(settings: ReplicateSettings) -> str:
    """Return the one size and its segments, or the range."""
    if not settings.sweep:
        return describe_segments(settings.segments)
    first, last = (sum(settings.sizes[i].values()) for i in (0, -1))
    parts = ", ".join(settings.segments)
    return f"{format_size(first)} to {format_size(last)}, {len(settings.sizes)} sizes ({parts})"


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


def host_table(
    settings: Mapping[str, Any], gate: Mapping[str, Any] | None, baselines: Sequence[str]
) -> RecordTable:
    """Return the table: a row for each size and mode, then what they are compared with.

    Its rows are JSON records and nothing else, so that a file can be printed as its run was.

    Args:
        settings: a document's.
        gate: a document's.
        baselines: what a user would do, and what the machine can do.
    """
    user, machine = baselines
    sizes, workers = len(settings["sizes"]) > 1, len(settings["num_sms"]) > 1
    bound = settings["link_gbps"] is not None or (
        gate is not None and gate["max_over_bound"] is not None
    )
    columns = [
        Column("mode", "", _mode),
        *([Column("size", "(B)", "expert_bytes")] if sizes else []),
        *([Column("SMs", "", lambda r: str(r["num_sms"]))] if workers else []),
        Column("replicas", "", "replicas"),
        Column("bytes", "(B)", lambda r: _whole(r, "replicas") * _whole(r, "expert_bytes")),
        *_time_columns(settings["times"]),
        Column("algbw", "(GB/s)", "algbw_gbps", ".2f"),
        Column("critbw", "(GB/s)", "critical_gbps", ".2f"),
        Column("model", "/T*", "over_model", ".3f"),
        *([Column("time", "/bound", "over_bound", ".3f")] if bound else []),
        Column(machine, "/time", f"over_{baseline_key(machine)}", ".2f"),
        Column(user, "/time", f"speedup_over_{baseline_key(user)}", ".2f"),
        Column("#wrong", "(B)", "wrong_bytes"),
        *([Column("gate", "", _verdict)] if gate is not None else []),
    ]
    return RecordTable(columns, _HOST_WIDTH if sizes or workers else 0)


def _mode(record: Mapping[str, Any]) -> str:
    mode, chosen = str(record["mode"]), record.get("chosen", record["mode"])
    return mode if chosen == mode else f"{mode} ({chosen})"


def _time_columns(names: Sequence[str]) -> list[Column]:
    titles = [f"time {names[0]}", *names[1:]]
    return [
        Column(title, "(us)", time_path(name), ".1f")
        for title, name in zip(titles, names, strict=True)
    ]


def _verdict(record: Mapping[str, Any]) -> str | None:
    if "gate" not in record:
        return None
    return "ok" if record["gate"] == "met" else f"FAIL:{record['gate']}"


def _whole(record: Mapping[str, Any], name: str) -> int:
    """Return an integer of a file: a text, for one, would be repeated by a product."""
    value = record[name]
    if not isinstance(value, int):
        raise TypeError(f"{name} is a {type(value).__name__}")
    return value


def format_document(document: Mapping[str, Any]) -> str:
    """Return what the run of a document of `run_host` printed."""
    records, baselines = document["records"], document["baselines"]
    names = [baseline["mode"] for baseline in baselines[:2]]
    table = host_table(document["settings"], document["gate"], names)
    parts = list(document["header"])
    for user, machine in zip(baselines[::2], baselines[1::2], strict=True):
        run = [r for r in records if _size_of(r) == _size_of(user)]
        parts.append(table.add([*run, user, machine]))
    return "\n".join(parts)


def _size_of(record: Mapping[str, Any]) -> tuple[Any, Any]:
    return record["expert_bytes"], record["num_sms"]


# ---- on GPUs ------------------------------------------------------------------------------------


def run_device(
    meter: Meter, collective: Collective, settings: ReplicateSettings, report: Report
) -> int:
    """Measure with a device; see `run_one_plan`."""
    settings = dataclasses.replace(settings, tile_bytes=settings.tile_bytes or TILE_BYTES)
    table = _device_table(settings)
    records: list[Record] = []
    sizes: list[Record] = []
    wrong = 0
    for one in each_size(settings):
        size = DeviceSize(meter, collective, one, report)
        size.run(settings)
        found = [report.judge(record) for record in size.records()]
        records += found
        compared = size.compared()
        sizes.append({"expert_bytes": one.expert_bytes, **compared})
        wrong += size.wrong
        report.show(table.add([*found, *size.baseline_rows()]))
        report.show("\n".join(_describe_fixed(compared)))
    more = {**{k: v for k, v in sizes[-1].items() if k != "expert_bytes"}, "sizes": sizes}
    return report.finish(records, describe_settings(settings), wrong=wrong, more=more)


@dataclasses.dataclass(frozen=True)
class DeviceMode:
    """One mode with one number of blocks a rank, and what a call keeps the host."""

    num_sms: int
    measured: Measured
    traffic: Traffic
    host_bound_us: float
    host_unbound_us: float

    @property
    def moved_gbps(self) -> float:
        """Return loads plus stores of all ranks, in 10^9 bytes a second."""
        return rate(self.traffic.moved, self.measured.p50)

    @property
    def egress_gbps(self) -> float:
        """Return what leaves the busiest rank, in 10^9 bytes a second."""
        return rate(self.traffic.critical, self.measured.p50)


class DeviceSize:
    """All that is measured of one size."""

    def __init__(
        self, meter: Meter, collective: Collective, settings: ReplicateSettings, report: Report
    ) -> None:
        """Prepare; ``settings`` are those of this size alone."""
        self._meter, self._collective, self._report = meter, collective, report
        self._settings = settings
        self._here = settings.num_ranks if settings.loopback else 1
        self._processes = settings.num_ranks // self._here
        self._modes: list[DeviceMode] = []
        self._baselines: dict[str, Measured] = {}
        self._copied: dict[str, int] = {}  # bytes that one process copies; not there: the plan's
        self._fixed: Record = {}
        self._plan: Plan

    def run(self, whole: ReplicateSettings) -> None:
        """Measure with each number of blocks, what modes are compared with along with the first.

        ``whole`` are the settings of all sizes, for the header.
        """
        settings, meter, collective = self._settings, self._meter, self._collective
        for num_sms in [meter.num_sms(n, self._here) for n in settings.num_sms or (None,)]:
            ranks = collective.make_ranks(meter, settings, num_sms)
            clock = ranks.clock(collective.calls, lined_up=collective.lined_up)
            self._plan = plan = plan_replicas(
                torch.from_numpy(settings.load), group=ranks.groups[0]
            )
            check_gated(plan, bool(settings.gate))
            if not self._report.places:
                self._report.place(ranks.groups[0], meter.describe())
                what = f"{settings.op}, engine cuda, fabric {settings.fabric}"
                self._report.header(what, _describe(whole, plan))
            baselines = [] if self._baselines else self._make_baselines(ranks)
            measured = measure(
                settings,
                clock,
                [*(Mode(ranks, plan, mode) for mode in settings.modes), *baselines],
                collective.make_payload(settings),
                fill=partial(ranks.fill, plan),
                report=self._report,
                label=f" of {format_size(settings.expert_bytes)}",
            )
            modes = measured[: len(settings.modes)]
            self._modes += [self._add_host_times(ranks, num_sms, m) for m in modes]
            if baselines:
                self._baselines = {m.mode: m for m in measured[len(modes) :]}
                self._fixed = self._fixed_costs(ranks, clock, num_sms)
            ranks.close()

    def _make_baselines(self, ranks: Ranks) -> list[Transfer]:
        """Return what modes are compared with, copies of as many and of many bytes first."""
        share = self._total_bytes // self._processes
        self._copied = {"copy": max(share, 1), "big copy": self._meter.big_bytes}
        copies = [DeviceCopy(self._meter, name, size) for name, size in self._copied.items()]
        return [*copies, *self._collective.device_baselines(ranks, self._plan)]

    def _add_host_times(self, ranks: Ranks, num_sms: int, m: Measured) -> DeviceMode:
        bound_us, unbound_us = self._host_us(ranks, self._plan, m.mode)
        return DeviceMode(
            num_sms,
            m,
            self._collective.traffic(self._settings, self._plan, m.chosen),
            bound_us,
            unbound_us,
        )

    def _host_us(self, ranks: Ranks, plan: Plan, mode: str) -> tuple[float, float]:
        """Return what a call keeps the host, with what was bound, and with checks in every call."""
        bound, unbound = (
            slowest(ranks.host_us(plan, mode, bound=bound), ranks.loopback)
            for bound in (True, False)
        )
        return bound, unbound

    def _fixed_costs(self, ranks: Ranks, clock: DeviceClock, num_sms: int) -> Record:
        """Return microseconds of calls with next to nothing to move."""
        mode = self._collective.empty_mode
        empty_us = median_us(self._settings, ranks, clock, ranks.nothing, mode)
        bound_us, unbound_us = self._host_us(ranks, ranks.nothing, mode)
        return {
            "empty_plan_us": empty_us,
            "one_tile_through_a_hub_us": self._collective.tile_us(
                self._meter, self._settings, num_sms
            ),
            "host_bound_us": bound_us,
            "host_unbound_us": unbound_us,
        }

    # ---- figures --------------------------------------------------------------------------------

    @property
    def wrong(self) -> int:
        """Return the wrong bytes of modes and baselines."""
        modes = sum(m.measured.wrong for m in self._modes)
        return modes + sum(m.wrong for m in self._baselines.values())

    @property
    def _total_bytes(self) -> int:
        return self._plan.num_replicas * self._settings.expert_bytes

    def _copy_gbps(self, name: str, processes: int) -> float:
        """Return what a copy moves in so many processes: it loads and stores."""
        return rate(2 * self._copied[name] * processes, self._baselines[name].p50)

    def _bound_us(self) -> float | None:
        """Return what the transfer cannot go below; None: nothing to move, or no rate is known."""
        settings = self._settings
        if not self._plan.num_replicas:
            return None
        if settings.link_gbps is not None:
            return link_bound_us(self._plan, settings.expert_bytes, settings.link_gbps)
        if not settings.loopback:
            return None
        return self._total_bytes / (self._copy_gbps("big copy", 1) / 2) / 1e3

    def records(self) -> list[Record]:
        """Return one JSON record for each mode and number of blocks."""
        return [self._record(m) for m in self._modes]

    def _record(self, m: DeviceMode) -> Record:
        settings, plan, p50 = self._settings, self._plan, m.measured.p50
        bound_us = self._bound_us()

        def over_copy(name: str) -> float:
            copy = self._copy_gbps(name, self._processes)
            return m.moved_gbps / copy if copy else 0.0

        def speedup(name: str) -> float | None:
            other = self._baselines.get(name)
            return None if other is None or not p50 else other.p50 / p50

        return {
            "op": settings.op,
            "engine": "cuda",
            "fabric": settings.fabric,
            "mode": m.measured.mode,
            "chosen": m.measured.chosen,
            "num_sms": m.num_sms,
            "ranks": settings.num_ranks,
            "experts": settings.num_experts,
            "slots": settings.slots,
            "expert_bytes": settings.expert_bytes,
            "replicas": plan.num_replicas,
            "imbalance_before": imbalance_before(settings),
            "imbalance_after": plan.imbalance,
            **m.measured.times.record(),
            "loads_bytes": int(m.traffic.loads.sum()),
            "stores_bytes": int(m.traffic.stores.sum()),
            "moved_bytes": m.traffic.moved,
            "egress_bytes_max": m.traffic.critical,
            "moved_gbps": m.moved_gbps,
            "egress_gbps": m.egress_gbps,
            "critical_gbps": rate(critical_bytes(plan, settings.expert_bytes), p50),
            "bound_us": bound_us,
            "over_bound": p50 / bound_us if bound_us else None,
            "over_copy": over_copy("copy"),
            "over_big_copy": over_copy("big copy"),
            "speedup_over_copies": speedup("copies"),
            "speedup_over_nccl": speedup("nccl"),
            "host_bound_us": m.host_bound_us,
            "host_unbound_us": m.host_unbound_us,
            "wrong_bytes": m.measured.wrong,
        }

    def compared(self) -> Record:
        """Return what modes of this size are compared with."""
        return {
            "baselines": {
                name: {
                    "p50_us": m.p50,
                    "bytes": self._copied.get(name, 0) * self._processes or self._total_bytes,
                    "moved_gbps": self._copy_gbps(name, self._processes)
                    if name in self._copied
                    else None,
                    "wrong_bytes": m.wrong,
                }
                for name, m in self._baselines.items()
            },
            "fixed_cost": self._fixed,
            "sms_needed": sms_needed(
                [(m.measured.mode, m.num_sms, m.egress_gbps) for m in self._modes]
            ),
        }

    def baseline_rows(self) -> list[Record]:
        """Return what the table shows of baselines."""
        compared = self.compared()["baselines"]
        return [
            {
                "mode": name,
                "expert_bytes": self._settings.expert_bytes,
                "moved_bytes": 2 * compared[name]["bytes"] if name in self._copied else None,
                **m.times.record(),
                "moved_gbps": compared[name]["moved_gbps"],
                "wrong_bytes": m.wrong,
            }
            for name, m in self._baselines.items()
        ]


def median_us(
    settings: ReplicateSettings, ranks: Ranks, clock: DeviceClock, plan: Plan, mode: str
) -> float:
    """Return the median time of calls after the warm-up, of the slowest rank. Collective."""
    times = [
        clock.time_us(lambda: ranks.call(plan, mode), TIMED_CALLS)
        for _ in range(settings.warmup + settings.iters)
    ]
    return slowest(float(np.median(times[settings.warmup :])), ranks.loopback)


def sms_needed(curve: Sequence[tuple[str, int, float]]) -> list[Record]:
    """Return for each mode the blocks at which the busiest rank sends at each of the goals.

    ``curve`` has mode, blocks of a rank and GB/s of egress.
    """
    found = []
    for name in dict.fromkeys(mode for mode, *_ in curve):
        own = [(sms, gbps) for mode, sms, gbps in curve if mode == name]
        goals = {str(goal): interpolate_sms(own, goal) for goal in EGRESS_GOALS}
        found.append({"mode": name, "curve": [list(point) for point in own], "sms": goals})
    return found


def _device_table(settings: ReplicateSettings) -> RecordTable:
    bound = settings.link_gbps is not None or settings.gate.max_over_bound is not None
    columns = [
        Column("mode", "", _mode),
        *([Column("size", "(B)", "expert_bytes")] if settings.sweep else []),
        Column("SMs", "", "num_sms"),
        Column("moved", "(B)", "moved_bytes"),
        *_time_columns(settings.times),
        Column("moved/s", "(GB/s)", "moved_gbps", ".1f"),
        Column("egress", "(GB/s)", "egress_gbps", ".1f"),
        Column("critbw", "(GB/s)", "critical_gbps", ".1f"),
        *([Column("time", "/bound", "over_bound", ".3f")] if bound else []),
        Column("copy", "/rate", "over_copy", ".3f"),
        Column("big", "/rate", "over_big_copy", ".3f"),
        Column("copies", "/time", "speedup_over_copies", ".2f"),
        Column("nccl", "/time", "speedup_over_nccl", ".2f"),
        Column("host", "(us)", "host_bound_us", ".1f"),
        Column("unbound", "(us)", "host_unbound_us", ".1f"),
        Column("#wrong", "(B)", "wrong_bytes"),
        *([Column("gate", "", _verdict)] if settings.gate else []),
    ]
    return RecordTable(columns, _DEVICE_WIDTH if settings.sweep else 0)


def _describe_fixed(compared: Record) -> list[str]:
    """Return the lines below the table of one size: fixed costs and blocks that are needed."""
    fixed = compared["fixed_cost"]
    tile_us = _show(fixed["one_tile_through_a_hub_us"])
    lines = [
        f"# empty plan {fixed['empty_plan_us']:.1f} us, one tile through a hub {tile_us} us;"
        f" host {fixed['host_bound_us']:.1f} us a call, {fixed['host_unbound_us']:.1f} us unbound"
    ]
    for needed in compared["sms_needed"]:
        goals = ", ".join(f"{_show(sms)} for {goal} GB/s" for goal, sms in needed["sms"].items())
        lines.append(f"# SMs of a rank, {needed['mode']}: {goals} of egress")
    return lines


def _show(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
