"""The measurement of ``critical-path``. bench/METRICS.md defines the figures."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ultraep_comm.bench.clock import DeviceClock, Meter, own_gpu
from ultraep_comm.bench.commands.critical_path import PathSettings
from ultraep_comm.bench.commands.critical_path.calls import Expected, Found, PathCalls, Variant
from ultraep_comm.bench.commands.critical_path.ids import draw_ids
from ultraep_comm.bench.inside import launch_counts
from ultraep_comm.bench.loads import rank_imbalance
from ultraep_comm.bench.measure import (
    Times,
    add_up,
    describe_link,
    gather,
    interleave,
    times_of,
    transfer_bound,
    with_link,
)
from ultraep_comm.bench.payload import Payload
from ultraep_comm.bench.ranks import TILE_BYTES, WeightRanks
from ultraep_comm.bench.report import Record, Report, describe_rounds
from ultraep_comm.bench.sizes import describe_segments
from ultraep_comm.bench.table import Column

BIG_COPY, HOST_PLAN = "big copy", "host plan"
WHOLE_PATH = (
    *("path", "path at once", "path + reroute", "path at once + reroute"),
    *("graph", "graph at once", "graph + reroute", "graph at once + reroute"),
    HOST_PLAN,
)


def run(settings: PathSettings, report: Report) -> int:
    """Measure; return the exit status.

    Raises:
        UltraEPError: there is no device, a group could not be created, or a call failed.
    """
    return run_on(own_gpu(), settings, report)


def run_on(meter: Meter, settings: PathSettings, report: Report) -> int:
    """Measure on a device; see :func:`run`."""
    settings = report.settings = with_link(settings, meter)
    ranks = WeightRanks(
        meter,
        num_ranks=settings.num_ranks,
        num_experts=settings.num_experts,
        fabric=settings.fabric,
        slots=settings.slots,
        segments=settings.segments,
        tile_bytes=settings.tile_bytes or TILE_BYTES,
        num_sms=meter.num_sms(settings.num_sms, settings.ranks_here),
    )
    report.place(ranks.groups[0], meter.describe())
    report.header(
        f"critical-path, engine cuda, fabric {settings.fabric}",
        [
            f"ranks {settings.num_ranks}, experts {settings.num_experts}, slots {settings.slots},"
            f" expert {describe_segments(settings.segments)}, mode {settings.mode}",
            f"ids: {settings.tokens} tokens of each rank to {settings.topk} experts,"
            f" {settings.source}",
            f"{describe_rounds(settings)}; fresh ids in each",
            *describe_link(settings),
        ],
    )
    found = Measurement(meter, settings, ranks, report).run()
    ranks.close()
    bound_us = found.bound_us(settings)
    bound = "-" if bound_us is None else f"{bound_us:.1f}"
    report.note(
        f"plans (medians): {np.median(found.replicas):g} replicas, imbalance"
        f" {np.median(found.before):.3f} before, {np.median(found.after):.3f} after, transfer bound"
        f" {np.median(found.transfer):.2f} experts, {bound} us"
    )
    report.columns(_COLUMNS)
    report.add(make_records(settings, found), gated=False)
    plans = {
        "imbalance_before": float(np.median(found.before)),
        "imbalance_after": float(np.median(found.after)),
        "replicas": float(np.median(found.replicas)),
        "transfer_bound": float(np.median(found.transfer)),
        "bound_us": bound_us,
    }
    return report.finish(
        wrong=sum(row.wrong_bytes + row.wrong_values for row in found.rows),
        more={"plans": plans},
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class PathRow:
    """The result of timing one variant.

    Attributes:
        name: of the row.
        times: on the device.
        host_us: ``[iters]``, host time to submit; None if the host waited for the device.
        kernels: counted launches of one rank.
        copies: counted copies to the device of one rank.
        wrong_bytes: of slots, over all ranks and checked iterations.
        wrong_values: integers of loads, plans and ids that differ from the host's, over all
            iterations.
    """

    name: str
    times: Times
    host_us: NDArray[np.float64] | None
    kernels: int
    copies: int
    wrong_bytes: int
    wrong_values: int

    @property
    def p50(self) -> float:
        """Return the median in microseconds."""
        return self.times.get("p50")


@dataclass(frozen=True, kw_only=True, eq=False)
class PathRun:
    """All results; arrays have an entry for each iteration.

    Attributes:
        rows: one for each variant.
        before: imbalance without replicas.
        after: imbalance under the plan.
        replicas: filled slots.
        transfer: T, in experts over one link.
        copy_bytes: of the row "big copy"; 0 without that row.
    """

    rows: list[PathRow]
    before: NDArray[np.float64]
    after: NDArray[np.float64]
    replicas: NDArray[np.float64]
    transfer: NDArray[np.float64]
    copy_bytes: int

    def p50(self, name: str) -> float | None:
        """Return a row's median; None if there is no such row."""
        return next((row.p50 for row in self.rows if row.name == name), None)

    def bound_us(self, settings: PathSettings) -> float | None:
        """Return the bound of the median transfer; None if the link rate is unknown.

        On one GPU: the time to copy the replicas at the rate of the big copy. On several: T * W
        over the link rate.
        """
        copied = self.p50(BIG_COPY)
        if copied is not None:
            moved = float(np.median(self.replicas)) * settings.expert_bytes
            return moved * copied / self.copy_bytes
        if settings.link_gbps is None:
            return None
        return float(np.median(self.transfer)) * settings.expert_bytes / settings.link_gbps / 1e3


