"""Baselines of `replicate_experts`: what users do today, and the machine's own rate."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ultraep_comm.bench.clock import Meter
from ultraep_comm.bench.inside import allocate, main_segments
from ultraep_comm.bench.machine import gather_json
from ultraep_comm.bench.payload import SENTINEL, Payload
from ultraep_comm.bench.ranks import WeightRanks, main_index, replicas_of
from ultraep_comm.plan.plan import Plan

_PAGE = 4096
Check = tuple[int, str, torch.Tensor]  # expert, segment, destination


class Arrivals:
    """A baseline that copies experts to private memory."""

    def __init__(self) -> None:
        """Create it without destinations."""
        self._checks: list[Check] = []

    def count_wrong(self, payload: Payload, epoch: int) -> int:
        """Return the wrong bytes at the destinations."""
        return sum(
            payload.count_wrong(data.cpu().numpy(), epoch=epoch, expert=expert, segment=name)
            for expert, name, data in self._checks
        )


class PointToPoint(Arrivals):
    """What users do today: `batch_isend_irecv` of every replica's segments from its home rank."""

    def __init__(
        self, ranks: WeightRanks, plan: Plan, name: str, process_group: dist.ProcessGroup | None
    ) -> None:
        """Prepare the operations and private receive buffers; ``process_group`` None: over gloo."""
        super().__init__()
        self.name = name
        self._operations: list[dist.P2POp] = []
        (group,), (weights,) = ranks.groups, ranks.weights
        mains = main_index(group)
        for expert, home, rank, _ in replicas_of(plan):
            for segment, stacked in weights.items():
                if home == group.rank:
                    sent = stacked[mains[expert]]
                    self._operations.append(dist.P2POp(dist.isend, sent, rank, process_group))
                elif rank == group.rank:
                    buffer = torch.full_like(group.slots[segment][0], SENTINEL)
                    self._checks.append((expert, segment, buffer))
                    self._operations.append(dist.P2POp(dist.irecv, buffer, home, process_group))

    def run(self) -> None:
        """Send and receive everything, and wait; on a GPU the current stream waits."""
        exchange(self._operations)


class Broadcast(Arrivals):
    """A broadcast of every segment of every replicated expert, to the ranks that have a slot of it.

    All start at once, in the order of experts on every rank.
    """

    name = "broadcast"

    def __init__(self, ranks: WeightRanks, plan: Plan) -> None:
        """Create the process groups, and private receive buffers. Collective."""
        super().__init__()
        self._jobs: list[tuple[torch.Tensor, int, dist.ProcessGroup]] = []
        (group,), (weights,) = ranks.groups, ranks.weights
        mains = main_index(group)
        for expert, home, holders in holders_of(plan):
            members = group_of(holders)
            for segment, stacked in weights.items() if group.rank in holders else ():
                if group.rank == home:
                    data = stacked[mains[expert]]
                else:
                    data = torch.full_like(group.slots[segment][0], SENTINEL)
                    self._checks.append((expert, segment, data))
                self._jobs.append((data, home, members))

    def run(self) -> None:
        """Broadcast everything, and wait."""
        works = [dist.broadcast(data, home, g, async_op=True) for data, home, g in self._jobs]
        for work in works:
            work.wait()


def holders_of(plan: Plan) -> list[tuple[int, int, tuple[int, ...]]]:
    """Return ``(expert, home, ranks that hold it, ascending)`` of replicated experts, by expert."""
    ranks: dict[tuple[int, int], set[int]] = {}
    for expert, home, rank, _ in replicas_of(plan):
        ranks.setdefault((expert, home), {home}).add(rank)
    return [(*of, tuple(sorted(found))) for of, found in sorted(ranks.items())]


