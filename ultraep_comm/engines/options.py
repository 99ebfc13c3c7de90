"""The arguments common to all ways of creating a group, checked."""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from ultraep_comm import _core, env
from ultraep_comm.calibration import MeasuredCosts
from ultraep_comm.errors import InvalidArgumentError, UnsupportedError
from ultraep_comm.plan.topology import IntsLike, Topology, as_int
from ultraep_comm.recording.recorder import CAPACITY, MAX_CAPACITY
from ultraep_comm.weights.binding import GRAD_TYPES, GradSpec, make_grads
from ultraep_comm.weights.segments import Segment, make_segments

# For the host engine: makes a flag group one tile, and each copy long enough to stream.
HOST_TILE_BYTES = 64 << 10
WAIT_TIMEOUT = 30.0
MAX_BANKS = 1 << 16
ENGINES = ("auto", "host", "cuda", "c10d")
FABRICS = ("auto", "shm", "nvshmem", "torch", "none", "loopback")
# Engines over fabrics between processes, in the order in which "auto" prefers them.
PREFERRED = (("cuda", "nvshmem"), ("cuda", "torch"), ("host", "shm"), ("c10d", "none"))
ExpertSpec = Mapping[str, Segment | tuple[Sequence[int], torch.dtype]]


_WORKS_ON = {"host": "cpu", "cuda": "cuda"}  # c10d: on what the process group has a backend for


def allowed_backends(
    engine: str, fabric: str, device: torch.device | None = None
) -> list[tuple[str, str]]:
    """Return the engines and fabrics that these arguments of a group allow, preferred first."""
    return [
        (e, f)
        for e, f in PREFERRED
        if engine in ("auto", e)
        and fabric in ("auto", f)
        and (device is None or _WORKS_ON.get(e, device.type) == device.type)
    ]


def _as_device(device: torch.device | str | None, engine: str) -> torch.device | None:
    """Return a ``device=`` argument; raise InvalidArgumentError if the engine cannot work there."""
    try:
        found = None if device is None else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InvalidArgumentError(f"device is {device!r}; expected a device or None") from error
    works_on = _WORKS_ON.get(engine)
    if found is not None and works_on not in (None, found.type):
        raise InvalidArgumentError(
            f"device is {str(found)!r} with engine={engine!r}; expected {works_on!r} or None"
        )
    return found


def as_seconds(timeout: timedelta | float, name: str = "timeout") -> float:
    """Return a limit in seconds; 0: none.

    Raises:
        InvalidArgumentError: it is neither a timedelta nor a number, or out of range.
    """
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if not (isinstance(seconds, int | float) and 0 <= seconds < 1e9):
        raise InvalidArgumentError(
            f"{name} is {seconds!r}; expected a timedelta, or seconds below 1e9; 0: no limit"
        )
    return seconds


@dataclass(frozen=True, kw_only=True)
class GroupConfig:
    """The arguments of a group, as given; see :func:`new_group`."""

    num_experts: int
    slots_per_rank: int
    expert: ExpertSpec
    home: IntsLike | None = None
    domains: IntsLike | None = None
    allow_cross_domain: bool = False
    grads: GradSpec = None
    banks: int = 1
    grad_banks: int = 1
    instances: bool = False
    engine: str = "auto"
    fabric: str = "auto"
    timeout: timedelta | float | None = None
    num_sms: int | None = None
    tile_bytes: int | None = None
    check: bool | None = None
    device: torch.device | str | None = None

    def topology(self, num_ranks: int) -> Topology:
        """Return the constants of the group's planner."""
        return Topology.make(
            num_ranks=num_ranks,
            num_experts=self.num_experts,
            slots_per_rank=self.slots_per_rank,
            home=self.home,
            domains=self.domains,
            allow_cross_domain=self.allow_cross_domain,
        )


