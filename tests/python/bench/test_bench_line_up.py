"""The barrier that lines up the ranks of a benchmark."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from benched import settings_of
from emulated_device import EmulatedDevice
from fake_memory import FakeMemory
from stand_in import Emulated, StandIn

from ultraep_comm.bench.commands.critical_path import PathSettings
from ultraep_comm.bench.commands.reduce import ReduceSettings
from ultraep_comm.bench.commands.reduce.run import GradRanks
from ultraep_comm.bench.launch import run_ranks
from ultraep_comm.bench.ranks import Ranks, WeightRanks
from ultraep_comm.engines.cuda import device as device_module
from ultraep_comm.engines.cuda import make

FEW = ["-b", "24K", "--experts", "6", "--ranks", "2", "--slots", "1"]


def _waits(ranks: Ranks) -> int:
    """Return 0 if this rank left the barrier after the last rank entered it; else 1."""
    for late in (0.0, 0.3):  # a first round for one-time work
        dist.barrier()
        time.sleep(late if dist.get_rank() == 1 else 0)
        began = time.monotonic_ns()
        ranks.line_up()
        ranks.meter.synchronize()
        ended = time.monotonic_ns()
    last = torch.tensor([began])
    dist.all_reduce(last, op=dist.ReduceOp.MAX)
    ranks.close()
    return int(ended < int(last))


def _path(settings: PathSettings, library: Path, folder: Path) -> int:
    emulated, memory = EmulatedDevice(library), FakeMemory(folder)
    patch = pytest.MonkeyPatch()  # of this process, which ends here
    patch.setattr(make, "find_torch_device", lambda: (emulated, memory, emulated.kernels))
    patch.setattr(device_module, "find_device", lambda: emulated)
    ranks = WeightRanks(
        Emulated(),
        num_ranks=settings.num_ranks,
        num_experts=settings.num_experts,
        fabric=settings.fabric,
        slots=settings.slots,
        segments=settings.segments,
        tile_bytes=32768,
        num_sms=1,
    )
    return _waits(ranks)


def _reduction(settings: ReduceSettings) -> int:
    return _waits(GradRanks(StandIn(), settings, 1))


@pytest.mark.parametrize("op", ["critical-path", "reduce"])
def test_no_rank_leaves_before_the_last_enters(
    op: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """A call with an empty plan is no barrier: a rank with nothing to move does not wait."""
    more = ["--engine", "cuda"] if op == "reduce" else []
    settings: Any = settings_of(op, *FEW, *more, "--fabric", "torch")
    run: Callable[..., int] = _reduction
    if op == "critical-path":
        library = request.getfixturevalue("emulated_library")
        run = functools.partial(_path, library=library, folder=tmp_path)
    assert run_ranks(run, settings, 2) == 0