@functools.cache
def group_of(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """Return a process group over gloo of some ranks. Collective over all ranks, the first time."""
    group: dist.ProcessGroup = dist.new_group(list(ranks), backend="gloo")
    return group


def exchange(operations: list[dist.P2POp]) -> None:
    """Send and receive, and wait."""
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()


def nccl_group() -> dist.ProcessGroup | None:
    """Return a process group of all ranks over NCCL; None if some rank cannot use NCCL."""
    mine = None
    if dist.is_nccl_available() and torch.cuda.is_available():
        device = torch.cuda.current_device()
        mine = str(getattr(torch.cuda.get_device_properties(device), "uuid", device))
    devices = set(gather_json(mine))
    # NCCL allows one rank per GPU.
    if None in devices or len(devices) < dist.get_world_size() or len(devices) < 2:
        return None
    group: dist.ProcessGroup = dist.new_group(backend="nccl")
    return group


class PlainCopy(Arrivals):
    """The machine's copy rate: the plan's bytes, spread evenly over the ranks, with `memcpy`.

    Copies go from the main weights to shared memory of the slots' size, allocated like the slots.
    The ranks of a domain share its replicas: the concatenated bytes, cut into equal parts.
    """

    name = "memcpy"

    def __init__(self, ranks: WeightRanks, plan: Plan) -> None:
        """Allocate the destinations and find this rank's part. Collective."""
        super().__init__()
        (group,) = ranks.groups
        expert_bytes = sum(segment.nbytes for segment in group.segments.values())
        slots, domain = group.topology.slots_per_rank, group.topology.domain
        # Collective. Mapping touches the pages.
        self._target = allocate(group, max(_PAGE, slots * expert_bytes))
        pieces: list[tuple[int, int, int]] = []
        for expert, home, rank, slot in replicas_of(plan):
            if domain[rank] != domain[group.rank]:
                continue
            at = slot * expert_bytes
            for name, source, size in main_segments(group, expert, home):
                pieces.append((self._target.bases[rank] + at, source, size))
                if rank == group.rank:
                    self._checks.append((expert, name, self._target.local[at : at + size]))
                at += size
        here = np.flatnonzero(domain == domain[group.rank]).tolist()
        sizes = [size for *_, size in pieces]
        self._pieces = [
            (pieces[piece][0] + low, pieces[piece][1] + low, high - low)
            for piece, low, high in cut_line(sizes, here.index(group.rank), len(here))
        ]

    def run(self) -> None:
        """Copy this rank's part."""
        for target, source, size in self._pieces:
            ctypes.memmove(target, source, size)


def cut_line(sizes: list[int], index: int, count: int) -> list[tuple[int, int, int]]:
    """Return part ``index`` of ``count`` of concatenated pieces, as ``(piece, begin, end)``.

    Cuts are multiples of the page size, so that no two ranks write to the same page.
    """
    total = sum(sizes)
    first, last = (
        total if i == count else total * i // count // _PAGE * _PAGE for i in (index, index + 1)
    )
    share, start = [], 0
    for piece, size in enumerate(sizes):
        low, high = max(first - start, 0), min(last - start, size)
        if low < high:
            share.append((piece, low, high))
        start += size
    return share


# ---- on a device --------------------------------------------------------------------------------


class DeviceCopy:
    """A single `copy_` of ``num_bytes`` on the device."""

    def __init__(self, meter: Meter, name: str, num_bytes: int) -> None:
        """Allocate source and target."""
        self.name, self.num_bytes = name, num_bytes
        self._source = torch.full((num_bytes,), 7, dtype=torch.uint8, device=meter.torch_device)
        self._target = torch.zeros_like(self._source)

    def run(self) -> None:
        """Copy."""
        self._target.copy_(self._source, non_blocking=True)

    def count_wrong(self, payload: object, epoch: int) -> int:
        """Return the wrong bytes of the target, and clear it."""
        wrong = int((self._target != self._source).sum())
        self._target.zero_()
        return wrong


class StreamCopies(Arrivals):
    """A copy for every segment of every replica, from its home, on several streams."""

    name = "copies"

    def __init__(self, ranks: WeightRanks, plan: Plan) -> None:
        """Find the sources and allocate private targets."""
        super().__init__()
        self._meter = ranks.meter
        self._jobs: list[Callable[[], Any]] = []
        for group in ranks.groups:
            for expert, home, rank, _ in replicas_of(plan):
                if rank != group.rank:
                    continue
                for name, address, size in main_segments(group, expert, home):
                    source = ranks.meter.view(address, size)
                    target = torch.full_like(source, SENTINEL)
                    self._checks.append((expert, name, target))
                    self._jobs.append(functools.partial(target.copy_, source, non_blocking=True))

    def run(self) -> None:
        """Enqueue all copies."""
        self._meter.spread(self._jobs)
