"""Interleaved rounds on a device, and what the ranks make of their figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from ultraep_comm.bench.figures import Times
from ultraep_comm.bench.interleaved import Rounds
from ultraep_comm.bench.progress import show_progress
from ultraep_comm.group import Group


class DeviceRound(Protocol):
    """Something to time that knows what is right."""

    def run(self) -> None:
        """Enqueue it, for all ranks of this process."""

    def count_wrong(self, payload: Any, epoch: int) -> int:
        """Return the wrong bytes of these ranks after :meth:`run`."""


def measure_rounds(
    settings: Rounds,
    transfers: Sequence[DeviceRound],
    payload: object,
    *,
    fill: Callable[[int], None],
    time_us: Callable[[Callable[[], None]], float],
    loopback: bool,
    label: str = "",
) -> tuple[list[Times], NDArray[np.int64]]:
    """Time transfers of one plan, interleaved. Collective, but in loopback.

    Args:
        settings: how often, and what is checked.
        transfers: what to time.
        payload: what they are checked against.
        fill: writes this process's bytes of an epoch.
        time_us: returns the device's time of a call.
        loopback: all ranks are in this process.
        label: what is measured, for the terminal.

    Returns:
        For each transfer its times, an iteration's being the slowest rank's; and wrong bytes
        ``[transfers]`` of all ranks. In loopback all ranks have one time.
    """
    times = np.zeros((len(transfers), settings.iters))
    wrong = np.zeros(len(transfers), np.int64)
    shuffle = np.random.default_rng(settings.seed)
    epoch = 0
    speaks = loopback or dist.get_rank() == 0
    for i in range(-settings.warmup, settings.iters):
        if speaks:
            show_progress(max(i, 0), settings.iters, f"iterations{label}")
        for t in shuffle.permutation(len(transfers)):
            epoch += 1
            fill(epoch)
            took = time_us(transfers[t].run)
            if settings.check or i == settings.iters - 1:
                wrong[t] += transfers[t].count_wrong(payload, epoch)
            if i >= 0:
                times[t, i] = took
    if speaks:
        show_progress(settings.iters, settings.iters, "")
    everybody = [times]
    if not loopback:
        mine = torch.from_numpy(times)
        gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, mine)
        everybody = [one.numpy() for one in gathered]
        dist.all_reduce(torch.from_numpy(wrong))
    of_ranks = np.stack(everybody, axis=1)  # [transfers, ranks, iters]
    return [Times(iterations=t.max(axis=0), ranks=t.mean(axis=1)) for t in of_ranks], wrong


def padding_id(group: Group) -> torch.Tensor:
    """Return an id that counts nothing. Its `gather_load` lines up the ranks of a group.

    None goes on before all have come to it, and nobody's host waits. (A call with an empty plan
    lines up nobody: a rank with nothing to move waits for no other.)
    """
    padding = torch.full((1, 1), -1)
    return padding if group._stages is None else group._stages.put(padding)


def slowest(value: float, loopback: bool) -> float:
    """Return the largest of the ranks' values. Collective, but in loopback."""
    if loopback:
        return value
    found = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found)
