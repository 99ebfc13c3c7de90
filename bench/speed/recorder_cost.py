"""The host time that a recorder adds to a call.

    python bench/speed/recorder_cost.py [--iters 5000] [--json FILE]

The calls are those of ``host_cost.py`` with bound weights and plans on the CPU. Calls without a
recorder, with one that omits loads, and with one that records everything are interleaved. The ring
is smaller than the number of calls.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from pathlib import Path

import numpy as np
import torch
from host_cost import EXPERTS, SLOTS, IdleDevice, make_group, make_plans, make_weights

from ultraep_comm.bench.report import print_records
from ultraep_comm.bench.table import Column
from ultraep_comm.calls.replicate import replicate_experts

CAPACITY = 1024


def measure(num_ranks: int, iters: int) -> dict[str, np.ndarray]:
    """Return the times of calls in us, by kind of recorder."""
    groups = {name: make_group(num_ranks, IdleDevice()) for name in ("off", "without loads", "all")}
    recorders = [
        groups[name].start_recording(CAPACITY, loads=name == "all")
        for name in ("without loads", "all")
    ]
    bound = {name: group.bind(make_weights(group)) for name, group in groups.items()}
    plans = itertools.cycle(make_plans(num_ranks))
    times = {name: np.zeros(iters) for name in groups}
    for i in range(-2 * CAPACITY, iters):
        for name, group in groups.items():
            plan = next(plans)
            start = time.perf_counter_ns()
            replicate_experts(bound[name], plan, group=group)
            if i >= 0:
                times[name][i] = (time.perf_counter_ns() - start) / 1e3
    assert all(recorder.num_calls == iters + 2 * CAPACITY for recorder in recorders)
    for group in groups.values():
        group.close()
    return times


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--iters", type=int, default=5000)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    records = []
    for num_ranks in arguments.ranks:
        found = measure(num_ranks, arguments.iters)
        for name, times in found.items():
            added = times - found["off"]  # of consecutive calls
            record = {"op": "recorder_cost", "ranks": num_ranks, "experts": EXPERTS}
            record |= {"slots": SLOTS, "recorder": name, "iters": arguments.iters}
            record |= {
                f"{what}_us": round(float(value), 2)
                for what, value in (
                    ("least", times.min()),
                    ("median", np.median(times)),
                    ("p95", np.percentile(times, 95)),
                    ("added_median", np.median(added)),
                )
            }
            records.append(record)
    settings = {"iters": arguments.iters, "capacity": CAPACITY}
    columns = [Column("ranks", "", "ranks"), Column("recorder", "", "recorder")]
    columns += [Column(what, "(us)", f"{what}_us", ".2f") for what in ("least", "median", "p95")]
    columns.append(Column("added", "median", "added_median_us", ".2f"))
    print_records(columns, records, arguments.json, settings=settings)
    return 0


if __name__ == "__main__":
    sys.exit(main())
