"""Machines to predict times for: links or cores, latencies, workers and tiles in flight."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from ultraep_comm.calibration import MeasuredCosts, link_gbps
from ultraep_comm.errors import InvalidArgumentError

_MAX_GBPS = 1e6
_MAX_WORKERS = 1024
_RANGES = {  # by how a name ends
    "_gbps": (1e-3, _MAX_GBPS),
    "_us": (0.0, 1e6),
    "_efficiency": (1e-3, 1.0),
    "parallel": (1.0, _MAX_GBPS),
}
_HIGHEST = {  # of integers
    "num_sms": _MAX_WORKERS,
    "tiles_in_flight": _MAX_WORKERS * _MAX_WORKERS,
    "tile_bytes": 1 << 30,
    "domain_size": 1 << 20,
}
_HOST_TILE_BYTES, _HOST_STAGES = 64 << 10, 4  # of the host engine


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A machine's parameters. Rates are in 10^9 bytes per second, one way; times in microseconds.

    Raises InvalidArgumentError, with the attribute's name and value, for an impossible value.

    Attributes:
        name: for tables.
        egress_gbps: rate out of a rank.
        ingress_gbps: rate into a rank, at the same time.
        deliver_us: from a store's last byte until its sender knows that it is delivered.
        flag_us: from a publish until it is observed. The sum of both is a hop.
        load_us: from a remote load's issue to its first byte.
        write_efficiency: fraction of the rates that stores reach, above 0 and at most 1.
        read_efficiency: fraction of the rates that remote loads reach, likewise.
        num_sms: workers of a rank; each has its own tile buffers.
        tiles_in_flight: tile buffers of a rank, a multiple of ``num_sms``.
        tile_bytes: the largest tile.
        fair_loads: a home rank serves the ranks that load from it round-robin; else first come,
            first served, so that a rank with many loads queued holds up the others.
        domain_size: consecutive ranks that form a domain; None: one domain of any size.
        cross_gbps: rate of a rank's separate link to other domains, each way; None: no such link.
        cross_us: additional time of a delivery, a flag or a load between domains.
        call_us: fixed time of a call before anything else.
        leave_us: fixed time after everything else.
        launch_us: of a kernel, before the call.
        schedule_us: fixed time in which a kernel makes the schedule of a plan in device memory.
        schedule_replica_us: the same for each replica of the plan.
        poll_us: time in which a worker polls the flags that it waits for.
        fetch_us: time of a worker's loads for a tile, besides the time for its bytes.
        store_us: time of its stores for a tile, likewise.
        publish_us: time to publish a flag to a peer.
        gather_us: time in which a block of a reduction issues one addition, which is of several
            tiles if experts are large.
        add_us: time in which its adding warps add a tile of one replica, once it is loaded.
        clear_us: time in which they clear a tile.
        unloaded_gbps: rate of a link while no other rank's link out is busy, at least both rates;
            between that and all links the time of a byte is taken to be linear. None: one rate.
        parallel: None: ranks have links. Else ranks are processes whose cores copy in one memory,
            which sustains this many ranks' copies at full rate, at least 1. A core is busy at
            ``egress_gbps`` for every store, also to the rank's own slot; a remote load is part of
            the first store. ``ingress_gbps``, ``load_us`` and ``read_efficiency`` are not used, and
            there is one domain.
        read_gbps: rate at which a core reads a tile, once for all its stores; None: no cost.
        group_us: time of a hub's core to pass on a flag group.
    """

    name: str = "custom"
    egress_gbps: float
    ingress_gbps: float
    deliver_us: float = 1.3
    flag_us: float = 0.7
    load_us: float = 2.0
    write_efficiency: float = 1.0
    read_efficiency: float = 1.0
    num_sms: int = 64
    tiles_in_flight: int = 256
    tile_bytes: int = 32 << 10
    fair_loads: bool = True
    domain_size: int | None = None
    cross_gbps: float | None = None
    cross_us: float = 0.0
    call_us: float = 0.0
    leave_us: float = 0.0
    launch_us: float = 0.0
    schedule_us: float = 0.0
    schedule_replica_us: float = 0.0
    poll_us: float = 0.0
    fetch_us: float = 0.0
    store_us: float = 0.0
    publish_us: float = 0.0
    gather_us: float = 0.0
    add_us: float = 0.0
    clear_us: float = 0.0
    unloaded_gbps: float | None = None
    parallel: float | None = None
    read_gbps: float | None = None
    group_us: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise InvalidArgumentError(f"name is {self.name!r}; expected a string")
        if not isinstance(self.fair_loads, bool):
            raise InvalidArgumentError(f"fair_loads is {self.fair_loads!r}; expected True or False")
        for field in fields(self):
            if not (field.default is None and getattr(self, field.name) is None):
                self._check(field.name)
        if self.parallel is None and (self.read_gbps or self.group_us):
            raise InvalidArgumentError(
                f"read_gbps is {self.read_gbps!r} and group_us {self.group_us!r}, but parallel is"
                " None; expected neither for ranks with links, or both for ranks that copy with"
                " their cores"
            )
        if self.parallel is not None and self.domain_size is not None:
            raise InvalidArgumentError(
                f"domain_size is {self.domain_size!r}; expected None with parallel: ranks that"
                " copy in one memory are one domain"
            )
        if self.unloaded_gbps is not None and self.unloaded_gbps < max(
            self.egress_gbps, self.ingress_gbps
        ):
            raise InvalidArgumentError(
                f"unloaded_gbps is {self.unloaded_gbps}; expected at least both rates"
            )
        if self.tiles_in_flight % self.num_sms or self.stages > _MAX_WORKERS:
            raise InvalidArgumentError(
                f"tiles_in_flight is {self.tiles_in_flight}; expected a multiple of num_sms"
                f" ({self.num_sms}), of at most {_MAX_WORKERS} each"
            )

    def _check(self, name: str) -> None:
        """Raise InvalidArgumentError for a number of the wrong type or out of its range."""
        value, highest = getattr(self, name), _HIGHEST.get(name)
        if highest is not None:
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= highest:
                raise InvalidArgumentError(
                    f"{name} is {value!r}; expected an integer, 1 to {highest}"
                )
            return
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        for ending, (low, high) in _RANGES.items():
            if name.endswith(ending) and not (is_number and low <= value <= high):
                raise InvalidArgumentError(f"{name} is {value!r}; expected {low:g} to {high:g}")

    @classmethod
    def from_calibration(cls, costs: MeasuredCosts, *, num_sms: int = 1) -> Machine:
        """Return the machine that ``bench calibrate`` measured for the host engine.

        A flag takes the measured hop, and a call the measured time of an empty one.

        Args:
            costs: of the host engine, ``read_calibration(path)["host"]``.
            num_sms: workers of a rank, as in the calibration.
        """
        return cls(
            name=f"calibrated: {costs.device}",
            egress_gbps=costs.store_gbps,
            ingress_gbps=min(costs.store_gbps * costs.parallel, _MAX_GBPS),
            deliver_us=0.0,
            flag_us=costs.hop_us,
            load_us=0.0,
            num_sms=num_sms,
            tiles_in_flight=num_sms * _HOST_STAGES,
            tile_bytes=_HOST_TILE_BYTES,
            call_us=costs.call_us,
            parallel=costs.parallel,
            read_gbps=costs.load_gbps,
            group_us=costs.flag_us,
        )

    @property
    def stages(self) -> int:
        """Return the tiles that one worker has in flight."""
        return self.tiles_in_flight // self.num_sms

    @property
    def hop_us(self) -> float:
        """Return the time from a store's last byte until its flag is observed."""
        return self.deliver_us + self.flag_us


