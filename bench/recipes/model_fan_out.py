"""Modelled time over the bound, by mode, size and fan-out: one expert and its replicas.

    python bench/recipes/model_fan_out.py [--json FILE]

The expert's home is rank 0 of 64, its replicas are on the next ranks. A record is one transfer on
the NVL72 of ultraep_comm.model; "relay" is the model of the published relay. `python
bench/studies draw FILE` draws the records.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from ultraep_comm import Plan
from ultraep_comm.bench.report import print_records
from ultraep_comm.bench.table import Column
from ultraep_comm.model import predict

sys.path.append(str(Path(__file__).resolve().parents[1]))
from studies.model.published import EXPERT_BYTES
from studies.peers.relay import predict_relay

MACHINE = "nvl72"
NUM_RANKS = 64
SIZES = (4 << 20, EXPERT_BYTES)
FAN_OUTS = (1, 2, 4, 8, 16, 32, 63)
MODES = ("push", "pull", "direct", "relay")


def spread_one(fan_out: int) -> Plan:
    slots = torch.full((NUM_RANKS, 1), -1, dtype=torch.int32)
    slots[1 : fan_out + 1] = 0
    return Plan.from_slots(slots, num_experts=NUM_RANKS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-J", "--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    records = []
    for size in SIZES:
        for fan_out in FAN_OUTS:
            plan = spread_one(fan_out)
            for mode in MODES:
                if mode == "relay":
                    found = predict_relay(plan, size, MACHINE)
                else:
                    found = predict(plan, size, MACHINE, mode)
                records.append(
                    {
                        "op": "model_fan_out",
                        "size": size,
                        "mode": mode,
                        "fan_out": fan_out,
                        "time_us": found.time_us,
                        "bound_us": found.bound_us,
                        "over_bound": found.over_bound,
                    }
                )
    columns = [
        Column("size", "(B)", "size"),
        Column("replicas", "", "fan_out"),
        Column("mode", "", "mode"),
        Column("time", "/T*", "over_bound", ".3f"),
    ]
    print_records(columns, records, options.json, modelled_machine=MACHINE)


if __name__ == "__main__":
    main()
