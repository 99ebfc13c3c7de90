"""The replicate benchmark, as every rank runs it. bench/METRICS.md says what the figures mean."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from ultraep_comm.bench.payload import Payload
from ultraep_comm.bench.progress import show_progress
from ultraep_comm.bench.report import Measurement, format_header, format_results, write_json
from ultraep_comm.bench.settings import ReplicateSettings
from ultraep_comm.bench.transfers import LibraryMode, PlainCopy, PointToPoint, Stage, Transfer
from ultraep_comm.creation import new_group
from ultraep_comm.group import Group
from ultraep_comm.plan import Plan
from ultraep_comm.planning import plan_replicas

# Ranks of one machine start together this long after the last of them was ready: enough for all
# to have left the barrier.
_LINE_UP_NS = 1_000_000


def run(settings: ReplicateSettings) -> int:
    """Measure on an initialised process group; rank 0 prints. Return the exit code, 1: wrong bytes.

    Raises:
        UltraEPError: the group could not be made, or a transfer failed.
    """
    torch.set_num_threads(1)
    with new_group(
        num_experts=settings.num_experts,
        slots_per_rank=settings.slots,
        expert=settings.expert,
        tile_bytes=settings.tile_bytes,
        num_sms=settings.num_sms[0] if settings.num_sms else None,
        engine=settings.engine,
    ) as group:
        plan = plan_replicas(torch.from_numpy(settings.load), group=group)
        if group.rank == 0:
            print(format_header(settings, plan), flush=True)
        measured = _measure(settings, group, plan)
        if group.rank == 0:
            print(format_results(settings, plan, measured), flush=True)
            if settings.json is not None:
                write_json(settings.json, settings, plan, measured)
    return 1 if any(m.wrong_bytes for m in measured) else 0


def _measure(settings: ReplicateSettings, group: Group, plan: Plan) -> list[Measurement]:
    stage = Stage(group=group, weights=group.empty_weights(), plan=plan)
    modes = [LibraryMode(stage, mode) for mode in settings.modes]
    transfers: list[Transfer] = [*modes, PointToPoint(stage), PlainCopy(stage)]
    return measure(settings, stage, Payload(settings.seed, settings.segments), transfers)


def measure(
    settings: ReplicateSettings, stage: Stage, payload: Payload, transfers: Sequence[Transfer]
) -> list[Measurement]:
    """Time transfers of one plan, interleaved iteration by iteration. Collective."""
    group = stage.group
    chosen = [t.choose() if isinstance(t, LibraryMode) else "" for t in transfers]
    one_machine = len(set(group.topology.domain.tolist())) == 1
    spans = np.zeros((2, len(transfers), settings.iters), np.int64)
    wrong = torch.zeros(len(transfers), dtype=torch.int64)
    shuffle = np.random.default_rng(settings.seed)
    epoch = 0
    for i in range(-settings.warmup, settings.iters):
        if group.rank == 0:
            show_progress(max(i, 0), settings.iters, "iterations")
        # Shuffled, alike on all ranks: what a transfer leaves in caches falls to no fixed other.
        for t in shuffle.permutation(len(transfers)):
            epoch += 1
            stage.fill(payload, epoch)
            _line_up(one_machine)
            start = time.perf_counter_ns()
            transfers[t].run()
            end = time.perf_counter_ns()
            dist.barrier()
            if settings.check or i == settings.iters - 1:
                wrong[t] += transfers[t].count_wrong(payload, epoch)
            if i >= 0:
                spans[:, t, i] = start, end
    if group.rank == 0:
        show_progress(settings.iters, settings.iters, "iterations")
    dist.all_reduce(wrong)
    times = _iteration_times(spans, one_machine)
    return [
        Measurement(mode=x.name, chosen=chosen[t], times=times[t], wrong_bytes=int(wrong[t]))
        for t, x in enumerate(transfers)
    ]


def _line_up(one_machine: bool) -> None:
    """Let all ranks leave at the same time: a barrier on which they agree on a moment."""
    ready = torch.tensor([time.perf_counter_ns()])
    dist.all_reduce(ready, op=dist.ReduceOp.MAX)
    if one_machine:  # one clock
        wait = int(ready) + _LINE_UP_NS - time.perf_counter_ns()
        time.sleep(max(wait, 0) / 1e9)


def _iteration_times(spans: NDArray[np.int64], one_machine: bool) -> NDArray[np.int64]:
    """Return ``[transfers, iters]`` nanoseconds from starts and ends ``[2, transfers, iters]``.

    On one machine from the first start to the last end; else the longest of the ranks' own times.
    """
    mine = torch.from_numpy(spans)
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, mine)
    starts, ends = torch.stack(gathered, dim=1).numpy()
    times: NDArray[np.int64]
    times = ends.max(axis=0) - starts.min(axis=0) if one_machine else (ends - starts).max(axis=0)
    return times
