"""Every planner on the same loads: generated, public workloads, recorded routing, MoonEP's cases.

    python bench/recipes/plan_against.py [--traces FOLDER] [--seeds N] [--json FILE]

As `python bench/studies against`, for several sizes and numbers of tokens; a
workload's loads are its first steps. `--traces` is the folder with the recorded routing, of which
every `--every`th step and layer is taken. MoonEP's cases are summed up: `cases` says on how many
each planner is exact. `python bench/studies draw FILE` draws the records.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ultraep_comm.bench.commands.plan import TRACE, PlanSize
from ultraep_comm.bench.commands.plan.cells import Loads
from ultraep_comm.bench.options import DEFAULT_TARGET, ZIPF
from ultraep_comm.bench.report import print_records, show_progress
from ultraep_comm.bench.table import Column, format_records
from ultraep_comm.bench.traces import open_trace

sys.path.append(str(Path(__file__).resolve().parents[1]))
from studies.against.run import COLUMNS, EXPERT_BYTES, MACHINE, compare
from studies.loads import make_loads
from studies.options import PEER_NAMES, WORKLOADS
from studies.peers.moonep_cases import CASES, RANKS

SLOTS = 2
# Ranks, experts, topk, tokens of a rank, families.
GENERATED = (
    (64, 256, 8, 4096, (*ZIPF, "lognormal")),
    (64, 256, 8, 1024, tuple(WORKLOADS)),
    (4, 8, 2, 128, tuple(WORKLOADS)),  # as published
)
# File, ranks, slots.
RECORDED = (
    ("gptoss20b_counts_G8_tok4096_topic.npz", 8, 1),
    ("gptoss20b_counts_G32_tok1024_topic.npz", 32, 2),
)
STEPS = 4  # of a workload: W7's burst is in the last one

Cell = tuple[PlanSize, str, int | None, Loads]


def sized(ranks: int, experts: int, slots: int) -> PlanSize:
    return PlanSize(num_ranks=ranks, num_experts=experts, slots_per_rank=slots, domain_size=ranks)


def cells(options: argparse.Namespace) -> Iterator[Cell]:
    """Yield size, kind of load, tokens of a rank and loads."""
    for ranks, experts, topk, tokens, families in GENERATED:
        for family in families:
            loads = make_loads(
                family,
                num_ranks=ranks,
                num_experts=experts,
                num_tokens=ranks * tokens,
                topk=topk,
                seeds=STEPS if family in WORKLOADS else options.seeds,
            )
            yield sized(ranks, experts, SLOTS), family, tokens, loads
    if options.traces is not None:
        for name, ranks, slots in RECORDED:
            trace = open_trace(options.traces / name)
            shape = {"num_ranks": ranks, "tokens_per_rank": 1}  # counts have their own tokens
            every = [
                (step, layer)
                for step in range(trace.num_steps(**shape))
                for layer in range(trace.num_layers)
            ][:: options.every]
            loads = [
                trace.load(step=step, layer=layer, **shape).sum(axis=0, dtype="int64")
                for step, layer in every
            ]
            yield sized(ranks, trace.num_experts, slots), TRACE, None, loads


def run_cases() -> list[dict[str, Any]]:
    """Return each planner's sum over MoonEP's cases."""
    sums: dict[str, dict[str, Any]] = {}
    applicable = [(case, ranks) for case in CASES for ranks in RANKS if case.applies(ranks)]
    for i, (case, ranks) in enumerate(applicable):
        show_progress(i, len(applicable), case.name)
        size = sized(ranks, ranks * case.per_rank, SLOTS)
        for record in compare(
            size, "moonep", [case.load(ranks)], DEFAULT_TARGET, PEER_NAMES, certify=True
        ):
            total = sums.setdefault(
                record["planner"],
                {"op": "moonep_cases", "planner": record["planner"], "cases": 0, "exact": 0}
                | {"replicas": 0.0, "most_slots": 0, "worst": 0.0},
            )
            total["cases"] += 1
            total["exact"] += record["exact"]
            total["replicas"] += record["replicas"]
            total["most_slots"] = max(total["most_slots"], record["slots_used"])
            total["worst"] = max(total["worst"], record["imbalance"]["worst"])
    show_progress(len(applicable), len(applicable), "")
    return list(sums.values())


CASE_COLUMNS = (
    Column("MoonEP's cases", "planner", "planner"),
    Column("cases", "", "cases"),
    Column("exact", "", "exact"),
    Column("replicas", "in all", "replicas", ".0f"),
    Column("slots", "most", "most_slots"),
    Column("imbal", "worst", "worst", ".3f"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path, metavar="FOLDER")
    parser.add_argument("--every", type=int, default=6, metavar="N")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("-J", "--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    if options.traces is not None:
        missing = [name for name, *_ in RECORDED if not (options.traces / name).is_file()]
        if missing:
            expected = " and ".join(name for name, *_ in RECORDED)
            parser.error(f"--traces {options.traces} has no {missing[0]}; expected {expected}")
    records = []
    found = list(cells(options))
    for i, (size, family, tokens, loads) in enumerate(found):
        show_progress(i, len(found), f"{size} {family}")
        records += [
            {**record, "tokens": tokens}
            for record in compare(size, family, loads, DEFAULT_TARGET, PEER_NAMES, certify=True)
        ]
    show_progress(len(found), len(found), "")
    cases = run_cases()
    print(format_records(CASE_COLUMNS, cases))
    print_records(
        COLUMNS,
        records,
        options.json,
        cases=cases,
        modelled_machine=MACHINE,
        settings={
            "seeds": options.seeds,
            "steps": STEPS,
            "every": options.every,
            "target": DEFAULT_TARGET,
            "expert_bytes": EXPERT_BYTES,
        },
    )


if __name__ == "__main__":
    main()
