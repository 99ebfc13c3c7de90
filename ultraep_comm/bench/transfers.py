"""The things that one run times: the library's modes, and what they are compared with."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from ultraep_comm.bench.payload import SENTINEL, Bytes, Payload, count_disturbed
from ultraep_comm.collectives import replicate_experts
from ultraep_comm.group import Group
from ultraep_comm.plan import Plan

_PAGE = 4096


def replicas_of(plan: Plan) -> Iterator[tuple[int, int, int, int]]:
    """Yield ``(expert, home, rank, slot)`` of a plan, by ascending rank and slot."""
    home = plan.home.tolist()
    for rank, row in enumerate(plan.slot_expert.tolist()):
        for slot, expert in enumerate(row):
            if expert >= 0:
                yield expert, home[expert], rank, slot


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What all transfers of a run share.

    Attributes:
        group: the group, with slots full of SENTINEL.
        weights: this rank's main weights, from ``group.empty_weights()``: the group's only region.
        plan: the plan.
    """

    group: Group
    weights: dict[str, torch.Tensor]
    plan: Plan

    def replicas(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield ``(expert, home, rank, slot)``, in the same order on every rank."""
        return replicas_of(self.plan)

    def fill(self, payload: Payload, epoch: int) -> None:
        """Give this rank's replicated experts the bytes of a new epoch."""
        mains = self.group.topology.mains(self.group.rank).tolist()
        replicated = {expert for expert, *_ in self.replicas()}
        for name, stacked in self.weights.items():
            rows = stacked.numpy()
            for i, expert in enumerate(mains):
                if expert in replicated:
                    payload.fill(rows[i], epoch=epoch, expert=expert, segment=name)


class LibraryMode:
    """`replicate_experts`, blocking, with weights bound once."""

    def __init__(self, stage: Stage, mode: str) -> None:
        """Prepare repeated calls in ``mode``, and mark the slots."""
        self.name = mode
        self._stage = stage
        self._bound = stage.group.bind(stage.weights)
        for slots in stage.group.slots.values():
            slots.fill_(SENTINEL)

    def run(self) -> None:
        """Copy the plan's experts."""
        replicate_experts(self._bound, self._stage.plan, group=self._stage.group, mode=self.name)

    def choose(self) -> str:
        """Return the mode that the library takes for this plan. Collective: makes a call."""
        stage = self._stage
        work = replicate_experts(
            self._bound, stage.plan, group=stage.group, mode=self.name, async_op=True
        )
        assert work is not None
        work.wait()
        return work.mode

    def count_wrong(self, payload: Payload, epoch: int) -> int:
        """Compare filled slots with the payload, and empty ones with what they held before."""
        group, wrong = self._stage.group, 0
        for slot, expert in enumerate(self._stage.plan.slot_expert[group.rank].tolist()):
            for name, slots in group.slots.items():
                data: Bytes = slots[slot].numpy()
                if expert < 0:
                    wrong += count_disturbed(data)
                else:
                    wrong += payload.count_wrong(data, epoch=epoch, expert=expert, segment=name)
        return wrong


class PointToPoint:
    """What a user would do today: `batch_isend_irecv` of every replica's segments from its home."""

    name = "p2p"

    def __init__(self, stage: Stage) -> None:
        """Make the operations and the private buffers to receive into."""
        self._received: list[tuple[int, str, torch.Tensor]] = []
        self._operations: list[dist.P2POp] = []
        me = stage.group.rank
        mains = {e: i for i, e in enumerate(stage.group.topology.mains(me).tolist())}
        for expert, home, rank, _ in stage.replicas():
            for name, stacked in stage.weights.items():
                if home == me:
                    send = dist.P2POp(dist.isend, stacked[mains[expert]], rank)
                    self._operations.append(send)
                elif rank == me:
                    buffer = torch.full_like(stage.group.slots[name][0], SENTINEL)
                    self._received.append((expert, name, buffer))
                    self._operations.append(dist.P2POp(dist.irecv, buffer, home))

    def run(self) -> None:
        """Send and receive everything, and wait."""
        if self._operations:
            for work in dist.batch_isend_irecv(self._operations):
                work.wait()

    def count_wrong(self, payload: Payload, epoch: int) -> int:
        """Compare what was received with the payload."""
        return sum(
            payload.count_wrong(buffer.numpy(), epoch=epoch, expert=expert, segment=name)
            for expert, name, buffer in self._received
        )


class PlainCopy:
    """The machine's copy rate: the plan's bytes, spread evenly over the ranks, with `memcpy`.

    From the main weights into shared segments as large as the slots, allocated like them. Ranks of
    one domain share the replicas of their domain: the concatenated bytes, cut into equal parts.
    """

    name = "memcpy"

    def __init__(self, stage: Stage) -> None:
        """Allocate the segments to copy to, and find this rank's part. Collective."""
        group, layout = stage.group, stage.group._layout
        sizes = {name: segment.nbytes for name, segment in group.segments.items()}
        expert_bytes, slots = sum(sizes.values()), group.topology.slots_per_rank
        # Collective. The pages are touched when they are mapped.
        self._target = group._fabric.allocate(max(_PAGE, slots * expert_bytes))
        self._checks: list[tuple[int, str, Bytes]] = []
        region, main_idx = group._memory[1], layout.main_idx
        pieces: list[tuple[int, int, int]] = []
        domain = group.topology.domain
        for expert, home, rank, slot in stage.replicas():
            if domain[rank] != domain[group.rank]:
                continue
            at = slot * expert_bytes
            for offset, (name, size) in zip(layout.region_offset, sizes.items(), strict=True):
                source = region.bases[home] + offset + main_idx[expert] * size
                pieces.append((self._target.bases[rank] + at, source, size))
                if rank == group.rank:
                    self._checks.append((expert, name, self._target.local.numpy()[at : at + size]))
                at += size
        ranks = np.flatnonzero(domain == domain[group.rank]).tolist()
        self._pieces = take_share(pieces, ranks.index(group.rank), len(ranks))

    def run(self) -> None:
        """Copy this rank's part."""
        for target, source, size in self._pieces:
            ctypes.memmove(target, source, size)

    def count_wrong(self, payload: Payload, epoch: int) -> int:
        """Compare this rank's segment with the payload."""
        return sum(
            payload.count_wrong(data, epoch=epoch, expert=expert, segment=name)
            for expert, name, data in self._checks
        )


def take_share(
    pieces: list[tuple[int, int, int]], index: int, count: int
) -> list[tuple[int, int, int]]:
    """Return part ``index`` of ``count`` of the pieces ``(target, source, bytes)`` in a line."""
    share = []
    for piece, low, high in cut_line([size for *_, size in pieces], index, count):
        target, source, _ = pieces[piece]
        share.append((target + low, source + low, high - low))
    return share


def cut_line(sizes: list[int], index: int, count: int) -> list[tuple[int, int, int]]:
    """Return part ``index`` of ``count`` of pieces in a line, as ``(piece, begin, end)``.

    Cuts lie on multiples of a page, so that no two ranks write to one.
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
