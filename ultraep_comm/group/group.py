"""Group: one rank's slots, weights, saved plans, recorder and health, until it is closed."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from ultraep_comm.errors import InvalidArgumentError, InvalidPlanError, UnsupportedError
from ultraep_comm.group.bank import Bank, find_bank, make_banks
from ultraep_comm.group.checks import check_fits
from ultraep_comm.group.copies import Shared
from ultraep_comm.group.health import GroupHealth, health_of
from ultraep_comm.group.memory import GroupMemory, memory_of
from ultraep_comm.group.names import register_group
from ultraep_comm.group.saved_plans import PlanHandle
from ultraep_comm.group.session import Session
from ultraep_comm.group.slots import views
from ultraep_comm.plan.plan import Plan
from ultraep_comm.plan.topology import as_int
from ultraep_comm.recording.recorder import CAPACITY, Recorder
from ultraep_comm.weights.binding import Binding
from ultraep_comm.weights.segments import Weights


class Group(Shared):
    """One rank's part of a group. Created by :func:`new_group` or :func:`new_loopback_groups`.

    Copies of a module share its group. Saving leaves it out: set a loaded module's ``group``.

    Attributes:
        rank: this rank in the group.
        topology: the group's constants.
        device: where weights and slots are.
        segments: the tensors of an expert, by name.
        slots: ``{name: [S, *shape]}``, views of this rank's slots in bank 0; addresses do not
            change.
        slot_grads: the same for their gradients, initially zero; only segments with gradients.
        banks: all sets of slots, by index, for instance of layers.
        name: the key by which operators find the group in this process.
        num_local_experts: M, the experts whose home is this rank.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.rank = session.rank
        self.topology = session.topology
        self.device = session.device
        self.segments = session.segments
        self.num_local_experts = session.num_local_experts
        self.name = session.name
        self.banks = make_banks(session)
        self.slots, self.slot_grads = self.banks[0].slots, self.banks[0].slot_grads
        register_group(self)
        _ = self.topology.instances_per_rank  # caches it: torch.compile cannot trace its property

    @property
    def num_ranks(self) -> int:
        """Return G."""
        return self.topology.num_ranks

    def memory(self) -> GroupMemory:
        """Return the bytes that the group has on each rank; see :func:`group_memory`."""
        session = self._session
        return memory_of(session.engine.layout, self.topology.slots_per_rank, session.options)

    # ---- weights --------------------------------------------------------------------------

    def bind(self, weights: Weights | Binding) -> Binding:
        """Check main weights and take their addresses, once for repeated calls.

        On a CUDA group this also copies the addresses to the device, synchronously; weights that
        were bound before a capture into a CUDA graph can be used in it. For weights that move, see
        :meth:`Binding.update`.

        Args:
            weights: ``{name: tensor [M, *shape] or sequence of M tensors}``; segments that later
                calls do not transfer may be left out.

        Raises:
            InvalidWeightsError: unknown segment, wrong number of experts, shape, dtype, device or
                strides, or bound to another group.
        """
        return self._session.weights.bind_persistent(weights)

    def bind_grads(self, grads: Weights | Binding) -> Binding:
        """Check main gradients and take their addresses, once for repeated reductions.

        On a CUDA group this also copies the addresses to the device, synchronously; gradients that
        were bound before a capture into a CUDA graph can be used in it.

        Args:
            grads: as for :func:`reduce_expert_grads`.

        Raises:
            InvalidWeightsError: likewise; a segment is missing; rows share memory; or the group
                was created without ``grads=``.
        """
        return self._session.grads.bind_persistent(grads)

    def empty_weights(self) -> dict[str, torch.Tensor]:
        """Allocate main weights that peers can address, as ``pull`` needs. Collective.

        Returns:
            ``{name: tensor [M, *shape]}``, zeroed.

        Raises:
            OutOfSharedMemoryError: some rank has not enough memory.
            UnsupportedError: some ranks have no load/store access to each other, which ``pull``
                needs; or the current stream is being captured.
        """
        session = self._session
        session.refuse_capture("empty_weights()")
        session.enter("empty_weights")
        if not session.engine.can_pull:
            raise UnsupportedError(
                f"rank {self.rank}: empty_weights() is for mode='pull', and some ranks of this"
                " group reach each other by puts only; use ordinary tensors and mode='push'"
            )
        layout = session.engine.layout
        with session.allocating():
            region = session.engine.fabric.allocate(layout.region_bytes)
        session.engine.memory.append(region)
        session.add_main_weights(region, layout.region_offset)
        with torch.inference_mode(False):  # as in new_group
            return views(region.local, layout.region_offset, self.num_local_experts, self.segments)

    def expert_pointers(
        self, weights: Weights | Binding, *, bank: Bank | int = 0
    ) -> dict[str, torch.Tensor]:
        """Return addresses for grouped GEMMs: ``{name: int64 [M + S]}``, slots last.

        Args:
            weights: as for :meth:`bind`.
            bank: whose slots are meant.

        Raises:
            InvalidWeightsError: as :meth:`bind`.
            InvalidArgumentError: the bank is not one of this group.
            UnsupportedError: the current stream is being captured.
        """
        session = self._session
        session.refuse_capture("expert_pointers()")
        first = find_bank(bank, self.banks, self.rank).index * len(self.segments)
        bound, count = session.weights.bind(weights), self.num_local_experts
        result = {}
        for i, (name, segment) in enumerate(self.segments.items()):
            if name not in bound.tensors:
                continue
            base = (
                session.engine.memory[0].bases[self.rank]
                + session.engine.layout.slot_offset[first + i]
            )
            slots = [base + s * segment.nbytes for s in range(self.topology.slots_per_rank)]
            own = bound.addresses[i * count : (i + 1) * count]
            result[name] = torch.tensor([*own, *slots], dtype=torch.int64, device=self.device)
        return result

    # ---- static shapes --------------------------------------------------------------------

    def instance_offsets(self, plan: Plan, *, pad_to: int) -> torch.Tensor:
        """Return where each instance's rows end in a buffer of fixed length, as grouped GEMMs ask.

        Instances follow each other in the order of :meth:`expert_pointers`, slots last, each
        with as many rows as its quota. Rows past the last end are padding, of no instance. A plan
        on the device is read there: the host does not wait, and the call can be captured into a
        CUDA graph. If its quotas exceed the buffer, its ends stay inside, and a later call on the
        group, or ``group.close()``, raises the error. The caller's streams order such calls of a
        rank, as they do its launches.

        Args:
            plan: of this group, with quotas.
            pad_to: rows of the buffer, below 2**31; see ``topology.token_capacity``.

        Returns:
            int32 ``[M + S]`` on the plan's device, ascending, none above ``pad_to``.

        Raises:
            InvalidPlanError: the plan is for another group, has no quotas, or, on the CPU, gives
                this rank more than ``pad_to`` tokens.
            InvalidArgumentError: ``pad_to`` is out of range.
            GroupClosedError: the group is closed or failed earlier.
        """
        self._require_plan(plan, "instance_offsets")
        if plan.slot_quota is None or plan.home_quota is None:
            raise InvalidPlanError(
                f"rank {self.rank}: the plan has no quotas, so its instances' rows are unknown;"
                " expected slot_quota and home_quota: use plan_replicas, or pass both to"
                " Plan.from_slots"
            )
        rows = as_int(pad_to, "pad_to")
        if not 0 <= rows < 2**31:
            raise InvalidArgumentError(f"pad_to is {rows}; expected 0 to 2**31 - 1")
        return self._session.engine.instance_offsets(plan.home_quota, plan.slot_quota, rows)

    # ---- saved plans ----------------------------------------------------------------------

    def save(self, plan: Plan, *, layer: int = 0, microbatch: int | None = None) -> PlanHandle:
        """Save a plan for later calls of a layer and microbatch. Local.

        The group copies the plan, in the current stream's order; the caller may then reuse its
        memory. On the device of a CUDA group a save can be captured by torch.cuda.graph: its memory
        belongs to the graph, and every replay saves the plan's current contents. A replay does not
        overwrite a plan whose reduction or captured release has not run: the old plan stays, and
        the next call on the group raises PlanHandleError.

        Args:
            plan: of this group's shape, on the CPU or on the device of a CUDA group.
            layer: 0 or more.
            microbatch: 0 or more; None: the number of plans of this layer saved so far.

        Raises:
            InvalidPlanError: the plan is for another group.
            InvalidArgumentError: ``layer`` or ``microbatch`` is out of range.
            GroupClosedError: the group is closed or failed earlier.
            PlanHandleError, InvalidLoadError: an earlier launch on the device found the error.
            UnsupportedError: the current stream is being captured, by another library than torch;
                or graphs have saved as many plans of this group as it can track.
            DeviceError: the CUDA driver refused the launch.
        """
        self._require_plan(plan, "save")
        return self._session.plans.save(plan, layer, microbatch)

    def _require_plan(self, plan: Plan, operation: str) -> None:
        """Raise unless the group is open, earlier launches were right, and the plan fits."""
        session = self._session
        session.require_open(operation)
        session.raise_fault()
        check_fits(plan, session.engine.is_on_device(plan), session)

    def assert_idle(self) -> None:
        """Raise unless every saved plan was reduced or released, and every call has finished.

        Meant for the end of a training step. It does not block: on a CUDA group, synchronize the
        device first.

        Raises:
            GroupBusyError: a saved plan is still live, or a call has not finished.
            GroupClosedError: the group is closed or failed earlier.
            PlanHandleError, InvalidLoadError, InvalidPlanError: an earlier launch on the device, or
                a replay of one, found the error.
        """
        self._session.require_open("assert_idle")
        self._session.raise_fault()
        self._session.plans.assert_idle()

    # ---- recording ------------------------------------------------------------------------

    def start_recording(self, capacity: int = CAPACITY, *, loads: bool = True) -> Recorder:
        """Start to record the times and plans of this rank's calls. Local.

        Args:
            capacity: calls to keep; newer calls overwrite the oldest.
            loads: keep the load ``[G, E]`` of plans too, which takes most of the memory.

        Returns:
            The recorder; ``with group.start_recording() as recorder:`` stops it at the end.

        Raises:
            InvalidArgumentError: the capacity is out of range, or the group is already recorded.
            GroupClosedError: the group is closed or failed earlier.
        """
        self._session.require_open("start_recording")
        return self._session.start_recording(capacity, loads)

    # ---- health ---------------------------------------------------------------------------

    def health(self) -> GroupHealth:
        """Return this rank's calls and waits, and the last known state of its peers. Local.

        May be called from any thread at any time: during a call, after a failure, after a close.
        It does not block and has no side effects.
        """
        return health_of(self._session)

    # ---- life -----------------------------------------------------------------------------

    def abort(self) -> None:
        """Fail the calls in flight, on this rank and, through their waits, on all others.

        The group takes no more calls; close it.
        """
        self._session.abort()

    def close(self) -> None:
        """Finish submitted calls, tell the peers, and free threads and connections.

        Slot tensors stay valid as long as they are referenced. Closing twice is harmless. In a
        process forked from the group's, it only frees memory.

        Raises:
            TransferError: a submitted call failed, and no wait has raised it.
            PlanMismatchError: a peer's last call differs from this rank's.
            InvalidLoadError, InvalidPlanError: an earlier plan or reroute on the device was given
                bad values, and no call has raised that since.
            PlanHandleError: likewise, a replay saved a plan before the previous one was reduced.
            GroupBusyError: a saved plan was neither reduced nor released. The group is closed
                nevertheless.
            UnsupportedError: the current stream is being captured; the group stays open.
        """
        self._session.close()

    def __enter__(self) -> Group:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.abort()
        self.close()

    def __repr__(self) -> str:
        t = self.topology
        return (
            f"Group(rank={self.rank}, num_ranks={t.num_ranks}, num_experts={t.num_experts},"
            f" slots_per_rank={t.slots_per_rank}, {self._session.state})"
        )


def session_of(group: Group) -> Session:
    """Return the session of what was given as a group.

    Raises:
        InvalidArgumentError: it is no group.
    """
    if not isinstance(group, Group):
        raise InvalidArgumentError(f"group is {group!r}; expected what new_group returned")
    return group._session  # noqa: SLF001


def rejecting(group: Group) -> AbstractContextManager[None]:
    """Enclose what a rank does by itself before a call that its peers wait for.

    Any error in it is passed on, and fails the peers' call at once.
    """
    return session_of(group).rejecting()


def is_on_device(value: torch.Tensor | Plan, group: Group) -> bool:
    """Return whether a tensor, or a plan, is on the group's device, and that is no CPU."""
    return session_of(group).engine.is_on_device(value)
