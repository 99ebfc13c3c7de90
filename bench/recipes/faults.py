"""The errors that the ranks of a group raise when one of them fails, and how soon.

    python bench/recipes/faults.py [--repeat 5] [--soak N] [--groups N] [--only TEXT] [--json FILE]

Runs the scenes of ``tests/faults``: real processes are killed, stopped, interrupted, forked, or
make other calls than their peers. Every run is checked as in the tests: types of errors, the ranks
that they name, time, bytes, leftovers, and a new group afterwards. The exit status is 1 if a check
failed.

A time is measured from the fault, or from the start of the call if that is later, to the error.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "faults"), str(ROOT / "tests" / "python")]
from lives import lives_scene  # noqa: E402
from scene import Scene  # noqa: E402
from scenes import SCENES  # noqa: E402
from soak import soak_scene  # noqa: E402
from table import COLUMNS, Row  # noqa: E402

from ultraep_comm.bench.report import print_records  # noqa: E402


def chosen(arguments: argparse.Namespace) -> list[tuple[Scene, int]]:
    """The chosen scenes, each with its number of runs."""
    found = [(scene, arguments.repeat) for scene in SCENES if arguments.only in scene.name]
    if arguments.short:
        found = [(scene, times) for scene, times in found if not scene.long]
    if arguments.soak:
        found.append((soak_scene(arguments.soak, arguments.seed), 1))
    if arguments.groups:
        found.append((lives_scene(arguments.groups), 1))
    return found


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=1, help="runs of every scene")
    parser.add_argument("--soak", type=int, default=0, help="transfers by random plans")
    parser.add_argument("--groups", type=int, default=0, help="groups opened and closed")
    parser.add_argument("--seed", type=int, default=1, help="of the soak")
    parser.add_argument("--only", default="", help="scenes with this text in their name")
    parser.add_argument("--short", action="store_true", help="leave out the rarer scenes")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    for scene, times in chosen(arguments):
        row = Row(scene=scene)
        rows.append(row)
        for number in range(times):
            wrong = row.add(scene.run())
            print(f"{scene.name}, run {number + 1}: {wrong or 'as expected'}", file=sys.stderr)
    if not rows:
        parser.error(f"no scene has {arguments.only!r} in its name")
    names = ("repeat", "soak", "groups", "seed", "only", "short")
    settings = {name: getattr(arguments, name) for name in names}
    print_records(COLUMNS, [row.record() for row in rows], arguments.json, settings=settings)
    return 1 if any(row.wrong for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
