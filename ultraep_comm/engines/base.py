"""What a group needs of an engine, and the parts that an engine's module makes for one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from ultraep_comm import _core
from ultraep_comm.engines.options import Options
from ultraep_comm.errors import BootstrapError, PeerGoneError, PeerRejectedError, Words
from ultraep_comm.fabrics import Fabric, SharedRegion
from ultraep_comm.fabrics.meeting import Meeting
from ultraep_comm.plan.plan import Plan
from ultraep_comm.plan.planner import Costs
from ultraep_comm.plan.topology import Topology
from ultraep_comm.weights.binding import AddressTables
from ultraep_comm.weights.segments import Segment

Tensor = torch.Tensor


class Engine(Protocol):
    """One rank of one group. Calls are numbered by epochs from 1."""

    def add_region(self, bases: list[int]) -> int:
        """Remember main weights that peers can address; return their number."""

    def check(self, plan: _core.PlanView) -> tuple[_core.PlanFault, int, int, int]:
        """Check the placement of a plan of the group's shape; see `check_plan` in the core."""

    def accepts(self, plan: _core.PlanView) -> bool:
        """Return whether a plan fits and is legal: both, in one question."""

    def fits(self, plan: _core.PlanView) -> bool:
        """Return whether a plan is on the CPU, and of the group's shape and home map."""

    def has_shape(self, plan: _core.PlanView) -> bool:
        """Return whether a plan is for as many ranks, slots and experts as the group."""

    def transfer(self, call: _core.TransferCall) -> tuple[int, _core.Mode | None]:
        """Submit a transfer or a reduction; return its epoch and mode; None: the device chooses."""

    def gather(self, counted: Tensor, load: Tensor) -> int:
        """Exchange what :meth:`LocalStages.count` returned into ``[G, E]``; return the epoch."""

    @property
    def plans_at_once(self) -> bool:
        """Return whether :meth:`gather_and_plan` can be used."""

    def gather_and_plan(
        self, counted: Tensor, load: Tensor, target_ppm: int, costs: Costs | None
    ) -> tuple[int, Plan, tuple[Tensor, ...]]:
        """Gather and plan in one launch; return the epoch, the plan, and what to keep."""

    def wait(self, epoch: int) -> bool:
        """Order what the caller does next behind a call; False: it has failed.

        The host engine blocks; the CUDA engine orders the current stream.
        """

    def synchronize(self, epoch: int) -> bool:
        """Block until a call has finished; False: it has failed."""

    def is_completed(self, epoch: int) -> bool:
        """Return whether a call has finished or failed."""

    def finished_at(self, epoch: int) -> int:
        """Return when a call finished, in nanoseconds of the monotonic clock; 0: not known.

        The host engine knows it of its last eight calls; the CUDA engine of none.
        """

    def failed_epoch(self) -> int:
        """Return the first call that failed; 0: none is known."""

    def report(self) -> _core.Report:
        """Return how it failed."""

    def bad_id(self) -> tuple[int, int] | None:
        """Return where the first id was that this rank's device rejected, and the id; -1: none.

        None: there is no device, which could also refuse plans.
        """

    def damage(self) -> tuple[_core.DamageKind, int, int, int, int, int, int, int, bool]:
        """Return what a checked transfer found wrong; see `Damage` of the host engine."""

    def last_words(self) -> list[Words] | None:
        """Return what is known of each rank; None: a device would have to be asked."""

    def reject(self) -> None:
        """Tell the peers that this rank's input was bad."""

    def abort(self) -> None:
        """Fail what is under way, here and at the peers."""

    def close(self) -> int:
        """Say goodbye; return a rank that is seen to have made another last call, else -1."""

    @property
    def epoch(self) -> int:
        """Return the number of submitted calls."""

    @property
    def completed(self) -> int | None:
        """Return the number of finished calls; None: a device would have to be asked."""

    @property
    def waits(self) -> tuple[float, list[int], float, _core.FlagKind, int, int, int] | None:
        """Return how long workers slept in waits; None: kernels wait, and nobody counts."""

    @property
    def bytes_stored(self) -> int:
        """Return the bytes stored so far; the CUDA engine synchronises with its device."""

    @property
    def calls(self) -> tuple[int, int, int, int]:
        """Return how many calls took an epoch: transfers, reductions, gathers, rejected ones."""


