"""Frameworks' real code with the adapters, where a framework is installed: tools/frameworks."""

from __future__ import annotations

import functools
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from ranks import run_python
from tiers import cases, sampled

TOOLS = Path(__file__).resolve().parents[3] / "tools"
sys.path.append(str(TOOLS))

from frameworks import table  # noqa: E402
from frameworks.run import MISSING, why_missing  # noqa: E402
from frameworks.training import Limits, failures  # noqa: E402

EVERY = {
    (name, case): given
    for name, (_, programs) in table.FRAMEWORKS.items()
    for program in programs
    for case, given in program.cases.items()
    if not given.source
}
QUICK = cases(1, 0) * ["--quick"]


@functools.cache
def found(name: str) -> dict[str, Any]:
    """Run a framework's cases, and return what each has found."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "found.json")
        arguments = (str(TOOLS / "frameworks"), name, *QUICK, "--json", str(path))
        done = run_python(*arguments, timeout=1500)
        assert path.exists(), done.stdout[-2000:] + done.stderr[-2000:]
        every: dict[str, Any] = json.loads(path.read_text())["cases"]
        wrong = any(one.get("failed") for one in every.values())
        assert done.returncode == int(wrong), done.stderr[-2000:]
        return every


@pytest.mark.timeout(1600)
@pytest.mark.parametrize(("name", "case"), sampled(EVERY, lambda key: EVERY[key].is_quick))
def test_real_code_finds_nothing_wrong(name: str, case: str) -> None:
    if reason := why_missing(name):
        pytest.skip(f"{reason}: see docs/frameworks")
    one = found(name)[case]
    print(f"{name}, {case}: {one}")
    assert not one["failed"], "\n".join(one["failed"])


def test_a_missing_framework_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(table.FRAMEWORKS, "pytest", ((99,), []))
    monkeypatch.setitem(table.FRAMEWORKS, "nothing", ((1,), []))
    assert why_missing("pytest") == f"pytest is {pytest.__version__}; expected 99 or newer"
    assert why_missing("nothing") == "nothing is not installed"
    missing = ((n, r) for n in table.FRAMEWORKS if n != "pytest" and (r := why_missing(n)))
    name, reason = next(missing)
    if name != "nothing":  # unless all are installed
        done = run_python(str(TOOLS / "frameworks"), name)
        assert (done.returncode, done.stdout) == (MISSING, f"{name}: {reason}\n")


RIGHT: dict[str, Any] = {
    "losses": [[4.0, 3.5], [4.0, 3.5]],
    "gradients": [1e-6, 1e-6],
    "left": {"parameters": 1e-6, "moments": 1e-6},
    "arrivals": [[3], [3]],
    "imbalance": [["0", 1.5, 1.01, 2], ["1", 1.1, 1.0, 1]],
}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, ""),
        ({"losses": [[4.0], [float("nan")]]}, "a loss is nan; expected 4.0"),
        ({"gradients": [1e-3, 1e-6]}, "first gradients are 0.001 apart; expected less than 2e-05"),
        ({"gradients": [1e-6, float("nan")]}, "gradients are nan apart"),
        ({"arrivals": [[3], [2, 3]]}, "parameters got [2, 3] gradients; expected [3]"),
        ({"from_fp32": [0.01, 0.02]}, "gradients are 0.02 from fp32; expected less than 0.013"),
        ({"imbalance": []}, "0 plans; expected some"),
        ({"imbalance": [["0", 1.5, 1.2, 2]]}, "imbalance 1.50 to 1.20; expected below 1.05"),
    ],
)
def test_what_is_wrong_is_said(change: dict[str, Any], says: str) -> None:
    lines = list(failures(RIGHT | change, Limits(), few=False, plans=True))
    assert len(lines) == bool(says), lines
    assert says in "".join(lines)


def test_few_tokens_get_no_replicas() -> None:
    lines = failures(RIGHT, Limits(), few=True, plans=True)
    assert next(lines) == "2 replicas, imbalance 1.50 to 1.01; expected none"
