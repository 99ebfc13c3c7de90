"""How long the kernels run on a GPU, without launches: all ranks of a group in one process.

    python bench/speed/kernel_times.py [--json FILE]

Times are CUPTI's, through torch.profiler. Copies stay within the GPU's memory: no link is measured.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

import ultraep_comm as uec
from ultraep_comm.bench.loads import make_loads
from ultraep_comm.bench.report import print_records
from ultraep_comm.bench.table import Column

CALLS = 10
STEPS = 40  # of a load that drifts
RANKS = 4
PLANS = {  # slots by rank, of experts whose home is rank 0
    "one replica": [[-1], [0], [-1], [-1]],
    "three replicas": [[-1], [0], [0], [0]],
}
SIZES = ((8, 32, 4096), (64, 256, 1024))  # ranks, experts, tokens of a rank


def drifting(ranks: int, experts: int, tokens: int) -> Iterator[torch.Tensor]:
    """Return loads ``[G, E]`` of 8 experts a token, each a little like the one before."""
    draw = torch.Generator().manual_seed(1)
    skew = torch.randn(experts, generator=draw)
    while True:
        share = torch.softmax(skew, 0) * tokens * 8
        yield share.round().int().repeat(ranks, 1)
        skew = 0.97 * skew + (1 - 0.97**2) ** 0.5 * torch.randn(experts, generator=draw)


def kernel_times(call: Callable[[], object], calls: int) -> dict[str, list[float]]:
    """Return the microseconds of each run of our kernels, by kernel."""
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = {}
    for event in profiled.events():
        name = event.name.split("(")[0]
        if name.startswith("ultraep_"):
            found.setdefault(name.removeprefix("ultraep_"), []).append(event.device_time)
    return found


def record(
    row: str, call: Callable[[], object], moved: int = 0, calls: int = CALLS
) -> list[dict[str, Any]]:
    """Time a call; return a record for each kernel."""
    records = []
    for kernel, times in kernel_times(call, calls).items():
        us = {f"p{p}": float(np.percentile(times, p)) for p in (50, 90)}
        us |= {"min": min(times), "max": max(times)}
        rate = round(moved / us["p50"] / 1e3, 1) if moved else None
        records.append({"row": row, "kernel": kernel, "runs": len(times), "us": us, "gbps": rate})
    return records


def replicate(groups: Sequence[uec.Group], weights: Any, plans: Any, mode: str) -> None:
    """Start the call on every rank, in the order of ranks; the last one launches."""
    works = [
        uec.replicate_experts(
            weights[group.rank], plans[group.rank], group=group, async_op=True, mode=mode
        )
        for group in groups
    ]
    for work in works:
        work.wait()


def new_groups(ranks: int, experts: int, slots: int, size: int, num_sms: int) -> list[uec.Group]:
    """Create groups of one segment on the GPU."""
    return uec.testing.new_loopback_groups(
        ranks,
        num_experts=experts,
        slots_per_rank=slots,
        expert={"w": ((size,), torch.uint8)},
        engine="cuda",
        num_sms=num_sms,
    )


def transfers(size: int, num_sms: int) -> list[dict[str, Any]]:
    """Time transfers of one size with one number of blocks, by plan and mode."""
    groups = new_groups(RANKS, RANKS, 1, size, num_sms)
    weights = [group.empty_weights() for group in groups]
    records = []
    for name, slots in PLANS.items():
        plan = uec.Plan.from_slots(torch.tensor(slots), num_experts=RANKS)
        for mode in ("push", "pull", "direct"):
            row = f"{size >> 10} KiB to {name}, {mode}, {num_sms} blocks"
            call = partial(replicate, groups, weights, [plan] * RANKS, mode)
            records += record(row, call, size * plan.num_replicas)
    for group in groups:
        group.close()
    return records


def stages(ranks: int, experts: int, tokens: int) -> list[dict[str, Any]]:
    """Time the kernels from ids to slots, with the call's block made by the host or the device."""
    groups = new_groups(ranks, experts, 2, 4096, num_sms=2)
    (load,) = make_loads(
        "zipf1.0", num_ranks=ranks, num_experts=experts, num_tokens=tokens, topk=8, seeds=1
    )
    share = torch.from_numpy(load / load.sum()).repeat(tokens, 1)
    ids = [torch.multinomial(share, 8).cuda() for _ in groups]
    size, found = f"{ranks}/{experts}/2", {}

    with ThreadPoolExecutor(ranks) as pool:  # a collective call of each rank

        def gather() -> None:
            found["load"] = list(pool.map(lambda g: uec.gather_load(ids[g.rank], group=g), groups))

        def at_once() -> None:
            plan = lambda g: uec.gather_and_plan(ids[g.rank], group=g)  # noqa: E731
            found["plan"] = list(pool.map(plan, groups))

        records = record(f"{size}: counts", gather)
        records += record(f"{size}: counts and plan", at_once)
    load, plans = found["load"][0], found["plan"]
    plan = partial(uec.plan_replicas, load, group=groups[0])
    records += record(f"{size}: plan", plan)
    records += record(f"{size}: reroute", partial(uec.reroute, ids[0], plans[0], group=groups[0]))
    weights = [group.bind(group.empty_weights()) for group in groups]
    empty = uec.Plan.from_slots(torch.full((ranks, 2), -1), num_experts=experts)
    on_host = uec.Plan.from_slots(plans[0].slot_expert.cpu(), num_experts=experts)
    for name, given in (
        ("empty plan", [empty] * ranks),
        ("the plan, from the host", [on_host] * ranks),
        ("the plan, from the device", plans),
    ):
        call = partial(replicate, groups, weights, given, "auto")
        records += record(f"{size}: {name}", call)
    steps = drifting(ranks, experts, tokens)

    def plan_on_held() -> None:
        load = next(steps).cuda()
        held = [uec.plan_replicas(load, group=group, reuse=True) for group in groups]
        replicate(groups, weights, held, "auto")

    for row in record(f"{size}: plan on held slots", plan_on_held, calls=STEPS):
        records += [row] if row["kernel"] == "plan_in_bank" else []
    for group in groups:
        group.close()
    return records


def main() -> None:
    """Measure everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-J", "--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    shapes = itertools.product((64 << 10, 1 << 20, 4 << 20, 36 << 20), (8, 16, 24, 33))
    records = [r for size, num_sms in shapes for r in transfers(size, num_sms)]
    records += [r for size in SIZES for r in stages(*size)]
    columns = [
        Column("call", "", "row"),
        Column("kernel", "", "kernel"),
        Column("p50", "(us)", "us.p50", ".1f"),
        Column("p90", "(us)", "us.p90", ".1f"),
        Column("max", "(us)", "us.max", ".1f"),
        Column("bandwidth", "(GB/s)", "gbps", ".1f"),
    ]
    device = {"name": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    print_records(columns, records, options.json, settings={"calls": CALLS, "device": device})


if __name__ == "__main__":
    main()
