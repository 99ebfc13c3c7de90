"""The rehearsal of tools/gpu_hour: it passes, and finds what a first run on a GPU would end at."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_gpu_hour import ROOT, report, unpacked


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout, of which the build has been rehearsed."""
    folder = tmp_path_factory.mktemp("rehearsal") / "checkout"
    hidden = shutil.ignore_patterns(".*", "build", "results", "__pycache__", "*.so")
    shutil.copytree(ROOT, folder, ignore=hidden)
    done = rehearse(folder, "build", "doctor")
    assert done.returncode == 0, done.stdout[-report.LIMIT :]
    return folder


def rehearse(folder: Path, *names: str, **environment: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, folder / "tools" / "gpu_hour", "--rehearse", *names]
    env = os.environ | environment
    return subprocess.run(words, env=env, capture_output=True, text=True, check=False)


@contextlib.contextmanager
def planted(folder: Path, file: str, right: str, wrong: str) -> Iterator[None]:
    """Change a file of a checkout."""
    path = folder / file
    text = path.read_text()
    assert text.count(right) == 1
    path.write_text(text.replace(right, wrong))
    try:
        yield
    finally:
        path.write_text(text)


# What a first run on a GPU would have ended at: the change, the stages, and what is said.
FAULTS = {
    "nvshmem4py": (
        "tools/hour/stages.py",
        "first = [str(self.package), str(self.wheels)]",
        "first = [str(self.package)]",
        ["nvshmem"],
        "No module named 'nvshmem'",
    ),
    "resume": (
        "tools/hour/stages.py",
        "self._builds(), of_machine=True)",
        "self._builds())",
        ["build"],
        "--resume left out the build",
    ),
}


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("fault", FAULTS)
def test_the_rehearsal_finds(checkout: Path, fault: str) -> None:
    file, right, wrong, names, message = FAULTS[fault]
    with planted(checkout, file, right, wrong):
        done = rehearse(checkout, *names)
    assert done.returncode == 1, done.stdout[-report.LIMIT :]
    assert message in done.stdout.partition("====")[2]


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_the_rehearsal_passes(tmp_path: Path) -> None:
    done = rehearse(ROOT, "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout[-report.LIMIT :]
    clock = unpacked(tmp_path).get("clock_measured.env", "")
    if shutil.which("nvcc") is not None:
        assert re.findall("(.*)=.*not measured", clock) == ["REMOTE", "LINK_BYTES"]
