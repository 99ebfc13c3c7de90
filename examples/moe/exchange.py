"""Token dispatch and combine: rows go to their expert's rank and back, gradients in reverse."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


def _send(
    rows: torch.Tensor, sends: list[int], receives: list[int], process_group: Any
) -> torch.Tensor:
    received = rows.new_empty((sum(receives), *rows.shape[1:]))
    dist.all_to_all_single(received, rows.contiguous(), receives, sends, group=process_group)
    return received


class _Exchange(torch.autograd.Function):
    """All-to-all; its backward pass is the reverse all-to-all."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sends: list[int], receives: list[int], process_group: Any
    ) -> torch.Tensor:
        ctx.reverse = receives, sends, process_group
        return _send(rows, sends, receives, process_group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _send(gradients[0], *ctx.reverse), None, None, None


def exchange(
    rows: torch.Tensor, sends: list[int], receives: list[int], process_group: Any = None
) -> torch.Tensor:
    """Send consecutive parts of ``rows`` to the ranks. Collective, also in the backward pass.

    Args:
        rows: ``[sum(sends), ...]``, in order of destination rank.
        sends: number of rows for each rank.
        receives: number of rows from each rank.
        process_group: None: WORLD.

    Returns:
        ``[sum(receives), ...]``, in order of source rank.
    """
    result: torch.Tensor = _Exchange.apply(rows, sends, receives, process_group)
    return result


@dataclass(frozen=True, kw_only=True)
class Route:
    """The destinations of this rank's tokens, and the order of arriving rows.

    Attributes:
        topk: experts per token.
        order: int64 ``[T * topk]``: choices (token by token) sorted by physical instance.
        sends, receives: number of rows for and from each rank.
        by_instance: int64 ``[sum(receives)]``: arriving rows sorted by instance.
        counts: number of rows of each instance on this rank.
        process_group: of the ranks that exchange rows.
    """

    topk: int
    order: torch.Tensor
    sends: list[int]
    receives: list[int]
    by_instance: torch.Tensor
    counts: list[int]
    process_group: Any

    @property
    def num_rows(self) -> int:
        """Return the number of rows that this rank's experts compute."""
        return int(self.by_instance.numel())


def find_route(
    physical_ids: torch.Tensor, instances_per_rank: int, process_group: Any = None
) -> Route:
    """Count rows per instance and exchange the counts. Collective.

    Args:
        physical_ids: ``[T, k]``, ``rank * instances_per_rank + index``.
        instances_per_rank: the same on every rank.
        process_group: None: WORLD.
    """
    num_ranks = dist.get_world_size(process_group)
    flat = physical_ids.flatten().long()
    sent = torch.bincount(flat, minlength=num_ranks * instances_per_rank)
    sent = sent.view(num_ranks, instances_per_rank)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=process_group)
    # Rows arrive sorted by source rank, then by instance.
    instance_of = torch.arange(instances_per_rank).repeat(num_ranks)
    instance_of = instance_of.repeat_interleave(received.flatten())
    return Route(
        topk=physical_ids.shape[1],
        order=flat.argsort(stable=True),
        sends=sent.sum(1).tolist(),
        receives=received.sum(1).tolist(),
        by_instance=instance_of.argsort(stable=True),
        counts=received.sum(0).tolist(),
        process_group=process_group,
    )


def dispatch(tokens: torch.Tensor, route: Route) -> torch.Tensor:
    """Send tokens ``[T, H]`` to their instances; return this rank's rows, sorted by instance."""
    rows = tokens.index_select(0, route.order // route.topk)
    arrived = exchange(rows, route.sends, route.receives, route.process_group)
    return arrived.index_select(0, route.by_instance)


def combine(rows: torch.Tensor, probs: torch.Tensor, route: Route) -> torch.Tensor:
    """Send results ``[R, H]`` back; return each token's sum, weighted by ``probs [T, k]``."""
    arrived = rows.index_select(0, _inverse(route.by_instance))
    back = exchange(arrived, route.receives, route.sends, route.process_group)
    choices = back.index_select(0, _inverse(route.order)).view(*probs.shape, rows.shape[1])
    return (choices * probs.unsqueeze(-1)).sum(1)


def _inverse(order: torch.Tensor) -> torch.Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order))
    return inverse
