"""What a transfer of weights and a reduction of gradients have in common."""

from __future__ import annotations

from collections.abc import Collection

import torch

from ultraep_comm import _core
from ultraep_comm.engines.reports import name_call
from ultraep_comm.errors import InvalidArgumentError, UltraEPError, UnsupportedError
from ultraep_comm.group.checks import check_plan
from ultraep_comm.group.saved_plans import PlanHandle
from ultraep_comm.group.session import Session
from ultraep_comm.group.work import Work
from ultraep_comm.plan.plan import Plan
from ultraep_comm.plan.schedule import MODES
from ultraep_comm.weights.binding import BoundGrads
from ultraep_comm.weights.segments import BoundWeights

_NAMES: dict[_core.Mode | None, str] = {mode: name for name, mode in MODES.items()}
_NAMES[None] = "auto"


class Call:
    """A call by a plan, or by the handle of a saved one, on its way to the engine.

    Raises what is wrong with the group or the plan; peers have been told, except of a capture that
    cannot hold the call.

    Attributes:
        plan: where the engine reads it.
        view: the same for the engine.
        on_device: a kernel will read it.
        tag: what ranks compare besides the plan: of the handle; 0: none was given.
    """

    __slots__ = ("_given", "_operation", "_session", "on_device", "plan", "tag", "view")

    def __init__(self, session: Session, given: Plan | PlanHandle, operation: str) -> None:
        self._session, self._given, self.tag = session, given, 0
        if isinstance(given, PlanHandle):
            try:
                plan = session.plans.plan_of(given, operation)
            except UltraEPError as error:
                session.reject(error)
                raise
            self.tag = given.saved.tag
            operation = f"{operation} of layer {given.layer}, microbatch {given.microbatch}"
        else:
            plan = given
        self._operation = operation
        session.enter(operation)
        self.plan, self.on_device = session.local.plan_for_call(plan, operation)
        try:
            self.view = check_plan(self.plan, self.on_device, session)
        except Exception as error:
            self.reject(error)
            raise

    def reject(self, error: Exception) -> None:
        """Tell the peers that this rank's input is bad; say which saved plan's call it was for."""
        if self.tag:
            name_call(error, self._operation)
        self._session.reject(error)

    def submit(
        self,
        call: _core.TransferCall,
        bound: BoundWeights | BoundGrads,
        expert_bytes: int,
        async_op: bool,
        *,
        spends: bool = False,
    ) -> Work | None:
        """Give the call to the engine.

        Args:
            call: what the engine takes.
            bound: what it moves, to be kept until it has finished.
            expert_bytes: that it moves for each replica.
            async_op: return a handle at once; else wait.
            spends: the call is a handle's last use.
        """
        session, given, plan = self._session, self._given, self.plan
        try:
            epoch, mode = session.engine.transfer(call)
            work = session.submit(
                epoch,
                (bound, plan),
                self._operation,
                _NAMES[mode],
                None if self.on_device else plan,
                self.tag,
                expert_bytes,
            )
            if spends and isinstance(given, PlanHandle):
                session.plans.spend(given.saved, on_device=self.on_device)
            if not async_op:
                work.wait()
        except BaseException as error:
            session.broke_off(error)
            raise
        return work if async_op else None


def plan_of(given: Plan | PlanHandle, operation: str, session: Session) -> Plan:
    """Return a plan, or that of a handle.

    Raises:
        PlanHandleError: a handle that cannot be used.
        UnsupportedError: a handle of outside in a capture, or any in a compiled function.
    """
    if not isinstance(given, PlanHandle):
        return given
    if torch.compiler.is_dynamo_compiling():
        raise UnsupportedError(
            f"{operation} was given a PlanHandle in a compiled function, which cannot see"
            " whether it has ended; give the plan, whose tensors autograd saves"
        )
    return session.plans.plan_of(given, operation)


def find_mode(mode: str, modes: Collection[str], rank: int) -> _core.Mode | None:
    """Return what an engine takes for a mode; InvalidArgumentError: it is none of ``modes``."""
    if mode == "auto":
        return None
    if mode not in modes:
        raise InvalidArgumentError(
            f"rank {rank}: mode is {mode!r}; expected 'auto' or one of {list(modes)}"
        )
    return MODES[mode]


def address(tensor: torch.Tensor | None) -> int:
    """Return where a tensor is; 0: there is none."""
    return 0 if tensor is None else tensor.data_ptr()