class LocalStages(Protocol):
    """The stages of one rank that need no peer: count, plan, reroute, save.

    Those of a device launch kernels for what is there, and do the rest as the host does; what they
    find wrong with values on the device is raised by a later :meth:`raise_fault`.

    Attributes:
        home: int32 ``[E]``, where the group works; of every plan that is made there.
        domains: int32 ``[G]``, likewise.
        lends_entries: whether plans are saved to memory that was there before, for a capture.
    """

    home: Tensor
    domains: Tensor
    lends_entries: bool

    def holds(self, value: object) -> bool:
        """Return whether a tensor, or a plan, is on the device."""

    def is_capturing(self) -> bool:
        """Return whether the current stream is being captured into a graph."""

    def raise_fault(self) -> None:
        """Raise what an earlier launch has found wrong with its input, once."""

    def on_host(self, tensor: Tensor, name: str) -> Tensor:
        """Return a tensor on the CPU; UnsupportedError: the current stream is being captured."""

    def plan_on_host(self, plan: Plan) -> Plan:
        """Return a plan with its tensors on the CPU, which may synchronise.

        Raises:
            UnsupportedError: the plan is on the device, and the current stream is being captured.
        """

    def plan_for_call(self, plan: Plan, operation: str) -> tuple[Plan, bool]:
        """Return a plan where the engine reads it, and whether that is on the device.

        Raises:
            UnsupportedError: it has to be copied, and the current stream is being captured.
        """

    def put(self, tensor: Tensor) -> Tensor:
        """Return a copy where the group works."""

    def beside(self, result: Tensor, given: Tensor) -> Tensor:
        """Return a result where ``given`` is."""

    def count_on_host(self, topk_ids: Tensor) -> Tensor:
        """Return int32 ``[E]`` on the CPU: tokens of this rank for each expert.

        Raises:
            InvalidLoadError: an id is out of range.
        """

    def count(self, topk_ids: Tensor) -> Tensor:
        """Return what the engine's ``gather`` takes: counts ``[E]``, or ids that its kernel counts.

        Raises:
            InvalidLoadError: an id on the CPU is out of range.
            UnsupportedError: ids are on the CPU, and the current stream is being captured.
        """

    def empty_load(self) -> Tensor:
        """Return memory for a load, int32 ``[G, E]``, where the engine writes it."""

    def plan(
        self, load: Tensor, target_ppm: int, costs: Costs | None, *, apart: bool = False
    ) -> Plan:
        """Plan a load ``[G, E]`` or ``[E]``; with ``apart`` no two tensors share memory."""

    def reroute(self, topk_ids: Tensor, plan: Plan) -> Tensor:
        """Return physical ids; see ``uec.reroute``. The plan has load and quotas."""

    def reroute_map(
        self, routing_map: Tensor, probs: Tensor | None, plan: Plan
    ) -> tuple[Tensor, Tensor | None]:
        """Return the physical map and probabilities; see ``uec.reroute_map``."""

    def reroute_gradient(self, grad: Tensor, routing_map: Tensor, plan: Plan) -> Tensor:
        """Return the gradient ``[T, E]`` of probabilities from that of the rerouted."""

    def allocate(self, num_bytes: int) -> Tensor:
        """Return memory for saved plans, uint8, zeroed."""

    def save(
        self, fields: Iterable[tuple[Tensor, Tensor]], in_use: Tensor | None, mark: int, tag: int
    ) -> None:
        """Copy a plan's tensors: pairs of where to and from.

        ``in_use`` (int64, one word) is the mark of an entry that graphs save to; see the PlanStore.
        """

    def address_tables(self, num_segments: int, num_mains: int) -> AddressTables | None:
        """Return tables of addresses on the device; None: there is none."""

    def finish_replays(self) -> None:
        """Wait for launches outside the engine, also of replays."""


Local = TypeVar("Local", bound=LocalStages)


class LoadExchange(Protocol):
    """One rank's part of an exchange of loads outside the engine. Collective."""

    def exchange(self, counts: Tensor) -> Tensor:
        """Give this rank's int32 ``[E]`` and return everybody's ``[G, E]``."""

    def leave(self) -> None:
        """Take part no more."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a group is made of, on one rank.

    Attributes:
        rank: this rank.
        topology: the group's constants.
        segments: the tensors of an expert, by name.
        grads: those of a slot's gradients.
        layout: of symmetric memory.
        fabric: allocates it.
        memory: what is allocated: slots, slot gradients and flags come first.
        engine: executes schedules.
        local: does what needs no peer.
        loads: exchanges loads; None: the engine does.
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
    loads: LoadExchange | None = None


def make_parts(
    rank: int,
    topology: Topology,
    options: Options,
    config: _core.EngineConfig,
    fabric: Fabric,
    local: Callable[[], Local],
    engine: Callable[[_core.EngineConfig, Local], Engine],
    *,
    loads: LoadExchange | None = None,
) -> Parts:
    """Allocate one rank's memory, and make its local stages and its engine, in this order."""
    layout = _core.EngineLayout(config)
    region = fabric.allocate(layout.total_bytes)
    checked = [fabric.allocate(layout.check_bytes)] if options.check else []
    config.set_memory(region.bases, checked[0].bases if checked else [])
    config.set_peers(fabric.peer_sockets, fabric.peer_processes)
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
        loads=loads,
    )


REJECTED_ROW = -1  # fills the row of a rank whose ids were bad


def check_rows(table: Tensor, rank: int, epoch: int) -> None:
    """Raise PeerRejectedError if a rank's ids were bad."""
    rejected = torch.nonzero(table[:, 0] == REJECTED_ROW).flatten().tolist()
    if rejected:
        peer = rejected[0]
        raise PeerRejectedError(
            f"rank {rank}: gather_load ended because rank {peer} rejected its own input; its error"
            " says why. Close the group and make a new one",
            rank=rank,
            peer=peer,
            root=peer,
            epoch=epoch,
        )


class ProcessGroupLoads:
    """Over the process group: for ranks that no fabric of the host reaches."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting

    def exchange(self, counts: Tensor) -> Tensor:
        """Gather the counts of all ranks."""
        try:
            return self._meeting.gather(counts)
        except BootstrapError as error:
            raise PeerGoneError(
                f"rank {self._meeting.rank}: gather_load over the process group failed ({error});"
                " close the group and make a new one",
                rank=self._meeting.rank,
                peer=error.failed_rank,
            ) from error

    def leave(self) -> None:
        """Nothing to give up: the process group is the caller's."""
