"""Groups: ranks that replicate experts among each other, their slots, and their life."""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType

import numpy as np
import torch
import torch.distributed as dist

from ultraep_comm import _core, env
from ultraep_comm.errors import (
    BootstrapError,
    GroupClosedError,
    InvalidArgumentError,
    InvalidWeightsError,
    PlanMismatchError,
    UltraEPError,
    UnsupportedError,
)
from ultraep_comm.fabrics import Fabric
from ultraep_comm.fabrics.bootstrap import DEFAULT_TIMEOUT, Hello, Meeting
from ultraep_comm.fabrics.loopback import LoopbackFabric, LoopbackMemory
from ultraep_comm.fabrics.shm import ShmFabric, machine_id
from ultraep_comm.reports import error_from
from ultraep_comm.segments import BoundWeights, Segment, Weights, bind_weights, make_segments
from ultraep_comm.topology import IntsLike, Topology
from ultraep_comm.work import Work

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
        if self.timeout is not None and not 0 <= self.timeout < 1e9:
            raise InvalidArgumentError(f"timeout is {self.timeout}; expected seconds, 0: no limit")
        self.num_workers = env.num_sms() if num_sms is None else num_sms
        if self.num_workers is not None and not 1 <= self.num_workers <= 256:
            raise InvalidArgumentError(f"num_sms is {self.num_workers}; expected 1 to 256")
        tile = env.tile_bytes() if tile_bytes is None else tile_bytes
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


