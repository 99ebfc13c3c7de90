"""Gradients of replicas come home by plain sends and adds: a baseline for reduce_expert_grads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

import ultraep_comm as uec

Tensors = Mapping[str, torch.Tensor]


@dataclass(kw_only=True)
class Reduction:
    """Sends and receives under way, and what is left to do when they are done."""

    works: list[dist.Work] = field(default_factory=list)
    sums: list[tuple[torch.Tensor, list[torch.Tensor]]] = field(default_factory=list)
    sent: list[torch.Tensor] = field(default_factory=list)
    handle: uec.PlanHandle | None = None

    def wait(self) -> None:
        """Wait, add what came to the main gradients, and zero the slot gradients that were sent.

        Sums are fp32, over replicas in ascending rank order, then added to the main gradient and
        rounded once to its dtype.
        """
        for work in self.works:
            work.wait()
        for main, received in self.sums:
            total = received[0].float()
            for part in received[1:]:
                total = total + part
            main.copy_(main + total)
        for slot in self.sent:
            slot.zero_()
        if self.handle is not None:
            self.handle.release()


def reduce_by_sends(
    grads: Tensors,
    plan: uec.Plan | uec.PlanHandle,
    *,
    group: uec.Group,
    async_op: bool = False,
    process_group: Any = None,
) -> Reduction | None:
    """Do what ``uec.reduce_expert_grads`` does, to the same bits. Collective.

    Every replica sends its gradients to the home, which receives each apart.

    Args:
        grads: ``{name: [M, *shape]}``, this rank's main gradients.
        plan: the same on every rank; or its handle, which this is the last use of.
        group: made with ``grads=``.
        async_op: return a :class:`Reduction` at once; until its ``wait`` has returned, gradients
            are not to be touched.
        process_group: the ranks of ``group``; None: WORLD.
    """
    slot_grads = group.slot_grads
    reduction = Reduction()
    if isinstance(plan, uec.PlanHandle):
        reduction.handle, plan = plan, plan.plan
    operations: list[dist.P2POp] = []

    def add(op: Any, tensor: torch.Tensor, rank: int) -> None:
        peer = rank if process_group is None else dist.get_global_rank(process_group, rank)
        operations.append(dist.P2POp(op, tensor, peer, process_group))

    # Sends of a pair of ranks match its receives in order: by expert on both sides.
    mains = group.topology.mains(group.rank).tolist()
    for expert, ranks in _replicas(plan).items():
        if expert in mains:
            for name, grad in grads.items():
                received = [slot_grads[name].new_empty(grad.shape[1:]) for _ in ranks]
                for tensor, (rank, _) in zip(received, ranks, strict=True):
                    add(dist.irecv, tensor, rank)
                reduction.sums.append((grad[mains.index(expert)], received))
        for rank, slot in ranks:
            if rank == group.rank:
                for name in grads:
                    add(dist.isend, slot_grads[name][slot], int(plan.home[expert]))
                    reduction.sent.append(slot_grads[name][slot])
    if operations:
        reduction.works = dist.batch_isend_irecv(operations)
    if async_op:
        return reduction
    reduction.wait()
    return None


def _replicas(plan: uec.Plan) -> dict[int, list[tuple[int, int]]]:
    """Return ``{expert: [(rank, slot), ...]}``, both in ascending order."""
    found: dict[int, list[tuple[int, int]]] = {}
    for rank, slots in enumerate(plan.slot_expert.tolist()):
        for slot, expert in enumerate(slots):
            if expert >= 0:
                found.setdefault(expert, []).append((rank, slot))
    return dict(sorted(found.items()))