# Times of the CUDA engine's compiled kernels in an interpreter of PTX: fitted to transfers of 1 to
# 4 MiB among 2 to 8 ranks; tests/ptx/test_charged_model.py compares them. `fetch_us` includes that
# hubs read memory twice; memory bandwidth, several times a link's, is not charged.
_FAST_WORKERS: dict[str, Any] = {  # tests/ptx/clock_a.env: flags and tables in near caches
    "call_us": 1.4,
    "leave_us": 1.4,
    "deliver_us": 2.1,
    "flag_us": 1.25,
    "load_us": 2.1,
    "schedule_us": 4.5,
    "schedule_replica_us": 0.18,
    "poll_us": 0.65,
    "fetch_us": 1.3,
    "store_us": 1.35,
    "publish_us": 0.5,
    "gather_us": 3.0,
    "add_us": 0.8,
    "clear_us": 0.2,
}
_SLOW_WORKERS: dict[str, Any] = {  # clock_b.env: in far ones, or in memory
    "call_us": 2.3,
    "leave_us": 1.2,
    "deliver_us": 2.2,
    "flag_us": 1.75,
    "load_us": 3.95,
    "schedule_us": 6.7,
    "schedule_replica_us": 0.17,
    "poll_us": 0.9,
    "fetch_us": 1.8,
    "store_us": 1.5,
    "publish_us": 0.5,
    "gather_us": 3.1,
    "add_us": 0.8,
    "clear_us": 0.2,
}
_LAUNCH_US = 3.0  # published: 2 to 4

# Published: direct fan-out reaches 706-715 GB/s on a rack of 72 GPUs, all of which send; a copy
# alone 785 GB/s behind 6.5 us, half of them a launch (22 MB in 34.5 us, 24 of them at 776 GB/s).
_LOADED, _UNLOADED = link_gbps((10, 0), None), 785.0
_HOPPER = link_gbps((9, 0), None)
_RACK: dict[str, Any] = {
    "egress_gbps": _LOADED,
    "ingress_gbps": _LOADED,
    "unloaded_gbps": _UNLOADED,
    "domain_size": 72,
    "launch_us": _LAUNCH_US,
}
_NICS: dict[str, Any] = {"cross_gbps": 45.0, "cross_us": 3.0}  # 400 Gb/s, not calibrated

MACHINES = {
    machine.name: machine
    for machine in (
        # The links alone, as if workers took no time, to compare schedules by. A hop of 2 us fits
        # the published times.
        Machine(name="nvl72-links", egress_gbps=_LOADED, ingress_gbps=_LOADED, domain_size=72),
        Machine(name="nvl72", **_RACK, **_FAST_WORKERS),
        # The same rack of GPUs of two dies each: flags and tables may lie in the other die's cache.
        Machine(name="gb200", **_RACK, **_SLOW_WORKERS),
        Machine(name="nvl72-racks", **_RACK, **_FAST_WORKERS, **_NICS),
        # Nodes of 8 H100 or H200, at the rate that NCCL assumes of 450 GB/s each way. Not
        # calibrated.
        Machine(
            name="hgx8",
            egress_gbps=_HOPPER,
            ingress_gbps=_HOPPER,
            domain_size=8,
            launch_us=_LAUNCH_US,
            **_FAST_WORKERS,
            **_NICS,
        ),
    )
}
"""Described machines by name."""


def find_machine(machine: str | Machine) -> Machine:
    """Return the machine of a name, or the machine itself.

    Raises:
        InvalidArgumentError: no machine has this name.
    """
    if isinstance(machine, Machine):
        return machine
    if not isinstance(machine, str) or machine not in MACHINES:
        raise InvalidArgumentError(
            f"machine is {machine!r}; expected a Machine or one of {', '.join(MACHINES)}"
        )
    return MACHINES[machine]
