"""``replicate``: the ranks that copy weights, and what they are compared with."""

from __future__ import annotations

from ultraep_comm.bench.baselines import (
    Broadcast,
    PlainCopy,
    PointToPoint,
    StreamCopies,
    nccl_group,
)
from ultraep_comm.bench.clock import Meter
from ultraep_comm.bench.commands.replicate import ReplicateSettings
from ultraep_comm.bench.inside import all_in_reach
from ultraep_comm.bench.measure import Transfer
from ultraep_comm.bench.payload import Payload
from ultraep_comm.bench.ranks import TIMED_CALLS, WeightRanks
from ultraep_comm.bench.traffic import Traffic, count_traffic
from ultraep_comm.engines.options import HOST_TILE_BYTES
from ultraep_comm.plan.plan import Plan


class ReplicateRanks(WeightRanks):
    """Ranks that call `replicate_experts`.

    Attributes:
        calls: timed calls in a row, on a device.
        lined_up: line up the ranks with another call than the timed one.
    """

    calls, lined_up = TIMED_CALLS, False

    def __init__(self, meter: Meter, settings: ReplicateSettings, num_sms: int | None) -> None:
        """Create groups, with weights that peers can address. Collective, but in loopback."""
        super().__init__(
            meter,
            num_ranks=settings.num_ranks,
            num_experts=settings.num_experts,
            slots=settings.slots,
            fabric=settings.fabric,
            segments=settings.segments,
            tile_bytes=settings.tile_bytes,
            num_sms=num_sms,
        )
        self._settings = settings

    def make_payload(self) -> Payload:
        """Return the expected bytes."""
        return Payload(self._settings.seed, self._settings.segments)

    def baselines(self, plan: Plan) -> list[Transfer]:
        """Return what users do today, and the machine's own rate.

        Isend/irecv over gloo, and memcpy or, without shared memory, broadcasts. On a device copies
        on streams, if all ranks are in reach, and isend/irecv over NCCL.
        """
        if self._settings.engine != "cuda":
            shared = self._settings.engine == "host"
            p2p = PointToPoint(self, plan, "p2p", None)
            return [p2p, PlainCopy(self, plan) if shared else Broadcast(self, plan)]
        made: list[Transfer] = []
        if all_in_reach(self.groups[0]):
            made.append(StreamCopies(self, plan))
        nccl = None if self.loopback else nccl_group()
        if nccl is not None:
            made.append(PointToPoint(self, plan, "nccl", nccl))
        return made

    def traffic(self, plan: Plan, mode: str) -> Traffic:
        """Return the bytes that a call moves."""
        return count_traffic(
            plan,
            mode,
            segment_bytes=list(self._settings.segments.values()),
            tile_bytes=self._settings.tile_bytes or HOST_TILE_BYTES,
        )
