"""What a group needs from an engine, and the parts of one rank that an engine's module creates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from ultraep_comm import _core
from ultraep_comm.engines.options import Options
from ultraep_comm.errors import (
    OutOfSharedMemoryError,
    PeerRejectedError,
    Words,
)
from ultraep_comm.fabrics import Fabric, Place, SharedRegion
from ultraep_comm.plan.plan import Plan
from ultraep_comm.plan.planner import Costs
from ultraep_comm.plan.topology import IntArray, Topology
from ultraep_comm.weights.binding import Binding, PutAddresses
from ultraep_comm.weights.segments import Segment

Tensor = torch.Tensor
Form = Literal["topk_ids", "routing_map", "counts"]  # of a rank's routing, and how errors name it


class Counted(NamedTuple):
    """A rank's routing as its engine's ``gather`` takes it.

    Attributes:
        values: counts, int32 ``[E]``, or contiguous ids that a kernel counts.
        id_bytes: of an id; 0: they are counts.
    """

    values: Tensor
    id_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class BackendReport:
    """How a call failed that a backend made: the fields of `_core.Report`, and what it said."""

    fault: _core.Fault
    epoch: int
    flag: _core.FlagKind = _core.FlagKind.CALL
    peer: int = -1
    expert: int = -1
    piece: int = -1
    seen: int = 0
    expected: int = 0
    aborter: int = -1
    root: int = -1
    seconds: float = 0.0
    all_called: bool = False
    detail: str = ""


Report = _core.Report | BackendReport


class Engine(Protocol):
    """One rank of one group. Calls are numbered by epochs from 1."""

    def add_region(self, bases: list[int], offset: list[int]) -> int:
        """Register main weights that peers can address; return the region's index.

        On every rank the first main of each segment is ``offset`` bytes, ``[segments]``, behind the
        rank's address in ``bases``, ``[G]``.
        """

    def share_slots(
        self, allocate: Callable[[int], SharedRegion], num_bytes: int, places: Sequence[Place]
    ) -> SharedRegion:
        """Return new memory in which slots appear once more, at some places.

        Args:
            allocate: how a region of so many bytes is made, where the slots are host memory.
            num_bytes: of the region.
            places: where slots are to appear.

        Returns:
            A region, without ``bases`` if peers cannot address it.

        Raises:
            UnsupportedError: the slots' memory can be mapped only once.
            OutOfSharedMemoryError: there is not enough memory.
        """

    def check(self, plan: _core.PlanView) -> tuple[_core.PlanFault, int, int, int]:
        """Check the placement of a plan of the group's shape; see `check_plan` in the core."""

    def accepts(self, plan: _core.PlanView) -> bool:
        """Return whether a plan fits the group and is legal."""

    def fits(self, plan: _core.PlanView) -> bool:
        """Return whether a plan is on the CPU, and of the group's shape and home map."""

    def has_shape(self, plan: _core.PlanView) -> bool:
        """Return whether a plan is for as many ranks, slots and experts as the group."""

    def transfer(self, call: _core.TransferCall, bound: Binding) -> tuple[int, _core.Mode | None]:
        """Submit a transfer or reduction; return its epoch and mode (None: the device chooses).

        ``bound``: what it moves; most engines read the addresses in ``call``.
        """

    def gather(self, counted: Counted, load: Tensor) -> int:
        """Exchange the result of :meth:`LocalStages.count` into ``[G, E]``; return the epoch."""

    def residents(self, bank: int) -> IntArray:
        """Return int32 ``[G, S]``, what the slots of a bank hold after all submitted calls.

        The CUDA engine waits for these, unless the host knows all their plans.
        """

    def bank_table(self, bank: int) -> int:
        """Return the address of what :meth:`residents` tells, for plans on the device.

        It is that from here on in the current stream. 0: there is no device.
        """

    def version(self, bank: int) -> int:
        """Return the version of the weights of a bank's residents."""

    def moves(self) -> NDArray[np.bool_] | None:
        """Return bool ``[G, S]``, the slots that the last call writes to; of a reduction, reads.

        None: not known, as the device finds out.
        """

    def reader(self, bank: int) -> int:
        """Return the call to a bank that :meth:`invalidate` would have to wait for; 0: none."""

    def invalidate(self, bank: int) -> None:
        """Let a bank hold nothing, of the next version.

        The CUDA engine does so on the current stream, after the calls so far.
        """

    @property
    def plans_at_once(self) -> bool:
        """Return whether :meth:`gather_and_plan` can be used."""

    def gather_and_plan(
        self, counted: Counted, load: Tensor, target_ppm: int, costs: Costs | None
    ) -> tuple[int, Plan, tuple[Tensor, ...]]:
        """Gather and plan in one launch; return the epoch, the plan, and tensors to keep alive."""

    def wait(self, epoch: int) -> bool:
        """Order the caller's next work after a call; False if the call has failed.

        The host engine blocks; the CUDA engine makes the current stream wait.
        """

    def wait_slots(self, epoch: int, slots: list[int]) -> bool:
        """Do :meth:`wait` for what a call brings to some of this rank's slots, or for all of it."""

    def ready(self, bank: int) -> Tensor:
        """Return int64 ``[S]`` on the device: by which call each of this rank's slots was complete.

        Raises:
            UnsupportedError: there is no device.
        """

    def slot_ready(self, epoch: int, slot: int) -> bool:
        """Return whether what a call brings to a slot of this rank is there."""

    def synchronize(self, epoch: int) -> bool:
        """Block until a call has finished; False if it has failed."""

    def is_completed(self, epoch: int) -> bool:
        """Return whether a call has finished or failed."""

    def finished_at(self, epoch: int) -> int:
        """Return when a call finished, in nanoseconds of the monotonic clock; 0: unknown.

        The host engine keeps the times of its last eight calls, the CUDA engine none.
        """

    def failed_epoch(self) -> int:
        """Return the first call that is known to have failed; 0: none."""

    def report(self) -> Report:
        """Return the report of the first failed call."""

    def bad_id(self) -> tuple[int, int] | None:
        """Return position and value of the first id that this rank's device rejected; -1: none.

        A position of -2 - e is that of a count, of expert e.

        None: there is no device that rejects ids or plans.
        """

    def damage(self) -> tuple[_core.DamageKind, int, int, int, int, int, int, int, bool]:
        """Return what a checked transfer found wrong; see `Damage` of the host engine."""

    def last_words(self) -> list[Words] | None:
        """Return each rank's health record; None if that would need a copy from the device."""

    def reject(self) -> None:
        """Take an epoch and tell the peers that this rank rejected its input."""

    def abort(self) -> None:
        """Fail the calls in progress, on this rank and its peers."""

    def close(self) -> int:
        """Publish the close; return a rank known to have made another last call, else -1."""

    @property
    def epoch(self) -> int:
        """Return the number of submitted calls."""

    @property
    def completed(self) -> int | None:
        """Return the number of finished calls; None if that would need a copy from the device."""

    @property
    def waits(self) -> tuple[float, list[int], float, _core.FlagKind, int, int, int] | None:
        """Return how long workers slept in waits; None: waits in kernels are not measured."""

    @property
    def bytes_stored(self) -> int:
        """Return the bytes stored so far; synchronises with a device."""

    @property
    def calls(self) -> tuple[int, int, int, int]:
        """Return the numbers of transfers, reductions, gathers and rejected calls."""


