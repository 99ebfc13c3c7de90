"""The figures of ``imbalance``. bench/METRICS.md defines them."""

from __future__ import annotations

import torch

from studies.imbalance import ImbalanceSettings
from studies.options import EXACT_TARGET, WORKLOADS
from studies.workloads import workload_load
from ultraep_comm.bench.loads import rank_imbalance
from ultraep_comm.bench.options import DEFAULT_TARGET
from ultraep_comm.bench.report import Record, Report
from ultraep_comm.bench.table import Column
from ultraep_comm.calls.plan import plan_replicas
from ultraep_comm.plan.topology import Topology

TARGETS = {"default": DEFAULT_TARGET, "exact": EXACT_TARGET}


def run(settings: ImbalanceSettings, report: Report) -> int:
    """Print the workloads; return the exit status."""
    report.header(
        "imbalance",
        [
            f"ranks {settings.num_ranks}, experts {settings.experts}, slots {settings.slots};"
            f" {settings.tokens} tokens of each rank to {settings.topk} experts, seed"
            f" {settings.seed}",
            "all ranks route alike; max/mean and population CV of counts",
        ],
    )
    cells = [(name, step) for name in settings.workloads for step in range(settings.steps)]
    report.columns(_COLUMNS)
    for i, (name, step) in enumerate(cells):
        report.progress(i, len(cells), f"{name} step {step}")
        report.add([measure(settings, name, step)], gated=False)
    report.progress(len(cells), len(cells))
    return report.finish()


def measure(settings: ImbalanceSettings, workload: str, step: int) -> Record:
    """Return the record of one step of a workload."""
    num_ranks = settings.num_ranks
    load = workload_load(
        workload,
        num_ranks=num_ranks,
        num_experts=settings.experts,
        topk=settings.topk,
        num_tokens=settings.tokens,
        step=step,
        seed=settings.seed,
    )
    planned = {}
    topology = Topology.make(
        num_ranks=num_ranks, num_experts=settings.experts, slots_per_rank=settings.slots
    )
    for name, target in TARGETS.items():
        plan = plan_replicas(torch.from_numpy(load.copy()), topology=topology, target=target)
        planned[name] = {
            "owner_imbalance": plan.imbalance,
            "imbalance_bound": plan.imbalance_bound,
            "replicas": plan.num_replicas,
            "max_exports": plan.max_exports,
            "max_imports": plan.max_imports,
        }
    return {
        "op": "imbalance",
        "workload": workload,
        "name": WORKLOADS[workload],
        "ranks": num_ranks,
        "experts": settings.experts,
        "slots": settings.slots,
        "topk": settings.topk,
        "tokens": settings.tokens,
        "step": step,
        "assignments": int(load.sum()),
        "expert_imbalance": float(load.max() / load.mean()),
        "expert_cv": float(load.std() / load.mean()),
        "source_imbalance": 1.0,  # every rank has the same tokens
        "owner_imbalance": rank_imbalance(load, num_ranks),
        "expert_counts": load.tolist(),
        "planned": planned,
    }


_COLUMNS = (
    Column("workload", "", "name"),
    Column("step", "", "step"),
    Column("tokens", "", "assignments"),
    Column("expert", "max/mean", "expert_imbalance", ".3f"),
    Column("expert", "CV", "expert_cv", ".3f"),
    Column("source", "max/mean", "source_imbalance", ".3f"),
    Column("owner", "max/mean", "owner_imbalance", ".3f"),
    *(
        column
        for name, target in TARGETS.items()
        for column in (
            Column(f"{target:g}:", "max/mean", f"planned.{name}.owner_imbalance", ".4f"),
            Column("replicas", "", f"planned.{name}.replicas"),
        )
    ),
)
