"""Checks of arguments against the group. The kernels check values that are on a device."""

from __future__ import annotations

import torch

from ultraep_comm import _core
from ultraep_comm.engines.base import Form
from ultraep_comm.engines.reports import other_home, placement_error
from ultraep_comm.errors import InvalidArgumentError, InvalidLoadError, InvalidPlanError
from ultraep_comm.group.session import Session
from ultraep_comm.plan.certificate import verify_plan
from ultraep_comm.plan.plan import Plan
from ultraep_comm.plan.topology import as_int


def check_plan(plan: Plan, on_device: bool, session: Session) -> _core.PlanView:
    """Check a plan for a call and return its view; on a device, check only shape and devices.

    Raises:
        InvalidPlanError: wrong shape, home map, expert, or placement; in check mode also quotas
            that break a rule, or do not sum to the load.
    """
    config = session.engine.config
    if not on_device and isinstance(plan, Plan):
        view = view_of(plan)
        if config.accepts(view):  # fast path: the rest finds the error
            if session.options.check:
                _verify(plan, session)
            return view
    view = check_fits(plan, on_device, session)
    if on_device:
        return view
    fault, rank, slot, expert = config.check_plan(view)
    if fault is not _core.PlanFault.NONE:
        raise placement_error(session.rank, fault, (rank, slot), expert, plan.num_experts)
    return view


def _verify(plan: Plan, session: Session) -> None:
    """Do :func:`verify_plan`, as far as the plan has quotas and a load."""
    crossing = session.topology.allow_cross_domain
    try:
        if plan.load is None or plan.home_quota is None:
            plan.validate(allow_cross_domain=crossing)
        else:
            verify_plan(plan, plan.load, allow_cross_domain=crossing)
    except InvalidArgumentError as error:
        raise InvalidPlanError(f"rank {session.rank}: check mode: {error}") from None


def view_of(plan: Plan) -> _core.PlanView:
    """Return the addresses and the shape of a plan's tensors."""
    slots, home = plan.slot_expert, plan.home
    slot_quota, home_quota = plan.slot_quota, plan.home_quota
    num_ranks, slots_per_rank = slots.shape
    return _core.PlanView(
        slots.data_ptr(),
        0 if slot_quota is None else slot_quota.data_ptr(),
        0 if home_quota is None else home_quota.data_ptr(),
        home.data_ptr(),
        num_ranks,
        slots_per_rank,
        home.shape[0],
        slots.is_cpu and home.is_cpu,
    )


_INTEGERS = (torch.int32, torch.int64)


def check_routing(routing: torch.Tensor, form: Form, session: Session) -> None:
    """Raise InvalidLoadError for a routing of the wrong shape, dtype or device."""
    rank, devices = session.rank, (torch.device("cpu"), session.device)
    num_experts = session.topology.num_experts
    shape = {
        "topk_ids": "[T, k]",
        "routing_map": f"[T, {num_experts}]",
        "counts": f"[{num_experts}]",
    }
    if not isinstance(routing, torch.Tensor):
        raise InvalidLoadError(
            f"rank {rank}: {form} is a {type(routing).__name__}; expected a tensor {shape[form]}"
        )
    wide = form == "topk_ids" or routing.shape[-1:] == (num_experts,)
    if routing.dim() != (1 if form == "counts" else 2) or not wide:
        hint = "; tokens of each expert are given as counts=" if form == "topk_ids" else ""
        raise InvalidLoadError(
            f"rank {rank}: {form} has shape {tuple(routing.shape)}; expected {shape[form]}{hint}"
        )
    dtypes = (torch.bool,) if form == "routing_map" else _INTEGERS
    if routing.dtype not in dtypes or routing.device not in devices:
        expected = " or ".join(dict.fromkeys(map(str, devices)))
        cast = "bool" if form == "routing_map" else "long"
        hint = "" if routing.dtype in dtypes else f"; pass {form}.{cast}()"
        raise InvalidLoadError(
            f"rank {rank}: {form} is {routing.dtype} on {routing.device}; expected"
            f" {' or '.join(str(d).removeprefix('torch.') for d in dtypes)} on {expected}{hint}"
        )


