"""What a recorder adds to the host's time for a call.

    python bench/recorder_cost.py [--iters 5000] [--json FILE]

The calls are those of ``host_cost.py`` with bound weights and plans on the CPU, over a driver that
does nothing. A call without a recorder, one with a recorder that leaves loads out, and one with a
whole recorder take turns; the ring is smaller than the number of calls.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
from host_cost import EXPERTS, SLOTS, make_group, make_plans, make_weights

from ultraep_comm.bench.machine import describe_machine, find_commit
from ultraep_comm.collectives import replicate_experts
from ultraep_comm.group import Group

CAPACITY = 1024


def measure(group: Group, iters: int) -> dict[str, np.ndarray]:
    """Return times in us of calls by how they are recorded."""
    bound = group.bind(make_weights(group))
    plans = itertools.cycle(make_plans(group.num_ranks))
    recorders = {"off": None}
    for name, loads in (("without loads", False), ("all", True)):
        recorders[name] = group.start_recording(CAPACITY, loads=loads)
        group._recorder = None
    times = {name: np.zeros(iters) for name in recorders}
    for i in range(-2 * CAPACITY, iters):
        for name, recorder in recorders.items():
            group._recorder = recorder
            plan = next(plans)
            start = time.perf_counter_ns()
            replicate_experts(bound, plan, group=group)
            if i >= 0:
                times[name][i] = (time.perf_counter_ns() - start) / 1e3
    group._recorder = None
    for recorder in recorders.values():
        assert recorder is None or recorder.num_calls == iters + 2 * CAPACITY
    return times


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--iters", type=int, default=5000)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    machine, commit = describe_machine(), find_commit()
    records = []
    for num_ranks in arguments.ranks:
        found = measure(make_group(num_ranks), arguments.iters)
        for name, times in found.items():
            added = times - found["off"]  # of calls one after the other
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
            print(
                f"{num_ranks:3} ranks, recorder {name:13}: least {record['least_us']:6.2f} us,"
                f" median {record['median_us']:6.2f}, median added {record['added_median_us']:.2f}"
            )
    if arguments.json is not None:
        document = {"records": records, "machine": machine, "commit": commit}
        document["settings"] = {"iters": arguments.iters, "capacity": CAPACITY}
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
