"""Count the instructions of plan, schedule and reroute shares, independent of the machine's load.
Needs valgrind and a C++20 compiler.

python bench/speed/instructions.py [--sizes G/E/S,...] [--json FILE] [--compare FILE]

Exit status 3: a figure has grown past the limit; 2: nothing could be counted or compared.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ultraep_comm.bench.commands.plan import DEFAULT_SIZES, PlanSize, parse_sizes
from ultraep_comm.bench.loads import make_loads
from ultraep_comm.bench.options import FAMILIES, check_writable
from ultraep_comm.bench.report import print_records
from ultraep_comm.bench.table import Column, format_table
from ultraep_comm.errors import UltraEPError

ROOT = Path(__file__).resolve().parents[2]
SEEDS, TOKENS, TOPK = 4, 4096, 8
# -z now: bind symbols at the start, not in the first counted call.
FLAGS = ("-O3", "-std=c++20", "-Wl,-z,now")
FUNCTION = "counted"
FIGURES = ("mean", "p50", "max")
DECIDING = ("compiler", "target", "flags")  # counts are comparable if these are equal
TOO_MUCH, FAILED = 3, 2

Record = dict[str, Any]


class CountError(Exception):
    """Nothing can be counted or compared."""


def describe_tools() -> dict[str, str]:
    """Return what the counts depend on besides the source: compiler, target, flags, valgrind.

    Raises:
        CountError: there is no valgrind or no compiler.
    """
    compiler = os.environ.get("CXX", "c++")
    for name, remedy in (
        ("valgrind", "apt-get install valgrind"),
        (compiler, "install a C++20 compiler, or name it in CXX"),
    ):
        if shutil.which(name) is None:
            raise CountError(f"no {name} in PATH: {remedy}")

    def ask(*command: str) -> str:
        environment = os.environ | {"LC_ALL": "C"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        return done.stdout + done.stderr

    output = ask(compiler, "-v")
    version = re.search(r"^.* version \d.*$", output, re.MULTILINE)
    target = re.search(r"^Target: (.*)$", output, re.MULTILINE)
    if version is None or target is None:
        raise CountError(f"{compiler} -v names no version and target: {output[-200:]!r}")
    return {
        "compiler": version[0].strip(),
        "target": target[1].strip(),
        "flags": " ".join(FLAGS),
        "valgrind": ask("valgrind", "--version").strip(),
    }


def build(folder: Path) -> Path:
    """Compile the program to count."""
    program = folder / "instructions"
    command = [os.environ.get("CXX", "c++"), *FLAGS, f"-I{ROOT / 'src'}"]
    source = Path(__file__).with_suffix(".cc")
    if subprocess.run([*command, source, "-o", program], check=False).returncode:
        raise CountError(f"{source} does not compile: see above")
    return program


def count(program: Path, size: PlanSize) -> list[Record]:
    """Return the records of one size: a call of each kind for each load of all families."""
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
        tool = ["valgrind", "--quiet", "--tool=callgrind", f"--callgrind-out-file={folder}/out"]
        tool += [f"--toggle-collect={FUNCTION}", f"--dump-after={FUNCTION}"]
        done = subprocess.run(
            [*tool, program], input=text, text=True, stdout=subprocess.PIPE, check=False
        )
        if done.returncode:
            raise CountError(f"valgrind ended with status {done.returncode}: see above")
        sums = [_total(path) for path in sorted(Path(folder).glob("out.*"), key=_number)]
    calls = done.stdout.splitlines()
    if len(sums) != len(calls) or calls.count("plan") != len(loads) or not all(sums):
        raise CountError(f"valgrind counted {len(sums)} of {len(calls)} calls, {len(loads)} loads")
    counts = defaultdict(list)
    for call, instructions in zip(calls, sums, strict=True):
        counts[call].append(instructions)
    return [
        {
            "op": call,
            "size": str(size),
            "loads": len(of_call),
            "inputs": hashlib.sha256(text.encode()).hexdigest()[:12],
            "instructions": {
                "mean": round(np.mean(of_call)),
                "p50": round(np.median(of_call)),
                "max": max(of_call),
            },
        }
        for call, of_call in sorted(counts.items())
    ]


def _total(dump: Path) -> int:
    found = re.search(r"^totals: (\d+)", dump.read_text(), re.MULTILINE)
    return 0 if found is None else int(found[1])


def _number(dump: Path) -> int:
    return int(dump.suffix[1:])


def read_baseline(path: Path, tools: dict[str, str]) -> dict[tuple[str, str], Record]:
    """Return a file's records by kind of call and size.

    Raises:
        CountError: the file is invalid, or was recorded with another compiler.
    """
    try:
        document = json.loads(path.read_text())
        made_with = dict(document["tools"])
        records = {
            (record["op"], record["size"]): {
                "loads": int(record["loads"]),
                "inputs": str(record["inputs"]),
                "instructions": {name: int(record["instructions"][name]) for name in FIGURES},
            }
            for record in document["records"]
        }
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise CountError(
            f"--compare {path}: expected a file that --json of this script wrote: {error!r}"
        ) from None
    for name in DECIDING:
        if made_with.get(name) != tools[name]:
            raise CountError(
                f"--compare {path}: its {name} was {made_with.get(name)!r}, here it is"
                f" {tools[name]!r}; record a new file with --json"
            )
    return records


def compare(records: Sequence[Record], baseline: dict[tuple[str, str], Record]) -> list[Record]:
    """Return the changes against the baseline: 0.02 is 2% more instructions.

    Raises:
        CountError: the loads differ, or no record is in both.
    """
    changes = []
    for record in records:
        before = baseline.get((record["op"], record["size"]))
        if before is None:
            continue
        if before["inputs"] != record["inputs"]:
            raise CountError(
                f"the loads of {record['size']} are not those of the baseline; record it again"
            )
        ratio = {}
        for name, value in before["instructions"].items():
            ratio[name] = (record["instructions"][name] - value) / value
        changes.append({**record, "loads_before": before["loads"], "change": ratio})
    if not changes:
        raise CountError("the baseline has none of these sizes")
    return changes


def report_changes(changes: Sequence[Record], limit: float) -> int:
    """Print the changes; return the exit status."""
    rows = [
        [
            *(change["op"], change["size"]),
            *(str(change["loads_before"]), str(change["loads"])),
            *(f"{change['change'][name]:+.2%}" for name in FIGURES),
        ]
        for change in changes
        if any(change["change"].values()) or change["loads"] != change["loads_before"]
    ]
    print(f"# changes: {len(rows)} of {len(changes)} rows")
    if rows:
        print(format_table([("call", "size", "loads before", "now", *FIGURES)], rows))
    worst, name, change = max(
        ((c["change"][name], name, c) for c in changes for name in FIGURES), key=lambda one: one[0]
    )
    verdict = "more than" if worst > limit else "within"
    print(
        f"# worst: {worst:+.2%} ({change['op']}, {change['size']}, {name}), {verdict} {limit:.2%}"
    )
    return TOO_MUCH if worst > limit else 0


def parse_percent(text: str) -> float:
    """Return 0.02 for "2%" or "2"."""
    value = float(text.removesuffix("%")) / 100
    if not 0 <= value < np.inf:
        raise ValueError(text)
    return value


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the instructions of each call by size, and their changes against another run."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--sizes", default=DEFAULT_SIZES, metavar="G/E/S,...")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the counts")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="file of an earlier --json")
    parser.add_argument(
        "--max-increase",
        type=parse_percent,
        default=parse_percent("2%"),
        metavar="PERCENT",
        help="of any figure, else the exit status is 3 (default 2%%)",
    )
    options = parser.parse_args(arguments)
    try:
        if options.json is not None:
            check_writable(options.json, "--json")
        sizes = parse_sizes(options.sizes, "--sizes")
        tools = describe_tools()
        baseline = None if options.compare is None else read_baseline(options.compare, tools)
        with tempfile.TemporaryDirectory() as folder:
            program = build(Path(folder))
            records = [record for size in sizes for record in count(program, size)]
        print(f"# instructions of one call; {', '.join(FAMILIES)}; {SEEDS} loads of each")
        print(f"# {tools['compiler']}, {tools['target']}, {tools['flags']}")
        columns = [Column("call", "", "op"), Column("size", "G/E/S", "size")]
        columns.append(Column("loads", "", "loads"))
        columns += [Column(name, "", f"instructions.{name}") for name in FIGURES]
        print_records(columns, records, options.json, tools=tools)
        changes = None if baseline is None else compare(records, baseline)
    except (CountError, UltraEPError, OSError) as error:
        print(f"instructions: {error}", file=sys.stderr)
        return FAILED
    return 0 if changes is None else report_changes(changes, options.max_increase)


if __name__ == "__main__":
    sys.exit(main())