class LocalStages(Protocol):
    """The stages of a call on one rank that need no peer: count, plan, reroute, save.

    The CUDA engine launches kernels for tensors on the device and works as the host engine for
    others. Invalid values on the device are raised by a later :meth:`raise_fault`.

    Attributes:
        home: int32 ``[E]``, on the group's device; shared by all plans made there.
        domains: int32 ``[G]``, likewise.
        marks: int64, zeroed: one for each plan that graphs save.
        put_addresses: writes tables on the device; None: the engine reads addresses on the CPU.
    """

    home: Tensor
    domains: Tensor
    marks: Tensor
    put_addresses: PutAddresses | None

    def holds(self, value: object) -> bool:
        """Return whether a tensor, or a plan, is on the device."""

    def is_capturing(self) -> bool:
        """Return whether the current stream is being captured into a graph."""

    def instance_offsets(self, home_quota: Tensor, slot_quota: Tensor, pad_to: int) -> Tensor:
        """Return int32 ``[M + S]``: the ends of the rows of this rank's instances.

        Ends on the device are at most ``pad_to``, and :meth:`raise_fault` raises what went beyond.

        Raises:
            InvalidPlanError: the last end is above ``pad_to``.
        """

    def raise_fault(self) -> None:
        """Raise, once, the error of an earlier launch that found its input invalid."""

    def on_host(self, tensor: Tensor, name: str) -> Tensor:
        """Return a tensor on the CPU.

        Raises:
            UnsupportedError: it is on the device, and the current stream is being captured.
        """

    def plan_on_host(self, plan: Plan) -> Plan:
        """Return a plan with its tensors on the CPU; may synchronise.

        Raises:
            UnsupportedError: the plan is on the device, and the current stream is being captured.
        """

    def plan_for_call(self, plan: Plan, operation: str) -> tuple[Plan, bool]:
        """Return a plan where the engine reads it, and whether that is on the device.

        Raises:
            UnsupportedError: it has to be copied, and the current stream is being captured.
        """

    def plan_for_bank(self, plan: Plan) -> tuple[Plan, bool]:
        """Return a valid plan of a bank where the engine reads it, and whether on the device.

        Raises:
            UnsupportedError: it has to be copied, and the current stream is being captured; or the
                group has too many segments.
        """

    def put(self, tensor: Tensor) -> Tensor:
        """Return a copy on the group's device."""

    def beside(self, result: Tensor, given: Tensor) -> Tensor:
        """Return a result on the device of ``given``."""

    def counts_of(self, routing: Tensor, form: Form) -> Tensor:
        """Return this rank's tokens per expert, int32 ``[E]``, on the device of the routing.

        Bad values on the device give a negative count, for the next stage to find.

        Raises:
            InvalidLoadError: an id or a count on the CPU is out of range.
        """

    def count(self, routing: Tensor, form: Form) -> Counted:
        """Return the input of the engine's ``gather``.

        Raises:
            InvalidLoadError: an id or a count on the CPU is out of range.
            UnsupportedError: it is on the CPU, and the current stream is being captured.
        """

    def empty_load(self) -> Tensor:
        """Return uninitialised memory for a load, int32 ``[G, E]``, on the group's device."""

    def plan(
        self,
        load: Tensor,
        target_ppm: int,
        costs: Costs | None,
        *,
        apart: bool = False,
        residents: IntArray | None = None,
        bank_table: int = 0,
    ) -> Plan:
        """Plan a load ``[G, E]`` or ``[E]``; with ``apart``, no two of its tensors share memory.

        What slots hold already, without costs: for a load on the CPU ``residents``, int32
        ``[G, S]``; for one on the device ``bank_table``, as `Engine` tells it.
        """

    def reroute(self, topk_ids: Tensor, plan: Plan, source: int | None = None) -> Tensor:
        """Return physical ids; see ``uec.reroute``. The plan must have load and quotas.

        ``source``: whose tokens they are; None: this rank's.
        """

    def reroute_map(
        self, routing_map: Tensor, probs: Tensor | None, plan: Plan, source: int
    ) -> tuple[Tensor, Tensor | None]:
        """Return the physical map and probabilities; see ``uec.reroute_map``."""

    def reroute_gradient(
        self, grad: Tensor, routing_map: Tensor, plan: Plan, source: int
    ) -> Tensor:
        """Return the probabilities' gradient ``[T, E]`` from that of the rerouted ones."""

    def allocate(self, num_bytes: int) -> Tensor:
        """Return uninitialised uint8 memory for a saved plan; in a capture, of its graph.

        Raises:
            UnsupportedError: the current stream is being captured by another library than torch.
        """

    def save(
        self, fields: Iterable[tuple[Tensor, Tensor]], in_use: Tensor | None, mark: int, tag: int
    ) -> None:
        """Copy a plan's tensors, given as pairs (destination, source).

        ``in_use``, one of ``marks``, is that of a captured save; see ``PlanStore``.
        """

    def finish_replays(self) -> None:
        """Wait for launches outside the engine, those of graph replays included."""


