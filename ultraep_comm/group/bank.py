"""Bank: a set of slots, and what they hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ultraep_comm.errors import (
    GroupBusyError,
    InvalidArgumentError,
    InvalidPlanError,
    UnsupportedError,
)
from ultraep_comm.group.copies import Shared
from ultraep_comm.group.session import Session
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
        slot_grads: the same for their gradients; only segments with gradients. Banks share them,
            but for what ``grad_banks`` in :func:`new_group` says.
    """

    def __init__(
        self,
        session: Session,
        index: int,
        slots: dict[str, torch.Tensor],
        slot_grads: dict[str, torch.Tensor],
    ) -> None:
        self.index = index
        self.slots = slots
        self.slot_grads = slot_grads
        self._session = session

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
    def version(self) -> int:
        """Return the version of the main weights that residents are of; 0 at first."""
        return self._session.engine.version(self.index)

    def invalidate(self) -> None:
        """Declare that main weights have changed: slots hold nothing, and the version is the next.

        Local; every rank has to, between the same calls, for instance after each optimizer step.
        Calls of ranks that differ in this raise PlanMismatchError.

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

    def __repr__(self) -> str:
        return f"Bank({self.index} of group {self._session.name!r})"


class Banks:
    """The banks of a group, by index."""

    def __init__(self, banks: Sequence[Bank], rank: int) -> None:
        self._banks, self._rank = tuple(banks), rank

    def __len__(self) -> int:
        return len(self._banks)

    def __iter__(self) -> Iterator[Bank]:
        return iter(self._banks)

    def __getitem__(self, index: int) -> Bank:
        """Return a bank.

        Raises:
            InvalidArgumentError: there is none of this index.
        """
        number, count = as_int(index, "bank"), len(self._banks)
        if not 0 <= number < count:
            raise InvalidArgumentError(
                f"rank {self._rank}: bank is {number}; expected 0 to {count - 1}: the group was"
                f" created with banks={count}"
            )
        return self._banks[number]

    def find(self, bank: Bank | int) -> Bank:
        """Return one of these banks.

        Raises:
            InvalidArgumentError: there is none of this index, or it is another group's.
        """
        if not isinstance(bank, Bank):
            return self[bank]
        if bank not in self._banks:
            raise InvalidArgumentError(
                f"rank {self._rank}: bank is {bank!r}; expected one of {list(self)}"
            )
        return bank


def core_bank(plan: Plan, session: Session) -> int:
    """Return the core's number of a plan's bank; -1: bank 0, without reuse.

    Raises:
        InvalidPlanError: the group has no such bank.
    """
    if plan.bank >= session.banks:
        raise InvalidPlanError(
            f"rank {session.rank}: the plan is for bank {plan.bank}; expected 0 to"
            f" {session.banks - 1}: the group was created with banks={session.banks}"
        )
    return plan.bank if plan.bank or plan.reuse else -1


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
