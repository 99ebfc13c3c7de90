"""The core's planner and reroute compile for a device, and use no memory but what they get."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from cubin_files import ROOT, cuda_tool
from tiers import sampled


@pytest.mark.parametrize("arch", sampled([90, 100], lambda arch: arch == 90))
def test_core_functions_need_no_stack(arch: int, tmp_path: Path) -> None:
    nvcc = cuda_tool("nvcc")
    built = subprocess.run(
        [
            *(nvcc, f"-arch=sm_{arch}", "-std=c++20", "-cubin", "-Xptxas", "-v"),
            *(f"-I{ROOT / 'src'}", "-o", tmp_path / "core.cubin"),
            Path(__file__).with_name("core_functions.cu"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    used = re.findall(
        r"Function properties for (\w+)\n\s*(\d+) bytes stack frame, (\d+) bytes spill stores",
        built.stderr,
    )
    assert sorted(used) == [(name, "0", "0") for name in ("plan", "reroute", "reroute_map")]
