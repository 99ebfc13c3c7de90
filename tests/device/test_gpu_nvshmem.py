"""Ranks as processes over NVSHMEM, on one GPU. The host engine runs the same cases over shm."""

from __future__ import annotations

import pytest
from gpu import give_up, run_process_ranks
from process_ranks import CASES, MADE
from tiers import sampled

pytestmark = pytest.mark.timeout(600)


def run(engine: str, case: str, num_ranks: int) -> None:
    fabric = "nvshmem" if engine == "cuda" else "shm"
    done, refusal = run_process_ranks(fabric, case, str(num_ranks))
    if refusal is not None:
        give_up(f"NVSHMEM with {num_ranks} processes on one GPU: {refusal}")
    if engine == "cuda" and done.returncode != 0 and MADE not in done.stdout:
        last = " | ".join((done.stdout + done.stderr).strip().splitlines()[-5:])
        give_up(f"NVSHMEM ended {num_ranks} processes on one GPU as it started: {last}")
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