class Options:
    """What the engines of a group are given besides its topology, checked."""

    def __init__(
        self, given: GroupConfig, calibration: Mapping[str, MeasuredCosts] | None = None
    ) -> None:
        engine, fabric = given.engine, given.fabric
        for name, value, known in (("engine", engine, ENGINES), ("fabric", fabric, FABRICS)):
            if value not in known:
                raise InvalidArgumentError(f"{name} is {value!r}; expected one of {list(known)}")
        self.calibration = calibration or {}
        self.engine = engine
        self.fabric = fabric
        self.device = _as_device(given.device, engine)
        if fabric != "loopback" and not allowed_backends(engine, fabric, self.device):
            raise UnsupportedError(
                f"engine={engine!r} does not run over fabric={fabric!r}; expected engine='host'"
                " with fabric='shm', engine='cuda' with fabric='nvshmem' or fabric='torch', or"
                " engine='c10d' with fabric='none'"
            )
        self.banks = as_int(given.banks, "banks")
        self.grad_banks = as_int(given.grad_banks, "grad_banks")
        if not 1 <= self.banks <= MAX_BANKS:
            raise InvalidArgumentError(f"banks is {self.banks}; expected 1 to {MAX_BANKS}")
        if not 1 <= self.grad_banks <= self.banks:
            raise InvalidArgumentError(
                f"grad_banks is {self.grad_banks}; expected 1 to {self.banks}, the number of banks"
            )
        self.instances = bool(given.instances)
        self.given_domains = given.domains is not None
        self.page_bytes = max(4096, mmap.PAGESIZE)  # that are mapped together; of the host's memory
        check = given.check
        if check not in (None, False, True):
            raise InvalidArgumentError(f"check is {check!r}; expected True, False or None")
        self.check = bool(env.check() if check is None else check)
        if engine in ("cuda", "c10d"):
            self.refuse_check(engine)
        self.segments = make_segments(given.expert)
        self.grads = make_grads(given.grads, self.segments)
        timeout = env.timeout() if given.timeout is None else given.timeout
        self.timeout = None if timeout is None else as_seconds(timeout)
        self.num_sms = env.num_sms() if given.num_sms is None else as_int(given.num_sms, "num_sms")
        if self.num_sms is not None and not 1 <= self.num_sms <= 256:
            raise InvalidArgumentError(f"num_sms is {self.num_sms}; expected 1 to 256")
        tile = given.tile_bytes
        tile = env.tile_bytes() if tile is None else as_int(tile, "tile_bytes")
        self.given_tile_bytes = tile
        self.tile_bytes = HOST_TILE_BYTES if tile is None else tile
        if self.tile_bytes & (self.tile_bytes - 1) or not 1024 <= self.tile_bytes <= 1 << 24:
            raise InvalidArgumentError(
                f"tile_bytes is {self.tile_bytes}; expected a power of two from 1 KiB to 16 MiB"
            )

        self.record_folder = env.record_folder()
        calls = env.record_calls()
        self.record_calls = CAPACITY if calls is None else calls
        if not 1 <= self.record_calls <= MAX_CAPACITY:
            raise InvalidArgumentError(
                f"ULTRAEP_RECORD_CALLS is {calls}; expected 1 to {MAX_CAPACITY} calls"
            )

    def refuse_check(self, engine: str) -> None:
        """Raise UnsupportedError if check mode is on: this engine has none."""
        if self.check:
            raise UnsupportedError(
                "check=True, or ULTRAEP_CHECK=1, requires the host engine, but this group would use"
                f" engine={engine!r}; pass engine='host', or check=False"
            )

    def arguments(self, topology: Topology) -> dict[str, Any]:
        """Return everything that must be equal on all ranks, by name, as JSON can say it."""
        t = topology
        return {
            "num_experts": t.num_experts,
            "slots_per_rank": t.slots_per_rank,
            "home": t.home.tolist(),
            "domains": t.domain.tolist() if self.given_domains else None,
            "allow_cross_domain": t.allow_cross_domain,
            "list(expert)": list(self.segments),  # an object of JSON has no order
            "expert": {
                name: f"{s.shape} {s.dtype}, strides {s.layout}"
                for name, s in self.segments.items()
            },
            "grads": {name: str(s.dtype) for name, s in self.grads.items()},
            "banks": self.banks,
            "grad_banks": self.grad_banks,
            "instances": self.instances,
            "engine": self.engine,
            "fabric": self.fabric,
            "tile_bytes": self.tile_bytes,
            "check": self.check,
            "device": None if self.device is None else self.device.type,
        }

    def limits(self, call_timeout: float) -> tuple[float, float]:
        """Return the seconds of a wait until all ranks have called, and from then on; 0: none.

        ``call_timeout``: the first if ``timeout`` is None.
        """
        given = self.timeout
        return (call_timeout, WAIT_TIMEOUT) if given is None else (given, given)

    def config(
        self, topology: Topology, rank: int, call_timeout: float, cost: Sequence[int]
    ) -> _core.EngineConfig:
        """Return the engine's configuration, without addresses.

        ``call_timeout``: as for :meth:`limits`; ``cost``: the cost model's constants.
        """
        call_limit, wait_limit = self.limits(call_timeout)
        return _core.EngineConfig(
            rank=rank,
            num_experts=topology.num_experts,
            slots_per_rank=topology.slots_per_rank,
            home=topology.home.tolist(),
            domain=topology.domain.tolist(),
            allow_cross_domain=topology.allow_cross_domain,
            segment_bytes=[s.nbytes for s in self.segments.values()],
            grad_bytes=[s.nbytes for s in self.grads.values()],
            grad_type=[GRAD_TYPES[s.dtype] for s in self.grads.values()],
            num_banks=self.banks,
            num_grad_banks=self.grad_banks,
            instance_align=self.page_bytes if self.instances else 0,
            tile_bytes=self.tile_bytes,
            cost=cost,
            call_timeout=call_limit,
            wait_timeout=wait_limit,
        )
