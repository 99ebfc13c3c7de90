"""What transfers over single links: the ranks of this process, on the CPU or on a device."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from ultraep_comm.bench.device_transfers import RanksHere
from ultraep_comm.bench.gpu import Meter
from ultraep_comm.bench.interleaved import line_up
from ultraep_comm.bench.link_rounds import Link
from ultraep_comm.bench.links_settings import SEGMENT, LinksSettings
from ultraep_comm.bench.payload import Payload
from ultraep_comm.bench.transfers import Stage
from ultraep_comm.collectives import replicate_experts
from ultraep_comm.creation import new_group
from ultraep_comm.group import Group
from ultraep_comm.plan import Plan

TILE_BYTES = 32 << 10
TIMED_CALLS = 3  # as in `device`


class LinkRanks(Protocol):
    """The ranks of this process: one, or in loopback all.

    Attributes:
        groups: of these ranks.
        loopback: all ranks are here.
        one_clock: what `time_round` returns can be compared with other ranks' starts and ends.
    """

    groups: list[Group]
    loopback: bool
    one_clock: bool

    def fill(self, plan: Plan, epoch: int) -> None:
        """Write what these ranks send: other bytes in every epoch."""

    def time_round(self, plan: Plan) -> tuple[float, float]:
        """Transfer, all links of a plan at once. Return start and end in us. Collective."""

    def close(self) -> None:
        """Close the groups."""


class HostLinkRanks:
    """A process of the host engine."""

    loopback = False

    def __init__(self, settings: LinksSettings, payload: Payload) -> None:
        """Make the group. Collective."""
        group = new_group(
            num_experts=settings.num_ranks,
            slots_per_rank=1,
            expert=settings.expert,
            engine="host",
            tile_bytes=settings.tile_bytes,
            num_sms=settings.num_sms,
        )
        self.groups = [group]
        self.one_clock = len(set(group.topology.domain.tolist())) == 1
        self._payload, self._weights = payload, group.empty_weights()
        self._bound = group.bind(self._weights)

    def fill(self, plan: Plan, epoch: int) -> None:
        """Write this rank's expert, if it sends it."""
        (group,) = self.groups
        Stage(group=group, weights=self._weights, plan=plan).fill(self._payload, epoch)

    def time_round(self, plan: Plan) -> tuple[float, float]:
        """Call together with all ranks."""
        line_up(self.one_clock)
        start = time.perf_counter_ns()
        replicate_experts(self._bound, plan, group=self.groups[0], mode="direct")
        end = time.perf_counter_ns()
        dist.barrier()
        return start / 1e3, end / 1e3

    def close(self) -> None:
        """Close the group."""
        self.groups[0].close()


class DeviceLinkRanks:
    """A process with a GPU, or all ranks on one."""

    one_clock = False

    def __init__(self, meter: Meter, settings: LinksSettings, payload: Payload) -> None:
        """Make the groups. Collective, but in loopback."""
        self.loopback = settings.fabric == "loopback"
        here = settings.num_ranks if self.loopback else 1
        self._payload = payload
        self._ranks = RanksHere(
            meter,
            np.zeros((settings.num_ranks, settings.num_ranks), np.int32),
            fabric=settings.fabric,
            slots=1,
            segments={SEGMENT: settings.link_bytes},
            tile_bytes=settings.tile_bytes or TILE_BYTES,
            num_sms=meter.num_sms(settings.num_sms, here),
        )
        self.groups = self._ranks.groups

    def fill(self, plan: Plan, epoch: int) -> None:
        """Write the experts that these ranks send."""
        self._ranks.fill(plan, self._payload, epoch)

    def time_round(self, plan: Plan) -> tuple[float, float]:
        """Time calls on the device."""
        ranks = self._ranks
        self._settle()
        took = ranks.meter.time_us(
            lambda: ranks.call(plan, "direct", ranks.bound), TIMED_CALLS, len(ranks.groups)
        )
        self._settle()
        return 0.0, took

    def close(self) -> None:
        """Close the groups."""
        self._ranks.close()

    def _settle(self) -> None:
        self._ranks.meter.settle()
        if not self.loopback:
            dist.barrier()


def link_plan(num_ranks: int, links: Sequence[Link]) -> Plan:
    """Return the plan that copies the expert of every link's source to its destination."""
    table = torch.full((num_ranks, 1), -1, dtype=torch.int32)
    for source, destination in links:
        table[destination, 0] = source
    return Plan.from_slots(table, num_experts=num_ranks)


def count_wrong(
    groups: Sequence[Group], plan: Plan, payload: Payload, epoch: int
) -> NDArray[np.int64]:
    """Return the wrong bytes that each rank received ``[G]``; 0 for ranks of other processes."""
    wrong = np.zeros(plan.slot_expert.shape[0], np.int64)
    for group in groups:
        expert = int(plan.slot_expert[group.rank, 0])
        if expert >= 0:
            data = group.slots[SEGMENT][0].cpu().numpy()
            where = {"epoch": epoch, "expert": expert}
            wrong[group.rank] = payload.count_wrong(data, **where, segment=SEGMENT)
    return wrong
