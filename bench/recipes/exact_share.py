"""How often a target of 1.0 is exact: random loads by size and slots.

    python bench/recipes/exact_share.py [--loads N] [--json FILE]

A load has a random skew, from none to steep, and a random number of tokens, from one a rank to
32,768. The most slots are those that make every load exact. Of plans that are not exact, "best"
says how many have a certificate that no plan with as many slots is better balanced.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from ultraep_comm import slots_for_exact
from ultraep_comm.bench.commands.plan import PlanSize
from ultraep_comm.bench.commands.plan.cells import plan_load
from ultraep_comm.bench.report import print_records, show_progress
from ultraep_comm.bench.table import Column
from ultraep_comm.plan.certificate import verify_plan

SIZES = ((4, 8), (8, 32), (8, 64), (16, 64), (32, 32), (64, 256))
MAX_SKEW, MAX_TOKENS = 2.0, 1 << 15
COLUMNS = (
    Column("ranks", "", "ranks"),
    Column("experts", "", "experts"),
    Column("slots", "", "slots"),
    Column("loads", "", "loads"),
    Column("exact", "", "exact"),
    Column("exact", "%", "percent", ".2f"),
    Column("others:", "best", "best"),
    Column("imbal", "worst", "worst", ".4f"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--loads", type=int, default=10_000, metavar="N")
    parser.add_argument("-J", "--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    records = []
    for i, (ranks, experts) in enumerate(SIZES):
        certain = slots_for_exact(num_ranks=ranks, num_experts=experts)
        for slots in sorted({1, min(2, certain), certain}):
            show_progress(i, len(SIZES), f"{ranks}/{experts}/{slots}")
            size = PlanSize(
                num_ranks=ranks, num_experts=experts, slots_per_rank=slots, domain_size=ranks
            )
            random = np.random.default_rng(ranks * experts)  # the same loads for all slots
            exact, best, worst = 0, 0, 1.0
            for _ in range(options.loads):
                weights = random.lognormal(0, random.uniform(0, MAX_SKEW), experts)
                tokens = ranks * int(MAX_TOKENS ** random.uniform())
                load = random.multinomial(tokens, weights / weights.sum())
                plan = plan_load(size, load, 1.0)
                if plan.is_exact:
                    exact += 1
                    continue
                best += verify_plan(plan, load).over_bound == 0
                worst = max(worst, plan.imbalance)
            records.append(
                {
                    "op": "exact_share",
                    "ranks": ranks,
                    "experts": experts,
                    "slots": slots,
                    "loads": options.loads,
                    "exact": exact,
                    "percent": 100 * exact / options.loads,
                    "best": best,
                    "worst": worst,
                }
            )
    show_progress(len(SIZES), len(SIZES), "")
    print_records(COLUMNS, records, options.json)


if __name__ == "__main__":
    main()
