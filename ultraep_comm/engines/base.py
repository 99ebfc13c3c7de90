"""Engine: what a group needs to run on, with the stages that need no peer, done on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from ultraep_comm import _core
from ultraep_comm.engines.options import Options
from ultraep_comm.engines.reports import bad_count_error, bad_id_error, raise_fault
from ultraep_comm.errors import (
    InvalidLoadError,
    InvalidPlanError,
    OutOfSharedMemoryError,
    PeerRejectedError,
    UnsupportedError,
)
from ultraep_comm.fabrics import Fabric, Place, SharedRegion
from ultraep_comm.fabrics.loopback import map_alias
from ultraep_comm.plan.plan import Plan
from ultraep_comm.plan.planner import Costs
from ultraep_comm.plan.topology import IntArray, Topology
from ultraep_comm.weights.binding import Binding, PutAddresses

Tensor = torch.Tensor
PlanArrays = tuple[IntArray, IntArray, IntArray, IntArray, IntArray]
Setup = tuple[Options, _core.EngineConfig, Fabric]  # of one rank of a group
Objective = tuple[int, Costs | None]  # the target in parts per million; costs instead of it
Movable = TypeVar("Movable", Tensor, Plan)
Form = Literal["topk_ids", "routing_map", "counts"]  # of a rank's routing, and how errors name it


class Engine:
    """One rank of one group: its memory, its calls, and the stages that need no peer.

    Calls are numbered by epochs from 1. What stands here without a body every engine has of its
    own; the rest is right for an engine that works on the CPU, and for tensors that are there. The
    CUDA engine launches kernels for tensors on the device; what is invalid there is raised by a
    later ``raise_fault``.

    Attributes:
        rank: this rank.
        topology: the group's constants.
        home: int32 ``[E]``, on the group's device; shared by all plans made there.
        domains: int32 ``[G]``, likewise.
        config: of the core's half; it says whether a plan fits the group.
        layout: of the symmetric memory.
        fabric: allocates the symmetric memory.
        memory: its regions; the first has slots, slot gradients and flags.
        raise_fault: raises, once, the error of an earlier launch that found its input invalid; with
            ``wait=True``, of the launches so far, those of graph replays included. None: all input
            is checked by the call that is given it.
        can_pull: whether all ranks of a domain can load from each other's memory.
        exchange_counts: all-gathers int32 ``[E]`` into ``[G, E]`` where the engine cannot.
        finished_at: returns when one of the last eight calls finished, in nanoseconds of the
            monotonic clock; 0: unknown. None: of none.
        slots_to_fill: returns bool ``[G, S]``, the slots that the last call writes to; of a
            reduction, reads. None: only the device knows.
        marks: int64, zeroed: one for each plan that graphs save.
        put_addresses: writes tables on the device; None: the engine reads addresses on the CPU.
        wait_blocks: :meth:`wait` blocks the host until the call has finished.
    """

    _native: _core.Engine | _core.CudaEngine | _core.C10dLedger  # its half in C++
    config: _core.EngineConfig
    layout: _core.EngineLayout
    fabric: Fabric
    memory: list[SharedRegion]
    raise_fault: Callable[..., None] | None = None
    can_pull: bool = True
    exchange_counts: Callable[[Tensor], Tensor] | None = None
    finished_at: Callable[[int], int] | None = None
    slots_to_fill: Callable[[], NDArray[np.bool_]] | None = None
    marks = torch.empty(0, dtype=torch.int64, device="cpu")  # nothing is captured
    put_addresses: PutAddresses | None = None
    wait_blocks = True

    def __init__(self, topology: Topology, rank: int, setup: Setup | None = None) -> None:
        """Allocate the memory of ``setup``; None: for stages alone, which need none."""
        self.rank = rank
        self.topology = topology
        self.home = torch.tensor(topology.home, device="cpu")
        self.domains = torch.tensor(topology.domain, device="cpu")
        if setup is not None:
            self._allocate(*setup)

    def _allocate(self, options: Options, config: _core.EngineConfig, fabric: Fabric) -> None:
        layout = _core.EngineLayout(config)
        try:
            region = fabric.allocate(layout.total_bytes)
        except OutOfSharedMemoryError as error:
            if options.banks > 1 and error.args:
                slots = options.banks * self.topology.slots_per_rank
                taken = slots * sum(segment.nbytes for segment in options.segments.values())
                text = f"; {options.banks} banks of {self.topology.slots_per_rank} slots take"
                text = f"{error.args[0]}{text} {taken} bytes of them: see group_memory()"
                error.args = (text, *error.args[1:])
            raise
        checked = [fabric.allocate(layout.check_bytes)] if options.check else []
        config.set_memory(region.bases, checked[0].bases if checked else [])
        self.config, self.layout, self.fabric = config, layout, fabric
        self.memory = [region, *checked]

    # ---- calls ----------------------------------------------------------------------------

    def add_region(self, bases: list[int], offset: list[int]) -> int:
        """Register main weights that peers can address; return the region's index.

        On every rank the first local expert of each segment is ``offset`` bytes, ``[segments]``,
        behind the rank's address in ``bases``, ``[G]``.
        """
        raise NotImplementedError

    def share_slots(
        self, allocate: Callable[[int], SharedRegion], num_bytes: int, places: Sequence[Place]
    ) -> SharedRegion:
        """Return new memory in which slots appear once more, at some places.

        ``allocate`` makes a region of so many bytes, where the slots are host memory. The result
        has no ``bases`` if peers cannot address it.

        Raises:
            UnsupportedError: the slots' memory can be mapped only once.
            OutOfSharedMemoryError: there is not enough memory.
        """
        return map_alias(allocate(num_bytes), places)

    def transfer(self, call: _core.TransferCall, bound: Binding) -> tuple[int, _core.Mode | None]:
        """Submit a transfer or reduction; return its epoch and mode (None: the device chooses).

        ``bound``: what it moves; most engines read the addresses in ``call``.
        """
        raise NotImplementedError

    def gather(
        self, counted: Tensor, load: Tensor, objective: Objective | None = None
    ) -> tuple[int, Plan | None]:
        """Exchange the result of :meth:`count` into ``load [G, E]``.

        ``objective``, that of :meth:`plan`: if one launch can do both, plan too.

        Returns:
            The epoch, and the plan; None: it has yet to be made.
        """
        raise NotImplementedError

    def residents(self, bank: int) -> IntArray:
        """Return int32 ``[G, S]``, what the slots of a bank hold after all submitted calls.

        The CUDA engine waits for these, unless the host knows all their plans.
        """
        raise NotImplementedError

    def version(self, bank: int) -> int:
        """Return the version of the weights of a bank's residents."""
        raise NotImplementedError

    def invalidate(self, bank: int) -> int:
        """Let a bank hold nothing, of the next version; return 0.

        The CUDA engine does so on the current stream, after the calls so far. The others do nothing
        while a call that fills the bank has not finished, and return that call.
        """
        raise NotImplementedError

    def wait(self, epoch: int, slots: list[int] | None = None) -> bool:
        """Order the caller's next work after a call; False if the call has failed.

        The host engine blocks; the CUDA engine makes the current stream wait. With ``slots``, of
        this rank: at least after what the call brings to these.
        """
        raise NotImplementedError

    def ready(self, bank: int) -> Tensor:
        """Return int64 ``[S]`` on the device: by which call each of this rank's slots was complete.

        Raises:
            UnsupportedError: there is no device.
        """
        raise UnsupportedError(
            "the words that kernels wait for are of the CUDA engine; use work.wait(slots=) or"
            " work.slot_ready() on this engine"
        )

    def synchronize(self, epoch: int) -> bool:
        """Block until a call has finished; False if it has failed."""
        raise NotImplementedError

    def is_completed(self, epoch: int, slot: int | None = None) -> bool:
        """Return whether a call has finished or failed.

        With ``slot``, of this rank: whether what the call brings to it is there. The CUDA engine
        does not tell before the whole call has finished.
        """
        raise NotImplementedError

    def failed_epoch(self) -> int:
        """Return the first call that is known to have failed; 0: none."""
        raise NotImplementedError

    def report(self) -> _core.Report:
        """Return how the first failed call failed, and what is known of the ranks."""
        raise NotImplementedError

    def reject(self) -> None:
        """Take an epoch and tell the peers that this rank rejected its input."""
        raise NotImplementedError

    def abort(self) -> None:
        """Fail the calls in progress, on this rank and its peers."""
        raise NotImplementedError

    def close(self) -> int:
        """Publish the close; return a rank known to have made another last call, else -1."""
        raise NotImplementedError

    @property
    def epoch(self) -> int:
        """Return the number of submitted calls."""
        return self._native.epoch

    def health(self, *, waits: bool) -> _core.EngineHealth:
        """Return what the engine has done so far, as far as that needs no copy from a device.

        ``waits``: with its waits, which takes a lock, and there are none in kernels.
        """
        raise NotImplementedError

    # ---- devices --------------------------------------------------------------------------

    def is_on_device(self, value: object) -> bool:
        """Return whether a tensor, or a plan, is on the group's device, and that is no CPU."""
        return False

    def is_capturing(self) -> bool:
        """Return whether the current stream is being captured into a graph."""
        return False

    def to_host(self, value: Movable, name: str) -> Movable:
        """Return a tensor or a plan on the CPU; may synchronise. Plans elsewhere stay there.

        Raises:
            UnsupportedError: it is on the device, and the current stream is being captured.
        """
        return value.cpu() if isinstance(value, Tensor) else value

    def empty(self, shape: Sequence[int], *, of_graph: bool = False) -> Tensor:
        """Return an uninitialised int32 tensor on the group's device.

        ``of_graph``: in a capture, of the graph's memory.

        Raises:
            UnsupportedError: of_graph, and another library than torch captures the current stream.
        """
        return torch.empty(tuple(shape), dtype=torch.int32, device="cpu")

    def plan_for_call(
        self, plan: Plan, operation: str, *, in_bank: bool = False
    ) -> tuple[Plan, bool]:
        """Return a plan where the engine reads it, and whether that is on the device.

        ``in_bank``: it is valid, and for a bank that is reused.

        Raises:
            UnsupportedError: it has to be copied, and the current stream is being captured; or the
                group has too many segments for banks.
        """
        return plan, False

    # ---- stages ---------------------------------------------------------------------------

    def count(self, routing: Tensor, form: Form, *, for_gather: bool = False) -> Tensor:
        """Return this rank's tokens per expert, int32 ``[E]``, on the device of the routing.

        Bad values on the device give a negative count, for the next stage to find. ``for_gather``:
        as :meth:`gather` takes them, or contiguous ids ``[T, k]`` for it to count.

        Raises:
            InvalidLoadError: an id or a count on the CPU is out of range.
            UnsupportedError: for_gather, on the CPU, and the current stream is being captured.
        """
        given = self.to_host(routing, form) if self.is_on_device(routing) else routing
        if form == "counts":
            if bad := _first_bad(given):
                raise bad_count_error(self.rank, bad[0], int(given[bad]))
            return given.int().contiguous()
        if form == "routing_map":  # bool sums are slow in torch
            bytes_of = given.contiguous().view(torch.uint8).numpy()
            return torch.from_numpy(np.add.reduce(bytes_of, axis=0, dtype=np.int32))
        return self._count_ids(given)

    def _count_ids(self, topk_ids: Tensor) -> Tensor:
        counts = torch.empty(self.topology.num_experts, dtype=torch.int32, device="cpu")
        ids = topk_ids.contiguous()
        bad = _core.count_experts(
            ids.data_ptr(), ids.numel(), ids.dtype == torch.int64, counts.numel(), counts.data_ptr()
        )
        if bad >= 0:
            raise bad_id_error(self.rank, bad, int(topk_ids.reshape(-1)[bad]), counts.numel())
        return counts

    def plan(
        self,
        load: Tensor,
        target_ppm: int,
        costs: Costs | None,
        *,
        apart: bool = False,
        bank: int | None = None,
    ) -> Plan:
        """Plan a load ``[G, E]`` or ``[E]``.

        With ``bank`` on top of what its slots hold, and without costs. With ``apart``, no two of
        the plan's tensors share memory.

        Raises:
            InvalidLoadError: an expert has 2**31 or more tokens, or all have 2**40 or more.
            UnsupportedError: the load is on the device, and the group is too large to plan there.
        """
        if self.is_on_device(load):
            load = self.to_host(load, "the load")
        held = None if bank is None else self.residents(bank)
        return plan_on_cpu(self.topology, load, target_ppm, costs, residents=held)

    def reroute(self, topk_ids: Tensor, plan: Plan, source: int | None = None) -> Tensor:
        """Return physical ids, on the device of the ids; see ``uec.reroute``.

        The plan must have load and quotas. ``source``: whose tokens they are; None: this rank's.
        """
        ids = self.to_host(topk_ids, "topk_ids").contiguous().numpy()
        out = np.empty_like(ids)
        status = _core.reroute(ids, *_arrays(plan), self.rank if source is None else source, out)
        raise_fault(status, "topk_ids", self.rank, self.topology.num_experts)
        return torch.from_numpy(out).to(topk_ids.device)

    def reroute_map(
        self, routing_map: Tensor, probs: Tensor | None, plan: Plan, source: int
    ) -> tuple[Tensor, Tensor | None]:
        """Return the physical map and probabilities; see ``uec.reroute_map``."""
        before, after = self._find_moves(routing_map, plan, source)
        shape = (routing_map.shape[0], self.topology.num_ranks * self.topology.instances_per_rank)
        physical_map = routing_map.new_zeros(shape)
        physical_map.view(-1).index_fill_(0, after, True)
        if probs is None:
            return physical_map, None
        # index_copy is differentiable like scatter, and seven times as fast for bfloat16. torch
        # lacks it for 8-bit floats, whose bits are copied instead.
        values = probs.view(torch.uint8) if probs.element_size() == 1 else probs
        moved = values.reshape(-1).index_select(0, before)
        physical = values.new_zeros(shape[0] * shape[1]).index_copy_(0, after, moved).view(shape)
        return physical_map, physical if values is probs else physical.view(probs.dtype)

    def reroute_gradient(
        self, grad: Tensor, routing_map: Tensor, plan: Plan, source: int
    ) -> Tensor:
        """Return the probabilities' gradient ``[T, E]`` from that of the rerouted ones."""
        before, after = self._find_moves(routing_map, plan, source)
        moved = grad.reshape(-1).index_select(0, after)
        found = grad.new_zeros(routing_map.numel()).index_copy_(0, before, moved)
        return found.view(routing_map.shape)

    def _find_moves(self, routing_map: Tensor, plan: Plan, source: int) -> Tensor:
        """Return flat positions of routed entries before and after: ``[2, N]``, beside the map."""
        given = self.to_host(routing_map, "routing_map").contiguous().numpy()
        status, moves = _core.reroute_map(given.view(np.uint8), *_arrays(plan), source)
        raise_fault(status, "routing_map", self.rank, self.topology.num_experts)
        return torch.from_numpy(moves).to(routing_map.device)

    def instance_offsets(self, home_quota: Tensor, slot_quota: Tensor, pad_to: int) -> Tensor:
        """Return int32 ``[M + S]``: the ends of the rows of this rank's instances.

        Ends on the device are at most ``pad_to``, and ``raise_fault`` raises what went beyond.

        Raises:
            InvalidPlanError: the last end is above ``pad_to``.
        """
        local_experts = torch.from_numpy(self.topology.local_experts(self.rank))
        ends = find_ends(home_quota, local_experts, slot_quota[self.rank])
        num_rows = int(ends[-1]) if len(ends) else 0
        if num_rows > pad_to:
            raise too_many_rows(self.rank, num_rows, f"; pad_to is {pad_to}")
        return ends.int()

    # ---- saved plans ----------------------------------------------------------------------

    def save(
        self, fields: Iterable[tuple[Tensor, Tensor]], in_use: Tensor | None, mark: int, tag: int
    ) -> None:
        """Copy a plan's tensors, given as pairs (destination, source).

        ``in_use``, one of ``marks``, is that of a captured save; see ``PlanStore``.
        """
        for to, source in fields:
            to.copy_(source)


