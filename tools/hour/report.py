"""What went wrong, in so few characters that the end of a terminal shows all of it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

LIMIT = 12_000  # characters
LINES, WIDTH = 10, 200  # of a failure
UNFINISHED = re.compile(r"::\S+\s*$")  # pytest -v says which test it runs, and later its result
TELLING = re.compile(r"(?i)\w*(error|exception)\b|\bfail|\bassert|fatal|abort|\bfault\b|killed")


def telling_lines(text: str) -> list[str]:
    """Return the ten lines that matter: the test that ran, errors, the last lines, the first."""
    lines = [line[:WIDTH] for line in text.splitlines() if line.strip()]
    every = range(len(lines))
    tests = [i for i in every if UNFINISHED.search(lines[i])]
    errors = [i for i in every if TELLING.search(lines[i])]
    wanted = [*tests[-1:], *errors[-4:], *every[-3:], *every[:1], *errors[::-1], *every[::-1]]
    return [lines[i] for i in sorted(list(dict.fromkeys(wanted))[:LINES])]


def explain(name: str, record: dict[str, Any], text: str, xml: Path | None) -> dict[str, Any]:
    """Return what a command's record says besides: its tests, and its failures with their lines."""
    tests: dict[str, Any] = {}
    failures: list[dict[str, Any]] = []
    if xml is not None and xml.exists():
        tests, failures = read_xml(xml)
        if tests and record["status"] == "timeout":  # the test that ran is there without a failure
            tests["passed"] = max(0, tests["passed"] - 1)
    if record["status"] == "timeout" or (record["status"] != "passed" and not failures):
        error = f"{record['status']}, exit status {record.get('exit_status')}: {record['last']}"
        lines = telling_lines(text)
        failures.append({"name": name, "error": error[:WIDTH], "lines": lines})
    return {**({"tests": tests} if tests else {}), **({"failures": failures} if failures else {})}


def read_xml(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return how many of pytest's tests passed or were skipped, and those that failed."""
    passed, skipped, failures = 0, 0, []
    try:
        cases = list(ElementTree.parse(path).getroot().iter("testcase"))
    except ElementTree.ParseError as error:
        return {}, [{"name": path.name, "error": f"cut off: {error}", "lines": []}]
    for case in cases:
        wrong = [found for kind in ("failure", "error") for found in case.findall(kind)]
        skipped += case.find("skipped") is not None
        passed += case.find("skipped") is None and not wrong
        if wrong:
            message = (wrong[0].get("message") or "failed").splitlines()[0]
            module = case.get("classname", "").rpartition(".")[2]
            lines = telling_lines("\n".join(found.text or "" for found in wrong))
            name = f"{module}::{case.get('name')}"
            failures.append({"name": name, "error": message[:WIDTH], "lines": lines})
    return {"passed": passed, "skipped": skipped, "failed": len(failures)}, failures


def write(title: str, records: Iterable[dict[str, Any]], notes: Iterable[str]) -> str:
    """Return the report: a line for each stage, then each failure; at most LIMIT characters."""
    head, failures = [f"==== {title}"[:WIDTH]], []
    for record in records:
        head.append(_line(record))
        for command in record["commands"]:
            if command["status"] == "replaced":  # its failure is not the stage's
                head += [f"    instead of: {command['name']}"[:WIDTH]]
                head += [f"      {line}" for line in command["failures"][0]["lines"][-2:]]
                continue
            failures += [(record["stage"], failure) for failure in command.get("failures", [])]
            if command["status"] == "not run" or (
                command["status"] == "failed" and "failures" not in command
            ):
                text = f"    {command['status']}: {command['name']}: {command['last']}"
                head.append(text[:WIDTH])
    head += [note[:WIDTH] for note in notes]
    text = "\n".join(head)
    if len(text) > LIMIT // 2:
        text = text[: LIMIT // 2].rpartition("\n")[0] + "\n... more in summary.json"
    return text + _failures(failures, LIMIT - len(text) - 1)


def _line(record: dict[str, Any]) -> str:
    """Return a stage's line."""
    tests: dict[str, int] = {}
    for command in record["commands"]:
        for kind, count in command.get("tests", {}).items():
            tests[kind] = tests.get(kind, 0) + count
    counted = [f"{count} tests {kind}" for kind, count in tests.items() if count]
    others = [c["status"] for c in record["commands"] if "tests" not in c]
    counted += [f"{others.count(kind)} commands {kind}" for kind in dict.fromkeys(others) if record]
    lacks = [c["last"] for c in record["commands"] if c["status"] == "skipped"][:1]
    shown = record["status"].upper() if record["status"] == "failed" else record["status"]
    text = f"{record['stage']:12}{shown:9}{record.get('seconds', 0):6.1f} s  {', '.join(counted)}"
    return (text + "".join(f"; {why}" for why in lacks))[:WIDTH]


def _failures(failures: list[tuple[str, dict[str, Any]]], room: int) -> str:
    """Return the failures, each with an equal part of the room; those without room are counted."""
    shown = failures[: max(1, room // 160)]
    rest = len(failures) - len(shown)
    room -= 60  # for the last line
    text = ""
    for i, (stage, failure) in enumerate(shown):
        part = (room - len(text)) // (len(shown) - i)
        block = f"\n---- {stage}: {failure['name']}"[:part]
        for line in [failure["error"], *(f"    {line}" for line in failure["lines"])]:
            if len(block) + 1 + len(line) > part:
                break
            block += f"\n{line}"
        text += block
    return text + (f"\n... and {rest} failures more, in summary.json" if rest else "")
