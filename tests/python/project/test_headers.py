"""Each C++ header includes what it uses. Other files: the preset asan precompiles no headers."""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cpp_build import ROOT, CppBuild

# The emulated device has files of the same names.
FOR_NVCC = {"src/cuda/device/far.cuh", "src/cuda/device/ptx.cuh"}


def complaint(file: Path) -> str:
    folders = [ROOT / "tests/device/emulation", ROOT / "src", ROOT / "tests"]
    options = ["-std=c++20", "-fsyntax-only", "-w", "-x", "c++", *(f"-I{f}" for f in folders)]
    command = [os.environ.get("CXX", "c++"), *options, str(file)]
    return subprocess.run(command, capture_output=True, text=True, check=False).stderr


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_each_header_compiles_alone(cpp: CppBuild) -> None:
    files = [
        path
        for folder in ("src", "tests")
        for pattern in ("*.hpp", "*.cuh")
        for path in sorted((ROOT / folder).rglob(pattern))
        if str(path.relative_to(ROOT)) not in FOR_NVCC
    ]
    assert len(files) > 140
    with ThreadPoolExecutor(int(cpp.num_jobs)) as pool:
        found = [text for text in pool.map(complaint, files) if text]
    assert not found, "\n".join(found)
