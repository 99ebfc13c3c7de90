"""A framework's own tests in a folder of their own, and what became of them."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from ultraep_comm.bench.machine import find_commit

HERE = Path(__file__).resolve().parent


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
        "PYTHONPATH": os.pathsep.join([str(folder), str(HERE)]),
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


def summary(result: Mapping[str, Any]) -> str:
    """Return what :func:`main` prints of a result."""
    lines = [", ".join(f"{name} {version}" for name, version in result["versions"].items())]
    for name, counts in result["tests"].items():
        found = ", ".join(f"{n} {outcome}" for outcome, n in sorted(counts.items()))
        lines.append(f"{name}: {found}")
    numbers = [f"{k.replace('_', ' ')}: {v}" for k, v in result.items() if isinstance(v, int)]
    return "\n".join([*lines, ", ".join(numbers)])


def main(text: str, package: str, run: Callable[[Path, Path], dict[str, Any]], moved: str) -> int:
    """Run the tests, print the result, and return 0 if all passed and something has moved.

    Args:
        text: describes the command.
        package: the framework's distribution.
        run: given the framework's sources and an empty folder, returns ``tests``, as of
            :func:`run_tests`, and numbers.
        moved: the number that must not be 0.
    """
    parser = argparse.ArgumentParser(description=text.splitlines()[0])
    parser.add_argument("source", type=Path, metavar="FOLDER")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    names = (package, "torch", "ultraep_comm")
    versions = {name: importlib.metadata.version(name) for name in names}
    with tempfile.TemporaryDirectory() as folder:
        result = {"versions": versions, **run(options.source.resolve(), Path(folder))}
    result["commit"] = find_commit()
    print(summary(result))
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    failed = any(set(counts) - {"passed", "skipped"} for counts in result["tests"].values())
    return int(failed or not result["tests"] or not result[moved])
