"""SGLang's EPLB: moves a layer's experts to where a new map has them."""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

import ultraep_comm as uec
from ultraep_comm.adapters import checks, rows
from ultraep_comm.errors import PlanMismatchError

_LOGGER = logging.getLogger("ultraep_comm")


def make_buffers(original: Callable[..., Any], sample_tensors: Any) -> Any:
    """Return no buffers where a group's slots take their place."""
    return [] if dist.get_world_size() > 1 else original(sample_tensors)


def update(
    original: Callable[..., Any], get_elastic: Callable[[], Any], *args: Any, **given: Any
) -> list[str] | None:
    """Bring a layer's experts where the new map has them. Collective over WORLD.

    Takes the arguments of ``original``, SGLang's ``update_expert_weights_single_layer``.

    Returns:
        With ``debug`` a line for each row of this rank that has changed.

    Raises:
        UnsupportedError: elastic expert parallelism, ranks that are not WORLD's, or tensors
            without one dense row for each expert; on every rank, as the next two.
        PlanMismatchError: ranks have different maps.
        InvalidPlanError: the new map has an expert that no rank has.
        TransferError: the transfer failed.
    """
    world = dist.group.WORLD
    assert world is not None
    if checks.is_alone(world, "SGLang", "--ep-size above 1"):
        result: list[str] | None = original(*args, **given)
        return result
    bound = inspect.signature(original).bind(*args, **given)
    bound.apply_defaults()
    call = SimpleNamespace(**bound.arguments)
    tensors, count = call.routed_experts_weights, call.num_local_physical_experts
    old, new = call.old_physical_to_logical_map, call.new_physical_to_logical_map
    digest = hashlib.sha256(json.dumps([old, new]).encode()).hexdigest()
    every = checks.gather_json(world, (digest, _find_problem(call, get_elastic() is not None)))
    rank = world.rank()
    problems = [problem for _, problem in every]
    remedy = "unset ULTRAEP_SGLANG, and SGLang moves experts itself"
    rows.raise_problems(problems, "ULTRAEP_SGLANG", remedy)
    for other, (found, _) in enumerate(every):
        if found != every[0][0]:
            raise PlanMismatchError(
                f"rank {rank}: EPLB of rank {other} has other maps of experts than rank 0's;"
                " nothing was moved",
                rank=rank,
                peer=other,
            )
    group = rows.group_of_rows(world, tensors)
    sources, fills = rows.plan_update(old, new, count, group.topology.domain.tolist())
    by_rank = torch.tensor(sources, dtype=torch.int32, device="cpu").view(-1, count)
    own = torch.arange(len(by_rank), device="cpu")[:, None]
    plan = rows.plan_of(by_rank.masked_fill(by_rank // count == own, -1), group)
    pairs = [(t, group.slots[name]) for name, t in rows.by_name(tensors).items()]
    for slot, source in enumerate(by_rank[rank].tolist()):
        for tensor, slots in pairs if source // count == rank else ():
            slots[slot].copy_(tensor[source % count])
    if plan.num_replicas:
        uec.replicate_experts(rows.by_name(tensors), plan, group=group)
    changed = [(i, s) for i, s in enumerate(fills[rank * count :][:count]) if s >= 0]
    for row, slot in changed:
        for tensor, slots in pairs:
            tensor[row].copy_(slots[slot])
    if call.log_metrics:
        received = int((plan.slot_expert[rank] >= 0).sum())
        nbytes = received * sum(tensor[0].nbytes for tensor in tensors)
        _LOGGER.info("SGLang's EPLB: %d experts received, %d bytes", received, nbytes)
    first = rank * count
    lines = [f"row {first + r}: from row {sources[first + s]}" for r, s in changed]
    return lines if call.debug else None


def _find_problem(call: Any, is_elastic: bool) -> str:
    """Return why an update cannot be made; nothing: an empty text."""
    if is_elastic:
        return "has elastic expert parallelism, whose ranks change"
    if call.rank != dist.get_rank():
        return f"is rank {dist.get_rank()} of WORLD, and {call.rank} of SGLang's EPLB"
    count, tensors = call.num_local_physical_experts, call.routed_experts_weights
    expected = dist.get_world_size() * count
    for found in (call.old_physical_to_logical_map, call.new_physical_to_logical_map):
        if len(found) != expected:
            return f"has a map of {len(found)} rows; expected {expected}"
    if not tensors or any(t.dim() == 0 or len(t) != count for t in tensors):
        shapes = [tuple(t.shape) for t in tensors]
        return f"has tensors of shapes {shapes}, not with {count} rows each"
    return rows.find_problem([tensors])
