"""Ranks as processes over torch's symmetric memory: with a GPU each, and on one together."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gpu import give_up, script_environment
from process_ranks import CASES, REFUSED

SCRIPT = Path(__file__).with_name("process_ranks.py")

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


@pytest.mark.parametrize("num_gpus", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_two_ranks(gpu: torch.device, case: str, num_gpus: int) -> None:
    if num_gpus > torch.cuda.device_count():
        # Not a reason to fail under ULTRAEP_REQUIRE_GPU=1, which asks for one.
        pytest.skip(f"{torch.cuda.device_count()} GPU here, {num_gpus} needed")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "torch", case, "2", str(num_gpus)],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        env=script_environment(),
    )
    print(done.stdout, done.stderr, sep="\n")  # what happened, also where it skips
    if done.returncode == REFUSED:
        reasons = [line for line in done.stdout.splitlines() if line.startswith("REFUSED")]
        what = f"symmetric memory of torch with 2 processes, {num_gpus} GPU: {reasons[0][8:]}"
        if num_gpus == 2 and torch.cuda.can_device_access_peer(0, 1):
            pytest.fail(f"{what}, though the GPUs reach each other")
        give_up(what)
    assert done.returncode == 0, done.stderr
