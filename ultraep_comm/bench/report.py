"""What a run of replicate or reduce on the CPU finds; bench/METRICS.md has the formulas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ultraep_comm.bench.figures import Times, critical_bytes, link_bound_us, rate
from ultraep_comm.bench.gate import Gate
from ultraep_comm.bench.machine import describe_machine, find_commit
from ultraep_comm.bench.settings import ReplicateSettings
from ultraep_comm.bench.sizes import format_size
from ultraep_comm.bench.skew import rank_imbalance
from ultraep_comm.plan import Plan
from ultraep_comm.schedule import transfer_bound


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One transfer's figures over all ranks.

    Attributes:
        mode: as asked for.
        chosen: what the library made of it.
        times: int64 ``[iters]`` nanoseconds.
        rank_times: ``[G]`` nanoseconds, each rank's own mean over iterations.
        wrong_bytes: over all ranks and all checked iterations.
    """

    mode: str
    chosen: str
    times: NDArray[np.int64]
    rank_times: NDArray[np.float64]
    wrong_bytes: int

    def time_us(self, percentile: float) -> float:
        """Return a percentile of the iteration times in microseconds."""
        return float(np.percentile(self.times, percentile)) / 1e3

    @property
    def in_us(self) -> Times:
        """Return the times in microseconds."""
        return Times(iterations=self.times / 1e3, ranks=self.rank_times / 1e3)


@dataclass(frozen=True, kw_only=True, eq=False)
class SizeRun:
    """One size with one number of workers.

    Attributes:
        settings: of this size alone.
        plan: what was transferred.
        num_sms: workers of a rank; None: the engine's default.
        modes: of the library.
        user: what a user would do.
        machine: what the machine can do.
    """

    settings: ReplicateSettings
    plan: Plan
    num_sms: int | None
    modes: Sequence[Measurement]
    user: Measurement
    machine: Measurement

    @property
    def total_bytes(self) -> int:
        """Return what a call has to deliver."""
        return self.plan.num_replicas * self.settings.expert_bytes

    @property
    def wrong_bytes(self) -> int:
        """Return those of all rows."""
        return sum(m.wrong_bytes for m in (*self.modes, self.user, self.machine))

    def over_bound(self, m: Measurement) -> tuple[float | None, float | None]:
        """Return the bound in microseconds and the time over it; None: there is nothing to move.

        Ranks of one machine share its memory, so without a link's rate the bound is the time of
        ``machine``, and the ratio is paired by iterations.
        """
        link_gbps = self.settings.link_gbps
        if not self.plan.num_replicas:
            return None, None
        if link_gbps is None:
            return self.machine.time_us(50), paired_ratio(self.machine, m)
        bound = link_bound_us(self.plan, self.settings.expert_bytes, link_gbps)
        return bound, m.time_us(50) / bound

    def over_model(self, m: Measurement) -> float | None:
        """Return the schedule's time in the model over its bound; None: there is nothing to move.

        bench/METRICS.md, "The model and its bound".
        """
        bound = transfer_bound(self.plan.slot_expert, home=self.plan.home)
        if not bound:
            return None
        return max(self.settings.busiest_rank(self.plan, m.chosen), self.plan.max_imports) / bound

    def records(self, gate: Gate) -> list[dict[str, Any]]:
        """Return one JSON record for each mode of the library, judged by the gate."""
        return [self._record(m, gate) for m in self.modes]

    def baselines(self) -> list[dict[str, Any]]:
        """Return one JSON record for each thing that modes are compared with."""
        return [self._moved(m) for m in (self.user, self.machine)]

    def _record(self, m: Measurement, gate: Gate) -> dict[str, Any]:
        settings, plan = self.settings, self.plan
        user, machine = baseline_key(self.user.mode), baseline_key(self.machine.mode)
        bound_us, over_bound = self.over_bound(m)
        record = {
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
            **self._moved(m),
            "over_model": self.over_model(m),
            "bound_us": bound_us,
            "over_bound": over_bound,
            f"over_{machine}": paired_ratio(m, self.machine),
            f"{user}_time_us": self.user.time_us(50),
            f"speedup_over_{user}": paired_ratio(m, self.user),
        }
        return {**record, "gate": gate.judge(record)}

    def _moved(self, m: Measurement) -> dict[str, Any]:
        """Return what a record says of a row, whoever moves the bytes."""
        expert_bytes, p50 = self.settings.expert_bytes, m.time_us(50)
        return {
            "mode": m.mode,
            "num_sms": self.num_sms,
            "expert_bytes": expert_bytes,
            "replicas": self.plan.num_replicas,
            **m.in_us.record(),
            "algbw_gbps": rate(self.total_bytes, p50),
            "critical_gbps": rate(critical_bytes(self.plan, expert_bytes), p50),
            "wrong_bytes": m.wrong_bytes,
        }


def paired_ratio(ours: Measurement, other: Measurement) -> float:
    """Return the median over iterations of the other's time over ours."""
    return float(np.median(other.times / np.maximum(ours.times, 1)))


def baseline_key(mode: str) -> str:
    """Return the name of a baseline in the names of figures."""
    return mode.replace("+", "_")


def imbalance_before(settings: ReplicateSettings) -> float:
    """Return the busiest rank's tokens over the mean, without replicas."""
    return rank_imbalance(settings.load.sum(axis=0, dtype=np.int64), settings.num_ranks)


def make_document(
    settings: ReplicateSettings,
    records: Sequence[dict[str, Any]],
    baselines: Sequence[dict[str, Any]],
    places: Sequence[dict[str, Any]],
    header: str,
) -> dict[str, Any]:
    """Return the records with what they were measured on, and all that was printed besides."""
    return {
        "header": header.splitlines(),
        "records": list(records),
        "baselines": list(baselines),
        "machine": describe_machine(),
        "topology": list(places),
        "commit": find_commit(),
        "gate": describe_gate(settings.gate, records),
        "settings": describe_settings(settings),
    }


def describe_gate(gate: Gate, records: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the limits of a gate and whether all records keep them; None: there is none."""
    return {**gate.describe(), "met": not gate.explain(records)} if gate else None


def describe_settings(settings: ReplicateSettings) -> dict[str, Any]:
    """Return what JSON says of the arguments; ``segments`` are those of the first size."""
    return {
        "load": settings.load_source,
        "segments": settings.segments,
        "sizes": [sum(segments.values()) for segments in settings.sizes],
        "tile_bytes": settings.tile_bytes,
        "num_sms": list(settings.num_sms),
        "fabric": settings.fabric,
        "link_gbps": settings.link_gbps,
        "times": list(settings.times),
        "iters": settings.iters,
        "warmup": settings.warmup,
        "check": settings.check,
        "seed": settings.seed,
        **settings.more,
    }


def describe_run(command: str) -> list[str]:
    """Return the first lines of a header: the version, the command and the machine."""
    machine = describe_machine()
    memory = format_size(int(machine["memory_bytes"]))
    return [
        f"ultraep_comm {machine['ultraep_comm']}, commit {find_commit()}: {command}",
        f"machine: {machine['cpu']}, {machine['cores']} cores, {memory}, {machine['kernel']};"
        f" Python {machine['python']}, torch {machine['torch']}",
    ]
