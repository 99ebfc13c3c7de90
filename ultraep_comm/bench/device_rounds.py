"""Interleaved rounds on a device, and what the ranks make of their figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from ultraep_comm.bench.interleaved import Rounds


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
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Time transfers of one plan, interleaved. Collective, but in loopback.

    Args:
        settings: how often, and what is checked.
        transfers: what to time.
        payload: what they are checked against.
        fill: writes this process's bytes of an epoch.
        time_us: returns the device's time of a call.
        loopback: all ranks are in this process.

    Returns:
        ``[transfers, iters]`` us of the slowest rank, and wrong bytes ``[transfers]`` of all.
    """
    times = np.zeros((len(transfers), settings.iters))
    wrong = np.zeros(len(transfers), np.int64)
    shuffle = np.random.default_rng(settings.seed)
    epoch = 0
    for i in range(-settings.warmup, settings.iters):
        for t in shuffle.permutation(len(transfers)):
            epoch += 1
            fill(epoch)
            took = time_us(transfers[t].run)
            if settings.check or i == settings.iters - 1:
                wrong[t] += transfers[t].count_wrong(payload, epoch)
            if i >= 0:
                times[t, i] = took
    if not loopback:
        dist.all_reduce(torch.from_numpy(times), op=dist.ReduceOp.MAX)
        dist.all_reduce(torch.from_numpy(wrong))
    return times, wrong


def slowest(value: float, loopback: bool) -> float:
    """Return the largest of the ranks' values. Collective, but in loopback."""
    if loopback:
        return value
    found = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found)
