"""Making groups: arguments are checked, ranks agree, memory is shared."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist

from ultraep_comm import _core, env
from ultraep_comm.errors import BootstrapError, InvalidArgumentError, UnsupportedError
from ultraep_comm.fabrics.bootstrap import DEFAULT_TIMEOUT, Hello, Meeting
from ultraep_comm.fabrics.loopback import LoopbackFabric, LoopbackMemory
from ultraep_comm.fabrics.shm import ShmFabric, machine_id
from ultraep_comm.group import Group
from ultraep_comm.segments import Segment, make_segments
from ultraep_comm.topology import IntsLike, Topology, as_int

# The host engine's unit: a flag group is then one tile, and a copy is long enough to stream.
HOST_TILE_BYTES = 64 << 10
WAIT_TIMEOUT = 30.0
ExpertSpec = Mapping[str, Segment | tuple[Sequence[int], torch.dtype]]


def _default_cost(num_cores: int) -> tuple[int, int, int, int, int]:
    """Return the host engine's cost constants; see `CostModel` in src/core/cost.hpp.

    One core streams about 20 GB/s; reading costs half of storing; two cores together move about
    1.2 times what one does, because memory is shared.
    """
    return (40_000, 20_000, 300_000, 10_000_000, max(100, 60 * num_cores))


class _Options:
    """Checked arguments that all ways of making a group share."""

    def __init__(
        self,
        *,
        expert: ExpertSpec,
        engine: str,
        fabric: str,
        timeout: float | None,
        num_sms: int | None,
        tile_bytes: int | None,
    ) -> None:
        if engine not in ("auto", "host"):
            raise UnsupportedError(f"engine={engine!r} is not built; expected 'auto' or 'host'")
        if fabric not in ("auto", "shm", "loopback"):
            raise UnsupportedError(f"fabric={fabric!r} is not built; expected 'auto' or 'shm'")
        self.segments = make_segments(expert)
        self.timeout = env.timeout() if timeout is None else timeout
        if self.timeout is not None and not (
            isinstance(self.timeout, int | float) and 0 <= self.timeout < 1e9
        ):
            raise InvalidArgumentError(f"timeout is {timeout!r}; expected seconds, 0: no limit")
        self.num_workers = env.num_sms() if num_sms is None else as_int(num_sms, "num_sms")
        if self.num_workers is not None and not 1 <= self.num_workers <= 256:
            raise InvalidArgumentError(f"num_sms is {self.num_workers}; expected 1 to 256")
        tile = env.tile_bytes() if tile_bytes is None else as_int(tile_bytes, "tile_bytes")
        self.tile_bytes = HOST_TILE_BYTES if tile is None else tile
        if self.tile_bytes & (self.tile_bytes - 1) or not 1024 <= self.tile_bytes <= 1 << 24:
            raise InvalidArgumentError(
                f"tile_bytes is {self.tile_bytes}; expected a power of two from 1 KiB to 16 MiB"
            )

    def digest(self, topology: Topology, given_domains: bool) -> int:
        """Return 64 bits over what must be equal on all ranks."""
        t = topology
        segments = [(n, s.shape, str(s.dtype), s.layout) for n, s in self.segments.items()]
        text = repr(
            (
                t.num_ranks,
                t.num_experts,
                t.slots_per_rank,
                t.home.tolist(),
                t.domain.tolist() if given_domains else None,
                t.allow_cross_domain,
                segments,
                self.tile_bytes,
            )
        )
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")

    def config(self, topology: Topology, rank: int) -> _core.EngineConfig:
        """Return the engine's configuration, without addresses and timeouts."""
        config = _core.EngineConfig()
        config.rank = rank
        config.num_experts = topology.num_experts
        config.slots_per_rank = topology.slots_per_rank
        config.home = topology.home.tolist()
        config.domain = topology.domain.tolist()
        config.allow_cross_domain = topology.allow_cross_domain
        config.segment_bytes = [s.nbytes for s in self.segments.values()]
        config.tile_bytes = self.tile_bytes
        return config


