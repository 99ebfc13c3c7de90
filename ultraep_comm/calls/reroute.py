"""reroute, reroute_map: the local stage from routed experts to physical instances."""

from __future__ import annotations

import torch

from ultraep_comm.calls import traced
from ultraep_comm.calls.transfer import plan_of
from ultraep_comm.engines.base import Form
from ultraep_comm.errors import InvalidLoadError
from ultraep_comm.group.checks import (
    check_rerouted,
    check_routing,
    check_source,
    without_padding,
)
from ultraep_comm.group.group import Group, session_of
from ultraep_comm.group.saved_plans import PlanHandle
from ultraep_comm.group.session import Session
from ultraep_comm.plan.plan import Plan


def reroute(
    topk_ids: torch.Tensor,
    plan: Plan | PlanHandle,
    *,
    group: Group,
    num_tokens: int | torch.Tensor | None = None,
    source: int | None = None,
) -> torch.Tensor:
    """Map routed experts to physical instances, so that each receives its quota. Local.

    Token j of an expert, in row-major order, goes to the first instance, by rank, whose cumulative
    share of this rank's tokens exceeds j. So if a row names an expert twice, two instances may get
    that token.

    With ids and plan on the device of a CUDA group, this is one launch on the current stream: the
    host does not wait, and the call can be captured into a CUDA graph. If such ids or plans have
    bad values, the ids concerned become padding, and a later call on the group, or
    ``group.close()``, raises the error.

    Args:
        topk_ids: int32 or int64 ``[T, k]``: the ids that were counted for ``plan.load``; -1 is
            padding and stays -1. On the CPU, or on the device of a CUDA group.
        plan: a plan or the handle of a saved one, with quotas and ``[G, E]`` load, on the CPU or on
            the device. If only one of plan and ids is on the CPU, the other is copied there, and
            the result back to the ids' device, which synchronises.
        group: the group.
        num_tokens: as it was given to :func:`gather_load`; rows from this one on become padding.
        source: the rank whose tokens they are; None: this one.

    Returns:
        Physical ids ``rank * P + index`` of the same shape, dtype and device, with P the largest
        number of main instances on a rank plus S; a rank's M main instances come first, in expert
        order, and its slot s has index M + s. Indices from M + S on, on ranks with fewer main
        instances than others, are unused. Every id stays in its place, so weights ``[T, k]`` still
        belong to it.

    Raises:
        InvalidPlanError: the plan has no quotas or no ``[G, E]`` load, or its sums do not match.
        InvalidLoadError: wrong dtype or device, an id out of range, or ids that are not those
            counted in ``plan.load``.
        UnsupportedError: a stream is being captured, and a copy is needed, or the working memory
            has to grow (the text names the call to make once before the capture), or the handle's
            save was not captured.
        PlanHandleError: the handle has ended, or is another group's.
        DeviceError: the CUDA driver refused a launch.
    """
    session = session_of(group)
    plan = plan_of(plan, "reroute", session)
    ids = _without_padding(topk_ids, "topk_ids", num_tokens, session)
    if torch.compiler.is_dynamo_compiling():
        return traced.reroute(ids, plan, group, source)
    rank = check_source(source, session)
    return session.engine.reroute(ids, _to_device_of(ids, plan, session), rank)


def reroute_map(
    routing_map: torch.Tensor,
    probs: torch.Tensor | None,
    plan: Plan | PlanHandle,
    *,
    group: Group,
    num_tokens: int | torch.Tensor | None = None,
    source: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Do :func:`reroute` for a routing map and its probabilities. Local.

    The result is that of :func:`reroute` for the list of the map's experts, token by token, in
    ascending order within a token.

    Args:
        routing_map: bool ``[T, E]``, True where a token goes to an expert: as many per expert as
            were counted for ``plan.load``. On the CPU, or on the device of a CUDA group.
        probs: ``[T, E]`` of any floating dtype, on the map's device; None: there are none.
        plan: a plan or a handle, with quotas and ``[G, E]`` load. Devices, launches, capture and
            late errors are as for :func:`reroute`.
        group: the group.
        num_tokens: as for :func:`reroute`.
        source: likewise.

    Returns:
        ``(routing_map, probs)``, both ``[T, G * P]``, with the ids of :func:`reroute` as columns;
        columns without an instance are False and 0. Probabilities of routed tokens are moved bit
        for bit, the others dropped. ``probs`` has the dtype of the input, and gradients flow back
        through it, unless it is an 8-bit float; None if there were none.

    Raises:
        InvalidPlanError: the plan has no quotas or no ``[G, E]`` load, or its sums do not match.
        InvalidLoadError: wrong shape, dtype or device, or a map that is not the one counted in
            ``plan.load``.
        PlanHandleError, UnsupportedError, DeviceError: as :func:`reroute`.
    """
    session = session_of(group)
    plan = plan_of(plan, "reroute_map", session)
    routing_map = _without_padding(routing_map, "routing_map", num_tokens, session)
    if torch.compiler.is_dynamo_compiling():
        return traced.reroute_map(routing_map, probs, plan, group, source)
    if probs is not None:
        _check_probs(probs, routing_map, session.rank)
    plan = _to_device_of(routing_map, plan, session)
    return session.engine.reroute_map(routing_map, probs, plan, check_source(source, session))


def reroute_gradient(
    grad: torch.Tensor,
    routing_map: torch.Tensor,
    plan: Plan,
    *,
    group: Group,
    source: int | None = None,
) -> torch.Tensor:
    """Return the gradient ``[T, E]`` of ``probs``, given that of the result, ``[T, G * P]``."""
    session = session_of(group)
    plan = _to_device_of(routing_map, plan, session)
    return session.engine.reroute_gradient(grad, routing_map, plan, check_source(source, session))


def _without_padding(
    routing: torch.Tensor, form: Form, num_tokens: int | torch.Tensor | None, session: Session
) -> torch.Tensor:
    if not torch.compiler.is_dynamo_compiling():
        check_routing(routing, form, session)
    return without_padding(routing, num_tokens, session)


def _to_device_of(routing: torch.Tensor, plan: Plan, session: Session) -> Plan:
    """Check the plan and return it on the device if ``routing`` is there too, else on the CPU.

    Raises the faults of earlier launches first.
    """
    session.raise_fault()
    engine = session.engine
    on_device = engine.is_on_device(routing) and engine.is_on_device(plan)
    if not on_device:
        plan = engine.to_host(plan, "the plan")
    check_rerouted(plan, on_device, session)
    return plan


def _check_probs(probs: torch.Tensor, routing_map: torch.Tensor, rank: int) -> None:
    if not isinstance(probs, torch.Tensor):
        raise InvalidLoadError(
            f"rank {rank}: probs is a {type(probs).__name__}; expected a tensor [T, E] or None"
        )
    if probs.shape != routing_map.shape:
        raise InvalidLoadError(
            f"rank {rank}: probs has shape {tuple(probs.shape)}; expected that of routing_map,"
            f" {tuple(routing_map.shape)}"
        )
    if not probs.is_floating_point() or probs.device != routing_map.device:
        raise InvalidLoadError(
            f"rank {rank}: probs is {probs.dtype} on {probs.device}; expected a floating dtype on"
            f" {routing_map.device}, like routing_map"
        )
