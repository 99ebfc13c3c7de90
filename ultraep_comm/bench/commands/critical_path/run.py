"""The measurement of ``critical-path``. bench/METRICS.md defines the figures."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import numpy as np

from ultraep_comm.bench.clock import Meter, own_meter
from ultraep_comm.bench.commands.critical_path import PathSettings
from ultraep_comm.bench.commands.critical_path.calls import (
    BIG_COPY,
    HOST_PLAN,
    Expected,
    PathCalls,
    Variant,
)
from ultraep_comm.bench.inside import launch_counts
from ultraep_comm.bench.loads import rank_imbalance
from ultraep_comm.bench.measure import (
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


def run(settings: PathSettings, report: Report, meter: Meter | None = None) -> int:
    """Measure; return the exit status.

    Raises:
        UltraEPError: there is no device, a group could not be created, or a call failed.
    """
    meter = meter or own_meter(settings.engine)
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
    rows, plans, bound_us = measure_rows(settings, ranks, report)
    ranks.close()
    bound = "-" if bound_us is None else f"{bound_us:.1f}"
    report.note(
        f"plans (medians): {plans['replicas']:g} replicas, imbalance"
        f" {plans['imbalance_before']:.3f} before, {plans['imbalance_after']:.3f} after, transfer"
        f" bound {plans['transfer_bound']:.2f} experts, {bound} us"
    )
    report.columns(_COLUMNS)
    report.add(rows, gated=False)
    return report.finish(
        wrong=sum(row["wrong_bytes"] + row["wrong_values"] for row in rows),
        more={"plans": {**plans, "bound_us": bound_us}},
    )


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


def measure_rows(
    settings: PathSettings, ranks: WeightRanks, report: Report
) -> tuple[list[Record], dict[str, float], float | None]:
    """Time all variants, interleaved. Collective, but in loopback.

    Returns:
        A JSON record for each variant, medians over the plans, and the bound of their transfers in
        microseconds; None: the link rate is unknown.
    """
    calls, payload = PathCalls(ranks, settings), Payload(settings.seed, settings.segments)
    clock, group = ranks.clock(1, lined_up=True), ranks.groups[0]
    expected, drawn = calls.prepare(0), -settings.warmup - 1
    variants = calls.variants()
    shape = (len(variants), settings.iters)
    spans, host = np.zeros((2, *shape)), np.zeros(shape)
    wrong, counts = np.zeros((2, 2, len(variants)), np.int64)  # bytes, integers; kernels, copies
    plans = np.zeros((len(_OF_PLANS), settings.iters))
    last: dict[str, Any] = {}  # of the last run

    def submit(variant: Variant) -> None:
        before, start = launch_counts(group), time.perf_counter_ns()
        found = variant.run()
        took = (time.perf_counter_ns() - start) / 1e3
        launched = np.subtract(launch_counts(group), before)
        last.update(found=found, host_us=took, counts=variant.counts or launched)

    for turn in interleave(settings, len(variants), report.progress, "iterations"):
        i, v, variant = turn.i, turn.item, variants[turn.item]
        if drawn != i:
            expected, drawn = calls.prepare(i + settings.warmup), i
            if i >= 0:
                plans[:, i] = _describe(expected)
        ranks.fill(expected.plan, payload, turn.epoch)
        ranks.mark_slots()
        took = clock.time_us(partial(submit, variant))
        found = last["found"]
        if variant.copy is not None:
            wrong[0, v] += variant.copy.count_wrong(payload, turn.epoch)
        elif found.fills_slots and turn.checked:
            wrong[0, v] += ranks.count_wrong(expected.plan, payload, turn.epoch)
        wrong[1, v] += found.count_wrong(expected)
        counts[:, v] = np.maximum(counts[:, v], last["counts"])
        if i >= 0:
            host_us = last["host_us"] / (1 if variant.is_graph else len(ranks.groups))
            spans[1, v, i], host[v, i] = took, host_us
    times = times_of(gather(spans, ranks.loopback), one_clock=False)
    host = gather(host, ranks.loopback).max(axis=0)
    wrong = add_up(wrong, ranks.loopback)
    medians = dict(zip(_OF_PLANS, np.median(plans, axis=1).tolist(), strict=True))
    p50 = {variant.name: t.get("p50") for variant, t in zip(variants, times, strict=True)}
    bound_us = None
    if BIG_COPY in p50:  # on one GPU: the replicas at its rate
        moved = medians["replicas"] * settings.expert_bytes
        bound_us = moved * p50[BIG_COPY] / ranks.meter.big_bytes
    elif settings.link_gbps is not None:
        link_us = settings.expert_bytes / settings.link_gbps / 1e3
        bound_us = medians["transfer_bound"] * link_us
    rows = []
    for v, variant in enumerate(variants):
        took, host_plan = p50[variant.name], p50.get(HOST_PLAN)
        bound = bound_us if variant.is_whole else None
        row = {
            "op": "critical-path",
            "row": variant.name,
            "engine": "cuda",
            "fabric": settings.fabric,
            "ranks": settings.num_ranks,
            "experts": settings.num_experts,
            "slots": settings.slots,
            "expert_bytes": settings.expert_bytes,
            "tokens": settings.tokens,
            "topk": settings.topk,
            **times[v].record(),
            "host_us": float(np.median(host[v])) if variant.is_async else None,
            "kernels": int(counts[0, v]),
            "copies": int(counts[1, v]),
            "over_bound": took / bound if bound else None,
            "bound_over_time": bound / took if bound and took else None,
            "speedup_over_host_plan": host_plan / took
            if variant.is_whole and host_plan is not None and took
            else None,
            "wrong_bytes": int(wrong[0, v]),
            "wrong_values": int(wrong[1, v]),
        }
        judged = variant.is_whole and variant.name != HOST_PLAN
        rows.append({**row, "gate": settings.gate.judge(row) if judged else None})
    return rows, medians, bound_us


_OF_PLANS = ("imbalance_before", "imbalance_after", "replicas", "transfer_bound")


def _describe(expected: Expected) -> list[float]:
    plan, load = expected.plan, expected.load.numpy().sum(axis=0, dtype=np.int64)
    before = rank_imbalance(load, plan.num_ranks)
    return [before, plan.imbalance, plan.num_replicas, transfer_bound(plan)]