def new_group(
    process_group: dist.ProcessGroup | None = None,
    *,
    num_experts: int,
    slots_per_rank: int,
    expert: ExpertSpec,
    home: IntsLike | None = None,
    domains: IntsLike | None = None,
    allow_cross_domain: bool = False,
    engine: str = "auto",
    fabric: str = "auto",
    timeout: float | None = None,
    num_sms: int | None = None,
    tile_bytes: int | None = None,
) -> Group:
    """Make a group over a process group. Collective; several may live at once.

    Args:
        process_group: None: WORLD. Any backend that moves byte tensors.
        num_experts: E.
        slots_per_rank: S, replicas that a rank can hold at a time.
        expert: ``{name: (shape, dtype) or Segment}``: the tensors of one expert.
        home: integers ``[E]``; None: contiguous, as even as possible.
        domains: integers ``[G]``; None: ranks with load/store access to each other.
        allow_cross_domain: replicas may lie outside their home's domain.
        engine: "auto" or "host".
        fabric: "auto" or "shm".
        timeout: seconds for every wait, 0: no limit. None: the process group's timeout until every
            rank of a plan has called, then 30 s.
        num_sms: workers per rank; None: the machine's cores, divided by its ranks.
        tile_bytes: unit of the transfer, a power of two.

    Raises:
        InvalidArgumentError: an argument is wrong on this rank.
        BootstrapError: ranks disagree, a rank left or cannot take part.
        OutOfSharedMemoryError: this rank's slots do not fit into memory.
        UnsupportedError: the engine or fabric is not built.
    """
    meeting = Meeting(process_group)
    error: Exception | None = None
    options = topology = None
    try:
        options = _Options(
            expert=expert,
            engine=engine,
            fabric=fabric,
            timeout=timeout,
            num_sms=num_sms,
            tile_bytes=tile_bytes,
        )
        if fabric == "loopback":
            raise UnsupportedError("fabric='loopback' is for one process: new_loopback_groups")
        topology = Topology.make(
            num_ranks=meeting.num_ranks,
            num_experts=num_experts,
            slots_per_rank=slots_per_rank,
            home=home,
            domains=domains,
            allow_cross_domain=allow_cross_domain,
        )
    except Exception as bad_argument:  # whatever it is, the peers must not wait for this rank
        error = bad_argument
    meeting.agree(error)
    assert options is not None
    assert topology is not None

    listener, token = ShmFabric.listen()
    num_cores = len(os.sched_getaffinity(0))
    hellos = meeting.exchange(
        Hello(
            digest=options.digest(topology, domains is not None),
            machine=machine_id(),
            token=token,
            pid=os.getpid(),
            cost=_default_cost(num_cores),
        )
    )
    try:
        topology = _place(topology, hellos, domains is not None)
    except BaseException:
        listener.close()
        raise
    fabric_here = None
    try:
        fabric_here = ShmFabric(meeting, listener, hellos)
    except BootstrapError as no_connection:
        error = no_connection
    meeting.agree(error)
    assert fabric_here is not None

    ranks_here = sum(h.machine == hellos[meeting.rank].machine for h in hellos)
    config = options.config(topology, meeting.rank)
    config.num_workers = options.num_workers or max(1, min(8, num_cores // ranks_here))
    config.set_cost(*hellos[0].cost)
    config.call_timeout = meeting.timeout if options.timeout is None else options.timeout
    config.wait_timeout = WAIT_TIMEOUT if options.timeout is None else options.timeout
    try:
        return Group(
            rank=meeting.rank,
            topology=topology,
            segments=options.segments,
            config=config,
            fabric=fabric_here,
            meeting=meeting,
        )
    except BaseException:
        fabric_here.close()
        raise


def _place(topology: Topology, hellos: list[Hello], given_domains: bool) -> Topology:
    """Check that ranks agree, and find the domains. The same result or error on every rank."""
    for rank, hello in enumerate(hellos):
        if hello.digest != hellos[0].digest:
            raise BootstrapError(
                f"rank {rank} called new_group with other arguments than rank 0: num_experts,"
                " slots_per_rank, home, domains, expert, tile_bytes and allow_cross_domain must be"
                " equal on every rank"
            )
    machines = {machine: i for i, machine in enumerate(dict.fromkeys(h.machine for h in hellos))}
    machine = np.array([machines[h.machine] for h in hellos], np.int32)
    if topology.allow_cross_domain and len(machines) > 1:
        raise UnsupportedError(
            f"allow_cross_domain=True over {len(machines)} machines: the host engine reaches one"
            " machine's memory only"
        )
    if not given_domains:
        return Topology.make(
            num_ranks=topology.num_ranks,
            num_experts=topology.num_experts,
            slots_per_rank=topology.slots_per_rank,
            home=topology.home,
            domains=machine,
            allow_cross_domain=topology.allow_cross_domain,
        )
    for domain in np.unique(topology.domain):
        if len(np.unique(machine[topology.domain == domain])) > 1:
            raise UnsupportedError(
                f"domain {domain} spans several machines; the host engine reaches one machine's"
                " memory only. Leave domains=None to have them found"
            )
    return topology


def new_loopback_groups(
    num_ranks: int,
    *,
    num_experts: int,
    slots_per_rank: int,
    expert: ExpertSpec,
    home: IntsLike | None = None,
    domains: IntsLike | None = None,
    allow_cross_domain: bool = False,
    timeout: float | None = None,
    num_sms: int | None = None,
    tile_bytes: int | None = None,
) -> list[Group]:
    """Make a group of several ranks inside this process: the same engine, ranks as threads.

    A collective waits for its peers, so either call it from one thread per rank, or with
    ``async_op=True`` on every rank before the first wait. Arguments are those of
    :func:`new_group`.

    Raises:
        InvalidArgumentError: an argument is wrong.
    """
    options = _Options(
        expert=expert,
        engine="host",
        fabric="loopback",
        timeout=timeout,
        num_sms=num_sms,
        tile_bytes=tile_bytes,
    )
    topology = Topology.make(
        num_ranks=num_ranks,
        num_experts=num_experts,
        slots_per_rank=slots_per_rank,
        home=home,
        domains=domains,
        allow_cross_domain=allow_cross_domain,
    )
    memory = LoopbackMemory(num_ranks)
    groups = []
    for rank in range(num_ranks):
        config = options.config(topology, rank)
        config.num_workers = options.num_workers or 1
        config.set_cost(*_default_cost(len(os.sched_getaffinity(0))))
        config.call_timeout = DEFAULT_TIMEOUT if options.timeout is None else options.timeout
        config.wait_timeout = WAIT_TIMEOUT if options.timeout is None else options.timeout
        groups.append(
            Group(
                rank=rank,
                topology=topology,
                segments=options.segments,
                config=config,
                fabric=LoopbackFabric(memory, rank),
                meeting=None,
            )
        )
    return groups
