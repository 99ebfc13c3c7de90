"""A framework's own tests in a folder of their own, and what became of them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

TOOLS = Path(__file__).resolve().parents[1]
PASSED = {"passed", "skipped"}


def run_tests(
    folder: Path, files: Sequence[str], chosen: str, environment: Mapping[str, str]
) -> dict[str, dict[str, int]]:
    """Run pytest in ``folder``, and return the numbers of outcomes by module or class.

    Args:
        folder: on the tests' path, as is the folder of the tools.
        files: of tests.
        chosen: which of them, as for ``-k``.
        environment: added to this process's.
    """
    report = folder / "report.xml"
    environment = {
        "PYTHONPATH": os.pathsep.join([str(folder), str(TOOLS)]),
        "OMP_NUM_THREADS": "1",  # a forked process has none of its parent's threads
        **environment,
    }
    command = [sys.executable, "-m", "pytest", "-q", f"--junit-xml={report}"]
    command += ["-p", "no:cacheprovider", "-k", chosen, *files]
    subprocess.run(command, cwd=folder, env=os.environ | environment, check=False)
    counts: dict[str, Counter[str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        outcome = next((child.tag for child in case if child.tag != "system-out"), "passed")
        name = case.attrib["classname"].rpartition(".")[2].removeprefix("Test")
        counts.setdefault(name, Counter())[outcome] += 1
    return {name: dict(found) for name, found in counts.items()}


def failures(tests: Mapping[str, Mapping[str, int]], moved: int) -> list[str]:
    """Return what is wrong: tests that did not pass, or none, or nothing that moved."""
    failed = [f"{name}: {counts}" for name, counts in tests.items() if set(counts) - PASSED]
    if not tests:
        failed.append("no test ran")
    if not moved:
        failed.append("no expert was moved")
    return failed
