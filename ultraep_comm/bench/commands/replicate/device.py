"""Time a collective on GPUs, or on one GPU in loopback."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from ultraep_comm.bench.baselines import DeviceCopy
from ultraep_comm.bench.clock import DeviceClock, Meter
from ultraep_comm.bench.commands.replicate import ReplicateSettings, each_size, one_plan
from ultraep_comm.bench.commands.replicate.one_plan import Collective
from ultraep_comm.bench.measure import (
    Measured,
    Transfer,
    critical_bytes,
    link_bound_us,
    rate,
    slowest,
    with_link,
)
from ultraep_comm.bench.ranks import TILE_BYTES, TIMED_CALLS, Ranks
from ultraep_comm.bench.report import Record, Report
from ultraep_comm.bench.table import Column
from ultraep_comm.bench.traffic import Traffic, interpolate_sms
from ultraep_comm.plan.plan import Plan

EGRESS_GOALS = (450, 900)  # GB/s of a rank: one direction of NVLink 4 and of NVLink 5


def run_device(
    meter: Meter, collective: Collective, settings: ReplicateSettings, report: Report
) -> int:
    """Measure every size; return the exit status. Collective, but in loopback.

    Raises:
        UltraEPError: a group could not be created, or a call failed.
    """
    settings = dataclasses.replace(settings, tile_bytes=settings.tile_bytes or TILE_BYTES)
    settings = report.settings = with_link(settings, meter)
    sizes: list[Record] = []
    wrong = 0
    for one in each_size(settings):
        size = DeviceSize(meter, collective, one, report)
        size.run(settings)
        report.columns(_columns(settings), one_plan.least_width(settings))
        report.add(size.records())
        report.add(size.baselines(), gated=False)
        sizes.append({"expert_bytes": one.expert_bytes, **size.others()})
        report.note(*_describe_others(sizes[-1]))
        wrong += size.wrong
    return report.finish(wrong=wrong, more={"sizes": sizes})


@dataclasses.dataclass(frozen=True)
class DeviceMode:
    """One mode with one number of blocks per rank. ``host_..._us`` is the host time of a call."""

    num_sms: int
    measured: Measured
    traffic: Traffic
    host_bound_us: float
    host_unbound_us: float

    @property
    def moved_gbps(self) -> float:
        """Return loads plus stores of all ranks, in GB/s."""
        return rate(self.traffic.moved, self.measured.p50)

    @property
    def egress_gbps(self) -> float:
        """Return the egress of the busiest rank, in GB/s."""
        return rate(self.traffic.critical, self.measured.p50)


class DeviceSize:
    """The measurements of one size."""

    def __init__(
        self, meter: Meter, collective: Collective, settings: ReplicateSettings, report: Report
    ) -> None:
        """Prepare; ``settings`` has this size only."""
        self._meter, self._collective, self._report = meter, collective, report
        self._settings = settings
        self._processes = settings.num_ranks // settings.ranks_here
        self._modes: list[DeviceMode] = []
        self._baselines: dict[str, Measured] = {}
        self._copied: dict[str, int] = {}  # bytes per process, of plain copies
        self._fixed: Record = {}
        self._plan: Plan

    def run(self, whole: ReplicateSettings) -> None:
        """Measure with each number of blocks; the baselines with the first number only.

        ``whole`` has the settings of all sizes, for the header.
        """
        settings, meter, collective = self._settings, self._meter, self._collective
        for num_sms in [meter.num_sms(n, settings.ranks_here) for n in settings.num_sms or (None,)]:
            ranks = collective.make_ranks(meter, settings, num_sms)
            clock = ranks.clock(collective.calls, lined_up=collective.lined_up)
            self._plan = plan = one_plan.begin(whole, ranks, self._report)
            baselines = [] if self._baselines else self._make_baselines(ranks)
            modes, compared = one_plan.time_modes(
                collective, settings, ranks, plan, clock, baselines, self._report
            )
            for m in modes:
                traffic = collective.traffic(settings, plan, m.chosen)
                host_us = self._host_us(ranks, plan, m.mode)
                self._modes.append(DeviceMode(num_sms, m, traffic, *host_us))
            if compared:
                self._baselines = {m.mode: m for m in compared}
                self._fixed = self._fixed_costs(ranks, clock, num_sms)
            ranks.close()

    def _make_baselines(self, ranks: Ranks) -> list[Transfer]:
        """Return a copy of the plan's bytes, a big copy, and the collective's own baselines."""
        share = self._total_bytes // self._processes
        self._copied = {"copy": max(share, 1), "big copy": self._meter.big_bytes}
        copies = [DeviceCopy(self._meter, name, size) for name, size in self._copied.items()]
        return [*copies, *self._collective.device_baselines(ranks, self._plan)]

    def _host_us(self, ranks: Ranks, plan: Plan, mode: str) -> tuple[float, float]:
        """Return the host time of a call, with bound tensors and with unbound ones."""
        bound, unbound = (
            slowest(ranks.host_us(plan, mode, bound=bound), ranks.loopback)
            for bound in (True, False)
        )
        return bound, unbound

    def _fixed_costs(self, ranks: Ranks, clock: DeviceClock, num_sms: int) -> Record:
        """Return the times of an empty plan and of a single tile, in microseconds."""
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
        """Return the number of wrong bytes, of modes and baselines."""
        modes = sum(m.measured.wrong for m in self._modes)
        return modes + sum(m.wrong for m in self._baselines.values())

    @property
    def _total_bytes(self) -> int:
        return self._plan.num_replicas * self._settings.expert_bytes

    def _copy_gbps(self, name: str, processes: int) -> float:
        """Return loads plus stores of a copy that ``processes`` processes make, in GB/s."""
        return rate(2 * self._copied[name] * processes, self._baselines[name].p50)

    def _bound_us(self) -> float | None:
        """Return the bound of the transfer; None without replicas or without a known rate."""
        settings = self._settings
        if not self._plan.num_replicas:
            return None
        if settings.link_gbps is not None:
            return link_bound_us(self._plan, settings.expert_bytes, settings.link_gbps)
        if not settings.loopback:
            return None
        return self._total_bytes / (self._copy_gbps("big copy", 1) / 2) / 1e3

    def records(self) -> list[Record]:
        """Return a JSON record for each mode and number of blocks."""
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
            "name": m.measured.name,
            "mode": m.measured.mode,
            **one_plan.describe_mode(settings, plan, m.measured),
            "num_sms": m.num_sms,
            "expert_bytes": settings.expert_bytes,
            "replicas": plan.num_replicas,
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

    def others(self) -> Record:
        """Return the JSON fields of this size besides its records."""
        return {
            "fixed_cost": self._fixed,
            "sms_needed": sms_needed(
                [(m.measured.mode, m.num_sms, m.egress_gbps) for m in self._modes]
            ),
        }

    def baselines(self) -> list[Record]:
        """Return a JSON record for each baseline; plain copies load and store their bytes."""
        return [
            {
                "op": "baseline",
                "name": name,
                "mode": name,
                "expert_bytes": self._settings.expert_bytes,
                "bytes": self._copied.get(name, 0) * self._processes or self._total_bytes,
                "moved_bytes": 2 * self._copied[name] * self._processes
                if name in self._copied
                else None,
                **m.times.record(),
                "moved_gbps": self._copy_gbps(name, self._processes)
                if name in self._copied
                else None,
                "wrong_bytes": m.wrong,
            }
            for name, m in self._baselines.items()
        ]


def median_us(
    settings: ReplicateSettings, ranks: Ranks, clock: DeviceClock, plan: Plan, mode: str
) -> float:
    """Return the slowest rank's median time of a call. Collective."""
    times = [
        clock.time_us(lambda: ranks.call(plan, mode), TIMED_CALLS)
        for _ in range(settings.warmup + settings.iters)
    ]
    return slowest(float(np.median(times[settings.warmup :])), ranks.loopback)