def plan_on_cpu(
    topology: Topology,
    load: Tensor,
    target_ppm: int,
    costs: Costs | None,
    *,
    residents: IntArray | None = None,
) -> Plan:
    """Plan a load ``[G, E]`` or ``[E]`` on the CPU; see :meth:`Engine.plan`.

    ``residents``: int32 ``[G, S]``, what slots hold already, without costs.
    """
    t = topology
    by_source = load.dim() == 2
    tokens = load.sum(dim=0, dtype=torch.int64) if by_source else load.long()
    total = tokens.contiguous().numpy()
    slots_to_fill = None
    try:
        if residents is None:
            slot_expert, slot_quota, home_quota = _core.plan_replicas(
                *(total, t.home, t.domain, t.slots_per_rank),
                *(t.allow_cross_domain, target_ppm, costs),
            )
        else:
            slot_expert, slot_quota, home_quota = _core.plan_with_residents(
                total, t.home, t.domain, residents, t.allow_cross_domain, target_ppm
            )
            slots_to_fill = torch.from_numpy((slot_expert >= 0) & (slot_expert != residents))
    except ValueError as error:
        raise InvalidLoadError(str(error)) from None
    return Plan(
        slot_expert=torch.from_numpy(slot_expert),
        home=torch.tensor(t.home, device="cpu"),
        slot_quota=torch.from_numpy(slot_quota),
        home_quota=torch.from_numpy(home_quota),
        load=load.to(torch.int32, copy=True).contiguous() if by_source else None,
        domains=torch.tensor(t.domain, device="cpu"),
        slots_to_fill=slots_to_fill,
    )


