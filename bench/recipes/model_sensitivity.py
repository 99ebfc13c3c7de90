"""How much the modelled times depend on each assumption of the model.

    python bench/recipes/model_sensitivity.py [--json FILE]

Three plans of 64 ranks: a typical one; one in which ranks import two experts from homes that export
two and one; and one expert with nine tenths of the load. Every row changes one parameter of NVL72,
and gives the time of push and pull beyond the bound, in microseconds. docs/model.md has the table.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ultraep_comm import Plan, plan_replicas
from ultraep_comm.bench.loads import adversarial_loads, tuned_load
from ultraep_comm.bench.options import check_writable
from ultraep_comm.bench.report import print_records, show_progress
from ultraep_comm.bench.table import Column
from ultraep_comm.errors import InvalidArgumentError
from ultraep_comm.model import MACHINES, Machine, predict
from ultraep_comm.plan.topology import Topology

NVL72 = MACHINES["nvl72-links"]  # links alone: what a schedule can reach
SHAPES = {  # experts, imbalance (0: one expert), seed
    "64/128/2, imbalance 3": (128, 3.0, 0),
    "64/256/2, two imports": (256, 2.0, 6),
    "64/256/2, one expert": (256, 0.0, 0),
}
MODES = ("push", "pull")
EXPERT_BYTES = 37_748_736  # Qwen3-235B in bf16


def make_plans() -> list[Plan]:
    plans = []
    for num_experts, imbalance, seed in SHAPES.values():
        total = 64 * 4096 * 8
        load = (
            tuned_load(64, num_experts, imbalance, total, seed)
            if imbalance
            else adversarial_loads(64, num_experts, total)[0]
        )
        topology = Topology.make(num_ranks=64, num_experts=num_experts, slots_per_rank=2)
        plans.append(plan_replicas(torch.from_numpy(load), topology=topology))
    return plans


def variants() -> Iterator[tuple[str, Machine, int]]:
    yield "as described", NVL72, EXPERT_BYTES
    for hop in (0, 1, 4, 8):
        part = hop / NVL72.hop_us
        slow = replace(
            NVL72,
            deliver_us=NVL72.deliver_us * part,
            flag_us=NVL72.flag_us * part,
            load_us=NVL72.load_us * part,
        )
        yield f"{hop} us a hop and a load", slow, EXPERT_BYTES
    for sms, tiles in ((16, 4), (32, 2), (32, 4), (32, 6), (32, 8), (128, 4)):
        few = replace(NVL72, num_sms=sms, tiles_in_flight=sms * tiles)
        yield f"{sms} workers with {tiles} tiles each", few, EXPERT_BYTES
    for kib in (16, 64):
        yield f"tiles of {kib} KiB", replace(NVL72, tile_bytes=kib << 10), EXPERT_BYTES
    for gbps in (355.0, 1420.0):
        yield (
            f"links of {gbps:g} GB/s",
            replace(NVL72, egress_gbps=gbps, ingress_gbps=gbps),
            EXPERT_BYTES,
        )
    yield "remote loads at 80% of the rate", replace(NVL72, read_efficiency=0.8), EXPERT_BYTES
    yield "loads first come, first served", replace(NVL72, fair_loads=False), EXPERT_BYTES
    for mb in (5, 10, 19, 90):
        yield f"experts of {mb} MB", NVL72, mb * 1_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-J", "--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    try:
        if options.json is not None:
            check_writable(options.json, "--json")
    except InvalidArgumentError as error:
        parser.error(str(error))
    plans, records = make_plans(), list[dict[str, Any]]()
    changes = list(variants())
    for i, (name, machine, expert_bytes) in enumerate(changes):
        show_progress(i, len(changes), name)
        over = {}
        for shape, plan in zip(SHAPES, plans, strict=True):
            for mode in MODES:
                found = predict(plan, expert_bytes, machine, mode)
                over[f"{shape}, {mode}"] = {
                    "bound_us": found.bound_us,
                    "beyond_us": found.time_us - found.bound_us,
                }
        records.append({"op": "model_sensitivity", "change": name, "plans": over})
    show_progress(len(changes), len(changes), "")
    columns = [Column("us beyond T*", "", "change")]
    for name in records[0]["plans"]:
        shape, _, mode = name.rpartition(", ")
        columns.append(Column(shape, mode, f"plans.{name}.beyond_us", ".1f"))
    print_records(columns, records, options.json)


if __name__ == "__main__":
    main()
