"""Bank: a set of slots, and what they hold."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ultraep_comm.errors import (
    GroupBusyError,
    InvalidArgumentError,
    InvalidPlanError,
    InvalidWeightsError,
    UnsupportedError,
)
from ultraep_comm.fabrics.private import PrivateFabric
from ultraep_comm.group.copies import Shared
from ultraep_comm.group.saved_plans import PlanHandle
from ultraep_comm.group.session import Session
from ultraep_comm.group.slots import SlotSet
from ultraep_comm.plan.plan import Plan
from ultraep_comm.plan.topology import as_int


class Bank(Shared):
    """One set of S slots on every rank; one of ``group.banks``.

    A slot holds its expert until a plan has another one there, so that a later plan of the bank
    need not move it: a *resident*, bit for bit the home's weights of the same version. All ranks
    know what all slots hold, from the calls that were made.

    Attributes:
        index: of the bank in its group.
        slots: ``{name: [S, *shape]}``, views of this rank's slots; addresses do not change.
        slot_grads: the same for their gradients; only segments with gradients. Several banks may
            share them: see ``grad_banks`` in :func:`new_group`.
        holder: for :class:`nn.Replication`: whose main weights the slots hold; empty: unknown.
    """

    def __init__(self, session: Session, index: int, weights: SlotSet, grads: SlotSet) -> None:
        self.index = index
        self.slots = weights.slots
        self.slot_grads = grads.slots
        self.holder: tuple[object, ...] = ()
        self._session = session
        self._weights = weights
        self._grads = grads
        self._found_at: dict[tuple[str, int], torch.Tensor] = {}

    @property
    def residents(self) -> torch.Tensor:
        """Return int32 ``[G, S]``, the expert in each slot after all submitted calls; -1: none.

        After a call on the group has failed, slots hold nothing. On the CUDA engine this waits for
        the calls so far, and for the current stream, unless the host knows the plans of all: they
        were made by ``plan_replicas`` with this bank, or on the CPU, and none was captured.

        Raises:
            UnsupportedError: the current stream is being captured into a CUDA graph.
        """
        return torch.from_numpy(self._session.engine.residents(self.index))

    @property
    def ready(self) -> torch.Tensor:
        """Return int64 ``[S]`` on the device, for kernels that wait for single slots; a view.

        A slot's word is more than the ``epoch`` of every call by which it was complete; see
        ready.cuh in :func:`get_include`.

        Raises:
            UnsupportedError: the group uses the host engine.
        """
        return self._session.engine.ready(self.index)

    @property
    def filled_by(self) -> Plan | PlanHandle | None:
        """Return what the last transfer to the bank was given; None: there was none."""
        return self._session.filled_by.get(self.index)

    @property
    def version(self) -> int:
        """Return the version of the main weights that residents are of; 0 at first."""
        return self._session.engine.version(self.index)

    def invalidate(self) -> None:
        """Declare that main weights have changed: slots hold nothing, and the version is the next.

        Local. Every rank calls it between the same calls, for instance after each optimizer step;
        if ranks differ in this, their calls raise PlanMismatchError.

        On the CUDA engine it is work of the current stream, as the optimizer's step is: it makes
        the stream wait for the bank's calls, never blocks the host, and can be captured.

        Raises:
            GroupBusyError: on the host engine: a call that fills the bank has not finished, and may
                read the weights.
            GroupClosedError: the group is closed or failed earlier.
            UnsupportedError: in a compiled function.
        """
        session = self._session
        if torch.compiler.is_dynamo_compiling():
            raise UnsupportedError(
                f"invalidate() of bank {self.index} in a compiled function, where no operator"
                " stands for it; call it outside, or give replicate_experts a larger version="
            )
        session.require_open("invalidate")
        reader = session.engine.invalidate(self.index)
        if reader:
            raise GroupBusyError(
                f"rank {session.rank}: invalidate() of bank {self.index} while call {reader}, which"
                " fills it, may still read the main weights; wait for the call first",
                rank=session.rank,
                live=[],
            )

    # ---- one tensor for all instances -----------------------------------------------------

    def empty_instances(self) -> dict[str, torch.Tensor]:
        """Allocate main weights that the slots follow, as grouped GEMMs ask. Collective.

        The first call takes room that the group has; each further one, for another layer that
        shares the bank, new memory, to which the same slots are mapped too.

        ``pull`` takes the main weights, ``{name: tensor[:M]}``, where ranks reach each other by
        load and store, and all have as many experts; on the CUDA engine only those of the first
        call.

        Returns:
            ``{name: tensor [M + S, *shape]}``: main weights, zeroed, then :attr:`slots` themselves.

        Raises:
            OutOfSharedMemoryError: some rank has not enough memory.
            UnsupportedError: the group was created without ``instances=True``; or the slots are in
                memory of a device that can be mapped only once, and this is not the first call; or
                the current stream is being captured.
        """
        session = self._session
        session.refuse_capture("empty_instances()")
        session.enter("empty_instances")
        self._require_room("empty_instances()")
        with session.allocating(UnsupportedError):  # on all ranks alike
            region, begins, made = self._weights.take()
        # Otherwise main weights begin at different places on the ranks.
        is_even = len(set(session.engine.layout.num_local_experts)) == 1
        if is_even and region.bases and session.engine.can_pull:
            session.add_main_weights(region, begins)
        self._found_at.update({(name, t.data_ptr()): t for name, t in made.items()})
        return made

    def instances_of(self, name: str, weights: torch.Tensor) -> torch.Tensor:
        """Return the tensor of :meth:`empty_instances` of which main weights are the first rows.

        Args:
            name: of the segment.
            weights: ``[M, *shape]``, such as a parameter that was moved there.

        Raises:
            InvalidWeightsError: they are elsewhere.
        """
        session, whole = self._session, self._found_at.get((name, weights.data_ptr()))
        if whole is None or weights.shape != whole[: session.num_local_experts].shape:
            raise InvalidWeightsError(
                f"rank {session.rank}: main weights {name!r} are not in memory of empty_instances()"
                f" of bank {self.index}, before its slots; move them there once:"
                " parameter.data = instances[name][:M].copy_(parameter)"
            )
        return whole

    def empty_instance_grads(self) -> dict[str, torch.Tensor]:
        """Allocate main gradients that the slot gradients follow. Local.

        For weight-gradient GEMMs that write those of all instances at once; the first M rows are
        main gradients for :func:`reduce_expert_grads`. Otherwise as :meth:`empty_instances`, but
        no peer addresses them.

        Returns:
            ``{name: tensor [M + S, *shape]}`` of the slot gradients' dtype, for segments with
            gradients: main gradients, zeroed, then :attr:`slot_grads` themselves.

        Raises:
            OutOfSharedMemoryError: this rank has not enough memory.
            UnsupportedError: as :meth:`empty_instances`.
        """
        self._session.refuse_capture("empty_instance_grads()")
        self._session.require_open("empty_instance_grads")
        self._require_room("empty_instance_grads()")
        return self._grads.take()[2]

    def _require_room(self, operation: str) -> None:
        if not self._session.engine.layout.instance_align:
            raise UnsupportedError(
                f"rank {self._session.rank}: {operation} on a group whose slots have no room for"
                " local experts before them; create it with instances=True"
            )

    def __repr__(self) -> str:
        return f"Bank({self.index} of group {self._session.name!r})"


def find_bank(bank: Bank | int, banks: Sequence[Bank], rank: int) -> Bank:
    """Return one of a group's banks.

    Raises:
        InvalidArgumentError: there is none of this index, or it is another group's.
    """
    if isinstance(bank, Bank):
        if bank not in banks:
            raise InvalidArgumentError(
                f"rank {rank}: bank is {bank!r}; expected one of {list(banks)}"
            )
        return bank
    number, count = as_int(bank, "bank"), len(banks)
    if not 0 <= number < count:
        raise InvalidArgumentError(
            f"rank {rank}: bank is {number}; expected 0 to {count - 1}: the group was created with"
            f" banks={count}"
        )
    return banks[number]


def make_banks(session: Session) -> tuple[Bank, ...]:
    """Return the banks of a new group."""
    layout = session.engine.layout
    private = PrivateFabric(session.rank, session.topology.num_ranks, session.device)
    size, grad_size = len(session.segments), len(session.options.grads)
    weights = [
        SlotSet(
            session=session,
            segments=session.segments,
            offsets=layout.slot_offset[i * size : (i + 1) * size],
            places=layout.instance_offset,
            num_bytes=layout.instance_bytes,
            allocate=session.engine.fabric.allocate,
        )
        for i in range(session.options.banks)
    ]
    grads = [
        SlotSet(
            session=session,
            segments=session.options.grads,
            offsets=layout.grad_offset[i * grad_size : (i + 1) * grad_size],
            places=layout.grad_instance_offset,
            num_bytes=layout.grad_instance_bytes,
            allocate=private.allocate,
        )
        for i in range(session.options.grad_banks)
    ]
    return tuple(Bank(session, i, own, grads[i % len(grads)]) for i, own in enumerate(weights))


def check_bank(plan: Plan, session: Session) -> int:
    """Return a plan's bank.

    Raises:
        InvalidPlanError: the group has no such bank.
    """
    if plan.bank >= session.options.banks:
        raise InvalidPlanError(
            f"rank {session.rank}: the plan is for bank {plan.bank}; expected 0 to"
            f" {session.options.banks - 1}: the group was created with"
            f" banks={session.options.banks}"
        )
    return plan.bank


def find_version(version: int | None, plan: Plan, session: Session) -> int:
    """Return the version of the main weights of a call; without reuse the bank's next one.

    Raises:
        InvalidArgumentError: it is older than the bank's, or is given without reuse.
    """
    bank = plan.bank
    known = session.engine.version(bank)
    if version is None:
        return known if plan.reuse else known + 1
    if not plan.reuse:
        raise InvalidArgumentError(
            f"rank {session.rank}: version={version} was given with a plan without reuse, which"
            " copies everything; plan with reuse=True, or leave the version out"
        )
    number = as_int(version, "version")
    if not known <= number < 2**63:
        raise InvalidArgumentError(
            f"rank {session.rank}: version is {number}, and bank {bank} holds weights of version"
            f" {known}; expected at least that: versions only grow, with each change of the weights"
        )
    return number
