"""gather_load and gather_and_plan: count routed tokens, exchange the counts, plan."""

from __future__ import annotations

import torch

from ultraep_comm.calls import traced
from ultraep_comm.calls.plan import plan_objective, plan_replicas
from ultraep_comm.engines.base import REJECTED_ROW, LoadExchange, check_rows
from ultraep_comm.errors import UltraEPError
from ultraep_comm.group.checks import check_ids
from ultraep_comm.group.group import Group
from ultraep_comm.group.session import Session
from ultraep_comm.plan.plan import Plan, PlanCost


def gather_load(topk_ids: torch.Tensor, *, group: Group) -> torch.Tensor:
    """Count this rank's routed tokens and exchange the counts. Collective.

    Args:
        topk_ids: int32 or int64 ``[T, k]``, logical expert ids; -1 is padding. On the CPU, or on
            the device of a CUDA group: then the call is enqueued on the current stream without
            synchronisation, and can be captured into a CUDA graph. (Except in a group whose domains
            cannot reach each other: there the process group exchanges loads through the CPU.)
        group: the group.

    Returns:
        int32 ``[G, E]``, on the device of ``topk_ids``: tokens of each source rank per expert.

    Raises:
        InvalidLoadError: wrong dtype, device or an id out of range. A bad id on the device gives a
            load of zeros, and the next call raises the error.
        UnsupportedError: the current stream is being captured, and ``topk_ids`` is on the CPU.
        TransferError: the exchange failed; this too may surface in the next call.
    """
    if torch.compiler.is_dynamo_compiling():
        return traced.gather_load(topk_ids, group)
    session = group.session
    local = session.local
    session.enter("gather_load")
    if session.loads is not None:
        return _exchange(topk_ids, session, session.loads)
    try:
        check_ids(topk_ids, session)
        counted, load = local.count(topk_ids), local.empty_load()
    except Exception as error:
        session.reject(error)
        raise
    try:
        epoch = session.engine.gather(counted, load)
        work = session.submit(epoch, (counted, load), "gather_load")
        if local.holds(load) == local.holds(topk_ids):
            work.wait()
            return load
        work.synchronize()
    except BaseException as error:
        session.note_failure(error)
        raise
    return torch.empty(load.shape, dtype=torch.int32, device=topk_ids.device).copy_(load)


def gather_and_plan(
    topk_ids: torch.Tensor, *, group: Group, target: float = 1.01, cost: PlanCost | None = None
) -> Plan:
    """Do :func:`gather_load`, then :func:`plan_replicas`. Collective.

    With ids on the device of a CUDA group, one kernel launch does both; two launches if the group
    is too large for that or has ranks without load/store access to each other.

    Args:
        topk_ids: as for :func:`gather_load`.
        group: the group.
        target: as for :func:`plan_replicas`; the same on every rank, as is ``cost``.
        cost: as for :func:`plan_replicas`.

    Returns:
        The plan, on the device of ``topk_ids``; its ``load`` is that of :func:`gather_load`.

    Raises:
        InvalidArgumentError, InvalidLoadError, UnsupportedError, TransferError: as those two.
    """
    if torch.compiler.is_dynamo_compiling() or not _plans_at_once(topk_ids, group.session):
        load = gather_load(topk_ids, group=group)
        return plan_replicas(load, group=group, target=target, cost=cost)
    session = group.session
    local = session.local
    session.enter("gather_and_plan")
    try:
        objective = plan_objective(target, cost, group)
        check_ids(topk_ids, session)
        counted, load = local.count(topk_ids), local.empty_load()
    except Exception as error:
        session.reject(error)
        raise
    try:
        epoch, plan, keep = session.engine.gather_and_plan(counted, load, *objective)
        session.submit(epoch, keep, "gather_and_plan").wait()
    except BaseException as error:
        session.note_failure(error)
        raise
    return plan


def _plans_at_once(topk_ids: torch.Tensor, session: Session) -> bool:
    return session.engine.plans_at_once and session.loads is None and session.local.holds(topk_ids)


def _exchange(topk_ids: torch.Tensor, session: Session, loads: LoadExchange) -> torch.Tensor:
    """Exchange loads outside the engine; a rank with bad ids sends a row of REJECTED_ROW."""
    rejected: Exception | None = None
    local, what = session.local, "topk_ids, in a group whose domains cannot reach each other,"
    ids = local.on_host(topk_ids, what) if local.holds(topk_ids) else topk_ids
    try:
        check_ids(ids, session)
        counts = local.count_on_host(ids)
    except Exception as error:
        counts = torch.full(
            (session.topology.num_experts,), REJECTED_ROW, dtype=torch.int32, device="cpu"
        )
        rejected = error
    try:
        table = loads.exchange(counts)
        if rejected is None:
            check_rows(table, session.rank, session.engine.epoch)
    except UltraEPError as error:
        session.fail(rejected or error)
        raise (rejected or error) from (error if rejected is not None else error.__cause__)
    if rejected is not None:
        session.reject(rejected)
        raise rejected
    return local.beside(table, topk_ids)
