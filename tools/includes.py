#!/usr/bin/env python3
"""The include order of src/: which folder may include which, and no cycles.

python tools/includes.py [folder]    # default: src/; part of tools/lint
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

# Each folder with those directly below it. It may include itself and everything below it.
BELOW = {
    "core/base": (),
    "core/plan": ("core/base",),
    "core/reroute": ("core/base",),
    "core/schedule": ("core/plan", "core/reroute"),
    "core/transfer": ("core/schedule",),
    "engine": ("core/transfer",),
    "host": ("engine",),
    "c10d": ("engine",),
    "cuda/device": ("core/transfer",),
    "cuda": ("cuda/device", "engine"),
    "model": ("core/transfer",),
}
SUFFIXES = {".hpp", ".cuh", ".cc", ".cu"}
INCLUDE = re.compile(r'\s*#\s*include\s*(["<])([^">]+)')


def reachable(folder: str) -> set[str]:
    """Return the folders that a file in this folder may include."""
    return {folder}.union(*map(reachable, BELOW[folder]))


def violations(source: Path) -> Iterator[str]:
    """Yield the violations below `source`, each with its file and line."""
    included: dict[str, list[str]] = {}
    for path in sorted(path for path in source.rglob("*") if path.suffix in SUFFIXES):
        name = path.relative_to(source)
        folder = name.parent.as_posix()
        if folder not in BELOW:
            yield f"{path}:1: {folder} has no place in the order"
            continue
        allowed = reachable(folder)
        included[name.as_posix()] = found = []
        for number, line in enumerate(path.read_text().splitlines(), 1):
            match = INCLUDE.match(line)
            if match is None:
                continue
            quote, header = match.groups()
            if (source / header).is_file():
                found.append(header)
                if Path(header).parent.as_posix() not in allowed:
                    yield f"{path}:{number}: {folder} may not include {header}"
            elif quote == '"':
                yield f"{path}:{number}: {header} is not a path below {source.name}/"
    try:
        TopologicalSorter(included).prepare()
    except CycleError as error:
        cycle = error.args[1]
        yield f"{source / cycle[0]}:1: includes itself: {' <- '.join(cycle)}"


def main() -> int:
    """Print every violation; return 1 if there is one."""
    root = Path(__file__).resolve().parents[1]
    source = Path(sys.argv[1]).resolve() if sys.argv[1:] else root / "src"
    found = list(violations(source))
    for text in found:
        print(text)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
