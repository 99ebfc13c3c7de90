"""Timing several ways of doing the same, interleaved. bench/METRICS.md has the rules."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from ultraep_comm.bench.progress import show_progress
from ultraep_comm.bench.report import Measurement
from ultraep_comm.group import Group

# Ranks of one machine start together this long after the last of them was ready: enough for all
# to have left the barrier.
_LINE_UP_NS = 1_000_000

Payload_contra = TypeVar("Payload_contra", contravariant=True)  # what fills and checks: a payload


class Transfer(Protocol[Payload_contra]):
    """Something that delivers what a plan asks for, or moves as many bytes."""

    name: str

    def run(self) -> None:
        """Do it, on every rank; return when this rank's part is finished."""

    def count_wrong(self, payload: Payload_contra, epoch: int) -> int:
        """Return the wrong bytes that this rank sees after :meth:`run`."""


class Rounds(Protocol):
    """Settings that say how often, and what is checked."""

    @property
    def warmup(self) -> int:
        """Return the iterations that do not count."""

    @property
    def iters(self) -> int:
        """Return those that do."""

    @property
    def check(self) -> bool:
        """Return whether every iteration is checked, instead of the last one."""

    @property
    def seed(self) -> int:
        """Return the seed of the order."""


@runtime_checkable
class Chooser(Protocol):
    """A transfer in a mode that the library may choose."""

    def choose(self) -> str:
        """Return the mode that the library takes. Collective: makes a call."""


class Filled(Protocol[Payload_contra]):
    """What all transfers of a run share."""

    @property
    def group(self) -> Group:
        """Return the group."""

    def fill(self, payload: Payload_contra, epoch: int) -> None:
        """Write this rank's bytes of a new epoch."""


def measure(
    settings: Rounds,
    stage: Filled[Any],
    payload: object,
    transfers: Sequence[Transfer[Any]],
    *,
    label: str = "",
) -> list[Measurement]:
    """Time transfers of one plan, interleaved iteration by iteration. Collective.

    ``label`` says on the terminal what is measured.
    """
    group = stage.group
    chosen = [t.choose() if isinstance(t, Chooser) else "" for t in transfers]
    one_machine = len(set(group.topology.domain.tolist())) == 1
    spans = np.zeros((2, len(transfers), settings.iters), np.int64)
    wrong = torch.zeros(len(transfers), dtype=torch.int64)
    shuffle = np.random.default_rng(settings.seed)
    epoch = 0
    for i in range(-settings.warmup, settings.iters):
        if group.rank == 0:
            show_progress(max(i, 0), settings.iters, f"iterations{label}")
        # Shuffled, alike on all ranks: what a transfer leaves in caches falls to no fixed other.
        for t in shuffle.permutation(len(transfers)):
            epoch += 1
            stage.fill(payload, epoch)
            line_up(one_machine)
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
    times, rank_times = _gather_times(spans, one_machine)
    return [
        Measurement(
            mode=x.name,
            chosen=chosen[t],
            times=times[t],
            rank_times=rank_times[t],
            wrong_bytes=int(wrong[t]),
        )
        for t, x in enumerate(transfers)
    ]


def line_up(one_machine: bool) -> None:
    """Let all ranks leave at the same time: a barrier on which they agree on a moment."""
    ready = torch.tensor([time.perf_counter_ns()])
    dist.all_reduce(ready, op=dist.ReduceOp.MAX)
    if one_machine:  # one clock
        wait = int(ready) + _LINE_UP_NS - time.perf_counter_ns()
        time.sleep(max(wait, 0) / 1e9)


def _gather_times(
    spans: NDArray[np.int64], one_machine: bool
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return nanoseconds from starts and ends ``[2, transfers, iters]``. Collective.

    Of iterations, ``[transfers, iters]``: on one machine from the first start to the last end, else
    the longest of the ranks' own times. Of ranks, ``[transfers, G]``: each one's own mean.
    """
    mine = torch.from_numpy(spans)
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, mine)
    starts, ends = torch.stack(gathered, dim=1).numpy()
    own: NDArray[np.int64] = ends - starts
    whole = ends.max(axis=0) - starts.min(axis=0) if one_machine else own.max(axis=0)
    return whole, own.mean(axis=2).T
