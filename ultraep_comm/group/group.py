"""Group: one rank's slots, weights, saved plans, recorder and health, until it is closed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import NoReturn

import torch
from torch.utils._pytree import register_pytree_node

from ultraep_comm.errors import (
    InvalidArgumentError,
    InvalidPlanError,
    InvalidWeightsError,
    UnsupportedError,
)
from ultraep_comm.fabrics.private import PrivateFabric
from ultraep_comm.group.bank import Bank, Banks
from ultraep_comm.group.checks import check_device_plan, check_plan_fits
from ultraep_comm.group.copies import Shared
from ultraep_comm.group.health import GroupHealth, health_of
from ultraep_comm.group.instances import Instances
from ultraep_comm.group.memory import GroupMemory, memory_of
from ultraep_comm.group.names import register_group
from ultraep_comm.group.saved_plans import PlanHandle
from ultraep_comm.group.session import Session
from ultraep_comm.plan.plan import Plan
from ultraep_comm.plan.topology import IntsLike, as_int
from ultraep_comm.recording.recorder import CAPACITY, Recorder
from ultraep_comm.weights.binding import Binding
from ultraep_comm.weights.segments import Segment, Weights, with_own_storage


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
        num_local_experts: M, the main instances on this rank.
        session: internal state, for the package's own modules.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        grads = session.grad_segments
        self.rank = session.rank
        self.topology = session.topology
        self.device = session.device
        self.segments = session.segments
        self.num_local_experts = session.num_local_experts
        self.name = session.name
        memory, layout = session.engine.memory[0].local, session.engine.layout
        count = session.topology.slots_per_rank
        slots = _bank_views(memory, layout.slot_offset, count, session.segments, session.banks)
        slot_grads = _bank_views(memory, layout.grad_offset, count, grads, session.grad_banks)
        self._found_at: dict[tuple[str, int, int], torch.Tensor] = {}
        self._instances = Instances(
            session,
            session.segments,
            slot_offset=layout.slot_offset,
            places=layout.instance_offset,
            num_bytes=layout.instance_bytes,
            allocate=session.engine.fabric.allocate,
        )
        self._grad_instances = Instances(
            session,
            grads,
            slot_offset=layout.grad_offset,
            places=layout.grad_instance_offset,
            num_bytes=layout.grad_instance_bytes,
            allocate=PrivateFabric(session.rank, session.topology.num_ranks, self.device).allocate,
        )
        banks = [
            Bank(session, i, slots[i], slot_grads[i % session.grad_banks])
            for i in range(session.banks)
        ]
        self.banks = Banks(banks, session.rank)
        self.slots, self.slot_grads = slots[0], slot_grads[0]
        self._grads = grads
        register_group(self)
        _ = self.topology.instances_per_rank  # caches it: torch.compile cannot trace its property

    @property
    def num_ranks(self) -> int:
        """Return G."""
        return self.topology.num_ranks

    def memory(self) -> GroupMemory:
        """Return the bytes that the group has on each rank; see :func:`group_memory`."""
        session = self.session
        return memory_of(
            session.engine.layout,
            session.topology.slots_per_rank,
            session.segments,
            self._grads,
            session.banks,
            session.grad_banks,
            session.check,
        )

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
        return self.session.weights.bind_persistent(weights)

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
        return self.session.grads.bind_persistent(grads)

    def empty_weights(self) -> dict[str, torch.Tensor]:
        """Allocate main weights that peers can address, as ``pull`` needs. Collective.

        Returns:
            ``{name: tensor [M, *shape]}``, zeroed.

        Raises:
            OutOfSharedMemoryError: some rank has not enough memory.
            UnsupportedError: some ranks have no load/store access to each other, which ``pull``
                needs; or the current stream is being captured.
        """
        session = self.session
        session.refuse_capture("empty_weights()")
        session.enter("empty_weights")
        if not session.engine.fabric.can_pull:
            raise UnsupportedError(
                f"rank {self.rank}: empty_weights() is for mode='pull', and some ranks of this"
                " group reach each other by puts only; use ordinary tensors and mode='push'"
            )
        layout = session.engine.layout
        with session.allocating():
            region = session.engine.fabric.allocate(layout.region_bytes)
        session.engine.memory.append(region)
        session.add_mains(region, layout.region_offset)
        with torch.inference_mode(False):  # as in new_group
            return _views(region.local, layout.region_offset, self.num_local_experts, self.segments)

    def empty_instances(self, bank: Bank | int = 0) -> dict[str, torch.Tensor]:
        """Allocate main weights that the slots of a bank follow, as grouped GEMMs ask. Collective.

        The first call for a bank takes room that the group has; each further one, for another layer
        that shares the bank, new memory, in which the slots themselves appear once more.

        ``pull`` takes the mains, ``{name: tensor[:M]}``, where ranks reach each other by load and
        store, and all have as many experts; on the CUDA engine only those of a bank's first call.

        Args:
            bank: whose slots follow.

        Returns:
            ``{name: tensor [M + S, *shape]}``: mains, zeroed, then ``bank.slots``, the same memory.

        Raises:
            OutOfSharedMemoryError: some rank has not enough memory.
            InvalidArgumentError: the bank is not one of this group.
            UnsupportedError: the group was created without ``instances=True``; or the bank's slots
                are in memory of a device that can be mapped only once, and this is not the first
                call; or the current stream is being captured.
        """
        session = self.session
        session.refuse_capture("empty_instances()")
        session.enter("empty_instances")
        self._require_instances("empty_instances()")
        with session.allocating(UnsupportedError):  # on all ranks alike
            try:
                index = self.banks.find(bank).index
            except InvalidArgumentError as error:
                session.engine.fabric.begin(error)
                raise
            session.engine.fabric.begin(None)
            region, begins = self._instances.take(index)
        # Elsewhere mains begin at different places on the ranks.
        is_even = len(set(session.engine.layout.num_local_experts)) == 1
        if is_even and region.bases and session.engine.fabric.can_pull:
            session.add_mains(region, begins)
        with torch.inference_mode(False):
            made = _own_views(region.local, begins, self._num_instances, self.segments)
        for name, whole in made.items():
            self._found_at[name, index, whole.data_ptr()] = whole
        return made

    def instances_of(self, name: str, mains: torch.Tensor, bank: Bank | int = 0) -> torch.Tensor:
        """Return the tensor of :meth:`empty_instances` of which main weights are the first rows.

        Args:
            name: of the segment.
            mains: ``[M, *shape]``, such as a parameter that was moved there.
            bank: whose slots follow.

        Raises:
            InvalidWeightsError: the mains are elsewhere.
        """
        index = self.banks.find(bank).index
        whole = self._found_at.get((name, index, mains.data_ptr()))
        if whole is None or mains.shape != whole[: self.num_local_experts].shape:
            raise InvalidWeightsError(
                f"rank {self.rank}: main weights {name!r} are not in memory of"
                f" empty_instances({index}), before the bank's slots; move them there once:"
                " parameter.data = instances[name][:M].copy_(parameter)"
            )
        return whole

    def empty_instance_grads(self, bank: Bank | int = 0) -> dict[str, torch.Tensor]:
        """Allocate main gradients that the slot gradients of a bank follow. Local.

        For weight-gradient GEMMs that write those of all instances at once; the first M rows are
        main gradients for :func:`reduce_expert_grads`. Otherwise as :meth:`empty_instances`, but
        no peer addresses them.

        Args:
            bank: whose slot gradients follow.

        Returns:
            ``{name: tensor [M + S, *shape]}`` of the slot gradients' dtype, for segments with
            gradients: mains, zeroed, then ``bank.slot_grads``, the same memory.

        Raises:
            OutOfSharedMemoryError: this rank has not enough memory.
            InvalidArgumentError, UnsupportedError: as :meth:`empty_instances`.
        """
        session, index = self.session, self.banks.find(bank).index
        session.refuse_capture("empty_instance_grads()")
        session.require_open("empty_instance_grads")
        self._require_instances("empty_instance_grads()")
        with torch.inference_mode(False):
            region, begins = self._grad_instances.take(index % session.grad_banks)
            return _own_views(region.local, begins, self._num_instances, self._grads)

    @property
    def _num_instances(self) -> int:
        return self.num_local_experts + self.topology.slots_per_rank

    def _require_instances(self, operation: str) -> None:
        if not self.session.engine.layout.instance_align:
            raise UnsupportedError(
                f"rank {self.rank}: {operation} on a group whose slots have no room for mains"
                " before them; create it with instances=True"
            )

    def expert_pointers(
        self, weights: Weights | Binding, *, bank: Bank | int = 0
    ) -> dict[str, torch.Tensor]:
        """Return addresses for grouped GEMMs: ``{name: int64 [M + S]}``, mains first, then slots.

        Args:
            weights: as for :meth:`bind`.
            bank: whose slots are meant.

        Raises:
            InvalidWeightsError: as :meth:`bind`.
            InvalidArgumentError: the bank is not one of this group.
            UnsupportedError: the current stream is being captured.
        """
        session = self.session
        session.refuse_capture("expert_pointers()")
        first = self.banks.find(bank).index * len(self.segments)
        bound, mains = session.weights.bind(weights), self.num_local_experts
        result = {}
        for i, (name, segment) in enumerate(self.segments.items()):
            if name not in bound.tensors:
                continue
            base = (
                session.engine.memory[0].bases[self.rank]
                + session.engine.layout.slot_offset[first + i]
            )
            slots = [base + s * segment.nbytes for s in range(self.topology.slots_per_rank)]
            own = bound.addresses[i * mains : (i + 1) * mains]
            result[name] = torch.tensor([*own, *slots], dtype=torch.int64, device=self.device)
        return result

    # ---- static shapes --------------------------------------------------------------------

    def token_capacity(self, num_tokens: int | IntsLike, topk: int) -> int:
        """Return the rows of a buffer for all tokens that a rank has under an exact plan.

        That is ceil(sum over ranks of tokens * topk / G). Plans with ``target=1.0`` keep to it:
        with `slots_for_exact` slots for every load, with fewer for most, and what goes beyond is
        an error of :meth:`instance_offsets`.

        Args:
            num_tokens: tokens of every rank, or integers ``[G]`` by rank.
            topk: experts of a token.

        Raises:
            InvalidArgumentError: an argument is negative or misshapen; or the group has several
                domains or no slots, so that its plans cannot be exact.
        """
        return self.topology.token_capacity(num_tokens, topk)

    def instance_offsets(self, plan: Plan, *, pad_to: int) -> torch.Tensor:
        """Return where each instance's rows end in a buffer of fixed length, as grouped GEMMs ask.

        Instances follow each other in the order of :meth:`expert_pointers`: mains, then slots, each
        with as many rows as its quota. Rows past the last end are padding, of no instance. A plan
        on the device is read there: the host does not wait, and the call can be captured into a
        CUDA graph. If its quotas exceed the buffer, its ends stay inside, and a later call on the
        group, or ``group.close()``, raises the error. The caller's streams order such calls of a
        rank, as they do its launches.

        Args:
            plan: of this group, with quotas.
            pad_to: rows of the buffer, below 2**31; see :meth:`token_capacity`.

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
        return self.session.engine.instance_offsets(plan.home_quota, plan.slot_quota, rows)

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
        return self.session.plans.save(plan, layer, microbatch)

    def _require_plan(self, plan: Plan, operation: str) -> None:
        """Raise unless the group is open, earlier launches were right, and the plan fits."""
        session = self.session
        session.require_open(operation)
        session.engine.raise_fault()
        if session.engine.is_on_device(plan):
            check_device_plan(plan, session)
        else:
            check_plan_fits(plan, session)

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
        self.session.require_open("assert_idle")
        self.session.engine.raise_fault()
        self.session.plans.assert_idle()

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
        self.session.require_open("start_recording")
        return self.session.start_recording(capacity, loads)

    # ---- health ---------------------------------------------------------------------------

    def health(self) -> GroupHealth:
        """Return this rank's calls and waits, and the last known state of its peers. Local.

        May be called from any thread at any time: during a call, after a failure, after a close.
        It does not block and has no side effects.
        """
        return health_of(self.session)

    # ---- life -----------------------------------------------------------------------------

    def abort(self) -> None:
        """Fail the calls in flight, on this rank and, through their waits, on all others.

        The group takes no more calls; close it.
        """
        self.session.abort()

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
        self.session.close()

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
            f" slots_per_rank={t.slots_per_rank}, {self.session.state})"
        )


