#!/usr/bin/env python3
"""Put the figures of committed result files into the documents.

    .venv/bin/python tools/update_docs.py            # rewrites what has changed
    .venv/bin/python tools/update_docs.py --check    # shows what would change; exit status 1

Blocks stand below a line such as

    <!-- from bench/results/FILE.json: shown -->

and are made anew by a function of doc_blocks.py; "<!-- printed by the code above -->" stands above
what the Python block before it prints. Figures in sentences are found by the patterns of
doc_sentences.py.
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

from doc_blocks import BLOCKS
from doc_sentences import SENTENCES, Sentence

ROOT = Path(__file__).resolve().parents[1]
_MARKER = re.compile(r"^<!-- from (\S+): (\w+) -->\n", re.MULTILINE)
_PRINTED = re.compile(r"```python\n(.*?)```\s*\n<!-- printed by the code above -->\n", re.DOTALL)
_BLOCK = re.compile(r"```\n.*?^```\n|(?:\|[^\n]*\n)+", re.DOTALL | re.MULTILINE)


def documents(root: Path) -> list[Path]:
    """Return the documents that have figures."""
    return [
        root / "README.md",
        *sorted((root / "docs").glob("*.md")),
        *sorted((root / "bench").glob("*.md")),
        root / "bench" / "results" / "README.md",
    ]


class Results:
    """The result files of a tree, by name without its suffix."""

    def __init__(self, root: Path) -> None:
        """Take the files of ``root``."""
        self._root = root
        self._read: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        """Return a file's document."""
        if name not in self._read:
            path = self._root / "bench" / "results" / f"{name}.json"
            self._read[name] = json.loads(path.read_text())
        return self._read[name]


def update(text: str, results: Results, sentences: list[Sentence], name: str) -> str:
    """Return a document with the figures of the results.

    Raises:
        ValueError: a marker names no block, or a sentence is not there exactly once.
    """
    for found in reversed(list(_MARKER.finditer(text))):
        file, kind = Path(found[1]), found[2]
        if kind not in BLOCKS or file.parent.as_posix() != "bench/results":
            raise ValueError(f"{name}: {found[0].strip()}: expected one of {', '.join(BLOCKS)}")
        text = _put(text, found.end(), BLOCKS[kind](results[file.stem]), name)
    for found in reversed(list(_PRINTED.finditer(text))):
        text = _put(text, found.end(), f"```\n{run_code(found[1])}```\n", name)
    for sentence in sentences:
        try:
            text = sentence.put(text, sentence.figures(results))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return text


def _put(text: str, at: int, block: str, name: str) -> str:
    old = _BLOCK.match(text, at)
    if old is None:
        line = text.count("\n", 0, at)
        raise ValueError(f"{name}:{line}: no code block and no table below the marker; put one")
    return text[:at] + block + text[old.end() :]


@lru_cache
def run_code(code: str) -> str:
    """Return what a program prints."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout


def main(arguments: list[str] | None = None) -> int:
    """Update or check all documents; return the exit status."""
    parser = argparse.ArgumentParser(description="Put the figures of result files into documents.")
    parser.add_argument("--check", action="store_true", help="change nothing; 1: something is old")
    parser.add_argument("--root", type=Path, default=ROOT, help="of another tree")
    options = parser.parse_args(arguments)
    results, status = Results(options.root), 0
    for path in documents(options.root):
        name = path.relative_to(options.root).as_posix()
        old = path.read_text()
        try:
            new = update(old, results, SENTENCES.get(name, []), name)
        except (ValueError, KeyError, OSError) as error:
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
