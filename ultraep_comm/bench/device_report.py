"""What a run on GPUs finds; bench/METRICS.md has the formulas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ultraep_comm.bench.figures import Times, critical_bytes, link_bound_us, rate
from ultraep_comm.bench.machine import describe_machine, find_commit
from ultraep_comm.bench.report import describe_gate, describe_settings, imbalance_before
from ultraep_comm.bench.settings import ReplicateSettings
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
        times: on the device, of one call.
        wrong_bytes: over all ranks and all checked iterations.
        traffic: what the call moves.
        host_bound_us: median time that a call keeps the host, with bound weights or gradients.
        host_unbound_us: the same with ones that are checked in every call.
    """

    mode: str
    chosen: str
    num_sms: int
    times: Times
    wrong_bytes: int
    traffic: Traffic
    host_bound_us: float
    host_unbound_us: float

    @property
    def p50(self) -> float:
        """Return the median in microseconds."""
        return self.times.get("p50")

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
        times: of each.
        wrong_bytes: ``[transfers]``.
        copied: bytes that one process copies; 0: the plan's.
    """

    names: list[str]
    times: list[Times]
    wrong_bytes: NDArray[np.int64]
    copied: list[int]

    def p50(self, name: str) -> float | None:
        """Return a transfer's median; None: it was not possible."""
        if name not in self.names:
            return None
        return self.times[self.names.index(name)].get("p50")

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
    """All that was measured of one size; ``settings`` are those of this size alone."""

    settings: ReplicateSettings
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

    def bound_us(self) -> float | None:
        """Return what the transfer cannot go below; None: nothing to move, or no rate is known."""
        settings, base = self.settings, self.baselines
        if not self.plan.num_replicas:
            return None
        if settings.link_gbps is not None:
            return link_bound_us(self.plan, settings.expert_bytes, settings.link_gbps)
        if settings.fabric != "loopback" or base is None:
            return None
        one_way_gbps = base.copy_gbps("big copy", 1) / 2  # it loads and stores
        return self.plan.num_replicas * settings.expert_bytes / one_way_gbps / 1e3


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


def num_processes(settings: ReplicateSettings) -> int:
    """Return how many processes copy."""
    return 1 if settings.fabric == "loopback" else settings.num_ranks


def over_copy(run: ModeRun, base: Baselines, name: str, processes: int) -> float:
    """Return what a mode moves over what a copy moves."""
    copy = base.copy_gbps(name, processes)
    return run.moved_gbps / copy if copy else 0.0


def speedup(run: ModeRun, base: Baselines, name: str) -> float | None:
    """Return how many times as long a baseline takes; None: it was not possible."""
    other = base.p50(name)
    return None if other is None or not run.p50 else other / run.p50


def make_device_records(found: DeviceRun) -> list[dict[str, Any]]:
    """Return one JSON record for each mode and number of SMs, judged by the gate."""
    return [_record(found, m) for m in found.modes]


def _record(found: DeviceRun, m: ModeRun) -> dict[str, Any]:
    base, settings = found.baselines, found.settings
    assert base is not None
    processes, bound_us = num_processes(settings), found.bound_us()
    record = {
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
        "imbalance_before": imbalance_before(settings),
        "imbalance_after": found.plan.imbalance,
        **m.times.record(),
        "loads_bytes": int(m.traffic.loads.sum()),
        "stores_bytes": int(m.traffic.stores.sum()),
        "moved_bytes": m.traffic.moved,
        "egress_bytes_max": m.traffic.critical,
        "moved_gbps": m.moved_gbps,
        "egress_gbps": m.egress_gbps,
        "critical_gbps": rate(critical_bytes(found.plan, settings.expert_bytes), m.p50),
        "bound_us": bound_us,
        "over_bound": m.p50 / bound_us if bound_us else None,
        "over_copy": over_copy(m, base, "copy", processes),
        "over_big_copy": over_copy(m, base, "big copy", processes),
        "speedup_over_copies": speedup(m, base, "copies"),
        "speedup_over_nccl": speedup(m, base, "nccl"),
        "host_bound_us": m.host_bound_us,
        "host_unbound_us": m.host_unbound_us,
        "wrong_bytes": m.wrong_bytes,
    }
    return {**record, "gate": settings.gate.judge(record)}


def make_device_document(
    settings: ReplicateSettings,
    runs: Sequence[DeviceRun],
    records: Sequence[dict[str, Any]],
    places: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    """Return the records with what they were measured on and compared with, size by size."""
    sizes = [{"expert_bytes": run.settings.expert_bytes, **_compared(run)} for run in runs]
    return {
        "records": list(records),
        **_compared(runs[-1]),
        "sizes": sizes,
        "machine": {**describe_machine(), **runs[0].device},
        "topology": list(places),
        "commit": find_commit(),
        "gate": describe_gate(settings.gate, records),
        "settings": describe_settings(settings),
    }


def _compared(found: DeviceRun) -> dict[str, Any]:
    """Return what modes of one size are compared with."""
    base, fixed, settings = found.baselines, found.fixed, found.settings
    assert base is not None
    assert fixed is not None
    processes = num_processes(settings)
    return {
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
    }
