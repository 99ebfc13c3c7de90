"""Modelled time over the bound before and after charging what workers spend, by machine and size.

    python bench/recipes/model_charged.py [--json FILE]

"nvl72-links" charges links and latencies alone; "nvl72" and "gb200" charge what the compiled
kernels spend too. A record is of several loads of one size of group, with experts of one size; its
reduction is of every other load, with gradients of fp32, twice the bytes of the weights.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch

from ultraep_comm import Plan, plan_replicas
from ultraep_comm.bench.loads import make_loads
from ultraep_comm.bench.measure import figures_of
from ultraep_comm.bench.options import check_writable
from ultraep_comm.bench.report import print_records, show_progress
from ultraep_comm.bench.table import Column
from ultraep_comm.model import predict, predict_reduction
from ultraep_comm.plan.topology import Topology

MACHINES = ("nvl72-links", "nvl72", "gb200")
SIZES = ("64/256/2", "64/128/2", "64/128/1", "40/160/4", "72/288/2")
MEGABYTES = (10, 19, 38, 90)
MODES = ("push", "pull", "direct")
KINDS = ("imbalance2", "imbalance4", "zipf1.0", "lognormal")


def make_plans(size: str) -> list[Plan]:
    ranks, experts, slots = map(int, size.split("/"))
    shape = {"num_ranks": ranks, "num_experts": experts}
    topology = Topology.make(**shape, slots_per_rank=slots)
    return [
        plan_replicas(torch.from_numpy(np.array(load)), topology=topology)
        for kind in KINDS
        for load in make_loads(kind, **shape, num_tokens=4096 * ranks, topk=8, seeds=2)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-J", "--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    if options.json:
        check_writable(options.json, "--json")
    plans = {size: make_plans(size) for size in SIZES}
    cells = [(size, mb, machine) for size in plans for mb in MEGABYTES for machine in MACHINES]
    records = []
    for at, (size, mb, machine) in enumerate(cells):
        show_progress(at, len(cells), f"{size}, {mb} MB, {machine}")
        found = {
            mode: [predict(plan, mb * 10**6, machine, mode) for plan in plans[size]]
            for mode in MODES
        }
        sums = {
            mode: [
                predict_reduction(plan, 2 * mb * 10**6, machine, mode).over_bound
                for plan in plans[size][::2]
            ]
            for mode in ("pull", "direct")
        }
        over = {mode: np.array([p.over_bound for p in of]) for mode, of in found.items()}
        records.append(
            {
                "op": "model_charged",
                "size": size,
                "expert_mb": mb,
                "machine": machine,
                "loads": len(plans[size]),
                "bound_us": float(np.mean([p.bound_us for p in found["push"]])),
                "time_us": {m: float(np.mean([p.time_us for p in of])) for m, of in found.items()},
                "over_bound": {m: figures_of(of, "mean", "worst") for m, of in over.items()},
                "reduction": {
                    m: figures_of(np.array(of), "mean", "worst") for m, of in sums.items()
                },
            }
        )
    show_progress(len(cells), len(cells), "")
    columns = [
        Column("size", "G/E/S", "size"),
        Column("expert", "(MB)", "expert_mb"),
        Column("machine", "", "machine"),
        Column("T*", "(us)", "bound_us", ".0f"),
        *(Column(mode, "/T*", f"over_bound.{mode}.mean", ".2f") for mode in MODES),
        *(Column(f"reduce,{m}", "/T*", f"reduction.{m}.mean", ".2f") for m in ("pull", "direct")),
    ]
    print_records(columns, records, options.json)


if __name__ == "__main__":
    main()
