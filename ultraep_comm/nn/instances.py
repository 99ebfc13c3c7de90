"""Grouped GEMMs over a rank's instances: one tensor for all, or two calls; no weight is copied."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

import ultraep_comm as uec
from ultraep_comm.errors import UnsupportedError
from ultraep_comm.group.bank import Bank, find_bank
from ultraep_comm.nn.hooks import Grads, hook

Tensor = torch.Tensor


def join_instances(
    weights: Mapping[str, Tensor],
    slots: Mapping[str, Tensor],
    *,
    group: uec.Group,
    bank: Bank | int = 0,
) -> dict[str, Tensor]:
    """Return the weights of all of a rank's instances as one tensor of each segment, not copied.

    Args:
        weights: in memory of the bank's ``empty_instances()``, ``{name: tensor [M, *shape]}``, as
            :meth:`LayerPass.before_experts` returns them.
        slots: likewise, ``{name: [S, *shape]}``.
        group: whose memory it is.
        bank: whose slots they are.

    Returns:
        ``{name: tensor [M + S, *shape]}``; gradients flow back to both parts.

    Raises:
        InvalidWeightsError: weights are elsewhere; :func:`grouped_mm` takes both all the same.
    """
    found, count = find_bank(bank, group.banks, group.rank), group.num_local_experts

    def divide(grads: Grads) -> Grads:
        (grad,) = grads
        return (None, None, None) if grad is None else (None, grad[:count], grad[count:])

    return {
        name: hook(divide, 1, found.instances_of(name, weight), weight, slots[name])[0]
        for name, weight in weights.items()
    }


def grouped_mm(x: Tensor, weights: Tensor, slots: Tensor, offs: Tensor) -> Tensor:
    """Multiply rows by their instances' weights: two grouped GEMMs, and no copy of weights.

    As ``torch.nn.functional.grouped_mm(x, cat([weights, slots]), offs=offs)``. Ends on a device are
    read by the host, once.

    Args:
        x: ``[R, K]``, rows by instance: those of main weights, then those of slots.
        weights: ``[M, K, N]``, of any strides that a grouped GEMM takes.
        slots: ``[S, K, N]``.
        offs: int32 ``[M + S]``, where each instance's rows end.

    Returns:
        ``[R, N]``; rows past the last end are undefined.

    Raises:
        UnsupportedError: this torch has no grouped GEMM.
    """
    multiply = _find_grouped_mm()
    if len(weights) == 0 or len(slots) == 0:
        return multiply(x, slots if len(weights) == 0 else weights, offs=offs)
    own = int(offs[len(weights) - 1])
    first = multiply(x[:own], weights, offs=offs[: len(weights)])
    second = multiply(x[own:], slots, offs=offs[len(weights) :] - own)
    return torch.cat([first, second])


def _find_grouped_mm() -> Callable[..., Tensor]:
    found = getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
    if found is None:
        raise UnsupportedError(
            f"torch {torch.__version__} has no grouped_mm; use torch 2.8 or later, or loop over the"
            " instances"
        )
    result: Callable[..., Tensor] = found
    return result
