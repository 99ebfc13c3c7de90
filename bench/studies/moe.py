"""A minimal MoE layer, forward and backward, for the layer benchmark.

Rows go by all-to-all to the rank of their instance, through SwiGLU experts, and back. There is no
router: ids and probabilities are given, and have no gradients.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn.functional import silu


@dataclass(frozen=True, kw_only=True)
class Instance:
    """An instance on this rank, and the tensors that accumulate its gradients.

    Attributes:
        w13: ``[2 I, H]``, gate and up.
        w2: ``[H, I]``.
        w13_grad, w2_grad: of the same shapes.
    """

    w13: torch.Tensor
    w2: torch.Tensor
    w13_grad: torch.Tensor
    w2_grad: torch.Tensor

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the outputs ``[R, H]`` of rows ``[R, H]``, and the activations for backward()."""
        inner = rows @ self.w13.T
        gate, up = inner.chunk(2, dim=1)
        return (silu(gate) * up) @ self.w2.T, inner

    def backward(self, rows: torch.Tensor, inner: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """Accumulate the weights' gradients; return the gradient of the rows."""
        gate, up = inner.chunk(2, dim=1)
        sigmoid = gate.sigmoid()
        active = gate * sigmoid
        self.w2_grad.addmm_(grad.T, active * up)
        product = grad @ self.w2
        slope = sigmoid * (1 + gate * (1 - sigmoid))
        inner_grad = torch.cat([product * up * slope, product * active], dim=1)
        self.w13_grad.addmm_(inner_grad.T, rows)
        return inner_grad @ self.w13


@dataclass(frozen=True, kw_only=True)
class Passed:
    """The results of one forward and backward pass on this rank.

    Attributes:
        out: ``[T, H]``.
        tokens_grad: ``[T, H]``.
        num_rows: rows that this rank's experts computed.
        compute_ns: CPU time of this thread in the experts.
    """

    out: torch.Tensor
    tokens_grad: torch.Tensor
    num_rows: int
    compute_ns: int


def run_layer(
    tokens: torch.Tensor,
    physical_ids: torch.Tensor,
    probs: torch.Tensor,
    out_grad: torch.Tensor,
    instances: Sequence[Instance],
    instances_per_rank: int,
) -> Passed:
    """Run the layer forward and backward. Collective.

    Args:
        tokens: ``[T, H]``.
        physical_ids: ``[T, k]``, ``rank * instances_per_rank + index``.
        probs: ``[T, k]``.
        out_grad: ``[T, H]``, the gradient of the output.
        instances: this rank's, by index.
        instances_per_rank: the same on every rank.
    """
    k = physical_ids.shape[1]
    order, by_instance, counts, sends, receives = _find_route(physical_ids, instances_per_rank)
    rows = _exchange(tokens[order // k], sends, receives)[by_instance]
    out, rows_grad = torch.empty_like(rows), torch.empty_like(rows)
    parts = torch.split(rows, counts)
    compute_ns, inners = 0, []
    start = time.thread_time_ns()
    # A rank with fewer mains than others has fewer instances; its last counts are 0.
    for instance, part, result in zip(instances, parts, torch.split(out, counts), strict=False):
        made, inner = instance.forward(part)
        result.copy_(made)
        inners.append(inner)
    compute_ns += time.thread_time_ns() - start

    sorted_probs = probs.flatten()[order].unsqueeze(1)
    choices = _exchange(_put_back(out, by_instance), receives, sends) * sorted_probs
    combined = torch.zeros_like(tokens).index_add_(0, order // k, choices)

    grads = _exchange(out_grad[order // k] * sorted_probs, sends, receives)[by_instance]
    start = time.thread_time_ns()
    for instance, part, inner, grad, row_grad in zip(
        instances,
        parts,
        inners,
        torch.split(grads, counts),
        torch.split(rows_grad, counts),
        strict=False,
    ):
        row_grad.copy_(instance.backward(part, inner, grad))
    compute_ns += time.thread_time_ns() - start
    back = _exchange(_put_back(rows_grad, by_instance), receives, sends)
    return Passed(
        out=combined,
        tokens_grad=torch.zeros_like(tokens).index_add_(0, order // k, back),
        num_rows=len(rows),
        compute_ns=compute_ns,
    )


def _find_route(
    physical_ids: torch.Tensor, instances_per_rank: int
) -> tuple[torch.Tensor, torch.Tensor, list[int], list[int], list[int]]:
    """Return the sort orders of choices and of received rows, and row counts.

    The counts are of rows by instance here, sent to each rank, and received from each rank.
    """
    num_ranks = dist.get_world_size()
    flat = physical_ids.flatten().long()
    sent = torch.bincount(flat, minlength=num_ranks * instances_per_rank)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    table = received.view(num_ranks, instances_per_rank)
    # Received rows are sorted by source, then by instance.
    instance = torch.arange(instances_per_rank).repeat(num_ranks).repeat_interleave(received)
    sends = sent.view(num_ranks, -1).sum(1).tolist()
    return (
        flat.argsort(stable=True),
        instance.argsort(stable=True),
        table.sum(0).tolist(),
        sends,
        table.sum(1).tolist(),
    )


def _exchange(rows: torch.Tensor, sends: list[int], receives: list[int]) -> torch.Tensor:
    received = rows.new_empty((sum(receives), rows.shape[1]))
    dist.all_to_all_single(received, rows, receives, sends)
    return received


def _put_back(rows: torch.Tensor, taken: torch.Tensor) -> torch.Tensor:
    result = torch.empty_like(rows)
    result[taken] = rows
    return result
