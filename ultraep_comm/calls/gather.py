"""gather_load and gather_and_plan: count routed tokens, exchange the counts, plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from ultraep_comm.calls import traced
from ultraep_comm.calls.plan import plan_objective, plan_replicas
from ultraep_comm.engines.base import (
    REJECTED_ROW,
    Form,
    Objective,
    check_rows,
    count_in_torch,
)
from ultraep_comm.errors import InvalidArgumentError, UltraEPError
from ultraep_comm.group.checks import check_routing, check_source, without_padding
from ultraep_comm.group.group import Group, session_of
from ultraep_comm.group.session import Session
from ultraep_comm.group.work import Work
from ultraep_comm.plan.plan import Plan, PlanCost


def gather_load(
    topk_ids: torch.Tensor | None = None,
    *,
    group: Group,
    routing_map: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    num_tokens: int | torch.Tensor | None = None,
    source: int | None = None,
) -> torch.Tensor:
    """Count this rank's routed tokens and exchange the counts. Collective.

    The routing is given as ids, as a map, or as counts: one of them. It is on the CPU, or on the
    device of a CUDA group: then the call is enqueued on the current stream without synchronisation,
    and can be captured into a CUDA graph. (Except in a group whose domains cannot reach each other:
    there the process group exchanges loads through the CPU.)

    Args:
        topk_ids: int32 or int64 ``[T, k]``, logical expert ids; -1 is padding.
        group: the group.
        routing_map: bool ``[T, E]``, True where a token goes to an expert.
        counts: int32 or int64 ``[E]``, this rank's tokens of each expert.
        num_tokens: the rows from this one on are padding: an integer, or one in a tensor on the
            device of the routing, which the host does not read. None: there is no padding.
        source: a rank, where every rank has the same tokens, as with tensor parallelism: they count
            as this rank's, and nothing is exchanged. Give :func:`reroute` the same. None: every
            rank has its own tokens.

    Returns:
        int32 ``[G, E]``, on the device of the routing: tokens of each source rank per expert.

    Raises:
        InvalidLoadError: wrong shape, dtype or device, a value out of range. A bad value on the
            device gives a load of zeros, and the next call raises the error; with ``source`` the
            next call on the load does.
        InvalidArgumentError: there is no such ``source``, or not one routing.
        UnsupportedError: the current stream is being captured, and the routing is on the CPU.
        TransferError: the exchange failed; this too may surface in the next call.
    """
    session = session_of(group)
    given = (topk_ids, routing_map, counts, num_tokens)
    if torch.compiler.is_dynamo_compiling():
        routing, form = _find_routing(given, session)
        if source is not None:
            return _count_alone(routing, form, source, session)
        return traced.gather_load(routing, form, group)
    return _gather("gather_load", given, session, source)[0]


def gather_and_plan(
    topk_ids: torch.Tensor | None = None,
    *,
    group: Group,
    routing_map: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    num_tokens: int | torch.Tensor | None = None,
    source: int | None = None,
    target: float = 1.01,
    cost: PlanCost | None = None,
) -> Plan:
    """Do :func:`gather_load`, then :func:`plan_replicas`. Collective.

    With a routing on the device of a CUDA group, one kernel launch does both; two launches if the
    group is too large for that or has ranks without load/store access to each other.

    Args:
        topk_ids: as for :func:`gather_load`.
        group: the group.
        routing_map, counts, num_tokens, source: likewise.
        target, cost: as for :func:`plan_replicas`; the same on every rank.

    Returns:
        The plan, on the device of the routing; its ``load`` is that of :func:`gather_load`.

    Raises:
        InvalidArgumentError, InvalidLoadError, UnsupportedError, TransferError: as those two.
    """
    session = session_of(group)
    given = (topk_ids, routing_map, counts, num_tokens)
    if torch.compiler.is_dynamo_compiling():
        tokens: dict[str, Any] = {"counts": counts, "num_tokens": num_tokens, "source": source}
        load = gather_load(topk_ids, group=group, routing_map=routing_map, **tokens)
        return plan_replicas(load, group=group, target=target, cost=cost)
    try:
        objective = plan_objective(target, cost, group)
    except Exception as error:  # of any type: peers must not wait for this rank
        if source is None and session.engine.exchange_counts is not None:
            _exchange(given, session, session.engine.exchange_counts, error)
        session.reject(error)
        raise
    load, plan = _gather("gather_and_plan", given, session, source, objective)
    return plan or plan_replicas(load, group=group, target=target, cost=cost)


_FORMS: tuple[Form, ...] = ("topk_ids", "routing_map", "counts")
_Given: TypeAlias = "tuple[Any, ...]"  # the forms, all but one of them None, and num_tokens


def _find_routing(given: _Given, session: Session) -> tuple[torch.Tensor, Form]:
    """Return the routing that was given, checked and without its padding, and its form."""
    found = [i for i, value in enumerate(given[:-1]) if value is not None]
    if len(found) != 1:
        names = [_FORMS[i] for i in found]
        raise InvalidArgumentError(
            f"rank {session.rank}: the routing was given as {names}; expected one of {list(_FORMS)}"
        )
    form, routing, num_tokens = _FORMS[found[0]], given[found[0]], given[-1]
    if not torch.compiler.is_dynamo_compiling():
        check_routing(routing, form, session)
    if form == "counts" and num_tokens is not None:
        raise InvalidArgumentError(
            f"rank {session.rank}: num_tokens was given with counts, which have no padding; leave"
            " it out"
        )
    return without_padding(routing, num_tokens, session), form


def _gather(
    operation: str,
    given: _Given,
    session: Session,
    source: int | None,
    objective: Objective | None = None,
) -> tuple[torch.Tensor, Plan | None]:
    """Return the load, on the device of the routing, and its plan if one launch made both."""
    engine, t = session.engine, session.topology
    session.enter(operation)
    if engine.exchange_counts is not None and source is None:
        return _exchange(given, session, engine.exchange_counts), None
    try:
        routing, form = _find_routing(given, session)
        if source is not None:
            return _count_alone(routing, form, source, session), None
        counted = engine.count(routing, form, for_gather=True)
        load = engine.empty((t.num_ranks, t.num_experts))
    except Exception as error:
        session.reject(error)
        raise
    on_device = engine.is_on_device(routing)
    try:
        epoch, plan = engine.gather(counted, load, objective if on_device else None)
        made = "gather_load" if plan is None else "gather_and_plan"
        session.add_call(epoch, (counted, load, plan), made)
        work = Work(session, epoch, made, mode="")
        if engine.is_on_device(load) == on_device:
            work.wait()
            return load, plan
        work.synchronize()
    except BaseException as error:
        session.record_failure(error)
        raise
    return torch.empty(load.shape, dtype=torch.int32, device=routing.device).copy_(load), None


def _count_alone(routing: torch.Tensor, form: Form, source: int, session: Session) -> torch.Tensor:
    """Return the load of tokens that every rank has, as those of one rank."""
    row, t, engine = check_source(source, session), session.topology, session.engine
    compiling = torch.compiler.is_dynamo_compiling()
    if compiling:
        counts = routing if form == "counts" else count_in_torch(routing, t.num_experts)
    else:
        counts = engine.count(routing, form)
    if not compiling and engine.is_on_device(routing):
        load = engine.empty((t.num_ranks, t.num_experts)).zero_()
    else:
        load = counts.new_zeros((t.num_ranks, t.num_experts), dtype=torch.int32)
    load[row] = counts
    return load


def _exchange(
    given: _Given,
    session: Session,
    exchange: Callable[[torch.Tensor], torch.Tensor],
    rejected: Exception | None = None,
) -> torch.Tensor:
    """Exchange loads outside the engine; a rank that rejects its input sends REJECTED_ROW."""
    engine, t = session.engine, session.topology
    what = "the routing, in a group whose domains cannot reach each other,"
    on_device = [engine.is_on_device(value) for value in given]
    # Before anything is exchanged: a capture cannot hold the copies.
    moved = zip(given, on_device, strict=True)
    given = tuple(engine.to_host(value, what) if there else value for value, there in moved)
    counts = torch.full((t.num_experts,), REJECTED_ROW, dtype=torch.int32, device="cpu")
    try:
        if rejected is None:
            counts = engine.count(*_find_routing(given, session))
    except Exception as error:
        rejected = error
    try:
        table = exchange(counts)
        if rejected is None:
            check_rows(table, session.rank, engine.epoch)
    except UltraEPError as error:
        session.fail(rejected or error)
        raise (rejected or error) from (error if rejected is not None else error.__cause__)
    if rejected is not None:
        session.reject(rejected)
        raise rejected
    return engine.empty(table.shape).copy_(table) if any(on_device) else table
