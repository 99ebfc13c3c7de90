"""Modelled time from counts to filled slots: count and gather, plan, schedule and transfer.

    python bench/recipes/critical_path.py [--json FILE]

64 ranks, 256 experts of 37.75 MB, 2 slots; launches are not counted. Counting and planning are what
the compiled kernels take on the machine that executes PTX (tests/ptx/critical_path.json), under its
clock A for "nvl72" and B for "gb200"; the rest is `ultraep_comm.model`. A record is of all loads
whose plan has one size of its busiest rank: max(k, in), distinct experts sent or slots filled.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from ultraep_comm import Plan, plan_replicas
from ultraep_comm.bench.loads import make_loads
from ultraep_comm.bench.report import print_records
from ultraep_comm.bench.table import Column
from ultraep_comm.model import MACHINES, predict
from ultraep_comm.plan.topology import Topology

STAGES = Path(__file__).parents[2] / "tests" / "ptx" / "critical_path.json"
CLOCKS = {"nvl72": "a", "gb200": "b"}
ROWS = {"gather": "load:8,256,65536,65536,8", "plan": "plan:64,256,2,16"}
RANKS, EXPERTS, SLOTS = 64, 256, 2
EXPERT_BYTES = 37_748_736  # Qwen3-235B in bf16
KINDS = ("imbalance2", "imbalance4", "zipf1.0", "lognormal")


def make_plans() -> list[Plan]:
    shape = {"num_ranks": RANKS, "num_experts": EXPERTS}
    topology = Topology.make(**shape, slots_per_rank=SLOTS)
    return [
        plan_replicas(torch.from_numpy(np.array(load)), topology=topology)
        for kind in KINDS
        for load in make_loads(kind, **shape, num_tokens=4096 * RANKS, topk=8, seeds=4)
    ]


HEAD = (("max(k, in)", "busiest"), ("machine", "machine"), ("mode", "mode"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-J", "--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    stages = json.loads(STAGES.read_text())
    plans = defaultdict(list)
    for plan in make_plans():
        plans[max(plan.max_exports, plan.max_imports)].append(plan)
    records = []
    for busiest, of in sorted(plans.items()):
        for machine, clock in CLOCKS.items():
            on = replace(MACHINES[machine], launch_us=0.0)
            before = {stage: stages[clock][row]["us"] for stage, row in ROWS.items()}
            for mode in ("push", "pull"):
                with_schedule, moved = (
                    np.mean(
                        [
                            predict(
                                plan, EXPERT_BYTES, on, mode, may_pull=True, device_plan=made
                            ).time_us
                            for plan in of
                        ]
                    )
                    for made in (True, False)
                )
                parts = {**before, "schedule": with_schedule - moved, "transfer": moved}
                records.append(
                    {
                        "op": "critical_path",
                        "busiest": busiest,
                        "plans": len(of),
                        "machine": machine,
                        "mode": mode,
                        "us": {part: round(float(us), 1) for part, us in parts.items()},
                        "total_us": round(float(sum(parts.values())), 1),
                    }
                )
    parts = [*ROWS, "schedule", "transfer"]
    columns = [
        *(Column(title, "", of) for title, of in HEAD),
        *(Column(part, "(us)", f"us.{part}", ".1f") for part in parts),
        Column("together", "(us)", "total_us", ".1f"),
    ]
    print_records(columns, records, options.json, modelled_machine="nvl72, gb200")


if __name__ == "__main__":
    main()