def find_ends(home_quota: Tensor, local_experts: Tensor, slot_quota: Tensor) -> Tensor:
    """Return int64 ``[M + S]``, running sums of the quotas of local experts, then slots."""
    return torch.cat([home_quota.index_select(0, local_experts), slot_quota]).cumsum(0)


def too_many_rows(rank: int, num_rows: int, limit: str) -> InvalidPlanError:
    """Return the error of a plan that exceeds the buffer of `Group.instance_offsets`."""
    return InvalidPlanError(
        f"rank {rank}: the plan gives this rank {num_rows} tokens{limit}. Make plans with"
        " target=1.0 and as many slots as slots_for_exact() says, or pass a larger pad_to"
    )


def _arrays(plan: Plan) -> PlanArrays:
    """Return load, slot_expert, slot_quota, home_quota and home.

    As NumPy arrays, since the bindings take 4 us to accept a tensor, and far less for an array.
    """
    assert plan.load is not None
    assert plan.slot_quota is not None
    assert plan.home_quota is not None
    return (
        plan.load.numpy(),
        plan.slot_expert.numpy(),
        plan.slot_quota.numpy(),
        plan.home_quota.numpy(),
        plan.home.numpy(),
    )


def check_load_values(load: Tensor) -> None:
    """Raise InvalidLoadError for values of a load on the CPU that no plan can have."""
    if bad := _first_bad(load):
        raise InvalidLoadError(
            f"load{list(bad)} is {int(load[bad])}; expected at least 0, below 2**31"
        )


