"""Compare host_cost.py and empty_plan.py between this checkout and another one.

    python bench/speed/side_by_side.py ../before [--rounds 5] [--iters 2000] [--max-increase 5%]

The other checkout needs its own environment, for example made by

    git worktree add ../before HEAD~1 && cd ../before && python3 -m venv .venv
    .venv/bin/pip install -c constraints.txt -e .

Each side runs its own scripts in its own ``.venv``, one after the other, in alternating order. A
figure is the least median of all rounds. Exit status 3: a figure has grown by more than the limit.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from instructions import parse_percent

from ultraep_comm.bench.table import format_table

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ("host_cost", "empty_plan")
KEYS = ("op", "ranks", "weights", "async_op")
TOO_MUCH = 3

Figures = dict[tuple[str, ...], float]


def run(root: Path, python: Path, script: str, iters: int) -> Figures:
    """Return a checkout's medians in microseconds, by call."""
    found = list((root / "bench").rglob(f"{script}.py"))
    if len(found) != 1:
        sys.exit(f"{root}/bench has {len(found)} files {script}.py; expected one")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [python, found[0], "--iters", str(iters), "--json", out]
        subprocess.run(command, cwd=folder, stdout=subprocess.DEVNULL, check=True)
        records = json.loads(out.read_text())["records"]
    return {
        tuple(str(record.get(key, "")) for key in KEYS): record["time_us"]["p50"]
        for record in records
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path, help="folder of the other checkout")
    parser.add_argument("--python", type=Path, help="of the other checkout (default BEFORE/.venv)")
    parser.add_argument("--only", choices=SCRIPTS, help="one of the scripts")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--iters", type=int, default=2000)
    parser.add_argument("--max-increase", type=parse_percent, default=0.05, metavar="PERCENT")
    options = parser.parse_args(arguments)
    before = options.before.resolve()
    sides = [
        (before, options.python or before / ".venv" / "bin" / "python"),
        (ROOT, Path(sys.executable)),
    ]
    least: list[Figures] = [{}, {}]
    for number in range(options.rounds):
        for script in [options.only] if options.only else SCRIPTS:
            for side in (0, 1) if number % 2 == 0 else (1, 0):
                for key, time_us in run(*sides[side], script, options.iters).items():
                    least[side][key] = min(time_us, least[side].get(key, time_us))
    if least[0].keys() != least[1].keys():
        sys.exit(f"only one side has {sorted(least[0].keys() ^ least[1].keys())}")
    changes = {key: least[1][key] / time_us - 1 for key, time_us in least[0].items()}
    rows = [
        [*key, f"{least[0][key]:.2f}", f"{least[1][key]:.2f}", f"{change:+.1%}"]
        for key, change in changes.items()
    ]
    print(format_table([(*KEYS, "before (us)", "here (us)", "change")], rows))
    worst = max(changes.values())
    verdict = "more than" if worst > options.max_increase else "within"
    print(f"# worst: {worst:+.1%}, {verdict} {options.max_increase:.1%}")
    return TOO_MUCH if worst > options.max_increase else 0


if __name__ == "__main__":
    sys.exit(main())
