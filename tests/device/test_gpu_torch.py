"""Ranks as processes over torch's symmetric memory: with a GPU each, and on one together."""

from __future__ import annotations

import pytest
import torch
from gpu import give_up, run_process_ranks
from process_ranks import CASES

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


@pytest.mark.parametrize("num_gpus", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_two_ranks(gpu: torch.device, case: str, num_gpus: int) -> None:
    if num_gpus > torch.cuda.device_count():
        # Not a reason to fail under ULTRAEP_REQUIRE_GPU=1, which asks for one.
        pytest.skip(f"{torch.cuda.device_count()} GPU here, {num_gpus} needed")
    done, refusal = run_process_ranks("torch", case, "2", str(num_gpus))
    if refusal is not None:
        what = f"symmetric memory of torch with 2 processes, {num_gpus} GPU: {refusal}"
        if num_gpus == 2 and torch.cuda.can_device_access_peer(0, 1):
            pytest.fail(f"{what}, though the GPUs reach each other")
        give_up(what)
    assert done.returncode == 0, done.stderr
