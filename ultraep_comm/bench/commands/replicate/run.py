"""The measurement of ``replicate``. bench/METRICS.md defines the figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ultraep_comm.bench.baselines import (
    Broadcast,
    PlainCopy,
    PointToPoint,
    StreamCopies,
    nccl_group,
)
from ultraep_comm.bench.clock import Meter, own_gpu
from ultraep_comm.bench.commands.replicate import ReplicateSettings
from ultraep_comm.bench.commands.replicate.device import median_us, run_device
from ultraep_comm.bench.commands.replicate.host import run_host
from ultraep_comm.bench.commands.replicate.one_plan import Collective
from ultraep_comm.bench.commands.replicate.reduction import Reduction
from ultraep_comm.bench.inside import all_in_reach
from ultraep_comm.bench.measure import Transfer
from ultraep_comm.bench.payload import Payload
from ultraep_comm.bench.ranks import TILE_BYTES, TIMED_CALLS, WeightRanks
from ultraep_comm.bench.report import Report
from ultraep_comm.bench.traffic import Traffic, count_traffic, make_schedule
from ultraep_comm.engines.options import HOST_TILE_BYTES
from ultraep_comm.plan.plan import Plan


def run(settings: ReplicateSettings, report: Report) -> int:
    """Measure; return the exit status. See `run_one_plan`."""
    collective = Reduction() if settings.op == "reduce" else Replication()
    return run_one_plan(collective, settings, report)


def run_one_plan(collective: Collective, settings: ReplicateSettings, report: Report) -> int:
    """Measure a collective on the settings' engine; return the exit status.

    Collective, but in loopback.

    Raises:
        UltraEPError: there is no device, a group could not be created, or a call failed.
    """
    if settings.engine != "cuda":
        return run_host(collective, settings, report)
    return run_device(own_gpu(), collective, settings, report)


class Replication:
    """`replicate_experts` as a `one_plan.Collective`."""

    calls, lined_up, empty_mode = TIMED_CALLS, False, "push"

    def make_ranks(
        self,
        meter: Meter,
        settings: ReplicateSettings,
        num_sms: int | None,
        segments: Mapping[str, int] | None = None,
    ) -> WeightRanks:
        """Create groups, with weights that peers can address. Collective, but in loopback."""
        return WeightRanks(
            meter,
            num_ranks=settings.num_ranks,
            num_experts=settings.num_experts,
            slots=settings.slots,
            fabric=settings.fabric,
            segments=segments or settings.segments,
            tile_bytes=settings.tile_bytes,
            num_sms=num_sms,
        )

    def make_payload(self, settings: ReplicateSettings) -> Payload:
        """Return the expected bytes."""
        return Payload(settings.seed, settings.segments)

    def host_baselines(self, ranks: WeightRanks, plan: Plan) -> list[Transfer]:
        """Return isend/irecv over gloo, and memcpy; without shared memory, broadcasts instead."""
        p2p = PointToPoint(ranks, plan, "p2p", None)
        shared = ranks.meter.engine == "host"
        return [p2p, PlainCopy(ranks, plan) if shared else Broadcast(ranks, plan)]

    def device_baselines(self, ranks: WeightRanks, plan: Plan) -> list[Transfer]:
        """Return copies on streams, if all ranks are in reach, and isend/irecv over NCCL."""
        made: list[Transfer] = []
        if all_in_reach(ranks.groups[0]):
            made.append(StreamCopies(ranks, plan))
        nccl = None if ranks.loopback else nccl_group()
        if nccl is not None:
            made.append(PointToPoint(ranks, plan, "nccl", nccl))
        return made

    def busiest_rank(self, settings: ReplicateSettings, plan: Plan, mode: str) -> float:
        """Return the largest egress of a rank under the schedule, in experts."""
        schedule = make_schedule(plan, mode, **_sizes(settings, HOST_TILE_BYTES))
        return float(max(schedule["egress"])) / 65536

    def traffic(self, settings: ReplicateSettings, plan: Plan, mode: str) -> Traffic:
        """Return the bytes that a call on a device moves."""
        return count_traffic(plan, mode, **_sizes(settings, TILE_BYTES))

    def tile_us(self, meter: Meter, settings: ReplicateSettings, num_sms: int) -> float | None:
        """Return the time of one tile through a hub; None with too few ranks or slots."""
        plan = hub_plan(settings.load, settings.slots)
        if plan is None:
            return None
        segments = {"w": settings.tile_bytes or TILE_BYTES}
        ranks = self.make_ranks(meter, settings, num_sms, segments)
        took = median_us(settings, ranks, ranks.clock(), plan, "push")
        ranks.close()
        return took


def _sizes(settings: ReplicateSettings, tile_bytes: int) -> dict[str, Any]:
    return {
        "segment_bytes": list(settings.segments.values()),
        "tile_bytes": settings.tile_bytes or tile_bytes,
    }


def hub_plan(load: NDArray[np.int32], slots: int) -> Plan | None:
    """Return a plan of one expert with two replicas, one a hub; None without room for it."""
    num_ranks, num_experts = load.shape
    if num_ranks < 3 or slots < 1:
        return None
    table = torch.full((num_ranks, slots), -1, dtype=torch.int32)
    table[1, 0] = table[2, 0] = 0  # expert 0 is at home on rank 0
    return Plan.from_slots(table, num_experts=num_experts)
