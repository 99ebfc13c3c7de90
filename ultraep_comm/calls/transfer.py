"""Call: the common path of a transfer of weights and a reduction of gradients."""

from __future__ import annotations

from collections.abc import Collection

import torch

from ultraep_comm import _core
from ultraep_comm.engines.reports import name_call
from ultraep_comm.errors import InvalidArgumentError, UltraEPError, UnsupportedError
from ultraep_comm.group.bank import check_bank
from ultraep_comm.group.checks import check_plan, view_of
from ultraep_comm.group.saved_plans import PlanHandle
from ultraep_comm.group.session import Session
from ultraep_comm.group.work import Work
from ultraep_comm.plan.plan import Plan
from ultraep_comm.plan.schedule import MODES
from ultraep_comm.weights.binding import Binding

_NAMES: dict[_core.Mode | None, str] = {mode: name for name, mode in MODES.items()}
_NAMES[None] = "auto"


class Call:
    """A call with a plan or a handle, from the checks to the engine.

    The constructor checks group and plan, and tells the peers before it raises, unless a CUDA graph
    being captured cannot hold the call.

    Attributes:
        plan: the plan as the engine reads it.
        view: its addresses and shape.
        on_device: a kernel reads it.
        tag: layer and microbatch, which ranks compare besides the plan; 0: neither was given.
        bank: the core's number of the plan's bank; -1: bank 0, without reuse.
        filled: the plan's slot_expert on the CPU, if it is known there.
    """

    __slots__ = (
        "_given",
        "_on_host",
        "_operation",
        "_session",
        "bank",
        "filled",
        "on_device",
        "plan",
        "tag",
        "view",
    )

    def __init__(
        self,
        session: Session,
        given: Plan | PlanHandle,
        operation: str,
        layer: int | None = None,
    ) -> None:
        self._session, self._given, self.tag = session, given, 0
        try:
            if isinstance(given, PlanHandle):
                plan, self.tag = _open(given, operation, layer, session), given.tag
                operation = f"{operation} of layer {given.layer}, microbatch {given.microbatch}"
            else:
                plan = given
                if layer is not None:
                    self.tag = session.plans.tag(layer, operation)
                    operation = f"{operation} of layer {layer}"
        except UltraEPError as error:
            session.reject(error)
            raise
        self._operation = operation
        session.enter(operation)
        self.plan, self.on_device = session.engine.plan_for_call(plan, operation)
        try:
            self.view = check_plan(self.plan, self.on_device, session)
            self._on_host = None if self.on_device else self.plan
            self.filled = None if self._on_host is None else self._on_host.slot_expert
            self.bank = -1
            if self.plan.bank or self.plan.reuse:
                self.bank = check_bank(self.plan, session)
                plan, self.on_device = session.engine.plan_for_call(
                    self.plan, operation, in_bank=True
                )
                if plan is not self.plan:  # a copy on the device
                    self.plan, self.view = plan, view_of(plan)
        except Exception as error:
            self.reject(error)
            raise

    def reject(self, error: Exception) -> None:
        """Tell the peers that this rank's input is bad; name the handle's call in the error."""
        if self.tag:
            name_call(error, self._operation)
        self._session.reject(error)

    def submit(
        self,
        call: _core.TransferCall,
        bound: Binding,
        expert_bytes: int,
        async_op: bool,
        *,
        consumes: bool = False,
    ) -> Work | None:
        """Submit the call to the engine, which keeps the tensors of ``bound`` alive.

        ``expert_bytes`` are those that it moves for each replica. ``consumes``: it is a handle's
        last use.
        """
        session, given, plan = self._session, self._given, self.plan
        try:
            epoch, mode = session.engine.transfer(call, bound)
            session.add_call(
                epoch,
                (bound, bound.tensors, plan),  # before an update, too
                self._operation,
                _NAMES[mode],
                self._on_host,
                self.tag,
                expert_bytes,
            )
            filled = None if consumes else self.filled
            work = Work(session, epoch, self._operation, _NAMES[mode], filled)
            if consumes and isinstance(given, PlanHandle):
                session.plans.consume(given, on_device=self.on_device)
            if not async_op:
                work.wait()
        except BaseException as error:
            session.record_failure(error)
            raise
        return work if async_op else None


def _open(handle: PlanHandle, operation: str, layer: int | None, session: Session) -> Plan:
    """Return the plan of a handle that is given to a call of a layer, if that is known."""
    if layer not in (None, handle.layer):
        raise InvalidArgumentError(
            f"rank {session.rank}: {operation} was given layer={layer} and a handle of layer"
            f" {handle.layer}; leave layer= out"
        )
    return session.plans.plan_of(handle, operation)


def plan_of(given: Plan | PlanHandle, operation: str, session: Session) -> Plan:
    """Return the plan itself, or the plan of a handle.

    Raises:
        PlanHandleError: the handle has ended, or is another group's.
        UnsupportedError: a capture is given a handle saved outside of it, or a compiled function is
            given any handle.
    """
    if not isinstance(given, PlanHandle):
        return given
    if torch.compiler.is_dynamo_compiling():
        raise UnsupportedError(
            f"{operation} was given a PlanHandle in a compiled function, which cannot see"
            " whether it has ended; pass the plan, whose tensors autograd saves"
        )
    return session.plans.plan_of(given, operation)


def find_mode(mode: str, modes: Collection[str], rank: int) -> _core.Mode | None:
    """Return the engine's value of a mode; None: "auto".

    Raises:
        InvalidArgumentError: the mode is not one of ``modes``.
    """
    if mode == "auto":
        return None
    if not isinstance(mode, str) or mode not in modes:
        raise InvalidArgumentError(
            f"rank {rank}: mode is {mode!r}; expected 'auto' or one of {list(modes)}"
        )
    return MODES[mode]


def address(tensor: torch.Tensor | None) -> int:
    """Return a tensor's address; None: 0."""
    return 0 if tensor is None else tensor.data_ptr()
