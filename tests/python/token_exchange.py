"""Tokens to the ranks of their experts, for the tests' layers."""

from __future__ import annotations

from typing import Any

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


def exchange_counts(sent: torch.Tensor, group: Any) -> torch.Tensor:
    """Return how many rows each rank sends here, of how many go to each, ``[ranks, ...]``."""
    received = sent.clone()
    if group is not None:
        dist.all_to_all_single(received, sent.contiguous(), group=group)
    return received
