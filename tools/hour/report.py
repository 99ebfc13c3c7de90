"""What went wrong, in so few characters that the end of a terminal shows all of it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

LIMIT = 12_000  # characters
LINES, WIDTH = 10, 200  # of a failure
TELLING = re.compile(r"(?i)\w*(error|exception)\b|\bfail|\bassert|fatal|abort|\bfault\b|killed")


def telling_lines(text: str) -> list[str]:
    """Return the ten lines that matter: those that name an error, the first and the last ones."""
    lines = [line[:WIDTH] for line in text.splitlines() if line.strip()]
    found = [i for i, line in enumerate(lines) if TELLING.search(line)]
    chosen: list[int] = []
    # By turns, so that neither a long traceback nor a long message has all of the lines.
    for i in [*found[-4:], *range(len(lines))[-3:], *range(len(lines))[:1], *found[::-1]]:
        if i not in chosen and len(chosen) < LINES:
            chosen.append(i)
    for i in reversed(range(len(lines))):
        if i not in chosen and len(chosen) < LINES:
            chosen.append(i)
    return [lines[i] for i in sorted(chosen)]


def explain(record: dict[str, Any], text: str, xml: Path | None) -> dict[str, Any]:
    """Return what a command's record says besides: its tests, and its failures with their lines."""
    tests: dict[str, Any] = {}
    failures: list[dict[str, Any]] = []
    if xml is not None and xml.exists():
        tests, failures = read_xml(xml)
    if record["status"] != "passed" and not failures:
        words = record["command"].split()
        name = " ".join(Path(word).name for word in words[-4:])
        error = f"{record['status']}, exit status {record.get('exit_status')}: {record['last']}"
        failures = [{"name": name, "error": error[:WIDTH], "lines": telling_lines(text)}]
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
                head += [f"    instead of: {command['command'][:WIDTH]}"]
                head += [f"      {line}" for line in command["failures"][0]["lines"][-2:]]
                continue
            failures += [(record["stage"], failure) for failure in command.get("failures", [])]
            if command["status"] == "not run" or (
                command["status"] == "failed" and "failures" not in command
            ):
                words = " ".join(Path(word).name for word in command["command"].split()[-3:])
                head.append(f"    {command['status']}: {words}: {command['last']}"[:WIDTH])
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
