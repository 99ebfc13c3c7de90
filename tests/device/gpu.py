"""Whether kernels can run here, and what to do if not."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from process_ranks import MADE, REFUSED
from ranks import run_python

from ultraep_comm.errors import UltraEPError

NUM_GPUS = [pytest.param(count, id=f"{count}gpus") for count in (2, 4, 8)]  # with a rank on each


@functools.cache
def missing() -> str:
    """Return why there is nothing to run kernels on; empty: there is."""
    if not torch.cuda.is_available():
        build = "a CPU build" if torch.version.cuda is None else f"for CUDA {torch.version.cuda}"
        return f"no CUDA device: torch.cuda.is_available() is False (torch is {build})"
    from ultraep_comm.engines.cuda.device import find_device
    from ultraep_comm.engines.cuda.kernels import load_kernels

    try:
        device = find_device()
    except UltraEPError as error:
        return f"no CUDA device: {error}"
    try:
        load_kernels(device, None)
    except UltraEPError as error:
        return f"no cubins: {error}"
    return ""


def give_up(reason: str) -> NoReturn:
    """Skip, or fail where ULTRAEP_REQUIRE_GPU=1 says that there has to be a GPU."""
    if os.environ.get("ULTRAEP_REQUIRE_GPU") == "1":
        pytest.fail(f"ULTRAEP_REQUIRE_GPU=1, but {reason}")
    pytest.skip(reason)


def need_gpus(count: int) -> None:
    """Skip where there are fewer: ULTRAEP_REQUIRE_GPU=1 asks for one."""
    if count > torch.cuda.device_count():
        pytest.skip(f"{torch.cuda.device_count()} GPU here, {count} needed")


def script_environment() -> dict[str, str]:
    """Return what lets a script import what tests import."""
    return {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}


def run_process_ranks(fabric: str, case: str, num_ranks: int, num_gpus: int) -> None:
    """Run process_ranks.py; give up where the fabric does not work, as with a GPU for several."""
    script = str(Path(__file__).with_name("process_ranks.py"))
    arguments = (fabric, case, str(num_ranks), str(num_gpus))
    done = run_python(script, *arguments, timeout=500, **script_environment())
    print(done.stdout, done.stderr, sep="\n")  # what happened, also where it skips
    lines = [line for line in done.stdout.splitlines() if line.startswith("REFUSED")]
    starts = fabric == "nvshmem" and MADE not in done.stdout
    if done.returncode == REFUSED or (done.returncode != 0 and starts):
        last = (done.stdout + done.stderr).strip().splitlines()[-5:]
        why = " | ".join(lines[:1] or ["it ended the processes as it started", *last])
        what = f"{fabric} with {num_ranks} processes, {num_gpus} GPU: {why}"
        if num_gpus > 1 and (fabric == "nvshmem" or torch.cuda.can_device_access_peer(0, 1)):
            pytest.fail(what)
        give_up(what)
    assert done.returncode == 0, done.stderr
