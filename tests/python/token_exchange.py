"""Tokens to the ranks of their experts, for the tests' layers."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class Exchange(torch.autograd.Function):
    """Rows to the ranks and, backward, their gradients the other way."""

    @staticmethod
    def forward(ctx: Any, rows: Any, group: Any, sends: Any, receives: Any) -> Any:
        ctx.back = group, receives, sends
        arrived = rows.new_empty(sum(receives), *rows.shape[1:])
        # Detached: a thread of gloo holds both tensors a moment longer, and with them would hold
        # their graph, whose saved plan is released when it is dropped.
        sent, received = rows.detach().contiguous(), arrived.detach()
        dist.all_to_all_single(received, sent, receives, sends, group=group)
        return arrived

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return Exchange.apply(grad, *ctx.back), None, None, None
