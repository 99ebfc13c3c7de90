"""What the compiled kernels cost on the PTX machine: the budget of each critical path.

``python tests/ptx/measure.py`` prints the table, ``--update`` also writes critical_path.json, and
``--blocks`` prints what transfers take with fewer and more blocks instead. Clocks A and B are
clock_a.env and clock_b.env: times are estimates, counts are not.
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
    "load:8,256,65536,65536,8": "count and gather of 8,192 x 8 ids, 8 ranks",
    "load:64,256,7168,64,8": "count and gather of 896 x 8 ids in two blocks, 64 ranks",
    "plan:64,256,2,16": "plan 64/256/2, 16 warps",
    "plan_in_bank:8,32,2,8": "the same 8/32/2, 8 warps, on top of what slots hold",
    "plan_in_bank:64,256,2,8": "the same 64/256/2",
    "reroute:64,256,2,65536,1": "shares of a rank, 64/256/2",
    "reroute:64,256,2,65536,0": "reroute of 8,192 x 8 ids by these shares, 64/256/2",
    "planned:64,256,12,1,16,0,0": "replicas of 12 KiB, 64/256/2, call's block made by the host",
    "planned:64,256,12,1,16,1,0": "replicas of 12 KiB, 64/256/2, call's block made by the device",
    "fan_out:1,4096,64,16,0": "4 MiB to one replica, push, 64 blocks",
    "fan_out:2,4096,64,16,0": "4 MiB to two, push",
    "fan_out:2,24576,64,16,0": "24 MiB to two, push",
    "fan_out:2,4096,64,16,1": "4 MiB to two, pull",
    "fan_out:2,4096,64,16,2": "4 MiB to two, direct",
    "fan_out:3,4096,64,16,0": "4 MiB to three, push",
    "reduce:2,2048,32,8,1": "gradients of 2 MiB from two, pull, 32 blocks of 8 adding warps",
    "reduce:2,2048,32,8,2": "gradients of 2 MiB from two, direct",
}
# What BACKGROUND_NUM_SMS is chosen from: transfers, with a place for the number of blocks.
BLOCKS = (8, 16, 24, 32, 48, 64)
BY_BLOCKS = {
    "fan_out:1,24576,{},16,0": "24 MiB to one replica, push",
    "fan_out:2,24576,{},16,0": "24 MiB to two",
    "planned:8,32,12288,{},16,0,0": "replicas of 12 MiB, 8/32/2",
    "reduce:2,4096,{},16,1": "gradients of 4 MiB from two, pull",
}
LINKS = (710, 370)  # GB/s one way: NVL72 under load; NVLink 4, of H100 and H200


def nvcc_version() -> str:
    """Return which nvcc compiles the kernels: counts hold for this one."""
    text = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    return re.findall(r"release ([\d.]+)", text)[0]


def measure(
    machine: PtxMachine, clock: str, rows: Sequence[str] = tuple(ROWS), gbps: int | None = None
) -> dict[str, Any]:
    """Return the machine's report of each row; ``gbps``: of links, if not the clock's."""
    costs = HERE / f"clock_{clock}.env"
    if gbps is not None:
        rate = round(gbps * int(costs_of(clock)["LINK_BYTES"]) / link_gbps(clock))
        text = re.sub("(?m)^LINK_BYTES=.*", f"LINK_BYTES={rate}", costs.read_text())
        costs = machine.folder / "ptx" / f"clock_{clock}_{gbps}.env"
        costs.write_text(text)
    outcome = machine.run(
        [machine.folder / "ptx" / "ptx_measure", *rows], UEC_PTX_COSTS=str(costs), timeout=900
    )
    assert outcome.status == 0, outcome.text
    reports = [json.loads(line) for line in outcome.text.splitlines()]
    return {report["measurement"]: report for report in reports}


def forwards(found: dict[str, Any], clock: str) -> float:
    """Return what hubs forward of what their links carry: 20 MiB more take so much longer."""
    less, more = (found[f"fan_out:2,{kib},64,16,0"]["us"] for kib in (4096, 24576))
    return round((20 << 20) / (link_gbps(clock) * 1e3) / (more - less), 3)


def link_gbps(clock: str) -> float:
    """Return what a clock's links carry."""
    values = costs_of(clock)
    return int(values["LINK_BYTES"]) * int(values["MHZ"]) / 1e3


def costs_of(clock: str) -> dict[str, str]:
    """Return a clock's constants."""
    lines = (HERE / f"clock_{clock}.env").read_text().splitlines()
    return dict(line.split("#")[0].split("=") for line in lines if line[:1].isupper())


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
        found = {
            clock: {name: summary(report) for name, report in of.items()}
            for clock, of in zip(clocks, reports, strict=True)
        }
    for clock, of in found.items():
        of["fan_out:2,24576,64,16,0"]["of_the_link"] = forwards(of, clock)
    return found


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
        if "of_the_link" in a:
            shares = f"{a['of_the_link']:8.0%}{b['of_the_link']:8.0%}"
            lines.append(f"{shares}          of a link's rate, for all but the first 4 MiB")
    return "\n".join(lines)


def blocks_table(machine: PtxMachine) -> str:
    """Return the microseconds of BY_BLOCKS under clock A, by blocks of a rank."""
    lines = ["GB/s" + "".join(f"{blocks:8d}" for blocks in BLOCKS) + "  blocks; us of"]
    for gbps in LINKS:
        for row, title in BY_BLOCKS.items():
            found = measure(machine, "a", [row.format(blocks) for blocks in BLOCKS], gbps)
            times = "".join(f"{report['us']:8.1f}" for report in found.values())
            lines.append(f"{gbps:4d}{times}  {title}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--update", action="store_true", help=f"write {BUDGET.name}")
    parser.add_argument("--blocks", action="store_true", help="by the number of blocks instead")
    options = parser.parse_args()
    if options.blocks:
        print(blocks_table(PtxMachine(CppBuild())))
        return
    found = measure_all(PtxMachine(CppBuild()))
    print(table(found))
    if options.update:
        BUDGET.write_text(json.dumps({"nvcc": nvcc_version()} | found, indent=1) + "\n")


if __name__ == "__main__":
    main()
