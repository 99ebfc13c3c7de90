"""How well mode="auto" chooses: its time over that of the best fixed mode, by plan.

    python bench/recipes/auto_over_plans.py [--ranks 4] [--plans 24] [--iters 15] [--json FILE]

The plans come from loads of growing imbalance. Modes are interleaved by iteration. A plan's figure
is the largest, over the fixed modes, of the median of (auto's time / that mode's time). Every slot
is compared with its payload after the last iteration of each mode.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ultraep_comm.bench.clock import HostClock, Meter
from ultraep_comm.bench.launch import run_ranks
from ultraep_comm.bench.loads import generate_load
from ultraep_comm.bench.measure import Mode, measure
from ultraep_comm.bench.options import ALL_MODES
from ultraep_comm.bench.options import Settings as Rounds
from ultraep_comm.bench.payload import Payload
from ultraep_comm.bench.ranks import WeightRanks
from ultraep_comm.bench.report import print_records, show_progress
from ultraep_comm.bench.sizes import parse_size
from ultraep_comm.bench.table import Column
from ultraep_comm.calls.plan import plan_replicas


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Arguments of a run. Equal on every rank."""

    ranks: int
    experts: int
    slots: int
    expert_bytes: int
    plans: int
    iters: int
    json: Path | None


def run(settings: Settings) -> int:
    """Measure on an initialised process group; rank 0 prints. Return 1 for wrong bytes."""
    torch.set_num_threads(1)
    segments = {"w": settings.expert_bytes}
    records, wrong = [], 0
    ranks = WeightRanks(
        Meter(),
        num_ranks=settings.ranks,
        num_experts=settings.experts,
        slots=settings.slots,
        fabric="shm",
        segments=segments,
    )
    group = ranks.groups[0]
    for number in range(settings.plans):
        if group.rank == 0:
            show_progress(number, settings.plans, "plans")
        imbalance = 1.5 + (settings.ranks - 1.6) * number / max(settings.plans - 1, 1)
        load = generate_load(
            num_ranks=settings.ranks,
            num_experts=settings.experts,
            imbalance=imbalance,
            num_tokens=settings.ranks * 32768,
            seed=number,
        )
        plan = plan_replicas(torch.from_numpy(load), group=group)
        if plan.num_replicas == 0:
            continue
        measured = measure(
            Rounds(iters=settings.iters, warmup=2, seed=number),
            HostClock(group),
            [Mode(ranks, plan, mode) for mode in ALL_MODES],
            Payload(number, segments),
            fill=functools.partial(ranks.fill, plan),
        )
        auto = measured[-1]
        wrong += sum(m.wrong for m in measured)
        over = {
            m.mode: float(np.median(auto.times.iterations / m.times.iterations))
            for m in measured[:-1]
        }
        records.append(
            {
                "op": "auto",
                "imbalance_before": imbalance,
                "replicas": plan.num_replicas,
                "max_exports": plan.max_exports,
                "max_imports": plan.max_imports,
                "chosen": auto.chosen,
                "time_us": {m.mode: m.p50 for m in measured},
                "auto_over": over,
                "auto_over_best": max(over.values()),
                "wrong_bytes": sum(m.wrong for m in measured),
            }
        )
    ranks.close()
    if dist.get_rank() == 0:
        show_progress(settings.plans, settings.plans, "")
        _finish(settings, records)
    return 1 if wrong else 0


def _finish(settings: Settings, records: list[dict[str, Any]]) -> None:
    ratios = [r["auto_over_best"] for r in records]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    described = {**dataclasses.asdict(settings), "json": None}
    figures = {"geometric_mean": mean, "worst": max(ratios)}
    columns = [
        Column("replicas", "", "replicas"),
        *(Column(mode, "(us)", f"time_us.{mode}", ".1f") for mode in records[0]["time_us"]),
        Column("auto took", "", "chosen"),
        Column("auto", "/best", "auto_over_best", ".3f"),
    ]
    print_records(columns, records, settings.json, **figures, settings=described)
    print(f"auto/best over {len(ratios)} plans: geometric mean {mean:.3f}, worst {max(ratios):.3f}")


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--expert-bytes", type=parse_size, default=16 << 20)
    parser.add_argument("--plans", type=int, default=24)
    parser.add_argument("--iters", type=int, default=15)
    parser.add_argument("--json", type=Path)
    settings = Settings(**vars(parser.parse_args()))
    return run_ranks(run, settings, settings.ranks)


if __name__ == "__main__":
    sys.exit(main())