def session_of(group: Group) -> Session:
    """Return the session of what was given as a group.

    Raises:
        InvalidArgumentError: it is no group.
    """
    if not isinstance(group, Group):
        raise InvalidArgumentError(f"group is {group!r}; expected what new_group returned")
    return group.session


def _bank_views(
    storage: torch.Tensor,
    offsets: Sequence[int],
    count: int,
    segments: Mapping[str, Segment],
    banks: int,
) -> list[dict[str, torch.Tensor]]:
    """Return each bank's views of its slots, or of their gradients; bank 0 comes first."""
    size = len(segments)
    return [
        _own_views(storage, offsets[bank * size : (bank + 1) * size], count, segments)
        for bank in range(banks)
    ]


class _Views(dict[str, torch.Tensor]):
    """Tensors by segment; says which there are where another is asked for."""

    def __missing__(self, name: str) -> NoReturn:
        hint = "" if self else "; slot gradients need a group created with grads="
        raise InvalidArgumentError(f"there is no segment {name!r}; expected {list(self)}{hint}")


# What torch.vmap, torch.utils.checkpoint and others look into, as into a dict.
register_pytree_node(
    _Views,
    lambda views: (list(views.values()), list(views)),
    lambda values, names: _Views(zip(names, values, strict=True)),
)


def _own_views(
    storage: torch.Tensor, offsets: Sequence[int], count: int, segments: Mapping[str, Segment]
) -> dict[str, torch.Tensor]:
    views = _views(storage, offsets, count, segments)
    return _Views((name, with_own_storage(view)) for name, view in views.items())


def _views(
    storage: torch.Tensor, offsets: Sequence[int], count: int, segments: Mapping[str, Segment]
) -> dict[str, torch.Tensor]:
    views = {}
    for (name, segment), offset in zip(segments.items(), offsets, strict=True):
        views[name] = segment.view(storage.narrow(0, offset, count * segment.nbytes), count)
    return views
