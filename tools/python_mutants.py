#!/usr/bin/env python3
"""Mutants of the Python library, and the first test that kills each.

python tools/python_mutants.py RECORD [--number 200]         # write a record, or continue it
python tools/python_mutants.py RECORD --only-killed OLD      # mutants that OLD says were killed

A mutant changes a comparison, a condition, an integer, a returned value or a call made for its
effect. The same sources give the same sample. The tests of the changed folder run, then those of
folders that import it, until one fails: the record has its name, "survived" or "timeout".

This checkout's own files are changed and restored, as an editable install imports no others: run it
in a git worktree that nothing else uses, with the interpreter of that worktree's environment.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
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
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "ultraep_comm"
SURVIVED, TIMEOUT = "survived", "timeout"
# The folders of tests/python, and tests/device, that test a folder of the package; nearest first.
FOLDERS = {
    "plan": "plan model interop group calls engines device nn",
    "weights": "group calls device nn engines fabrics",
    "fabrics": "fabrics group engines",
    "recording": "recording calls group",
    "model": "model plan group bench",
    "engines": "engines device group calls",
    "group": "group calls device engines nn adapters",
    "calls": "calls device group nn engines recording adapters",
    "nn": "nn adapters group",
    "interop": "interop plan",
    "adapters": "adapters",
    "doctor": "doctor",
    "ops.py": "calls device nn",
}
TOP_LEVEL = "doctor group plan engines calls bench model"  # calibration, driver, env, ...
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


def all_mutants() -> dict[str, list[Mutant]]:
    """Return the mutants of each folder in the order of their hashes."""
    found: dict[str, list[Mutant]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        folder = path.relative_to(PACKAGE).parts[0]
        if folder not in ("bench", "viz"):  # what measures and draws
            found.setdefault(folder if folder in FOLDERS else "", []).extend(mutants_of(path))
    for own in found.values():
        own.sort(key=lambda mutant: hashlib.sha256(mutant.name.encode()).digest())
    return found


def choose(number: int) -> list[Mutant]:
    """Return the first mutants of each folder, a number by its share of all; at least one."""
    found = all_mutants()
    share = number / sum(map(len, found.values()))
    return [m for own in found.values() for m in own[: max(1, round(share * len(own)))]]


def failing_test(tests: str, limit: float) -> str:
    """Return the first test of a folder that fails, "survived" or "timeout"."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--timeout=60", tests]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    ) as process:
        try:
            text = process.communicate(timeout=limit)[0].decode(errors="replace")
        except subprocess.TimeoutExpired:
            return TIMEOUT
        finally:  # ranks that a failed test left behind too
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode in (0, 5) or "ERROR: not found: " in text:  # a test that is gone
        return SURVIVED
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", text, re.M)
    return failed[1] if failed else f"{tests}: {text.strip().splitlines()[-1]}"


def run(mutant: Mutant, limit: float, first: str = "") -> str:
    """Return what becomes of a mutant; ``first`` is the test that once killed it."""
    folders = FOLDERS.get(mutant.path.relative_to(PACKAGE).parts[0], TOP_LEVEL).split()
    places = [ROOT / "tests" / ("" if name == "device" else "python") / name for name in folders]
    text = mutant.path.read_bytes()
    mutant.path.write_bytes(text[: mutant.begin] + mutant.new.encode() + text[mutant.end :])
    try:
        for tests in [*([first] if "::" in first else []), *map(str, places)]:
            if (result := failing_test(tests, limit)) != SURVIVED:
                return result
        return SURVIVED
    finally:
        mutant.path.write_bytes(text)


def main() -> int:
    """Run the mutants; return 1 if one that was killed survives."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("record", type=Path)
    parser.add_argument("--number", type=int, default=200)
    parser.add_argument("--limit", type=float, default=600, help="seconds a mutant and folder")
    parser.add_argument("--only-killed", type=Path, metavar="OLD")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # restores the file
    record = json.loads(options.record.read_text()) if options.record.exists() else {}
    old, chosen = {}, choose(options.number)
    if options.only_killed:
        known = json.loads(options.only_killed.read_text())
        old = {name: test for name, test in known.items() if test not in (SURVIVED, TIMEOUT)}
        chosen = [m for own in all_mutants().values() for m in own if m.name in old]
        for name in old.keys() - {mutant.name for mutant in chosen}:
            print(f"is no longer there: {name}")
    for number, mutant in enumerate(chosen, start=1):
        if mutant.name not in record:
            begin = time.monotonic()
            record[mutant.name] = run(mutant, options.limit, old.get(mutant.name, ""))
            options.record.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
            print(f"{number}/{len(chosen)}, {time.monotonic() - begin:.0f} s: {mutant.name}")
            print(f"    {record[mutant.name]}", flush=True)
    lost = [mutant.name for mutant in chosen if old and record[mutant.name] == SURVIVED]
    print(*(f"survives now: {name}\n" for name in lost), sep="", end="")
    return int(bool(lost))


if __name__ == "__main__":
    sys.exit(main())