def _first_bad(counts: Tensor) -> tuple[int, ...]:
    """Return the index of the first number that is no int32 of at least 0; empty: there is none."""
    if counts.numel() == 0:
        return ()
    low, high = (int(bound) for bound in counts.aminmax())
    if low >= 0 and high < 2**31:
        return ()
    wide = counts.long()  # 2**31 is no int32
    return tuple(((wide < 0) | (wide >= 2**31)).nonzero()[0].tolist())


def count_in_torch(routing: Tensor, num_experts: int) -> Tensor:
    """Count ids, int ``[T, k]``, or a bool map ``[T, E]``, by operations of torch: int32 ``[E]``.

    No host waits for a device, so an id out of range gives counts of -1.
    """
    if routing.dtype == torch.bool:
        return routing.sum(0, dtype=torch.int32)
    flat = routing.reshape(-1).long()
    bad = (flat < -1) | (flat >= num_experts)
    to = torch.where(bad | (flat < 0), num_experts, flat)
    ones = torch.ones_like(to, dtype=torch.int32)
    counts = torch.zeros(num_experts + 1, dtype=torch.int32, device=routing.device)
    counts = counts.scatter_add(0, to, ones)[:num_experts]
    return torch.where(bad.any(), torch.full_like(counts, -1), counts)


REJECTED_ROW = -1  # fills the row of a rank that rejected its ids


def check_rows(table: Tensor, rank: int, epoch: int) -> None:
    """Raise PeerRejectedError if a rank rejected its ids."""
    rejected = torch.nonzero(table[:, 0] == REJECTED_ROW).flatten().tolist()
    if rejected:
        peer = rejected[0]
        raise PeerRejectedError(
            f"rank {rank}: gather_load ended because rank {peer} rejected its own input; its error"
            " says why. Close the group and create a new one",
            rank=rank,
            peer=peer,
            root=peer,
            epoch=epoch,
        )
