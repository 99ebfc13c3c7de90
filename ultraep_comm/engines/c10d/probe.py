"""What a process group's messages cost, measured when a group is created."""

from __future__ import annotations

import time

import torch

from ultraep_comm.calibration import Constants
from ultraep_comm.engines.c10d.channel import Channel, Message

_SMALL, _LARGE = 1024, 1 << 20  # bytes
_LIMIT = 60.0  # seconds
_PS = 1e12


def measure(channel: Channel, rank: int, num_ranks: int, device: torch.device) -> Constants:
    """Return the fields of `CostModel`, as this rank has measured them. Collective.

    A message's time besides its bytes, where several are under way; and the rate of messages of
    1 MiB: of one pair of ranks alone, and of all at once, each to the next.
    """
    if num_ranks == 1:
        return (1_000_000, 0, 10_000_000, 100_000_000, 100)

    def ring(num_bytes: int, count: int, rounds: int, tag: int) -> float:
        """Return the time of a message, of ``count`` at once to the next rank, by all ranks."""
        out, came = (torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
        after, before = (rank + 1) % num_ranks, (rank - 1) % num_ranks
        times = []
        for _ in range(rounds):
            start = time.perf_counter()
            messages = [Message(before, tag + i, came, True) for i in range(count)]
            messages += [Message(after, tag + i, out, False) for i in range(count)]
            for pending in channel.post(messages):
                pending.wait(_LIMIT)
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
            times.append((time.perf_counter() - start) / count)
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

    ring(_SMALL, 2, 1, 0)  # connections
    message = ring(_SMALL, 16, 5, 0)
    together = max(ring(_LARGE, 1, 3, 0) - message, 1e-9)
    alone = min(max(pair(_LARGE, 3, 1) - message, 1e-9), together)
    ring(_SMALL, 1, 1, 0)  # all wait for the pair
    return (
        max(1, round(alone * 1024 / _LARGE * _PS)),
        0,
        round(message * _PS / 8),
        round(message * _PS),
        max(100, round(100 * num_ranks * alone / together)),
    )
