"""All accesses of the benchmark to a group's session: addresses and engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ultraep_comm.calls.plan import plan_objective
from ultraep_comm.engines.cuda.engine import CudaEngine
from ultraep_comm.engines.cuda.stages import CudaStages
from ultraep_comm.group.group import Group, session_of
from ultraep_comm.group.work import Work
from ultraep_comm.plan.plan import Plan


def device_stages(group: Group) -> CudaStages:
    """Return the stages of a CUDA group."""
    engine = session_of(group).engine
    assert isinstance(engine, CudaStages)
    return engine


def plans_at_once(group: Group) -> bool:
    """Return whether `gather_and_plan` is one launch."""
    engine = session_of(group).engine
    return isinstance(engine, CudaEngine) and engine.plans_at_once


def put(group: Group, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the group's device."""
    engine = session_of(group).engine
    return engine.to_device(tensor) if isinstance(engine, CudaStages) else tensor


def launch_counts(group: Group) -> tuple[int, int]:
    """Return the numbers of kernels and copies that one rank has enqueued so far."""
    engine = session_of(group).engine
    assert isinstance(engine, CudaEngine)
    return engine.launch_counts


# ---- memory -------------------------------------------------------------------------------------


def allocate(group: Group, num_bytes: int) -> Any:
    """Allocate symmetric memory like the group's own. Collective."""
    return session_of(group).engine.fabric.allocate(num_bytes)


def all_in_reach(group: Group) -> bool:
    """Return whether this rank can address the main weights of all ranks."""
    return all(session_of(group).engine.memory[1].bases)


def main_segments(group: Group, expert: int, home: int) -> Iterator[tuple[str, int, int]]:
    """Yield ``(name, address on this rank, bytes)`` of the segments of an expert's main instance.

    Only for groups with a single region of weights, from one `Group.empty_weights`.
    """
    layout, base = session_of(group).engine.layout, session_of(group).engine.memory[1].bases[home]
    offsets = zip(layout.region_offset, group.segments.items(), strict=True)
    for offset, (name, segment) in offsets:
        yield name, base + offset + layout.local_idx[expert] * segment.nbytes, segment.nbytes


def slot_grad_address(group: Group, rank: int, slot: int, segment: int, num_bytes: int) -> int:
    """Return the address of a segment's gradients, of ``num_bytes``, in a slot of a rank."""
    session = session_of(group)
    offset = session.engine.layout.grad_offset[segment] + slot * num_bytes
    return session.engine.memory[0].bases[rank] + offset


# ---- calls of all ranks in one process ----------------------------------------------------------
# The last rank to call launches for all. So all ranks submit before the first one waits.


def gather_together(
    groups: Sequence[Group], ids: Sequence[torch.Tensor], target: float | None = None
) -> tuple[list[torch.Tensor], list[Plan]]:
    """Do `gather_load` for all ranks of a loopback group, or with a target `gather_and_plan`."""
    name = "gather_load" if target is None else "gather_and_plan"
    loads, plans, works = [], [], []
    for group, own in zip(groups, ids, strict=True):
        session = session_of(group)
        objective = None if target is None else plan_objective(target, None, group)
        counted = session.engine.count(own, "topk_ids", for_gather=True)
        load = session.engine.empty((group.num_ranks, group.topology.num_experts))
        epoch, plan = session.engine.gather(counted, load, objective)
        session.add_call(epoch, (own, counted, load, plan), name)
        works.append(Work(session, epoch, name, mode=""))
        loads.append(load)
        plans += [] if plan is None else [plan]
    for work in works:
        work.wait()
    return loads, plans
