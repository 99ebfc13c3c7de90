"""The one place where the benchmark looks into a group's session: addresses, and its device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ultraep_comm.calls.plan import plan_objective
from ultraep_comm.engines.cuda.engine import CudaEngine
from ultraep_comm.engines.cuda.stages import CudaStages
from ultraep_comm.group.group import Group
from ultraep_comm.plan.plan import Plan


def device_stages(group: Group) -> CudaStages:
    """Return what plans and reroutes on a CUDA group's device."""
    stages = group.session.local
    assert isinstance(stages, CudaStages)
    return stages


def plans_at_once(group: Group) -> bool:
    """Return whether counts, exchange and plan are one launch."""
    return bool(group.session.engine.plans_at_once)


def put(group: Group, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor where the group's calls want it."""
    return group.session.local.put(tensor)


def launch_counts(group: Group) -> tuple[int, int]:
    """Return the kernels and copies so far, as one rank has them."""
    engine = group.session.engine
    assert isinstance(engine, CudaEngine)
    shared, own = engine.launch_counts, device_stages(group).launch_counts
    return shared[0] + own[0], shared[1] + own[1]


# ---- memory -------------------------------------------------------------------------------------


def allocate(group: Group, num_bytes: int) -> Any:
    """Return shared memory as large on every rank, allocated like the group's. Collective."""
    return group.session.fabric.allocate(num_bytes)


def all_in_reach(group: Group) -> bool:
    """Return whether this rank reaches all ranks' weights, of `Group.empty_weights`, by address."""
    return all(group.session.memory[1].bases)


def main_segments(group: Group, expert: int, home: int) -> Iterator[tuple[str, int, int]]:
    """Yield name, address here and bytes of an expert's segments in its home's main weights.

    Of groups whose only region of weights is that of `Group.empty_weights`.
    """
    layout, base = group.session.layout, group.session.memory[1].bases[home]
    offsets = zip(layout.region_offset, group.segments.items(), strict=True)
    for offset, (name, segment) in offsets:
        yield name, base + offset + layout.main_idx[expert] * segment.nbytes, segment.nbytes


def slot_grad_address(group: Group, rank: int, slot: int, segment: int, num_bytes: int) -> int:
    """Return where a rank's slot has a segment's gradients, which have so many bytes."""
    session = group.session
    offset = session.layout.grad_offset[segment] + slot * num_bytes
    return session.memory[0].bases[rank] + offset


# ---- calls of all ranks in one process ----------------------------------------------------------
# The calls wait for the launch, which the last rank makes: here all call before the first waits.


def gather_together(groups: Sequence[Group], ids: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Do `gather_load` for all ranks of a loopback group."""
    loads, works = [], []
    for group, own in zip(groups, ids, strict=True):
        load = group.session.local.empty_load()
        epoch = group.session.engine.gather(own, load)
        works.append(group.session.submit(epoch, (own, load), "gather_load"))
        loads.append(load)
    for work in works:
        work.wait()
    return loads


def gather_and_plan_together(
    groups: Sequence[Group], ids: Sequence[torch.Tensor], target: float
) -> list[Plan]:
    """Do `gather_and_plan` for all ranks of a loopback group."""
    plans, works = [], []
    for group, own in zip(groups, ids, strict=True):
        session = group.session
        objective = plan_objective(target, None, group)
        load = session.local.empty_load()
        epoch, plan, keep = session.engine.gather_and_plan(own, load, *objective)
        works.append(session.submit(epoch, keep, "gather_and_plan"))
        plans.append(plan)
    for work in works:
        work.wait()
    return plans