def make_records(settings: PathSettings, found: PathRun) -> list[Record]:
    """Return a JSON record for each row. The gate judges whole paths planned on the device."""
    records = []
    for row in found.rows:
        whole = row.name in WHOLE_PATH
        bound_us, host_plan = found.bound_us(settings), found.p50(HOST_PLAN)
        record = {
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
            **row.times.record(),
            "host_us": None if row.host_us is None else float(np.median(row.host_us)),
            "kernels": row.kernels,
            "copies": row.copies,
            "over_bound": row.p50 / bound_us if whole and bound_us else None,
            "bound_over_time": bound_us / row.p50 if whole and bound_us and row.p50 else None,
            "speedup_over_host_plan": host_plan / row.p50
            if whole and host_plan is not None and row.p50
            else None,
            "wrong_bytes": row.wrong_bytes,
            "wrong_values": row.wrong_values,
        }
        judged = whole and row.name != HOST_PLAN
        records.append({**record, "gate": settings.gate.judge(record) if judged else None})
    return records


_COLUMNS = (
    Column("row", "", "row"),
    Column("time p50", "(us)", "time_us.p50", ".1f"),
    Column("max", "(us)", "time_us.max", ".1f"),
    Column("host", "(us)", "host_us", ".1f"),
    Column("kernels", "", "kernels"),
    Column("copies", "", "copies"),
    Column("bound", "/time", "bound_over_time", ".3f"),
    Column("host plan", "/time", "speedup_over_host_plan", ".2f"),
    Column("#wrong", "(B)", "wrong_bytes"),
    Column("#values", "wrong", "wrong_values"),
)


class Measurement:
    """The interleaved iterations over all variants."""

    def __init__(
        self, meter: Meter, settings: PathSettings, ranks: WeightRanks, report: Report
    ) -> None:
        """Prepare; nothing is measured yet."""
        self._meter, self._settings, self._ranks, self._report = meter, settings, ranks, report
        self._payload = Payload(settings.seed, settings.segments)
        self._calls = PathCalls(ranks, settings)
        self._clock: DeviceClock = ranks.clock(1, lined_up=True)
        self._took = 0.0  # host time of the last run
        self._found = Found()
        self._counts = (0, 0)

    def run(self) -> PathRun:
        """Measure. Collective, but in loopback."""
        s, loopback = self._settings, self._settings.loopback
        self._expect(0)
        variants = self._calls.variants()
        spans, host = np.zeros((2, len(variants), s.iters)), np.zeros((len(variants), s.iters))
        wrong = np.zeros((2, len(variants)), np.int64)  # bytes, integers
        counts: list[set[tuple[int, int]]] = [set() for _ in variants]
        loads = np.zeros((4, s.iters))  # imbalance before and after, replicas, transfer bound
        expected, drawn = None, -1
        for turn in interleave(s, len(variants), self._report.progress, "iterations"):
            i, v = turn.i, turn.item
            if expected is None or drawn != i:
                expected, drawn = self._expect(i + s.warmup), i
                if i >= 0:
                    loads[:, i] = _describe(expected)
            took = self._time(variants[v], expected, turn.epoch)
            wrong[:, v] += self._count_wrong(variants[v], expected, turn.epoch, turn.checked)
            counts[v].add(variants[v].counts or self._counts)
            if i >= 0:
                spans[1, v, i], host[v, i] = took, self._took
        times = times_of(gather(spans, loopback), one_clock=False)
        host = gather(host, loopback).max(axis=0)
        wrong = add_up(wrong, loopback)
        rows = [
            PathRow(
                name=variant.name,
                times=times[v],
                host_us=host[v] if variant.is_async else None,
                kernels=max(counts[v])[0],
                copies=max(counts[v])[1],
                wrong_bytes=int(wrong[0, v]),
                wrong_values=int(wrong[1, v]),
            )
            for v, variant in enumerate(variants)
        ]
        return PathRun(
            rows=rows,
            before=loads[0],
            after=loads[1],
            replicas=loads[2],
            transfer=loads[3],
            copy_bytes=self._meter.big_bytes if loopback else 0,
        )

    def _expect(self, turn: int) -> Expected:
        """Draw fresh ids, and put them on the device."""
        expected = Expected.of(draw_ids(self._settings, turn), self._ranks.groups)
        self._calls.prepare(expected)
        self._meter.synchronize()
        return expected

    def _time(self, variant: Variant, expected: Expected, epoch: int) -> float:
        """Run a variant once, with fresh bytes; return the device time in microseconds."""
        self._ranks.fill(expected.plan, self._payload, epoch)
        self._ranks.mark_slots()
        group, ranks_here = self._ranks.groups[0], len(self._ranks.groups)

        def run() -> None:
            before = launch_counts(group)
            start = time.perf_counter_ns()
            self._found = variant.run()
            self._took = (time.perf_counter_ns() - start) / 1e3
            self._took /= 1 if variant.is_graph else ranks_here
            kernels, copies = np.subtract(launch_counts(group), before).tolist()
            self._counts = (kernels, copies)

        return self._clock.time_us(run)

    def _count_wrong(
        self, variant: Variant, expected: Expected, epoch: int, checked: bool
    ) -> tuple[int, int]:
        """Return wrong bytes and wrong integers."""
        if variant.copy is not None:
            return variant.copy.count_wrong(self._payload, epoch), 0
        wrong_bytes = 0
        if self._found.fills_slots and checked:
            wrong_bytes = self._ranks.count_wrong(expected.plan, self._payload, epoch)
        return wrong_bytes, self._found.count_wrong(expected)


def _describe(expected: Expected) -> NDArray[np.float64]:
    plan, load = expected.plan, expected.load.numpy().sum(axis=0, dtype=np.int64)
    bound = transfer_bound(plan)
    before = rank_imbalance(load, plan.num_ranks)
    return np.array([before, plan.imbalance, plan.num_replicas, bound], np.float64)
