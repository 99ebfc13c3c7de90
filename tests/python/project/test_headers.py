"""Each C++ file includes what it uses; builds, which precompile standard headers, do not tell."""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cpp_build import ROOT, CppBuild

# The emulated device has files of the same names. The last is completed by a build.
FOR_NVCC = {"src/cuda/device/far.cuh", "src/cuda/device/ptx.cuh"}
LEFT_OUT = FOR_NVCC | {"tests/mutant.cc"}
# Every build compiles their .cc files without precompiled headers.
BUILT_ALONE = ("src", "tests/ptx/machine", "tests/fuzz")


def complaint(file: Path) -> str:
    folders = [ROOT / "tests/device/emulation", ROOT / "src", ROOT / "tests"]
    options = ["-std=c++20", "-fsyntax-only", "-w", "-x", "c++", *(f"-I{f}" for f in folders)]
    command = [os.environ.get("CXX", "c++"), *options, str(file)]
    return subprocess.run(command, capture_output=True, text=True, check=False).stderr


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_each_file_compiles_alone(cpp: CppBuild) -> None:
    files = [
        path
        for folder in ("src", "tests")
        for pattern in ("*.hpp", "*.cuh", "*.cc")
        for path in sorted((ROOT / folder).rglob(pattern))
        if "consumer" not in path.parts and str(path.relative_to(ROOT)) not in LEFT_OUT
        if path.suffix != ".cc" or not str(path.relative_to(ROOT)).startswith(BUILT_ALONE)
    ]
    assert len(files) > 150
    with ThreadPoolExecutor(int(cpp.num_jobs)) as pool:
        found = [text for text in pool.map(complaint, files) if text]
    assert not found, "\n".join(found)
