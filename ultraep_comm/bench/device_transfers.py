"""What a run on a GPU times: the library's modes, and what they are compared with."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist

from ultraep_comm.bench.gpu import Meter
from ultraep_comm.bench.payload import SENTINEL, Payload, count_disturbed
from ultraep_comm.bench.transfers import Stage
from ultraep_comm.collectives import replicate_experts
from ultraep_comm.creation import new_group, new_loopback_groups
from ultraep_comm.group import Group
from ultraep_comm.plan import Plan
from ultraep_comm.segments import BoundWeights

Weights = Mapping[str, torch.Tensor]


class RanksHere:
    """The ranks of this process: all of a loopback group, or one."""

    def __init__(
        self,
        meter: Meter,
        load: np.ndarray,
        *,
        fabric: str,
        slots: int,
        segments: Mapping[str, int],
        tile_bytes: int,
        num_sms: int | None,
    ) -> None:
        """Make groups and weights that peers can address. Collective."""
        num_ranks, num_experts = load.shape
        expert = {name: ((size,), torch.uint8) for name, size in segments.items()}
        self.meter, self.loopback = meter, fabric == "loopback"
        self.groups: list[Group] = (
            new_loopback_groups(
                num_ranks,
                num_experts=num_experts,
                slots_per_rank=slots,
                expert=expert,
                engine=meter.engine,
                tile_bytes=tile_bytes,
                num_sms=num_sms,
            )
            if self.loopback
            else [
                new_group(
                    num_experts=num_experts,
                    slots_per_rank=slots,
                    expert=expert,
                    engine=meter.engine,
                    fabric=fabric if meter.engine == "cuda" else "auto",
                    tile_bytes=tile_bytes,
                    num_sms=num_sms,
                )
            ]
        )
        self.weights = [group.empty_weights() for group in self.groups]
        self.bound = [g.bind(w) for g, w in zip(self.groups, self.weights, strict=True)]

    def stages(self, plan: Plan) -> list[Stage]:
        """Return every rank's view of a plan."""
        return [
            Stage(group=g, weights=w, plan=plan)
            for g, w in zip(self.groups, self.weights, strict=True)
        ]

    def call(self, plan: Plan, mode: str, given: Sequence[Weights | BoundWeights]) -> None:
        """Enqueue one call of every rank here, behind the current stream and before the rest."""
        if not self.loopback:
            replicate_experts(given[0], plan, group=self.groups[0], mode=mode)
            return
        works = [
            replicate_experts(own, plan, group=group, mode=mode, async_op=True)
            for group, own in zip(self.groups, given, strict=True)
        ]
        for work in works:
            assert work is not None
            work.wait()

    def host_us(
        self, plan: Plan, mode: str, given: Sequence[Weights | BoundWeights], calls: int
    ) -> float:
        """Return the median time that `replicate_experts` keeps the host, for one rank."""
        times = []
        for _ in range(calls):
            self.meter.settle()
            start = time.perf_counter_ns()
            works = [
                replicate_experts(own, plan, group=group, mode=mode, async_op=True)
                for group, own in zip(self.groups, given, strict=True)
            ]
            times.append((time.perf_counter_ns() - start) / 1e3 / len(self.groups))
            for work in works:
                assert work is not None
                work.synchronize()
        return float(np.median(times))

    def fill(self, plan: Plan, payload: Payload, epoch: int) -> None:
        """Give the replicated experts at home here the bytes of a new epoch."""
        replicated = set(plan.slot_expert[plan.slot_expert >= 0].tolist())
        for group, own in zip(self.groups, self.weights, strict=True):
            for i, expert in enumerate(group.topology.mains(group.rank).tolist()):
                for name, stacked in own.items() if expert in replicated else ():
                    data = np.empty(stacked[i].numel(), np.uint8)
                    payload.fill(data, epoch=epoch, expert=expert, segment=name)
                    stacked[i].copy_(torch.from_numpy(data))

    def close(self) -> None:
        """Close the groups."""
        for group in self.groups:
            group.close()


def mark_slots(groups: Sequence[Group]) -> None:
    """Give all slots the bytes of emptiness."""
    for group in groups:
        for slots in group.slots.values():
            slots.fill_(SENTINEL)


def count_wrong_slots(groups: Sequence[Group], plan: Plan, payload: Payload, epoch: int) -> int:
    """Compare filled slots with the payload, and empty ones with their mark."""
    wrong = 0
    for group in groups:
        for slot, expert in enumerate(plan.slot_expert[group.rank].tolist()):
            for name, slots in group.slots.items():
                data = slots[slot].cpu().numpy()
                if expert < 0:
                    wrong += count_disturbed(data)
                else:
                    wrong += payload.count_wrong(data, epoch=epoch, expert=expert, segment=name)
    return wrong


class DeviceTransfer(Protocol):
    """Something that delivers a plan's replicas, or as many bytes."""

    name: str

    def run(self) -> None:
        """Enqueue it on the current stream."""

    def count_wrong(self, payload: Payload, epoch: int) -> int:
        """Return the wrong bytes here."""


