"""The host engine: threads that copy in shared memory, and the local stages on the CPU."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np
import torch

from ultraep_comm import _core
from ultraep_comm.engines.base import (
    Counted,
    Form,
    LocalStages,
    Parts,
    make_parts,
)
from ultraep_comm.engines.options import Options
from ultraep_comm.engines.reports import bad_count_error, bad_id_error, raise_fault
from ultraep_comm.errors import (
    BootstrapError,
    InvalidLoadError,
    InvalidPlanError,
    UnsupportedError,
    name_ranks,
)
from ultraep_comm.fabrics import Fabric, Place, SharedRegion
from ultraep_comm.fabrics.loopback import LoopbackFabric, LoopbackMemory, show_again
from ultraep_comm.fabrics.rendezvous import DEFAULT_TIMEOUT, Rendezvous
from ultraep_comm.fabrics.shm import ShmFabric, machine_id, say_unknown
from ultraep_comm.fabrics.sockets import Address, Listener
from ultraep_comm.plan.plan import Plan
from ultraep_comm.plan.planner import Costs
from ultraep_comm.plan.topology import IntArray, Topology
from ultraep_comm.weights.binding import PutAddresses

Tensor = torch.Tensor
PlanArrays = tuple[IntArray, IntArray, IntArray, IntArray, IntArray]


class HostEngine(_core.Engine):
    """One rank of the host engine: the core's engine, with the protocol's tensor arguments."""

    plans_at_once = False

    def ready(self, bank: int) -> Tensor:
        """Raise UnsupportedError: there is no device."""
        raise UnsupportedError(
            "the words that kernels wait for are of the CUDA engine; use work.wait(slots=) or"
            " work.slot_ready() on the host engine"
        )

    def bank_table(self, bank: int) -> int:
        """Return 0: there is no device."""
        return 0

    def share_slots(
        self, allocate: Callable[[int], SharedRegion], num_bytes: int, places: Sequence[Place]
    ) -> SharedRegion:
        """Return new memory in which slots appear once more."""
        return show_again(allocate(num_bytes), places)

    def reader(self, bank: int) -> int:
        """Return the call that fills a bank, if it has not finished, else 0."""
        last = self.last_call(bank)
        return 0 if self.is_completed(last) else last

    def gather(self, counted: Counted, load: Tensor) -> int:
        """Exchange counts ``[E]`` into ``load [G, E]``; return the call's epoch."""
        return self.exchange(counted.values.data_ptr(), load.data_ptr())

    def gather_and_plan(
        self, counted: Counted, load: Tensor, target_ppm: int, costs: Costs | None
    ) -> tuple[int, Plan, tuple[Tensor, ...]]:
        """Raise UnsupportedError: ``plans_at_once`` is False."""
        raise UnsupportedError("the host engine gathers and plans in two calls")

    def bad_id(self) -> None:
        """Return None: ids and plans are checked before they reach the engine."""


def check_load_values(load: Tensor) -> None:
    """Raise InvalidLoadError for values of a load on the CPU that no plan can have."""
    if load.numel() == 0:
        return
    low, high = (int(bound) for bound in load.aminmax())
    if low < 0 or high >= 2**31:
        wide = load.long()  # 2**31 is no int32
        at = tuple(((wide < 0) | (wide >= 2**31)).nonzero()[0].tolist())
        raise InvalidLoadError(
            f"load{list(at)} is {int(load[at])}; expected at least 0, below 2**31"
        )


