"""SwiGLU experts, one GEMM at a time; a real implementation would use a grouped GEMM."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.functional import silu


class Instance(NamedTuple):
    """An expert on this rank, main instance or replica: weights and gradient buffers."""

    w13: torch.Tensor  # [2I, H]
    w2: torch.Tensor  # [H, I]
    w13_grad: torch.Tensor  # [2I, H], accumulated in the backward pass
    w2_grad: torch.Tensor  # [H, I], likewise


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, counts: Sequence[int], instances: Sequence[Instance]
    ) -> torch.Tensor:
        hidden = rows.new_empty((len(rows), instances[0].w13.shape[0]))
        out = torch.empty_like(rows)
        for instance, part in _parts(counts, instances):
            torch.mm(rows[part], instance.w13.T, out=hidden[part])
            gate, up = hidden[part].chunk(2, dim=1)
            torch.mm(silu(gate) * up, instance.w2.T, out=out[part])
        ctx.save_for_backward(rows, hidden)
        ctx.counts, ctx.instances = counts, instances
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        rows, hidden = ctx.saved_tensors
        rows_grad = torch.empty_like(rows)
        for instance, part in _parts(ctx.counts, ctx.instances):
            out_grad = gradients[0][part]
            gate, up = hidden[part].chunk(2, dim=1)
            sigmoid = gate.sigmoid()
            activated = gate * sigmoid
            product_grad = out_grad @ instance.w2
            gate_grad = product_grad * up * (sigmoid + activated * (1 - sigmoid))
            hidden_grad = torch.cat([gate_grad, product_grad * activated], dim=1)
            instance.w2_grad.addmm_(out_grad.T, activated * up)
            instance.w13_grad.addmm_(hidden_grad.T, rows[part])
            torch.mm(hidden_grad, instance.w13, out=rows_grad[part])
        return rows_grad, None, None


def apply_experts(
    rows: torch.Tensor, counts: Sequence[int], instances: Sequence[Instance]
) -> torch.Tensor:
    """Apply each instance's expert to its rows.

    As with fused weight gradients, the backward pass itself accumulates into the instances'
    gradients. It reads the weights again, which must be the same as in the forward pass.

    Args:
        rows: ``[R, H]``, sorted by instance; must require a gradient.
        counts: number of rows of each instance.
        instances: one for each count; may be fewer if the last counts are 0.

    Returns:
        ``[R, H]``.
    """
    out: torch.Tensor = _Experts.apply(rows, counts, instances)
    return out


def _parts(
    counts: Sequence[int], instances: Sequence[Instance]
) -> Iterator[tuple[Instance, slice]]:
    """Yield each instance that has rows, with their slice."""
    start = 0
    for count, instance in zip(counts, instances, strict=False):
        if count:
            yield instance, slice(start, start + count)
        start += count
