"""Ranks as processes over NVSHMEM: on one GPU, and with a GPU each.

The host engine runs the same cases over shm.
"""

from __future__ import annotations

from typing import NoReturn

import pytest
import torch
from gpu import NUM_GPUS, give_up, need_gpus, run_process_ranks
from process_ranks import CASES, MADE
from tiers import sampled

pytestmark = pytest.mark.timeout(600)


def unusable(what: str, num_gpus: int) -> NoReturn:
    """Give up where several processes share a GPU, which NVSHMEM may refuse."""
    if num_gpus > 1:
        pytest.fail(what)
    give_up(what)


def run(engine: str, case: str, num_ranks: int, num_gpus: int = 1) -> None:
    fabric = "nvshmem" if engine == "cuda" else "shm"
    done, refusal = run_process_ranks(fabric, case, str(num_ranks), str(num_gpus))
    if refusal is not None:
        unusable(f"NVSHMEM with {num_ranks} processes, {num_gpus} GPU: {refusal}", num_gpus)
    if engine == "cuda" and done.returncode != 0 and MADE not in done.stdout:
        last = " | ".join((done.stdout + done.stderr).strip().splitlines()[-5:])
        what = f"NVSHMEM ended {num_ranks} processes, {num_gpus} GPU, as it started: {last}"
        unusable(what, num_gpus)
    assert done.returncode == 0, done.stderr


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