class HostStages:
    """Count, plan and reroute on the CPU; see :class:`LocalStages`."""

    marks = torch.empty(0, dtype=torch.int64, device="cpu")  # nothing is captured
    put_addresses: PutAddresses | None = None

    def __init__(self, topology: Topology, rank: int) -> None:
        self._topology = topology
        self._rank = rank
        self.home = torch.tensor(topology.home, device="cpu")
        self.domains = torch.tensor(topology.domain, device="cpu")
        self._maps = self.home, self.domains  # there, also where a device has its own

    # ---- placement ------------------------------------------------------------------------

    def holds(self, value: object) -> bool:
        """Return False: there is no device."""
        return False

    def is_capturing(self) -> bool:
        """Return False."""
        return False

    def raise_fault(self) -> None:
        """Do nothing: errors are raised where they are found."""

    def on_host(self, tensor: Tensor, name: str) -> Tensor:
        """Return a tensor on the CPU."""
        return tensor.cpu()

    def plan_on_host(self, plan: Plan) -> Plan:
        """Return the plan as it is; checks reject a plan on a device."""
        return plan

    def plan_for_call(self, plan: Plan, operation: str) -> tuple[Plan, bool]:
        """Return the plan as it is, and False."""
        return plan, False

    def plan_for_bank(self, plan: Plan) -> tuple[Plan, bool]:
        """Return the plan as it is, and False."""
        return plan, False

    def put(self, tensor: Tensor) -> Tensor:
        """Return a copy."""
        return tensor.clone()

    def beside(self, result: Tensor, given: Tensor) -> Tensor:
        """Return the result."""
        return result

    # ---- stages ---------------------------------------------------------------------------

    def counts_of(self, routing: Tensor, form: Form) -> Tensor:
        """Return this rank's tokens per expert, int32 ``[E]`` on the CPU."""
        given = self.on_host(routing, form) if self.holds(routing) else routing
        if form == "counts":
            return self._check_counts(given)
        if form == "routing_map":  # bool sums are slow in torch
            bytes_of = given.contiguous().view(torch.uint8).numpy()
            return torch.from_numpy(np.add.reduce(bytes_of, axis=0, dtype=np.int32))
        return self._count_ids(given)

    def _check_counts(self, counts: Tensor) -> Tensor:
        if len(counts):
            low, high = (int(bound) for bound in counts.aminmax())
            if low < 0 or high >= 2**31:
                expert = int(((counts < 0) | (counts.long() >= 2**31)).nonzero()[0])
                raise bad_count_error(self._rank, expert, int(counts[expert]))
        return counts.int().contiguous()

    def _count_ids(self, topk_ids: Tensor) -> Tensor:
        counts = torch.empty(self._topology.num_experts, dtype=torch.int32, device="cpu")
        ids = topk_ids.contiguous()
        bad = _core.count_experts(
            ids.data_ptr(), ids.numel(), ids.dtype == torch.int64, counts.numel(), counts.data_ptr()
        )
        if bad >= 0:
            raise bad_id_error(self._rank, bad, int(topk_ids.reshape(-1)[bad]), counts.numel())
        return counts

    def count(self, routing: Tensor, form: Form) -> Counted:
        """Return the counts: the engine exchanges them."""
        return Counted(self.counts_of(routing, form))

    def empty_load(self) -> Tensor:
        """Return uninitialised int32 ``[G, E]``."""
        shape = (self._topology.num_ranks, self._topology.num_experts)
        return torch.empty(shape, dtype=torch.int32, device="cpu")

    def plan(
        self,
        load: Tensor,
        target_ppm: int,
        costs: Costs | None,
        *,
        apart: bool = False,
        residents: IntArray | None = None,
        bank_table: int = 0,  # of a device
    ) -> Plan:
        """Plan a load ``[G, E]`` or ``[E]`` on the CPU.

        Raises:
            InvalidLoadError: an expert has 2**31 or more tokens, or all have 2**40 or more.
        """
        t = self._topology
        by_source = load.dim() == 2
        tokens = load.sum(dim=0, dtype=torch.int64) if by_source else load.long()
        total = tokens.contiguous().numpy()
        home, domains = (each.clone() for each in self._maps)
        moves = None
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
                moves = torch.from_numpy((slot_expert >= 0) & (slot_expert != residents))
        except ValueError as error:
            raise InvalidLoadError(str(error)) from None
        return Plan(
            slot_expert=torch.from_numpy(slot_expert),
            home=home,
            slot_quota=torch.from_numpy(slot_quota),
            home_quota=torch.from_numpy(home_quota),
            load=load.to(torch.int32, copy=True).contiguous() if by_source else None,
            domains=domains,
            moves=moves,
        )

    def reroute(self, topk_ids: Tensor, plan: Plan, source: int | None = None) -> Tensor:
        """Return physical ids of ids on the CPU."""
        ids = topk_ids.contiguous().numpy()
        out = np.empty_like(ids)
        status = _core.reroute(ids, *_arrays(plan), self._rank if source is None else source, out)
        raise_fault(status, "topk_ids", self._rank, self._topology.num_experts)
        return torch.from_numpy(out)

    def reroute_map(
        self, routing_map: Tensor, probs: Tensor | None, plan: Plan, source: int
    ) -> tuple[Tensor, Tensor | None]:
        """Return the physical map and probabilities; gradients flow through these."""
        before, after = self._find_moves(routing_map, plan, source)
        shape = (routing_map.shape[0], self._topology.num_ranks * self._topology.instances_per_rank)
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
        given = self.on_host(routing_map, "routing_map").contiguous().numpy()
        status, moves = _core.reroute_map(given.view(np.uint8), *_arrays(plan), source)
        raise_fault(status, "routing_map", self._rank, self._topology.num_experts)
        return torch.from_numpy(moves).to(routing_map.device)

    def instance_offsets(self, home_quota: Tensor, slot_quota: Tensor, pad_to: int) -> Tensor:
        """Return the ends of the rows of this rank's instances."""
        mains = torch.from_numpy(self._topology.mains(self._rank))
        ends = find_ends(home_quota, mains, slot_quota[self._rank])
        num_rows = int(ends[-1]) if len(ends) else 0
        if num_rows > pad_to:
            raise too_many_rows(self._rank, num_rows, f"; pad_to is {pad_to}")
        return ends.int()

    # ---- saved plans ----------------------------------------------------------------------

    def allocate(self, num_bytes: int) -> Tensor:
        """Return uninitialised memory, uint8."""
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")

    def save(
        self, fields: Iterable[tuple[Tensor, Tensor]], in_use: Tensor | None, mark: int, tag: int
    ) -> None:
        """Copy a plan's tensors, given as pairs (destination, source)."""
        for to, source in fields:
            to.copy_(source)

    def finish_replays(self) -> None:
        """Do nothing: there are no replays."""


