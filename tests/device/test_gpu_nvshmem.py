"""Ranks as processes over NVSHMEM: on one GPU, and with a GPU each.

The host engine runs the same cases over shm.
"""

from __future__ import annotations

import pytest
import torch
from gpu import NUM_GPUS, need_gpus, run_process_ranks
from process_ranks import CASES
from tiers import sampled

pytestmark = pytest.mark.timeout(600)


def run(engine: str, case: str, num_ranks: int, num_gpus: int = 1) -> None:
    run_process_ranks("nvshmem" if engine == "cuda" else "shm", case, num_ranks, num_gpus)


@pytest.mark.parametrize(
    "case",
    sampled(
        ["every_mode", "on_device", "graph", "several_groups"],
        lambda case: case == "several_groups",
    ),
)
def test_a_rank_alone(process_engine: str, case: str) -> None:
    """Only plans without replicas are legal; all else of a group is there."""
    run(process_engine, case, 1)


@pytest.mark.parametrize("case", sampled(CASES, ["every_mode", "missing_rank"].__contains__))
def test_two_ranks(process_engine: str, case: str) -> None:
    run(process_engine, case, 2)


@pytest.mark.gpu
@pytest.mark.parametrize("num_gpus", NUM_GPUS)
@pytest.mark.parametrize("case", CASES)
def test_a_gpu_each(gpu: torch.device, case: str, num_gpus: int) -> None:
    need_gpus(num_gpus)
    run("cuda", case, num_gpus, num_gpus)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", ["every_mode", "missing_rank"])
def test_eight_ranks(case: str) -> None:
    """As with eight GPUs: more ranks than experts."""
    run("host", case, 8)
