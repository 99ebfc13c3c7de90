"""Main weights in the forms that models have them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

import ultraep_comm as uec
from ultraep_comm.errors import InvalidWeightsError, UnsupportedError
from ultraep_comm.group.group import is_on_device
from ultraep_comm.weights.binding import GRAD_TYPES
from ultraep_comm.weights.segments import Segment, Weights, local_part, plain_mapping

Tensor = torch.Tensor


def local_weights(weights: Weights, group: uec.Group) -> dict[str, Tensor | Sequence[Tensor]]:
    """Return main weights as this library's calls take them, without a copy.

    Args:
        weights: for each segment one tensor ``[M, *shape]``, or flattened over the first two
            dimensions (``[M * out, in]``), or a sequence of M tensors ``[*shape]``. A DTensor means
            its local part. Gradients flow back through all of these.
        group: whose segments they are.

    Returns:
        ``{name: tensor [M, *shape] or M tensors}``, in the order of the group's segments.

    Raises:
        InvalidWeightsError: the names are not those of the group's segments.
    """
    weights = plain_mapping(weights)
    if not isinstance(weights, Mapping):
        raise InvalidWeightsError(
            f"rank {group.rank}: weights is a {type(weights).__name__}; expected {{name: tensor or"
            f" sequence of tensors}} with the names {sorted(group.segments)}"
        )
    if set(weights) != set(group.segments):
        raise InvalidWeightsError(
            f"rank {group.rank}: the layer has the weights {sorted(weights)}; expected the group's"
            f" segments, {sorted(group.segments)}: what is no segment would stay behind"
        )
    return {
        name: _local(weights[name], f"rank {group.rank}: weights[{name!r}]", segment, group)
        for name, segment in group.segments.items()
    }


def _local(
    value: Tensor | Sequence[Tensor], what: str, segment: Segment, group: uec.Group
) -> Tensor | Sequence[Tensor]:
    if not isinstance(value, Tensor):
        if not isinstance(value, Iterable) or not all(isinstance(t, Tensor) for t in value):
            raise InvalidWeightsError(
                f"{what} is a {type(value).__name__}; expected a tensor or a sequence of tensors"
            )
        return [local_part(tensor) for tensor in value]
    tensor, shape = local_part(value), segment.shape
    if shape and tensor.shape == (group.num_local_experts * shape[0], *shape[1:]):
        return tensor.view(group.num_local_experts, *shape) if tensor.is_contiguous() else tensor
    return tensor


def listed(weight: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    """Return a segment's tensors, one or several."""
    return [weight] if isinstance(weight, Tensor) else weight


def names_with_gradient(weights: Weights) -> list[str]:
    """Return the names of weights of which some need gradients."""
    return [n for n, w in weights.items() if any(t.requires_grad for t in listed(w))]


def check_trained(weights: Weights, rank: int) -> None:
    """Raise UnsupportedError if gradients are needed of a dtype that no reduction takes."""
    for name, value in weights.items():
        for tensor in listed(value):
            if tensor.requires_grad and tensor.dtype not in GRAD_TYPES:
                raise UnsupportedError(
                    f"rank {rank}: main weights {name!r} need gradients and are {tensor.dtype};"
                    " expected torch.float32 or torch.bfloat16: train in one of these, with"
                    " torch.autocast for float16, or freeze them"
                )


def unbind_slots(slots: Tensor, plan: uec.Plan, group: uec.Group) -> Sequence[Tensor]:
    """Return the tensors of a rank's slots ``[S, *shape]``, without a graph where one is empty.

    Nobody needs an empty slot's gradient, which would be computed, as zeros. On a device the host
    does not know which slots are empty.
    """
    parts = slots.unbind()
    if is_on_device(plan, group):
        return parts
    held = plan.slot_expert[group.rank].tolist()
    return [part if e >= 0 else part.detach() for e, part in zip(held, parts, strict=True)]
