"""Ranks as processes over torch's symmetric memory: two on one GPU, and with a GPU each."""

from __future__ import annotations

import pytest
import torch
from gpu import NUM_GPUS, need_gpus, run_process_ranks
from process_ranks import CASES

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


@pytest.mark.parametrize("case", CASES)
def test_two_ranks(gpu: torch.device, case: str) -> None:
    run_process_ranks("torch", case, 2, 1)


@pytest.mark.parametrize("num_gpus", NUM_GPUS)
@pytest.mark.parametrize("case", CASES)
def test_a_gpu_each(gpu: torch.device, case: str, num_gpus: int) -> None:
    need_gpus(num_gpus)
    run_process_ranks("torch", case, num_gpus, num_gpus)
