"""The kernels under compute-sanitizer, over a short run of all modes."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gpu import give_up, script_environment
from sanitized import PARTS

SCRIPT = Path(__file__).with_name("sanitized.py")
FOUND = 86  # what the sanitizer exits with when it has something to report
WARP = 32
HAZARD = re.compile(  # the earlier access first
    r"Potential (\w+) hazard detected at .*\n"
    r"=+ +\w+ Thread \((\d+),.*?\) at (.*)\n"
    r"=+ +\w+ Thread \((\d+),.*?\) at (.*)"
)

pytestmark = pytest.mark.timeout(1200)


def find_sanitizer() -> str | None:
    """Return the program of PATH, of CUDA's toolkit, or of the environment's wheel."""
    namespace = importlib.util.find_spec("nvidia")
    wheels = [Path(p) for p in (namespace and namespace.submodule_search_locations) or []]
    roots = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"]
    folders = [*(Path(root) / "bin" for root in roots if root)]
    folders += [*(Path(root) / "compute-sanitizer" for root in roots if root)]
    folders += [bin_folder for wheel in wheels for bin_folder in sorted(wheel.glob("*/bin"))]
    path = os.pathsep.join([os.environ.get("PATH", ""), *map(str, folders)])
    return shutil.which("compute-sanitizer", path=path)


@pytest.fixture
def sanitizer(gpu: torch.device) -> str:
    program = find_sanitizer()
    if program is None:
        give_up("no compute-sanitizer: it comes with CUDA's toolkit")
    return program


def run(program: list[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    separate = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # no two tensors in one allocation
    return subprocess.run(
        [*program, sys.executable, str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        timeout=1100,
        check=False,
        env=os.environ | script_environment() | separate,
    )


def check(done: subprocess.CompletedProcess[str]) -> None:
    text = f"{done.stdout}\n{done.stderr}"
    watched = re.search(r"(?i)\b(error|racecheck) summary:|\bhazard", text)
    refused = re.search(r"(?i)not supported|failed to initialize|unable to (attach|inject)", text)
    if done.returncode != 0 and refused and not watched:
        give_up(f"compute-sanitizer does not run here: {text.strip().splitlines()[0]}")
    assert done.returncode == 0, text
    assert "every byte right" in done.stdout


def races(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Return racecheck's hazards but for those it cannot judge.

    To racecheck an arrival at an mbarrier orders its own thread's accesses alone. But releases are
    cumulative: all of a warp is ordered whose first lane arrives behind a __syncwarp(). So what
    tells is a hazard whose earlier access is a first lane's: a broken order breaks those, too.
    """
    text = f"{done.stdout}\n{done.stderr}"
    summary = re.search(r"RACECHECK SUMMARY: (\d+) hazards? displayed \((\d+) errors?", text)
    assert summary is not None, text
    found = HAZARD.findall(text)
    assert [len(found)] * 2 == [int(count) for count in summary.groups()], text[-2000:]
    return [" ".join(hazard) for hazard in found if int(hazard[1]) % WARP == 0]


@pytest.mark.parametrize(
    ("status", "text", "end"),
    [
        (1, "Device not supported. See the supported devices", pytest.skip.Exception),
        (FOUND, "an operation is not supported\n== ERROR SUMMARY: 1 error", AssertionError),
        (FOUND, "not supported\n== Error: Race reported: 1 hazard", AssertionError),
        (1, "TypeError: something else", AssertionError),
        (0, "warning: timing is not supported\nevery byte right", None),
    ],
)
def test_only_a_tool_that_does_not_run_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, status: int, text: str, end: type[BaseException] | None
) -> None:
    monkeypatch.delenv("ULTRAEP_REQUIRE_GPU", raising=False)
    done = subprocess.CompletedProcess([], status, text, "")
    with pytest.raises(end) if end else contextlib.nullcontext():
        check(done)


def test_the_script_runs_without_a_sanitizer() -> None:
    check(run([], "host"))


# More barriers than a block has: racecheck's and synccheck's own count may be too low.
BARRIERS = ["--kernel-regex", "kns=ultraep", "--num-cuda-barriers", "64"]
RACECHECK = ["--tool", "racecheck", "--racecheck-report", "hazard", "--print-limit", "1000000"]
RACECHECK += ["--show-backtrace", "no", *BARRIERS]


@pytest.mark.gpu
@pytest.mark.parametrize("tool", ["memcheck", "synccheck"])
@pytest.mark.parametrize("part", PARTS)
def test_sanitizers_find_nothing(sanitizer: str, part: str, tool: str) -> None:
    options = ["--tool", tool, "--error-exitcode", str(FOUND), "--target-processes", "all"]
    if tool == "memcheck":  # not torch's kernels, which ask for what may not be there
        options += ["--kernel-regex", "kns=ultraep", "--report-api-errors", "no"]
    else:
        options += BARRIERS
    check(run([sanitizer, *options], "cuda", part))


@pytest.mark.gpu
@pytest.mark.parametrize("part", PARTS)
def test_racecheck_finds_nothing(sanitizer: str, part: str) -> None:
    done = run([sanitizer, *RACECHECK], "cuda", part, "few")
    check(done)
    assert races(done) == []


@pytest.mark.gpu
@pytest.mark.parametrize("late", [False, True])
def test_racecheck_finds_what_is_written_behind_an_arrival(sanitizer: str, late: bool) -> None:
    """Negative control, and what the tool finds in a warp that is ordered."""
    done = run([sanitizer, *RACECHECK], "cuda", "late" if late else "in_time")
    check(done)
    assert bool(races(done)) == late


@pytest.mark.gpu
def test_memcheck_finds_a_read_out_of_bounds(sanitizer: str) -> None:
    """Negative control: memory that torch was lent is watched too."""
    options = ["--tool", "memcheck", "--error-exitcode", str(FOUND)]
    done = run([sanitizer, *options], "cuda", "out_of_bounds")
    text = f"{done.stdout}\n{done.stderr}"
    assert done.returncode == FOUND, text
    assert "Invalid __global__ read" in text
