"""EPLB's physical rows as a group's experts: row ``i`` has its home on rank ``i // L``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

import ultraep_comm as uec
from ultraep_comm.errors import InvalidPlanError, UnsupportedError
from ultraep_comm.group.layers import group_for


def by_name(tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a layer's tensors as the segments of :func:`group_of_rows`."""
    return {f"tensor {i}": tensor for i, tensor in enumerate(tensors)}


def group_of_rows(process_group: dist.ProcessGroup, tensors: Sequence[torch.Tensor]) -> uec.Group:
    """Return the group of all layers and models with such tensors, ``[L, ...]`` each; L slots."""
    rows = len(tensors[0])
    return group_for(
        process_group,
        like=by_name(tensors),
        slots_per_rank=rows,
        num_experts=process_group.size() * rows,
        allow_cross_domain=True,
        device=tensors[0].device,
    ).group


def plan_of(sources: Any, group: uec.Group) -> uec.Plan:
    """Return the plan that brings rows ``sources``, int ``[G, L]``, into slots; -1: none."""
    return uec.Plan.from_slots(
        torch.as_tensor(sources, dtype=torch.int32, device="cpu"),
        num_experts=group.num_ranks * group.topology.slots_per_rank,
        domains=group.topology.domain,
        allow_cross_domain=True,
    )


def plan_update(
    old: Sequence[int], new: Sequence[int], rows: int, domains: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Return, for the G * L physical rows, the row that each slot gets, and each row's slot.

    A rank gets an expert once: from itself, else its domain, else the rank that gives least.

    Args:
        old: the expert in every row.
        new: the expert that is to be there.
        rows: L.
        domains: of the ranks.

    Raises:
        InvalidPlanError: an expert is nowhere.
    """
    holders: dict[int, list[int]] = {}
    for row, expert in enumerate(old):
        holders.setdefault(expert, []).append(row)
    sources, fills, given = [-1] * len(new), [-1] * len(new), [0] * len(domains)
    slots: dict[tuple[int, int], int] = {}  # rank and expert
    for row, expert in enumerate(new):
        rank = row // rows
        if old[row] == expert:
            continue
        if expert not in holders:
            raise InvalidPlanError(f"EPLB puts expert {expert} into row {row}, and no row has it")
        if (rank, expert) not in slots:
            costs = [
                (r // rows != rank, domains[r // rows] != domains[rank], given[r // rows], r)
                for r in holders[expert]
            ]
            sources[row] = min(costs)[-1]
            given[sources[row] // rows] += 1
            slots[rank, expert] = row % rows
        fills[row] = slots[rank, expert]
    return sources, fills


def find_problem(layers: Sequence[Sequence[torch.Tensor]]) -> str:
    """Return why experts of these layers cannot travel: one has no dense rows, or other shapes."""
    for number, layer in enumerate(layers):
        for i, tensor in enumerate(layer):
            what = f"has a tensor {i} of layer {number} with shape {tuple(tensor.shape)}"
            if tensor.dim() == 0 or tensor.shape[0] != layers[0][0].shape[0]:
                return f"{what}, without one row for each expert"
            if tensor.shape[0] > 1 and tensor.stride(0) < tensor[0].numel():
                return f"{what}, whose rows share memory"
        kinds = [[(t.shape, t.stride(), t.dtype, t.device) for t in w] for w in (layer, layers[0])]
        if kinds[0] != kinds[1]:
            return f"has layer {number} with tensors {kinds[0]}, and layer 0 with {kinds[1]}"
    return ""


def raise_problems(problems: Sequence[str], variable: str, remedy: str) -> None:
    """Raise UnsupportedError if a rank, of all that were asked, has found a problem."""
    for rank, problem in enumerate(problems):
        if problem:
            raise UnsupportedError(
                f"{variable}=eplb: expert-parallel rank {rank} {problem}; {remedy}"
            )