Local = TypeVar("Local", bound=LocalStages)


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts of a group on one rank.

    Attributes:
        rank: this rank.
        topology: the group's constants.
        segments: the tensors of an expert, by name.
        grads: the tensors of a slot's gradients, by name.
        layout: layout of the symmetric memory.
        fabric: allocates the symmetric memory.
        memory: its regions; the first has slots, slot gradients and flags.
        engine: executes schedules.
        local: the stages that need no peer.
        exchange_counts: all-gathers int32 ``[E]`` into ``[G, E]`` where the engine cannot.
        check: check mode.
        banks, grad_banks: sets of slots, and of their gradients.
    """

    rank: int
    topology: Topology
    segments: dict[str, Segment]
    grads: dict[str, Segment]
    layout: _core.EngineLayout
    fabric: Fabric
    memory: list[SharedRegion]
    engine: Engine
    local: LocalStages
    exchange_counts: Callable[[Tensor], Tensor] | None = None
    check: bool = False
    banks: int = 1
    grad_banks: int = 1


def make_parts(
    rank: int,
    topology: Topology,
    options: Options,
    config: _core.EngineConfig,
    fabric: Fabric,
    local: Callable[[], Local],
    engine: Callable[[_core.EngineConfig, Local], Engine],
    *,
    exchange_counts: Callable[[Tensor], Tensor] | None = None,
) -> Parts:
    """Allocate one rank's memory, then create its local stages, then its engine."""
    layout = _core.EngineLayout(config)
    try:
        region = fabric.allocate(layout.total_bytes)
    except OutOfSharedMemoryError as error:
        if options.banks > 1 and error.args:
            slots = options.banks * topology.slots_per_rank
            taken = slots * sum(segment.nbytes for segment in options.segments.values())
            text = f"; {options.banks} banks of {topology.slots_per_rank} slots take {taken} bytes"
            error.args = (f"{error.args[0]}{text} of them: see group_memory()", *error.args[1:])
        raise
    checked = [fabric.allocate(layout.check_bytes)] if options.check else []
    config.set_memory(region.bases, checked[0].bases if checked else [])
    stages = local()
    return Parts(
        rank=rank,
        topology=topology,
        segments=dict(options.segments),
        grads=dict(options.grads),
        layout=layout,
        fabric=fabric,
        memory=[region, *checked],
        engine=engine(config, stages),
        local=stages,
        exchange_counts=exchange_counts,
        check=options.check,
        banks=options.banks,
        grad_banks=options.grad_banks,
    )


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
