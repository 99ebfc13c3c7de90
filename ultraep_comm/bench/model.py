"""The table of modelled transfers. docs/model.md says what is modelled."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ultraep_comm.bench.families import make_loads, tuned_load
from ultraep_comm.bench.model_published import EXPERT_BYTES, PUBLISHED_RUNS
from ultraep_comm.bench.model_report import (
    WAYS,
    ModelRow,
    PublishedRow,
    describe_results,
    format_claims,
    format_model_header,
    format_model_table,
    format_published_table,
    sum_up,
)
from ultraep_comm.bench.model_settings import ModelSettings
from ultraep_comm.bench.outputs import write_outputs
from ultraep_comm.bench.plan_settings import PlanSize
from ultraep_comm.bench.progress import show_progress
from ultraep_comm.model import Machine, predict
from ultraep_comm.model.published import predict_relay
from ultraep_comm.plan import Plan
from ultraep_comm.planning import plan_replicas


def run(settings: ModelSettings) -> int:
    """Predict everything in this process and print; return the exit code, 0.

    Raises:
        UltraEPError: the machine cannot hold a size's plans.
    """
    print(format_model_header(settings), flush=True)
    kinds = [*(f"imbalance{x:g}" for x in settings.imbalances), *settings.families]
    cells = [(size, kind) for size in settings.sizes for kind in kinds]
    rows = []
    for i, (size, kind) in enumerate(cells):
        show_progress(i, len(cells), f"{size} {kind}")
        row = predict_row(settings, size, kind)
        if row is not None:
            rows.append(row)
    show_progress(len(cells), len(cells), "")
    published = [_predict_published(settings.machine, i) for i in range(len(PUBLISHED_RUNS))]
    print(format_model_table(rows), flush=True)
    print(format_claims(sum_up(rows)), flush=True)
    print(format_published_table(published), flush=True)
    document = describe_results(settings, rows, published)
    write_outputs(document, json_path=settings.json, csv_path=settings.csv)
    return 0


def predict_row(settings: ModelSettings, size: PlanSize, kind: str) -> ModelRow | None:
    """Predict all loads of one size and kind; None: there are none, or nothing is replicated."""
    plans = [_plan(size, load) for load in _make_loads(settings, size, kind)]
    plans = [plan for plan in plans if plan.num_replicas]
    if not plans:
        return None
    bounds, times = [], []
    for plan in plans:
        found = [_predict(plan, settings, way) for way in WAYS]
        bounds.append(found[0][1])
        times.append([time for time, _ in found])
    return ModelRow(
        size=size,
        kind=kind,
        replicas=np.array([plan.num_replicas for plan in plans]),
        bound_us=np.array(bounds),
        time_us=np.array(times),
    )


def _make_loads(settings: ModelSettings, size: PlanSize, kind: str) -> Sequence[NDArray[np.int64]]:
    num_tokens = size.num_ranks * settings.tokens
    if not kind.startswith("imbalance"):
        return make_loads(
            kind,
            num_ranks=size.num_ranks,
            num_experts=size.num_experts,
            num_tokens=num_tokens,
            topk=settings.topk,
            seeds=settings.seeds,
        )
    imbalance = float(kind.removeprefix("imbalance"))
    if imbalance >= size.num_ranks:
        return []
    total = num_tokens * settings.topk
    return [
        tuned_load(size.num_ranks, size.num_experts, imbalance, total, seed)
        for seed in range(settings.seeds)
    ]


def _plan(size: PlanSize, load: NDArray[np.int64]) -> Plan:
    return plan_replicas(
        torch.from_numpy(load.copy()),
        slots_per_rank=size.slots_per_rank,
        num_ranks=size.num_ranks,
        home=size.home,
        domains=size.domain,
    )


def _predict(plan: Plan, settings: ModelSettings, way: str) -> tuple[float, float]:
    if way == "relay":
        found = predict_relay(plan, settings.expert_bytes, settings.machine)
    else:
        found = predict(plan, settings.expert_bytes, settings.machine, way)
    return found.time_us, found.bound_us


def _predict_published(machine: Machine, i: int) -> PublishedRow:
    plan = PUBLISHED_RUNS[i].make_plan()
    return PublishedRow(
        run=PUBLISHED_RUNS[i],
        direct_us=predict(plan, EXPERT_BYTES, machine, "direct").time_us,
        relay_us=predict_relay(plan, EXPERT_BYTES, machine).time_us,
        push_us=predict(plan, EXPERT_BYTES, machine, "push").time_us,
    )
