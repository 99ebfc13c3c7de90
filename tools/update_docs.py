#!/usr/bin/env python3
"""Put the figures of committed result files into the documents.

    .venv/bin/python tools/update_docs.py            # rewrites what has changed
    .venv/bin/python tools/update_docs.py --check    # shows what would change; exit status 1

Generated blocks stand below these markers:

    <!-- from bench/results/FILE.json: shown -->    a function of doc_blocks.py, from that file
    <!-- drawn by tools/doc_blocks.py: walk -->     a function of doc_blocks.py, from the code
    <!-- printed by the code above -->              the output of the Python block above

A figure in a sentence is followed by its place in a file, and keeps its number of digits:
``114<!--= critical_path:records.1.total_us --> us``.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

from doc_blocks import BLOCKS, DRAWINGS

ROOT = Path(__file__).resolve().parents[1]
_MARKER = re.compile(r"^<!-- from bench/results/([\w/]+)\.json: (\w+) -->\n", re.MULTILINE)
_DRAWN = re.compile(r"^<!-- drawn by tools/doc_blocks\.py: (\w+) -->\n", re.MULTILINE)
_PRINTED = re.compile(r"```python\n(.*?)```\s*\n<!-- printed by the code above -->\n", re.DOTALL)
_BLOCK = re.compile(r"```\w*\n.*?^```\n|(?:\|[^\n]*\n)+", re.DOTALL | re.MULTILINE)
_FIGURE = re.compile(r"(\d+)(\.\d+)?(%?)(<!--= (\w+):(.+?) -->)")


def documents(root: Path) -> list[Path]:
    """Return the documents that may have figures."""
    return [
        root / "README.md",
        *sorted((root / "docs").rglob("*.md")),
        *sorted((root / "bench").glob("*.md")),
        root / "bench" / "results" / "README.md",
    ]


def update(text: str, root: Path) -> str:
    """Return a document with the figures of a tree's result files.

    Raises:
        ValueError, LookupError, OSError: a marker names a missing file, place or block.
    """

    def read(name: str) -> Any:
        return json.loads((root / "bench" / "results" / f"{name}.json").read_text())

    def figure(found: re.Match[str]) -> str:
        value = read(found[5])
        for key in found[6].split("."):
            value = value[int(key) if isinstance(value, list) else key]
        digits = len(found[2] or ".") - 1
        return f"{value:.{digits}{found[3] or 'f'}}{found[4]}"

    for found in reversed(list(_MARKER.finditer(text))):
        text = _put(text, found.end(), BLOCKS[found[2]](read(found[1])))
    for found in reversed(list(_DRAWN.finditer(text))):
        text = _put(text, found.end(), DRAWINGS[found[1]]())
    for found in reversed(list(_PRINTED.finditer(text))):
        text = _put(text, found.end(), f"```\n{run_code(found[1])}```\n")
    return _FIGURE.sub(figure, text)


def _put(text: str, at: int, block: str) -> str:
    old = _BLOCK.match(text, at)
    if old is None:
        raise ValueError(f"line {text.count(chr(10), 0, at)}: no code block or table below it")
    return text[:at] + block + text[old.end() :]


@lru_cache
def run_code(code: str) -> str:
    """Return the output of a program."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout


def main(arguments: list[str] | None = None) -> int:
    """Update or check all documents; return the exit status."""
    parser = argparse.ArgumentParser(description="Put the figures of result files into documents.")
    parser.add_argument("--check", action="store_true", help="change nothing; 1: out of date")
    parser.add_argument("--root", type=Path, default=ROOT, help="of another tree")
    options = parser.parse_args(arguments)
    status = 0
    for path in documents(options.root):
        name = path.relative_to(options.root).as_posix()
        old = path.read_text()
        try:
            new = update(old, options.root)
        except (ValueError, LookupError, OSError) as error:
            print(f"error: {name}: {error}", file=sys.stderr)
            return 2
        if new == old:
            continue
        if options.check:
            lines = (old.splitlines(), new.splitlines())
            print("\n".join(difflib.unified_diff(*lines, name, name, lineterm="", n=0)))
            status = 1
        else:
            path.write_text(new)
            print(name)
    return status


if __name__ == "__main__":
    sys.exit(main())
