"""What the compiled kernels cost on the PTX machine: the budget of each critical path.

``python tests/ptx/measure.py`` prints the table, ``--update`` also writes critical_path.json.
Clocks A and B are clock_a.env and clock_b.env: times are estimates, counts are not.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1] / "python"))
from cpp_build import CppBuild
from ptx_machine import HERE, PtxMachine

BUDGET = HERE / "critical_path.json"
CLOCKS = ("a", "b")

# What measure.cc is asked for.
ROWS = {
    "empty:8,16,0": "empty call, 8 ranks x 16 blocks",
    "empty:64,4,0": "empty call, 64 ranks x 4 blocks",
    "empty:8,16,1": "empty call, 8 ranks x 16 blocks, plan on the device",
    "plan:64,256,2,16": "plan 64/256/2, 16 warps",
    "planned:64,256,12,1,16,0,0": "replicas of 12 KiB, 64/256/2, call's block made by the host",
    "planned:64,256,12,1,16,1,0": "replicas of 12 KiB, 64/256/2, call's block made by the device",
    "fan_out:1,4096,64,16,0": "4 MiB to one replica, push, 64 blocks",
    "fan_out:2,4096,64,16,0": "4 MiB to two, push",
    "fan_out:2,4096,64,16,1": "4 MiB to two, pull",
    "fan_out:2,4096,64,16,2": "4 MiB to two, direct",
    "fan_out:3,4096,64,16,0": "4 MiB to three, push",
    "reduce:2,2048,32,8,1": "gradients of 2 MiB from two, pull, 32 blocks of 8 warps",
    "reduce:2,2048,32,8,2": "gradients of 2 MiB from two, direct",
}


def nvcc_version() -> str:
    """Return which nvcc compiles the kernels: counts hold for this one."""
    text = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    return re.findall(r"release ([\d.]+)", text)[0]


def measure(machine: PtxMachine, clock: str, rows: Sequence[str] = tuple(ROWS)) -> dict[str, Any]:
    """Return the machine's report of each row."""
    outcome = machine.run(
        [machine.folder / "ptx" / "ptx_measure", *rows],
        UEC_PTX_COSTS=str(HERE / f"clock_{clock}.env"),
    )
    assert outcome.status == 0, outcome.text
    reports = [json.loads(line) for line in outcome.text.splitlines()]
    return {report["measurement"]: report for report in reports}


def claims(report: dict[str, Any]) -> dict[str, float]:
    """Return how hubs claimed flagged groups: won, lost, and won by a rank a microsecond."""
    at = {a["at"].split()[-1]: a for a in report["atomics"] if a["at"].endswith((" won", " lost"))}
    if "won" not in at or "fan_out" not in report["measurement"]:
        return {}
    hubs = int(report["measurement"].split(":")[1].split(",")[0])
    won = at["won"]
    rate = won["times"] / hubs / (won["to_us"] - won["from_us"])
    return {
        "claims_won": won["times"],
        "claims_lost": at.get("lost", {}).get("times", 0),
        "claims_of_a_rank_per_us": round(rate, 3),
    }


def summary(report: dict[str, Any]) -> dict[str, Any]:
    """Return what is kept of a report: its critical path is the warp that ends last."""
    last = report["last"]
    prepared = [c for c in report["calls"] if "prepare_call" in c["function"]]
    return {
        "us": report["us"],
        "instructions": last["instructions"],
        "round_trips": {
            place: last["trips"][place]
            for place in ("l2", "remote", "host", "fence", "barrier")
            if last["trips"][place]
        },
        "most_instructions_of_a_warp": report["most_instructions"],
        **claims(report),
        **(
            {"prepare_call_us": round(prepared[0]["us"] / prepared[0]["times"], 3)}
            if prepared
            else {}
        ),
    }


def measure_all(machine: PtxMachine, clocks: tuple[str, ...] = CLOCKS) -> dict[str, Any]:
    """Return the summaries of all rows, by clock."""
    with ThreadPoolExecutor() as pool:
        reports = pool.map(lambda clock: measure(machine, clock), clocks)
        return {
            clock: {name: summary(report) for name, report in of.items()}
            for clock, of in zip(clocks, reports, strict=True)
        }


def table(found: dict[str, Any]) -> str:
    """Return the rows as text, microseconds under both clocks."""
    lines = [f"{'A, us':>8}{'B, us':>8}{'instr.':>8}  round trips (A); what"]
    for name, title in ROWS.items():
        a, b = (found[clock][name] for clock in CLOCKS)
        trips = " ".join(f"{place} {count}" for place, count in a["round_trips"].items())
        lines.append(f"{a['us']:8.1f}{b['us']:8.1f}{a['instructions']:8d}  {trips}; {title}")
        if "prepare_call_us" in a:
            times = f"{a['prepare_call_us']:8.1f}{b['prepare_call_us']:8.1f}"
            lines.append(f"{times}          of it the call's block (prepare_call)")
        if "claims_won" in a:
            rates = f"{a['claims_of_a_rank_per_us']:8.2f}{b['claims_of_a_rank_per_us']:8.2f}"
            lost = f"{a['claims_won']} won, {a['claims_lost']} lost"
            lines.append(
                f"{rates}          flagged groups claimed by a rank, a microsecond; {lost}"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--update", action="store_true", help=f"write {BUDGET.name}")
    options = parser.parse_args()
    found = measure_all(PtxMachine(CppBuild()))
    print(table(found))
    if options.update:
        BUDGET.write_text(json.dumps({"nvcc": nvcc_version()} | found, indent=1) + "\n")


if __name__ == "__main__":
    main()