class Group:
    """One rank's part of a group. Made by :func:`new_group` or :func:`new_loopback_groups`.

    Attributes:
        rank: this rank in the group.
        topology: the group's constants.
        segments: the tensors of an expert, by name.
        slots: ``{name: [S, *shape]}``, views of this rank's slots, stable for the group's life.
    """

    def __init__(
        self,
        *,
        rank: int,
        topology: Topology,
        options: _Options,
        config: _core.EngineConfig,
        fabric: Fabric,
        meeting: Meeting | None,
    ) -> None:
        self.rank = rank
        self.topology = topology
        self.segments = options.segments
        self._names = tuple(self.segments)
        self._fabric = fabric
        self._meeting = meeting
        self._layout = _core.EngineLayout(config)
        self._region = fabric.allocate(self._layout.total_bytes)
        config.set_bases(self._region.bases)
        config.peer_sockets = fabric.peer_sockets
        self._engine = _core.Engine(config)
        self._regions: list[object] = []
        self._region_of: dict[int, int] = {}
        self._selections: dict[tuple[str, ...] | None, np.ndarray] = {}
        self._in_flight: deque[tuple[int, tuple[object, ...]]] = deque()
        self._state = "open"
        self.num_mains = self._layout.num_mains[rank]
        self.slots = self._views(
            self._region.local, self._layout.slot_offset, topology.slots_per_rank
        )

    def _views(
        self, storage: torch.Tensor, offsets: list[int], count: int
    ) -> dict[str, torch.Tensor]:
        views = {}
        for (name, segment), offset in zip(self.segments.items(), offsets, strict=True):
            views[name] = segment.view(storage.narrow(0, offset, count * segment.nbytes), count)
        return views

    @property
    def num_ranks(self) -> int:
        """Return G."""
        return self.topology.num_ranks

    @property
    def bytes_stored(self) -> int:
        """Return the bytes that this rank's engine has stored into slots since the group exists."""
        return self._engine.bytes_stored

    # ---- weights --------------------------------------------------------------------------

    def bind(self, weights: Weights | BoundWeights) -> BoundWeights:
        """Check main weights and take their addresses, once for repeated calls.

        Args:
            weights: ``{name: tensor [M, *shape] or sequence of M tensors}``; may leave segments
                out that later calls do not transfer.

        Raises:
            InvalidWeightsError: as the text says.
        """
        if isinstance(weights, BoundWeights):
            return weights
        pointers, names = bind_weights(weights, self.segments, self.num_mains, self.rank)
        return BoundWeights(
            pointers=pointers,
            names=names,
            region=self._find_region(weights, pointers, names),
            tensors=tuple(weights.values()),
        )

    def _find_region(self, weights: Weights, pointers: np.ndarray, names: frozenset[str]) -> int:
        """Return the region of ``empty_weights`` that these addresses fill exactly, else -1."""
        if not self._regions or not names:
            return -1
        if self.num_mains == 0:  # empty tensors have no address, but they know their storage
            found = {
                self._region_of.get(t.untyped_storage().data_ptr(), -1)
                if isinstance(t, torch.Tensor)
                else -1
                for t in weights.values()
            }
            return found.pop() if len(found) == 1 else -1
        first = next(i for i, name in enumerate(self._names) if name in names)
        offset = self._layout.region_offset[first]
        index = self._region_of.get(int(pointers[first, 0]) - offset, -1)
        if index < 0:
            return -1
        start = int(pointers[first, 0]) - offset
        for i, (name, segment) in enumerate(self.segments.items()):
            if name in names:
                at = start + self._layout.region_offset[i]
                steps = np.arange(self.num_mains, dtype=np.uint64) * np.uint64(segment.nbytes)
                if not np.array_equal(pointers[i], np.uint64(at) + steps):
                    return -1
        return index

    def empty_weights(self) -> dict[str, torch.Tensor]:
        """Allocate main weights that peers can address, as ``pull`` needs. Collective.

        Returns:
            ``{name: tensor [M, *shape]}``, zeroed.

        Raises:
            OutOfSharedMemoryError: there is not enough memory on some rank.
        """
        self._check_open("empty_weights")
        region = self._fabric.allocate(self._layout.region_bytes)
        index = self._engine.add_region(region.bases)
        self._regions.append(region)
        self._region_of[region.bases[self.rank]] = index
        return self._views(region.local, self._layout.region_offset, self.num_mains)

    def expert_pointers(self, weights: Weights | BoundWeights) -> dict[str, torch.Tensor]:
        """Return addresses for grouped GEMMs: ``{name: int64 [M + S]}``, mains first, then slots.

        Raises:
            InvalidWeightsError: as :meth:`bind`.
        """
        bound = self.bind(weights)
        result = {}
        for i, (name, segment) in enumerate(self.segments.items()):
            if name not in bound.names:
                continue
            base = self._region.bases[self.rank] + self._layout.slot_offset[i]
            slots = [base + s * segment.nbytes for s in range(self.topology.slots_per_rank)]
            result[name] = torch.tensor([*bound.pointers[i].tolist(), *slots], dtype=torch.int64)
        return result

    def _selection(self, segments: Sequence[str] | None) -> np.ndarray:
        """Return the indices of the segments to transfer, int32 ascending."""
        key = None if segments is None else tuple(segments)
        found = self._selections.get(key)
        if found is not None:
            return found
        names = self._names if key is None else key
        unknown = [name for name in names if name not in self.segments]
        if unknown or not names or len(set(names)) != len(names):
            raise InvalidArgumentError(
                f"rank {self.rank}: segments={key} is not a selection of {list(self._names)};"
                " expected known names, each once, at least one"
            )
        chosen = np.array(sorted(self._names.index(n) for n in names), np.int32)
        self._selections[key] = chosen
        return chosen

    def _require(self, bound: BoundWeights, selection: np.ndarray) -> None:
        if bound.pointers.shape != (len(self._names), self.num_mains):
            raise InvalidWeightsError(
                f"rank {self.rank}: the bound weights are of another group; bind them on this one"
            )
        missing = [self._names[i] for i in selection if self._names[i] not in bound.names]
        if missing:
            raise InvalidWeightsError(
                f"rank {self.rank}: weights lack segment {missing[0]!r}; expected"
                f" {[self._names[i] for i in selection]}, or choose with segments="
            )

    # ---- life -----------------------------------------------------------------------------

    def _check_open(self, operation: str) -> None:
        failed = self._engine.failed_epoch()
        if self._state == "open" and failed == 0:
            return
        reason = "is closed" if self._state == "closed" else f"failed in call {failed}"
        error = GroupClosedError(
            f"rank {self.rank}: {operation} on a group that {reason}; make a new group"
        )
        raise error from (self._failure(failed, "a call") if failed else None)

    def _submitted(self, epoch: int, keep: tuple[object, ...], operation: str, mode: str) -> Work:
        """Return the handle of a call; ``keep`` lives until it has finished, waited for or not."""
        while (
            self._in_flight
            and self._engine.failed_epoch() == 0
            and self._engine.is_completed(self._in_flight[0][0])
        ):
            self._in_flight.popleft()
        self._in_flight.append((epoch, keep))
        return Work(self, epoch, operation, mode)

    def _failure(self, epoch: int, operation: str) -> UltraEPError:
        failed = self._engine.failed_epoch()
        if failed != 0 and failed < epoch:
            return GroupClosedError(
                f"rank {self.rank}: {operation} (call {epoch} on this group) did not run, because"
                f" call {failed} failed; make a new group"
            )
        return error_from(self._engine.report(), self.rank, operation)

    @contextmanager
    def _rejecting(self) -> Iterator[None]:
        """Tell the peers when this rank's own input is bad, so that none waits for it."""
        try:
            yield
        except Exception:
            self._engine.reject()
            raise

    def abort(self) -> None:
        """Fail the calls that are under way, here and, through the peers' waits, everywhere.

        The group takes no more calls; close it.
        """
        if self._state != "closed":
            self._engine.abort()

    def close(self) -> None:
        """Finish submitted calls, say goodbye to the peers, and free threads and connections.

        Slot tensors stay valid as long as they are referenced. Closing twice is harmless.

        Raises:
            PlanMismatchError: a peer is seen to have made another last call than this rank.
        """
        if self._state == "closed":
            return
        self._state = "closed"
        peer = self._engine.close()
        self._in_flight.clear()
        self._fabric.close()
        if peer >= 0:
            raise PlanMismatchError(
                f"rank {self.rank}: rank {peer} made another call than this rank's last one, whose"
                " plan gave this rank nothing to wait for. Make the same calls on every rank",
                rank=self.rank,
                peer=peer,
                epoch=self._engine.epoch,
            )

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self.abort()
        self.close()

    def __repr__(self) -> str:
        t = self.topology
        return (
            f"Group(rank={self.rank}, num_ranks={t.num_ranks}, num_experts={t.num_experts},"
            f" slots_per_rank={t.slots_per_rank}, {self._state})"
        )


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
    except UltraEPError as bad_argument:
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
    except UltraEPError:
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
            options=options,
            config=config,
            fabric=fabric_here,
            meeting=meeting,
        )
    except UltraEPError:
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
                options=options,
                config=config,
                fabric=LoopbackFabric(memory, rank),
                meeting=None,
            )
        )
    return groups
