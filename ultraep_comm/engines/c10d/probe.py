"""What a process group's messages cost, measured when a group is created."""

from __future__ import annotations

import time

import torch

from ultraep_comm.calibration import Constants
from ultraep_comm.engines.c10d.channel import Channel, Message

_SMALL, _LARGE = 1024, 1 << 20  # bytes
_SMALL_ROUNDS, _LARGE_ROUNDS = 20, 3
_LIMIT = 60.0  # seconds
_PS = 1e12


def measure(channel: Channel, rank: int, num_ranks: int, device: torch.device) -> Constants:
    """Return the fields of `CostModel`, as this rank has measured them. Collective.

    A message's latency, and the rate of messages of 1 MiB: of one pair of ranks alone, and of all
    at once, each to the next.
    """
    if num_ranks == 1:
        return (1_000_000, 0, 10_000_000, 100_000_000, 100)

    def ring(num_bytes: int, rounds: int, active: bool, tag: int) -> float:
        """Return the time of one round, of the fastest half."""
        out, came = (torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
        after, before = (rank + 1) % num_ranks, (rank - 1) % num_ranks
        times = []
        for _ in range(rounds):
            start = time.perf_counter()
            messages = [Message(before, tag, came, True), Message(after, tag, out, False)]
            for pending in channel.post(messages if active else []):
                pending.wait(_LIMIT)
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
            times.append(time.perf_counter() - start)
        return sorted(times)[(rounds - 1) // 2]

    def pair(num_bytes: int, rounds: int, tag: int) -> float:
        """Return the time of a message from rank 0 to rank 1 and back."""
        if rank > 1:
            return 1.0
        data = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        times = []
        for _ in range(rounds):
            start = time.perf_counter()
            for receives in (rank == 1, rank == 0):
                for pending in channel.post([Message(1 - rank, tag, data, receives)]):
                    pending.wait(_LIMIT)
                if device.type != "cpu":
                    torch.accelerator.synchronize(device)
            times.append((time.perf_counter() - start) / 2)
        return sorted(times)[(rounds - 1) // 2]

    ring(_SMALL, 2, True, 1)  # connections, and the first use of memory
    message = ring(_SMALL, _SMALL_ROUNDS, True, 2)
    together = max(ring(_LARGE, _LARGE_ROUNDS, True, 3) - message, 1e-9)
    alone = min(max(pair(_LARGE, _LARGE_ROUNDS, 4) - message, 1e-9), together)
    ring(_SMALL, 1, True, 5)  # all wait for the pair
    return (
        max(1, round(alone * 1024 / _LARGE * _PS)),
        0,
        round(message * _PS / 8),
        round(message * _PS),
        max(100, round(100 * num_ranks * alone / together)),
    )
