"""What a process group's messages cost, measured when a group is created."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from ultraep_comm.calibration import MAX_FIGURE, MeasuredCosts, device_name
from ultraep_comm.engines.c10d.channel import Channel, Message

_SMALL, _LARGE = 1024, 512 << 10  # bytes
_LIMIT = 60.0  # seconds
GROUPS = 8  # flag groups in a typical chunk; ledger.cc knows it as kChunkGroups


def measure(
    channel: Channel, rank: int, num_ranks: int, device: torch.device, rounds: int = 5
) -> MeasuredCosts:
    """Return what messages cost, as this rank has measured it. Collective.

    A small message's latency; the time that it costs where several are under way; and the rate of
    messages of 512 KiB: of one pair of ranks alone, and of all at once, each to the next. Of the
    ``rounds`` of each figure the fastest counts, as whatever disturbs a message slows it.
    """

    def time_of(batches: Sequence[Sequence[Message]], rounds: int) -> float:
        """Return the time of some batches of messages, one after another."""
        times = []
        for _ in range(rounds):
            start = time.perf_counter()
            for messages in batches:
                for pending in channel.post(messages):
                    pending.wait(_LIMIT)
                if device.type != "cpu":
                    torch.accelerator.synchronize(device)
            times.append(time.perf_counter() - start)
        return min(times)

    def ring(num_bytes: int, count: int, rounds: int, tag: int) -> float:
        """Return the time of a message, of ``count`` at once to the next rank, by all ranks."""
        out, came = (torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
        after, before = (rank + 1) % num_ranks, (rank - 1) % num_ranks
        messages = [Message(before, tag + i, came, True) for i in range(count)]
        messages += [Message(after, tag + i, out, False) for i in range(count)]
        return time_of([messages], rounds) / count

    def pair(num_bytes: int, rounds: int, tag: int) -> float:
        """Return the time of a message from rank 0 to rank 1 and back."""
        if rank > 1:
            return 1.0
        data = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        both = [[Message(1 - rank, tag, data, receives)] for receives in (rank == 1, rank == 0)]
        return time_of(both, rounds) / 2

    latency = message = 100e-6  # alone there is nobody to send to
    alone = together = 1e-3
    if num_ranks > 1:
        ring(_SMALL, 2, 1, 0)  # connections
        message = ring(_SMALL, 16, rounds, 0)
        latency = pair(_SMALL, rounds, 1)
        together, alone = ring(_LARGE, 1, rounds, 0), pair(_LARGE, rounds, 1)
        together, alone = (max(took - message, took / 4) for took in (together, alone))
        # Ranks that slow each other down so much share a processor, or a link: what all of them
        # send counts then, and handing on saves nothing.
        alone = min(alone, together) if 2 * alone > together else together / num_ranks
        ring(_SMALL, 1, 1, 0)  # all wait for the pair
    return MeasuredCosts(
        device=device_name("c10d") or "",
        ranks=num_ranks,
        store_gbps=_LARGE / alone / 1e9,
        load_gbps=MAX_FIGURE,  # the network is slower by far
        flag_us=message * 1e6 / GROUPS,
        hop_us=latency * 1e6,
        parallel=max(num_ranks * alone / together, 1.0),
        call_us=message * 1e6,
    )