class DeviceMode:
    """`replicate_experts` with weights bound once."""

    def __init__(self, ranks: RanksHere, plan: Plan, mode: str) -> None:
        """Mark the slots."""
        self.name, self._ranks, self._plan = mode, ranks, plan
        mark_slots(ranks.groups)

    def run(self) -> None:
        """Copy the plan's experts."""
        self._ranks.call(self._plan, self.name, self._ranks.bound)

    def choose(self) -> str:
        """Return the mode that the library takes for this plan. Collective: makes a call."""
        works = [
            replicate_experts(own, self._plan, group=group, mode=self.name, async_op=True)
            for group, own in zip(self._ranks.groups, self._ranks.bound, strict=True)
        ]
        for work in works:
            assert work is not None
            work.synchronize()
        assert works[0] is not None
        return works[0].mode

    def count_wrong(self, payload: Payload, epoch: int) -> int:
        """Compare filled slots with the payload, and empty ones with what they held before."""
        return count_wrong_slots(self._ranks.groups, self._plan, payload, epoch)


class DeviceCopy:
    """One copy on the device of so many bytes, by `copy_`."""

    def __init__(self, meter: Meter, name: str, num_bytes: int) -> None:
        """Allocate source and target."""
        self.name, self.num_bytes = name, num_bytes
        self._source = torch.full((num_bytes,), 7, dtype=torch.uint8, device=meter.torch_device)
        self._target = torch.zeros_like(self._source)

    def run(self) -> None:
        """Copy."""
        self._target.copy_(self._source, non_blocking=True)

    def count_wrong(self, payload: Payload, epoch: int) -> int:
        """Compare target and source, and wipe the target."""
        wrong = int((self._target != self._source).sum())
        self._target.zero_()
        return wrong


class StreamCopies:
    """A copy for every segment of every replica, from its home, on several streams."""

    name = "copies"

    def __init__(self, ranks: RanksHere, plan: Plan) -> None:
        """Find the sources and allocate private targets."""
        meter, self._spread = ranks.meter, ranks.meter.spread
        self._checks: list[tuple[int, str, torch.Tensor]] = []
        self._jobs: list[Callable[[], None]] = []
        for stage in ranks.stages(plan):
            group, layout = stage.group, stage.group._layout
            bases = group._memory[1].bases
            for expert, home, rank, _ in stage.replicas():
                if rank != group.rank:
                    continue
                for offset, (name, segment) in zip(
                    layout.region_offset, group.segments.items(), strict=True
                ):
                    at = bases[home] + offset + layout.main_idx[expert] * segment.nbytes
                    source = meter.view(at, segment.nbytes)
                    target = torch.full_like(source, SENTINEL)
                    self._checks.append((expert, name, target))
                    self._jobs.append(_copier(target, source))

    def run(self) -> None:
        """Copy all."""
        self._spread(self._jobs)

    def count_wrong(self, payload: Payload, epoch: int) -> int:
        """Compare the targets with the payload."""
        return _count_wrong(self._checks, payload, epoch)


class NcclPointToPoint:
    """`batch_isend_irecv` over NCCL of every replica's segments from its home."""

    name = "nccl"

    def __init__(self, ranks: RanksHere, plan: Plan, process_group: dist.ProcessGroup) -> None:
        """Make the operations and the private buffers to receive into."""
        (stage,) = ranks.stages(plan)
        me = stage.group.rank
        mains = {e: i for i, e in enumerate(stage.group.topology.mains(me).tolist())}
        self._checks: list[tuple[int, str, torch.Tensor]] = []
        self._operations: list[dist.P2POp] = []
        for expert, home, rank, _ in stage.replicas():
            for name, stacked in stage.weights.items():
                if home == me:
                    send = dist.P2POp(dist.isend, stacked[mains[expert]], rank, process_group)
                    self._operations.append(send)
                elif rank == me:
                    buffer = torch.full_like(stage.group.slots[name][0], SENTINEL)
                    self._checks.append((expert, name, buffer))
                    self._operations.append(dist.P2POp(dist.irecv, buffer, home, process_group))

    def run(self) -> None:
        """Send and receive everything; the current stream waits."""
        if self._operations:
            for work in dist.batch_isend_irecv(self._operations):
                work.wait()

    def count_wrong(self, payload: Payload, epoch: int) -> int:
        """Compare what was received with the payload."""
        return _count_wrong(self._checks, payload, epoch)


def _copier(target: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
    def copy() -> None:
        target.copy_(source, non_blocking=True)

    return copy


def _count_wrong(
    checks: Sequence[tuple[int, str, torch.Tensor]], payload: Payload, epoch: int
) -> int:
    return sum(
        payload.count_wrong(data.cpu().numpy(), epoch=epoch, expert=expert, segment=name)
        for expert, name, data in checks
    )