def find_ends(home_quota: Tensor, mains: Tensor, slot_quota: Tensor) -> Tensor:
    """Return int64 ``[M + S]``, running sums of the quotas of mains, then slots."""
    return torch.cat([home_quota.index_select(0, mains), slot_quota]).cumsum(0)


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


def cost_constants(num_cores: int) -> tuple[int, int, int, int, int]:
    """Return the cost model's constants; see `CostModel` in src/core/schedule/cost.hpp.

    One core streams about 20 GB/s; a load costs half a store; two cores together move about 1.2
    times what one does, because they share the memory's bandwidth.
    """
    return (40_000, 20_000, 300_000, 10_000_000, max(100, 60 * num_cores))


def make_shm_parts(
    rendezvous: Rendezvous, options: Options, topology: Topology, given_domains: bool
) -> Parts:
    """Create one rank's parts. Collective; arguments have been checked on every rank.

    Raises:
        BootstrapError: a rank left or cannot take part.
        OutOfSharedMemoryError: this rank's slots do not fit in memory.
        UnsupportedError: the ranks are on several machines.
    """
    num_cores = len(os.sched_getaffinity(0))
    rank, num_ranks = rendezvous.rank, rendezvous.num_ranks
    cost = options.calibration.constants("host", num_ranks, cost_constants(num_cores))
    with contextlib.closing(Listener(rank)) as listener:
        records = rendezvous.exchange(
            {"machine": machine_id(), "address": listener.address, "cost": cost}
        )
        topology = place(topology, [record["machine"] for record in records], given_domains)
        addresses = [Address(*record["address"]) for record in records]
        fabric = ShmFabric(rendezvous, listener, addresses)
    with contextlib.ExitStack() as undo:
        undo.callback(fabric.close)
        config = options.config(topology, rank, rendezvous.timeout, records[0]["cost"])
        config.set_peers(fabric.peer_sockets, fabric.peer_processes)
        config.num_workers = options.num_sms or max(1, min(8, num_cores // num_ranks))
        parts = _make_parts(rank, topology, options, config, fabric)
        undo.callback(parts.engine.close)
        undo.callback(parts.engine.abort)
        rendezvous.raise_if_any_failed()
        undo.pop_all()
    return parts


def _make_parts(
    rank: int,
    topology: Topology,
    options: Options,
    config: _core.EngineConfig,
    fabric: Fabric,
) -> Parts:
    return make_parts(
        rank,
        topology,
        options,
        config,
        fabric,
        partial(HostStages, topology, rank),
        partial(_start_engine, rank),
    )


def _start_engine(rank: int, config: _core.EngineConfig, _local: LocalStages) -> HostEngine:
    try:
        return HostEngine(config)
    except RuntimeError as error:
        raise BootstrapError(
            f"rank {rank}: {config.num_workers} threads could not be started ({error}); raise the"
            " limit of processes with ulimit -u, or create the group with a smaller num_sms",
            failed_rank=rank,
        ) from error


def place(topology: Topology, machines: list[str], given_domains: bool) -> Topology:
    """Check that the ranks share memory, and set the domains: alike on every rank."""
    if unknown := say_unknown(machines):
        raise UnsupportedError(
            f"{unknown}, by which the host engine finds the ranks that share memory. Use"
            " engine='c10d'"
        )
    apart = [rank for rank, machine in enumerate(machines) if machine != machines[0]]
    if apart:
        raise UnsupportedError(
            f"the host engine reaches only the memory of one machine, but rank 0 and"
            f" {name_ranks(apart)} of {len(machines)} are on different ones. Use engine='c10d'"
        )
    return topology if given_domains else topology.with_domains(np.zeros(len(machines), np.int32))


def make_loopback_parts(options: Options, topology: Topology) -> list[Parts]:
    """Create the parts of all ranks in this process."""
    memory = LoopbackMemory(topology.num_ranks)
    built_in = cost_constants(len(os.sched_getaffinity(0)))
    cost = options.calibration.constants("host", topology.num_ranks, built_in)
    made = []
    for rank in range(topology.num_ranks):
        config = options.config(topology, rank, DEFAULT_TIMEOUT, cost)
        config.num_workers = options.num_sms or 1
        made.append(_make_parts(rank, topology, options, config, LoopbackFabric(memory, rank)))
    return made
