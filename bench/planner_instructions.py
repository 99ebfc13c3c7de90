"""Instructions of one plan, which no other load of the machine changes. Needs valgrind and a C++20
compiler.

python bench/planner_instructions.py [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from ultraep_comm.bench.families import FAMILIES, make_loads
from ultraep_comm.bench.machine import describe_machine, find_commit
from ultraep_comm.bench.plan_settings import DEFAULT_SIZES, PlanSize, parse_plan_sizes
from ultraep_comm.bench.table import format_table

ROOT = Path(__file__).resolve().parents[1]
SEEDS, TOKENS, TOPK = 4, 4096, 8


def build(folder: Path) -> Path:
    """Compile the program that plans."""
    program = folder / "planner_instructions"
    compiler = os.environ.get("CXX", "c++")
    source = Path(__file__).with_suffix(".cc")
    options = ["-O3", "-std=c++20", f"-I{ROOT / 'src'}"]
    subprocess.run([compiler, *options, source, "-o", program], check=True)
    return program


def count(program: Path, size: PlanSize) -> list[int]:
    """Return the instructions of each plan, over the loads of all families."""
    loads = [
        load
        for family in FAMILIES
        for load in make_loads(
            family,
            num_ranks=size.num_ranks,
            num_experts=size.num_experts,
            num_tokens=size.num_ranks * TOKENS,
            topk=TOPK,
            seeds=SEEDS,
        )
    ]
    numbers = [size.num_ranks, size.num_experts, size.slots_per_rank, *size.home, *size.domain]
    text = " ".join(map(str, [*numbers, *np.concatenate(loads).tolist()]))
    with tempfile.TemporaryDirectory() as folder:
        tool = ["valgrind", "--quiet", "--tool=callgrind", "--toggle-collect=plan_once"]
        tool += ["--dump-after=plan_once", f"--callgrind-out-file={folder}/out"]
        subprocess.run([*tool, program], input=text, text=True, check=True)
        sums = [
            int(found[1])
            for dump in Path(folder).glob("out.*")
            if (found := re.search(r"^totals: (\d+)", dump.read_text(), re.MULTILINE))
        ]
    counts = [n for n in sums if n > 0]
    if len(counts) != len(loads):
        raise RuntimeError(f"valgrind counted {len(counts)} of {len(loads)} plans")
    return counts


def main() -> int:
    """Print instructions by size: how they grow with ranks and experts."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--sizes", default=DEFAULT_SIZES, metavar="G/E/S,...")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if shutil.which("valgrind") is None:
        print("no valgrind in PATH; install it (apt-get install valgrind)", file=sys.stderr)
        return 1
    rows, records = [], []
    with tempfile.TemporaryDirectory() as folder:
        program = build(Path(folder))
        for size in parse_plan_sizes(options.sizes, None):
            counts = count(program, size)
            p50, p99 = np.percentile(counts, [50, 99])
            rows.append([str(size), str(len(counts)), f"{p50:.0f}", f"{p99:.0f}"])
            records.append(
                {"size": str(size), "loads": len(counts), "instructions": {"p50": p50, "p99": p99}}
            )
    print(f"# instructions of one plan; {', '.join(FAMILIES)}; {SEEDS} loads of each")
    print(format_table([("size", "loads", "p50", "p99"), ("G/E/S", "", "", "")], rows))
    if options.json is not None:
        document = {"records": records, "machine": describe_machine(), "commit": find_commit()}
        options.json.write_text(json.dumps(document, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