def sms_needed(curve: Sequence[tuple[str, int, float]]) -> list[Record]:
    """Return, for each mode, the blocks at which the busiest rank reaches each of EGRESS_GOALS.

    ``curve`` has entries ``(mode, blocks of a rank, GB/s of egress)``.
    """
    found = []
    for name in dict.fromkeys(mode for mode, *_ in curve):
        own = [(sms, gbps) for mode, sms, gbps in curve if mode == name]
        goals = {str(goal): interpolate_sms(own, goal) for goal in EGRESS_GOALS}
        found.append({"mode": name, "curve": [list(point) for point in own], "sms": goals})
    return found


def _columns(settings: ReplicateSettings) -> list[Column]:
    bound = settings.link_gbps is not None or settings.gate.max_over_bound is not None
    return [
        one_plan.MODE,
        *([one_plan.SIZE] * (len(settings.sizes) > 1)),
        Column("SMs", "", "num_sms"),
        Column("moved", "(B)", "moved_bytes"),
        *one_plan.time_columns(settings.times),
        Column("moved/s", "(GB/s)", "moved_gbps", ".1f"),
        Column("egress", "(GB/s)", "egress_gbps", ".1f"),
        Column("critbw", "(GB/s)", "critical_gbps", ".1f"),
        *([one_plan.OVER_BOUND] * bound),
        Column("copy", "/rate", "over_copy", ".3f"),
        Column("big", "/rate", "over_big_copy", ".3f"),
        Column("copies", "/time", "speedup_over_copies", ".2f"),
        Column("nccl", "/time", "speedup_over_nccl", ".2f"),
        Column("host", "(us)", "host_bound_us", ".1f"),
        Column("unbound", "(us)", "host_unbound_us", ".1f"),
        one_plan.WRONG,
        *([one_plan.GATE] * bool(settings.gate)),
    ]


def _describe_others(one: Record) -> list[str]:
    """Return the lines below the table of one size: fixed costs and SMs needed."""
    fixed = one["fixed_cost"]
    tile_us = _show(fixed["one_tile_through_a_hub_us"])
    lines = [
        f"empty plan {fixed['empty_plan_us']:.1f} us, one tile through a hub {tile_us} us;"
        f" host {fixed['host_bound_us']:.1f} us a call, {fixed['host_unbound_us']:.1f} us unbound"
    ]
    for needed in one["sms_needed"]:
        goals = ", ".join(f"{_show(sms)} for {goal} GB/s" for goal, sms in needed["sms"].items())
        lines.append(f"SMs of a rank, {needed['mode']}: {goals} of egress")
    return lines


def _show(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
