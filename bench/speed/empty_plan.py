"""The time of a call with an empty plan, and of the exchange of loads.

    python bench/speed/empty_plan.py [--ranks 4] [--iters 2000] [--json FILE]

Each rank times its own blocking calls. A row is the median and the 99th percentile of the slowest
rank.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from ultraep_comm.bench.launch import run_ranks
from ultraep_comm.bench.report import print_records
from ultraep_comm.bench.table import Column
from ultraep_comm.calls.gather import gather_load
from ultraep_comm.calls.replicate import replicate_experts
from ultraep_comm.group.create import new_group
from ultraep_comm.plan.plan import Plan


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Arguments of a run. Equal on every rank."""

    ranks: int
    iters: int
    json: Path | None


def run(settings: Settings) -> int:
    """Measure on an initialised process group; rank 0 prints."""
    torch.set_num_threads(1)
    num_experts = 8 * settings.ranks
    expert = {"w": ((1 << 16,), torch.uint8)}
    with new_group(num_experts=num_experts, slots_per_rank=2, expert=expert) as group:
        weights = group.bind(
            {"w": torch.zeros((group.num_local_experts, 1 << 16), dtype=torch.uint8)}
        )
        empty = Plan.from_slots(torch.full((settings.ranks, 2), -1), num_experts=num_experts)
        ids = torch.zeros((1, 8), dtype=torch.int64)
        calls: dict[str, Callable[[], object]] = {
            "empty plan": lambda: replicate_experts(weights, empty, group=group),
            "gather_load": lambda: gather_load(ids, group=group),
        }
        rows = {name: _time(call, settings.iters) for name, call in calls.items()}
    if dist.get_rank() == 0:
        records = [
            {"op": name, "ranks": settings.ranks, "time_us": {"p50": p50, "p99": p99}}
            for name, (p50, p99) in rows.items()
        ]
        columns = [
            Column("call", "", "op"),
            Column("p50", "(us)", "time_us.p50", ".1f"),
            Column("p99", "(us)", "time_us.p99", ".1f"),
        ]
        print_records(columns, records, settings.json, settings={"iters": settings.iters})
    return 0


def _time(call: Callable[[], object], iters: int) -> tuple[float, float]:
    """Return p50 and p99 of the slowest rank, in microseconds."""
    times = np.zeros(iters)
    dist.barrier()
    for i in range(-50, iters):
        start = time.perf_counter_ns()
        call()
        if i >= 0:
            times[i] = (time.perf_counter_ns() - start) / 1e3
    found = torch.tensor([np.percentile(times, 50), np.percentile(times, 99)])
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found[0]), float(found[1])


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--iters", type=int, default=2000)
    parser.add_argument("--json", type=Path)
    settings = Settings(**vars(parser.parse_args()))
    return run_ranks(run, settings, settings.ranks)


if __name__ == "__main__":
    sys.exit(main())
