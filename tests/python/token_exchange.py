"""Tokens to the ranks of their experts, for the tests' layers."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist


class Mesh:
    """One dimension of a device mesh; of this rank alone without a group."""

    def __init__(self, group: Any = None) -> None:
        self._group = group

    def __deepcopy__(self, _memo: Any) -> Mesh:  # as of a DeviceMesh, of the same group
        return Mesh(self._group)

    def size(self) -> int:
        return 1 if self._group is None else dist.get_world_size(self._group)

    def get_group(self) -> Any:
        return self._group

    def get_local_rank(self) -> int:
        return 0 if self._group is None else dist.get_rank(self._group)


class Exchange(torch.autograd.Function):
    """Rows to the ranks and, backward, their gradients the other way."""

    @staticmethod
    def forward(ctx: Any, rows: Any, group: Any, sends: Any, receives: Any) -> Any:
        ctx.back = group, receives, sends
        if group is None:
            return rows.clone()
        arrived = rows.new_empty(sum(receives), *rows.shape[1:])
        # Detached: a thread of gloo holds both tensors a moment longer, and with them would hold
        # their graph, whose saved plan is released when it is dropped.
        sent, received = rows.detach().contiguous(), arrived.detach()
        dist.all_to_all_single(received, sent, receives, sends, group=group)
        return arrived

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return Exchange.apply(grad, *ctx.back), None, None, None


class Sent(NamedTuple):
    """Tokens that were sent to the ranks of their experts."""

    rows: torch.Tensor  # that came here, by rank and local expert
    local: torch.Tensor  # the expert of each
    counts: torch.Tensor  # of each local expert
    order: torch.Tensor
    sizes: list[list[int]]
    mesh: Mesh

    def give_back(self, rows: torch.Tensor, top_k: int) -> torch.Tensor:
        """Return the rows' outputs to their tokens: ``[T, k, H]``."""
        back = Exchange.apply(rows, self.mesh.get_group(), *self.sizes[::-1])
        each: torch.Tensor = back[self.order.argsort()].view(-1, top_k, back.shape[1])
        return each


def send(x: torch.Tensor, ids: torch.Tensor, num_experts: int, mesh: Mesh) -> Sent:
    """Send tokens ``[T, H]`` to the ranks of their experts ``[T, k]``."""
    order, ranks, group = ids.flatten().argsort(stable=True), mesh.size(), mesh.get_group()
    sent = torch.bincount(ids.flatten(), minlength=num_experts).view(ranks, -1)
    received = sent.clone()
    if group is not None:
        dist.all_to_all_single(received, sent, group=group)
    sizes = [counts.sum(1).tolist() for counts in (sent, received)]
    rows = Exchange.apply(x[order // ids.shape[1]], group, *sizes)
    local = torch.arange(sent.shape[1]).repeat(ranks).repeat_interleave(received.flatten())
    return Sent(rows, local, received.sum(0), order, sizes, mesh)
