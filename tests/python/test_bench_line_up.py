"""What lines up the ranks of a benchmark: nobody goes on before everybody has come."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from emulated_device import EmulatedDevice
from fake_memory import FakeMemory
from stand_in import Emulated, StandIn

from ultraep_comm.bench.cli import _parser
from ultraep_comm.bench.critical_path_calls import PathCalls
from ultraep_comm.bench.critical_path_settings import PathSettings, make_path_settings
from ultraep_comm.bench.device_reduce import ReducingRanks, _make_groups
from ultraep_comm.bench.device_transfers import RanksHere
from ultraep_comm.bench.gpu import Meter
from ultraep_comm.bench.launch import run_ranks
from ultraep_comm.bench.reduce_settings import ReduceSettings, make_reduce_settings
from ultraep_comm.cuda import device as device_module
from ultraep_comm.cuda import making
from ultraep_comm.planning import plan_replicas

FEW = ["-b", "24K", "--experts", "6", "--ranks", "2", "--slots", "1"]


def _waits(meter: Meter, line_up: Callable[[], None]) -> int:
    """Return 0 if this rank left the line-up behind the start of the last one's; else 1."""
    for late in (0.0, 0.3):  # first what is done once
        dist.barrier()
        time.sleep(late if dist.get_rank() == 1 else 0)
        began = time.monotonic_ns()
        line_up()
        meter.settle()
        ended = time.monotonic_ns()
    last = torch.tensor([began])
    dist.all_reduce(last, op=dist.ReduceOp.MAX)
    return int(ended < int(last))


def _path(settings: PathSettings, library: Path, folder: Path) -> int:
    emulated, memory, meter = EmulatedDevice(library), FakeMemory(folder), Emulated()
    patch = pytest.MonkeyPatch()  # of this process, which ends here
    patch.setattr(making, "find_torch_device", lambda: (emulated, memory, emulated.kernels))
    patch.setattr(device_module, "find_device", lambda: emulated)
    ranks = RanksHere(
        meter,
        np.zeros((settings.num_ranks, settings.num_experts), np.int32),
        fabric=settings.fabric,
        slots=settings.slots,
        segments=settings.segments,
        tile_bytes=32768,
        num_sms=1,
    )
    status = _waits(meter, PathCalls(ranks, settings).line_up)
    ranks.close()
    return status


def _reduction(settings: ReduceSettings) -> int:
    meter = StandIn()
    groups = _make_groups(meter, settings, 1)
    plan = plan_replicas(torch.from_numpy(settings.load), group=groups[0])
    ranks = ReducingRanks(meter, settings, groups, plan)
    status = _waits(meter, ranks.line_up)
    for group in groups:
        group.close()
    return status


@pytest.mark.parametrize("op", ["critical-path", "reduce"])
def test_nobody_leaves_before_the_last_has_come(
    op: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """A call with an empty plan lines up nobody: a rank with nothing to move waits for no other."""
    more = ["--engine", "cuda"] if op == "reduce" else []
    arguments = _parser().parse_args([op, *FEW, *more, "--fabric", "torch"])
    settings: Any
    run: Callable[..., int]
    if op == "reduce":
        settings, run = make_reduce_settings(arguments), _reduction
    else:
        library = request.getfixturevalue("emulated_library")
        settings = make_path_settings(arguments)
        run = functools.partial(_path, library=library, folder=tmp_path)
    assert run_ranks(run, settings, 2) == 0
