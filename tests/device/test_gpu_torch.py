"""Ranks as processes over torch's symmetric memory: two on one GPU, and with a GPU each."""

from __future__ import annotations

import pytest
import torch
from gpu import NUM_GPUS, give_up, need_gpus, run_process_ranks
from process_ranks import CASES

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


def run(case: str, num_ranks: int, num_gpus: int) -> None:
    done, refusal = run_process_ranks("torch", case, str(num_ranks), str(num_gpus))
    if refusal is not None:
        what = f"symmetric memory of torch with {num_ranks} processes, {num_gpus} GPU: {refusal}"
        if num_gpus > 1 and torch.cuda.can_device_access_peer(0, 1):
            pytest.fail(f"{what}, though the GPUs reach each other")
        give_up(what)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("case", CASES)
def test_two_ranks(gpu: torch.device, case: str) -> None:
    run(case, 2, 1)


@pytest.mark.parametrize("num_gpus", NUM_GPUS)
@pytest.mark.parametrize("case", CASES)
def test_a_gpu_each(gpu: torch.device, case: str, num_gpus: int) -> None:
    need_gpus(num_gpus)
    run(case, num_gpus, num_gpus)
