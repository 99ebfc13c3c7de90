"""The predictions of ``model``. docs/model.md describes the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import numpy as np
from numpy.typing import NDArray

from studies.model import ModelSettings
from studies.model.published import EXPERT_BYTES, PUBLISHED_RUNS, PublishedRun
from studies.peers.relay import predict_relay
from ultraep_comm.bench.commands.plan import PlanSize
from ultraep_comm.bench.commands.plan.cells import describe_loads, each_cell, plan_load
from ultraep_comm.bench.measure import figures_of
from ultraep_comm.bench.report import Record, Report
from ultraep_comm.bench.sizes import format_size
from ultraep_comm.bench.table import Column, format_records
from ultraep_comm.model import Machine, predict
from ultraep_comm.plan.plan import Plan

WAYS = ("push", "pull", "direct", "relay")
OURS = ("push", "pull")
TARGET_RATIO, TARGET_US = 1.10, 8.0
WORST_RATIO = 1.09


def run(settings: ModelSettings, report: Report) -> int:
    """Predict all times; return the exit status.

    Raises:
        UltraEPError: the machine cannot hold a size's plans.
    """
    m = settings.machine
    tiles = f"{m.tiles_in_flight} tiles of {format_size(m.tile_bytes)} in flight"
    report.header(
        "model",
        [
            f"modelled, not measured: {m.name}, {m.egress_gbps:g} GB/s out and"
            f" {m.ingress_gbps:g} in, {m.hop_us:g} us a hop, {tiles}",
            f"experts of {format_size(settings.expert_bytes)};"
            f" {describe_loads(settings.tokens, settings.topk)},"
            f" {settings.seeds} of a kind",
            "times over the bound T*; relay: two levels, as published",
        ],
    )
    records: list[Record] = []
    over_target: dict[tuple[str, str], list[float]] = {}  # of all loads, by size and mode
    for size, kind, loads in each_cell(settings, report):
        plans = [plan for plan in (plan_load(size, load) for load in loads) if plan.num_replicas]
        if not plans:
            continue
        bound_us, time_us = _predict_all(plans, settings)
        records.append(make_record(size, kind, plans, bound_us, time_us))
        for mode in OURS:
            over = time_us[:, WAYS.index(mode)] / target_us(bound_us)
            over_target.setdefault((str(size), mode), []).extend(over.tolist())
    published = [_predict_published(settings.machine, run) for run in PUBLISHED_RUNS]
    claims = [make_claim(size, mode, over) for (size, mode), over in over_target.items()]
    report.columns(_COLUMNS)
    report.add(records, gated=False)
    report.note(
        f"target: max({TARGET_RATIO:.2f} T*, T* + {TARGET_US:g} us) on average, at most"
        f" {WORST_RATIO} of it in the worst case"
    )
    report.note(*format_records(_CLAIM_COLUMNS, claims).splitlines())
    report.note("published, in us; the model's times are for a plan with these numbers")
    report.note(*format_records(_PUBLISHED_COLUMNS, published).splitlines())
    document = {
        "claims": claims,
        "published": published,
        "modelled_machine": asdict(settings.machine),
    }
    return report.finish(more=document)


def target_us(bound_us: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the target for the mean time of transfers: near the bound, plus latencies."""
    return np.maximum(TARGET_RATIO * bound_us, bound_us + TARGET_US)


def _predict_all(
    plans: Sequence[Plan], settings: ModelSettings
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return bounds ``[plans]`` and times ``[plans, WAYS]``."""
    bounds, times = [], []
    for plan in plans:
        found = [
            predict_relay(plan, settings.expert_bytes, settings.machine)
            if way == "relay"
            else predict(plan, settings.expert_bytes, settings.machine, way)
            for way in WAYS
        ]
        bounds.append(found[0].bound_us)
        times.append([one.time_us for one in found])
    return np.array(bounds), np.array(times)


def make_record(
    size: PlanSize,
    kind: str,
    plans: Sequence[Plan],
    bound_us: NDArray[np.float64],
    time_us: NDArray[np.float64],
) -> Record:
    """Return the JSON record of one size and kind of load, from times ``[plans, WAYS]``."""

    def over(base: NDArray[np.float64], ways: Sequence[str]) -> Record:
        return {w: figures_of(time_us[:, WAYS.index(w)] / base, "mean", "worst") for w in ways}

    return {
        "op": "model",
        "size": str(size),
        "ranks": size.num_ranks,
        "experts": size.num_experts,
        "slots": size.slots_per_rank,
        "load": kind,
        "loads": len(plans),
        "replicas": float(np.mean([plan.num_replicas for plan in plans])),
        "bound_us": float(bound_us.mean()),
        "time_us": {way: float(time_us[:, i].mean()) for i, way in enumerate(WAYS)},
        "over_bound": over(bound_us, WAYS),
        "over_target": over(target_us(bound_us), OURS),
    }


def make_claim(size: str, mode: str, over_target: Sequence[float]) -> Record:
    """Return whether the times of a size in one mode meet the target."""
    found = figures_of(over_target, "mean", "worst")
    holds = found["mean"] <= 1 and found["worst"] <= WORST_RATIO
    return {"size": size, "mode": mode, "over_target": found, "holds": holds}


def _predict_published(machine: Machine, run: PublishedRun) -> Record:
    """Return a published measurement, and the model's times for a similar plan."""
    plan = run.make_plan()
    return {
        "imbalance": run.imbalance,
        "replicas": run.num_replicas,
        "max_replicas": run.max_replicas,
        "published_us": {"direct": run.direct_us, "relay": run.relay_us},
        "model_us": {
            "direct": predict(plan, EXPERT_BYTES, machine, "direct").time_us,
            "relay": predict_relay(plan, EXPERT_BYTES, machine).time_us,
            "push": predict(plan, EXPERT_BYTES, machine, "push").time_us,
        },
    }


_COLUMNS = (
    Column("size", "G/E/S", "size"),
    Column("load", "", "load"),
    Column("loads", "", "loads"),
    Column("replicas", "mean", "replicas", ".1f"),
    Column("T*", "mean us", "bound_us", ".1f"),
    *(
        Column(way if which == "mean" else "", which, f"over_bound.{way}.{which}", ".3f")
        for way in WAYS
        for which in ("mean", "worst")
    ),
)
_CLAIM_COLUMNS = (
    Column("size", "G/E/S", "size"),
    Column("mode", "", "mode"),
    Column("time / target", "mean", "over_target.mean", ".3f"),
    Column("", "worst", "over_target.worst", ".3f"),
    Column("", "holds", "holds"),
)
_PUBLISHED_COLUMNS = (
    Column("64/256/2", "imbalance", "imbalance", ".2f"),
    Column("replicas", "", "replicas"),
    Column("most of", "an expert", "max_replicas"),
    Column("direct", "published", "published_us.direct", ".0f"),
    Column("", "model", "model_us.direct", ".1f"),
    Column("relay", "published", "published_us.relay", ".0f"),
    Column("", "model", "model_us.relay", ".1f"),
    Column("push", "model", "model_us.push", ".1f"),
)
