"""Every planner on the same loads. bench/METRICS.md defines the figures."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from studies.against import AgainstSettings
from studies.loads import make_loads
from studies.options import EXACT_TARGET
from studies.peers import PEERS
from studies.peers.relay import predict_relay
from ultraep_comm.bench.commands.plan import PlanSize
from ultraep_comm.bench.commands.plan.cells import (
    Loads,
    describe_certificates,
    describe_loads,
    each_cell,
    plan_load,
    show_certificates,
    time_core_us,
)
from ultraep_comm.bench.loads import rank_imbalance
from ultraep_comm.bench.measure import figures_of
from ultraep_comm.bench.report import Record, Report
from ultraep_comm.bench.sizes import format_size
from ultraep_comm.bench.table import Column
from ultraep_comm.model import predict
from ultraep_comm.plan.certificate import verify_plan
from ultraep_comm.plan.plan import Plan

MACHINE = "nvl72"
EXPERT_BYTES = 36 << 20  # 37.75 MB: Qwen3-235B in bf16


def run(settings: AgainstSettings, report: Report) -> int:
    """Compare planners; return the exit status."""
    trace = f"; {settings.trace_file.name}, every step and layer" if settings.trace_file else ""
    report.header(
        "against",
        [
            f"{describe_loads(settings.tokens, settings.topk)}, {settings.seeds} of a family"
            + trace,
            f"modelled: experts of {format_size(EXPERT_BYTES)} on {MACHINE}, each system in its own"
            " way; planning: ours in C++, our readings of others in Python, which says nothing of"
            " their own speed",
            *(f"{name}: {PEERS[name].reference}" for name in settings.peers),
        ],
    )
    records = [
        record
        for size, family, loads in each_cell(settings, report, make_loads)
        for record in compare(
            size, family, loads, settings.target, settings.peers, certify=settings.certify
        )
    ]
    report.columns(COLUMNS)
    report.add(records, gated=False)
    if settings.certify:
        show_certificates(report, records)
    return report.finish(more={"modelled_machine": MACHINE, "modelled_bytes": EXPERT_BYTES})


def compare(
    size: PlanSize,
    family: str,
    loads: Loads,
    target: float,
    peers: Sequence[str],
    *,
    certify: bool = False,
) -> list[Record]:
    """Return a record for each planner that applies to the size: ours, ours exact, the peers.

    ``certify`` adds certificates. All plans are verified with and without.
    """
    before = {
        "op": "plan_against",
        **size.describe(),
        "family": family,
        "vectors": len(loads),
        "imbalance_before": float(np.mean([rank_imbalance(x, size.num_ranks) for x in loads])),
    }
    records = []
    for name, goal in (("ours", target), ("ours exact", EXACT_TARGET)):
        ours = [(plan_load(size, load, goal), load) for load in loads]
        times = [time_core_us(size, load, goal) for load in loads]
        judged = judge(ours, name, "hubs", certify=certify)
        records.append({**before, **judged, **_planning(times, "C++")})
    for name in peers:
        peer = PEERS[name]
        theirs, times = [], []
        for load in loads:
            start = time.perf_counter_ns()
            placed = peer.place(load, size.home, size.num_ranks, size.slots_per_rank)
            times.append((time.perf_counter_ns() - start) / 1e3)
            if placed is not None:
                theirs.append((placed.plan(size.home), load))
        if theirs:
            judged = judge(theirs, name, peer.transfer, certify=certify)
            records.append({**before, **judged, **_planning(times, "Python")})
    return records


def judge(
    plans: Sequence[tuple[Plan, NDArray[np.int64]]],
    planner: str,
    transfer: str,
    *,
    certify: bool = False,
) -> Record:
    """Return the figures of one planner's plans, each with its load, under its own transfer.

    Raises:
        InvalidPlanError: a plan breaks a rule, or is not of its load.
    """
    found = [transfer_times_us(plan, transfer) for plan, _ in plans]
    certificates = [verify_plan(plan, load) for plan, load in plans]

    def mean(figures: Iterable[float]) -> float:
        return float(np.mean(list(figures)))

    return {
        "planner": planner,
        "transfer": transfer,
        "imbalance": figures_of([float(one.imbalance) for one in certificates], "mean", "worst"),
        "exact": sum(one.is_exact for one in certificates),
        "replicas": mean(one.num_replicas for one in certificates),
        "slots_used": max(one.max_imports for one in certificates),
        "max_exports": mean(one.max_exports for one in certificates),
        "max_imports": mean(one.max_imports for one in certificates),
        "max_copies": mean(_max_copies(plan) for plan, _ in plans),
        "transfer_bound": mean(float(one.transfer_experts) for one in certificates),
        "bound_us": mean(bound for _, bound in found),
        "time_us": figures_of([us for us, _ in found], "mean", "worst"),
        "certified": describe_certificates(certificates) if certify else None,
    }


def transfer_times_us(plan: Plan, transfer: str) -> tuple[float, float]:
    """Return the modelled time of a plan's transfer and its bound, in microseconds."""
    if transfer == "none":
        return 0.0, 0.0
    if transfer == "relay":
        found = predict_relay(plan, EXPERT_BYTES, MACHINE)
    else:
        mode = "auto" if transfer == "hubs" else transfer
        found = predict(plan, EXPERT_BYTES, MACHINE, mode)
    return found.time_us, found.bound_us


def _max_copies(plan: Plan) -> int:
    """Return the most replicas of all experts of one home: what it sends without hubs."""
    slots = plan.slot_expert.numpy()
    sent = np.bincount(plan.home.numpy()[slots[slots >= 0]], minlength=plan.num_ranks)
    return int(sent.max())


def _planning(times: Sequence[float], language: str) -> dict[str, Any]:
    return {"plan_us": figures_of(times, "p50"), "planned_in": language}


COLUMNS = (
    Column("size", "G/E/S", "size"),
    Column("load", "", "family"),
    Column("loads", "", "vectors"),
    Column("before", "mean", "imbalance_before", ".2f"),
    Column("planner", "", "planner"),
    Column("imbal", "mean", "imbalance.mean", ".4f"),
    Column("imbal", "worst", "imbalance.worst", ".4f"),
    Column("exact", "loads", "exact"),
    Column("replicas", "mean", "replicas", ".1f"),
    Column("slots", "used", "slots_used"),
    Column("max k", "mean", "max_exports", ".2f"),
    Column("max in", "mean", "max_imports", ".2f"),
    Column("copies", "mean", "max_copies", ".1f"),
    Column("T*", "mean", "transfer_bound", ".2f"),
    Column("transfer", "how", "transfer"),
    Column("transfer", "mean us", "time_us.mean", ".0f"),
    Column("transfer", "worst us", "time_us.worst", ".0f"),
    Column("plan", "p50 us", "plan_us.p50", ".1f"),
    Column("plan", "in", "planned_in"),
)