def check_source(source: int | None, session: Session) -> int:
    """Return the rank whose tokens are meant; None: this one.

    Raises:
        InvalidArgumentError: there is no such rank.
    """
    if source is None:
        return session.rank
    number = as_int(source, "source")
    if not 0 <= number < session.topology.num_ranks:
        raise InvalidArgumentError(
            f"rank {session.rank}: source is {number}; expected a rank of the group, 0 to"
            f" {session.topology.num_ranks - 1}"
        )
    return number


def without_padding(
    routing: torch.Tensor, num_tokens: int | torch.Tensor | None, session: Session
) -> torch.Tensor:
    """Return ids or a map whose rows from ``num_tokens`` on are routed nowhere.

    A number on a device is not read: numbers out of range there mean the nearest in it.

    Raises:
        InvalidLoadError: it is no integer, is elsewhere than the routing, or out of range.
    """
    if num_tokens is None:
        return routing
    rows = routing.shape[0]
    what = f"rank {session.rank}: num_tokens"
    if isinstance(num_tokens, torch.Tensor):
        if num_tokens.dtype not in _INTEGERS or num_tokens.numel() != 1:
            raise InvalidLoadError(
                f"{what} is {num_tokens.dtype} of shape {tuple(num_tokens.shape)}; expected one"
                " int32 or int64"
            )
        if num_tokens.device not in (torch.device("cpu"), routing.device):
            raise InvalidLoadError(
                f"{what} is on {num_tokens.device}; expected {routing.device}, like the routing"
            )
    compiling = torch.compiler.is_dynamo_compiling()  # which would read it to compile for it
    if not isinstance(num_tokens, torch.Tensor) or (num_tokens.is_cpu and not compiling):
        number = as_int(num_tokens, "num_tokens")
        if not 0 <= number <= rows:
            raise InvalidLoadError(f"{what} is {number}; expected 0 to {rows}, the rows given")
        if number == rows:
            return routing
    at = torch.arange(rows, device=routing.device)
    padding = (at >= num_tokens)[:, None]
    return routing.masked_fill(padding, False if routing.dtype == torch.bool else -1)


def check_fits(plan: Plan, on_device: bool, session: Session) -> _core.PlanView:
    """Return the view of a plan of the group's shape; the kernels check a device plan's values.

    Raises:
        InvalidPlanError: it has another shape or home map than the group, or tensors elsewhere.
    """
    if not isinstance(plan, Plan):
        raise InvalidPlanError(
            f"rank {session.rank}: plan is a {type(plan).__name__}; expected a Plan, for instance"
            " from Plan.from_slots"
        )
    view, t = view_of(plan), session.topology
    if not session.engine.config.has_shape(view):
        raise InvalidPlanError(
            f"rank {session.rank}: the plan is for {plan.num_ranks} ranks, {plan.slots_per_rank}"
            f" slots and {plan.num_experts} experts; expected {t.num_ranks}, {t.slots_per_rank} and"
            f" {t.num_experts}"
        )
    if on_device:
        index = plan.slot_expert.get_device()  # an integer: comparing devices takes microseconds
        for name, tensor in plan.tensors().items():
            if tensor.get_device() != index:
                raise InvalidPlanError(
                    f"rank {session.rank}: the plan's {name} is on {tensor.device}; expected"
                    f" {plan.slot_expert.device}, like its slot_expert"
                )
    elif not session.engine.config.fits(view):
        for tensor in (plan.slot_expert, plan.home):
            if not tensor.is_cpu:
                raise InvalidPlanError(
                    f"rank {session.rank}: the plan is on {tensor.device}; expected cpu"
                )
        raise other_home(session.rank)
    return view


def check_rerouted(plan: Plan, on_device: bool, session: Session) -> None:
    """Raise InvalidPlanError unless the plan fits the group and has quotas and a [G, E] load."""
    check_fits(plan, on_device, session)
    if plan.slot_quota is None or plan.home_quota is None or plan.load is None:
        raise InvalidPlanError(
            f"rank {session.rank}: a plan without quotas or [G, E] load cannot be rerouted; plan"
            " from gather_load's result, or give Plan.from_slots its quotas and load"
        )
