#!/usr/bin/env python3
"""Mutants of the Python library, and the first test that kills each.

pip install pytest-cov
python -m pytest -n 2 tests --cov=ultraep_comm --cov-context=test --cov-report=
python tools/python_mutants.py RECORD [--number 200]         # write a record, or continue it
python tools/python_mutants.py RECORD --only-killed OLD      # mutants that OLD says were killed

A mutant changes a comparison, a condition, an integer, a returned value or a call made for its
effect. The same sources give the same sample. The tests that execute the changed line run, the
smallest first and up to three of each function, until one fails: the record has its name,
"survived" or "timeout". For a line that only other processes execute, the folder's tests run.

This checkout's own files are changed and restored, as an editable install imports no others: run it
in a git worktree that nothing else uses, with the interpreter of that worktree's environment.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "ultraep_comm"
SURVIVED, TIMEOUT = "survived", "timeout"
LEFT_OUT = ("bench", "viz")  # what measures and draws
OPPOSITES = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="}
OPPOSITES |= {ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in"}


class Mutant(NamedTuple):
    """A change of the bytes ``begin`` to ``end`` of a file of the package."""

    name: str
    path: Path
    begin: int
    end: int
    new: str


def new_source(node: ast.AST) -> str | None:
    """Return what a mutant has in place of a node, if the node can be changed."""
    match node:
        case ast.Compare(ops=[op]):
            right = ast.unparse(node.comparators[0])
            return f"({ast.unparse(node.left)} {OPPOSITES[type(op)]} {right})"
        case ast.BoolOp():
            word = " or " if isinstance(node.op, ast.And) else " and "
            return "(" + word.join(f"({ast.unparse(value)})" for value in node.values) + ")"
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            return str(value + 1)
        case ast.Expr(value=ast.Call()):
            return "pass"
        case ast.Return(value=ast.Constant(value=bool(value))):
            return f"return {not value}"
        case ast.Return(value=ast.expr() as value) if ast.unparse(value) != "None":
            return "return None"
    return None


def changes(node: ast.AST, where: str = "") -> Iterator[tuple[str, ast.AST, str]]:
    """Yield the function, node and new source of each possible change."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.JoinedStr | ast.Raise):  # texts
            continue
        is_scope = isinstance(child, ast.FunctionDef | ast.ClassDef)
        inner = f"{where}.{child.name}".lstrip(".") if is_scope else where
        if inner and (new := new_source(child)) is not None:
            yield inner, child, new
        if inner and isinstance(child, ast.If | ast.While | ast.IfExp):
            yield inner, child.test, f"(not ({ast.unparse(child.test)}))"
        yield from changes(child, inner)


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Yield all mutants of a file; a name does not depend on what is elsewhere in the file."""
    text = path.read_bytes()
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    seen: Counter[str] = Counter()
    for where, node, new in changes(ast.parse(text)):
        begin = starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
        end = starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]
        old = " ".join(text[begin:end].decode().split())
        name = f"{path.relative_to(PACKAGE)}, {where}: {old} -> {new}"
        seen[name] += 1
        yield Mutant(f"{name} [{seen[name]}]", path, begin, end, new)


def all_mutants() -> list[Mutant]:
    """Return all mutants in the order of their hashes."""
    paths = [p for p in PACKAGE.rglob("*.py") if p.relative_to(PACKAGE).parts[0] not in LEFT_OUT]
    found = [mutant for path in paths for mutant in mutants_of(path)]
    return sorted(found, key=lambda mutant: hashlib.sha256(mutant.name.encode()).digest())


class Coverage:
    """Which tests execute a line."""

    def __init__(self) -> None:
        # Not a requirement of the tests: imported where it is used.
        self._data: Any = importlib.import_module("coverage").CoverageData(str(ROOT / ".coverage"))
        self._data.read()
        self._lines: Counter[str] = Counter()  # of each test
        for path in self._data.measured_files():
            for contexts in self._data.contexts_by_lineno(path).values():
                self._lines.update(contexts)

    def tests_of(self, mutant: Mutant, once: str) -> list[str]:
        """Return tests that execute a mutant's first line, or the folder's if none is known to.

        ``once``, the test that once killed it, comes first if it is still there.
        """
        line = mutant.path.read_bytes()[: mutant.begin].count(b"\n") + 1
        contexts = self._data.contexts_by_lineno(str(mutant.path)).get(line, [])
        found = dict.fromkeys(
            context.partition("|")[0]
            for context in sorted(contexts, key=lambda context: self._lines[context])
            if "::" in context
        )
        of_function: Counter[str] = Counter()
        tests = [once] if f"{once}|run" in self._lines else []
        for test in found:
            of_function[test.partition("[")[0]] += 1
            if of_function[test.partition("[")[0]] <= 3:
                tests.append(test)
        folder = mutant.path.relative_to(PACKAGE).parts[0]
        return tests[:60] or [f"tests/python/{folder if (PACKAGE / folder).is_dir() else 'group'}"]


def run(mutant: Mutant, tests: list[str], limit: float) -> str:
    """Return the first of the tests that fails with a mutant, "survived" or "timeout"."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n0", "--timeout=120", *tests]
    text = mutant.path.read_bytes()
    mutant.path.write_bytes(text[: mutant.begin] + mutant.new.encode() + text[mutant.end :])
    try:
        with subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process:
            try:
                output = process.communicate(timeout=limit)[0].decode(errors="replace")
            except subprocess.TimeoutExpired:
                return TIMEOUT
            finally:  # ranks that a failed test left behind too
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
    finally:
        mutant.path.write_bytes(text)
    if process.returncode in (0, 5):
        return SURVIVED
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", output, re.M)
    return failed[1] if failed else output.strip().splitlines()[-1]


def main() -> int:
    """Run the mutants; return 1 if one that was killed survives."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("record", type=Path)
    parser.add_argument("--number", type=int, default=200)
    parser.add_argument("--limit", type=float, default=600, help="seconds a mutant")
    parser.add_argument("--only-killed", type=Path, metavar="OLD")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # restores the file
    record = json.loads(options.record.read_text()) if options.record.exists() else {}
    coverage, old, mutants = Coverage(), {}, all_mutants()
    chosen = mutants[: options.number]
    if options.only_killed:
        known = json.loads(options.only_killed.read_text())
        old = {name: test for name, test in known.items() if test not in (SURVIVED, TIMEOUT)}
        chosen = [mutant for mutant in mutants if mutant.name in old]
        for name in old.keys() - {mutant.name for mutant in chosen}:
            print(f"is no longer there: {name}")
    for number, mutant in enumerate(chosen, start=1):
        if mutant.name not in record:
            begin = time.monotonic()
            tests = coverage.tests_of(mutant, old.get(mutant.name, ""))
            record[mutant.name] = run(mutant, tests, options.limit)
            options.record.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
            print(f"{number}/{len(chosen)}, {time.monotonic() - begin:.0f} s: {mutant.name}")
            print(f"    {record[mutant.name]}", flush=True)
    lost = [mutant.name for mutant in chosen if old and record[mutant.name] == SURVIVED]
    print(*(f"survives now: {name}\n" for name in lost), sep="", end="")
    return int(bool(lost))


if __name__ == "__main__":
    sys.exit(main())
