"""The rehearsal of tools/gpu_hour passes: all stages, with a bare GPU machine's packages only."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_gpu_hour import ROOT, report, unpacked


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_the_rehearsal_passes(tmp_path: Path) -> None:
    words = [sys.executable, ROOT / "tools" / "gpu_hour", "--rehearse", "--out", tmp_path]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-report.LIMIT :]
    clock = unpacked(tmp_path).get("clock_measured.env", "")
    if shutil.which("nvcc") is not None:
        assert re.findall("(.*)=.*not measured", clock) == ["REMOTE", "LINK_BYTES"]
