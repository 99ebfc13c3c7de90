"""Options of adapters, and a layer's calls with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

import ultraep_comm as uec
from ultraep_comm.adapters.checks import agree, check_experts, check_unchanged, name_code
from ultraep_comm.errors import InvalidArgumentError
from ultraep_comm.group.layers import group_for
from ultraep_comm.nn import Replication
from ultraep_comm.nn.weights import check_trained, names_with_gradient
from ultraep_comm.weights.segments import Weights

OF_LAYER = ("target", "cost", "min_tokens", "mode", "backward_segments")
OF_GROUP = (
    *("engine", "fabric", "timeout", "num_sms", "tile_bytes", "check"),
    *("domains", "allow_cross_domain"),
)


def check_options(what: str, options: Mapping[str, Any], *others: str) -> None:
    """Check options of layers and groups.

    Args:
        what: was given them, for the error.
        options: :data:`OF_LAYER`, as for :class:`ultraep_comm.nn.Replication`, and
            :data:`OF_GROUP`, as for :func:`ultraep_comm.new_group`. What is not given has its
            default there.
        others: what else there is, for the error.

    Raises:
        InvalidArgumentError: another option.
    """
    if unknown := options.keys() - {*OF_LAYER, *OF_GROUP}:
        raise InvalidArgumentError(
            f"{what} has no option {sorted(unknown)}; expected some of"
            f" {', '.join((*others, *OF_LAYER, *OF_GROUP))}"
        )


def open_layer(
    process_group: dist.ProcessGroup, weights: Weights, *, live: int = 1, **options: Any
) -> Replication:
    """Create or join the group of a layer, and return the layer's calls. Collective.

    Args:
        process_group: the expert-parallel group.
        weights: this rank's main weights.
        live: microbatches whose passes overlap; each takes slots of its own.
        options: as for :func:`check_options`, and the group's ``slots_per_rank``: replicas that a
            rank can hold at a time: memory for that many experts, and for their gradients in fp32,
            once for all layers of one shape.
    """
    of_layer = {name: options.pop(name) for name in OF_LAYER if name in options}
    grads = dict.fromkeys(names_with_gradient(weights), torch.float32) or None
    group, layer = group_for(process_group, like=weights, banks=live, grads=grads, **options)
    return Replication(group, layer=layer, live=live, **of_layer)


def calls_of(
    calls: Replication | None,
    process_group: dist.ProcessGroup,
    experts: torch.nn.Module,
    count: int,
    remedy: str,
    options: Mapping[str, Any],
    *,
    hooks: bool = True,
) -> tuple[Replication, dict[str, torch.Tensor]]:
    """Return a layer's calls and weights; collective at first, and when others are trained.

    For layers whose experts' module has a parameter for each segment.

    Args:
        calls: what was returned before; None: nothing.
        process_group: the expert-parallel group.
        experts: their module, which runs the same code on every rank, and stays as it is.
        count: as for :func:`check_experts`, which is done again: they may have been replaced.
        remedy: likewise.
        options: for :func:`open_layer`, with ``live`` and ``slots_per_rank``.
        hooks: as for :func:`check_unchanged`.

    Raises:
        UnsupportedError: a rank's experts cannot be replicated, or are trained and neither float32
            nor bfloat16; or the experts were changed.
    """
    weights: dict[str, torch.Tensor] = dict(experts.named_parameters(recurse=False))
    trained = names_with_gradient(weights)
    if calls is not None and isinstance(calls.group, uec.Group):  # else it was loaded
        check_unchanged(calls, experts, hooks=hooks)
        if not trained or set(trained) == calls.group.slot_grads.keys():
            return calls, weights

    def describe(experts: torch.nn.Module) -> list[Any]:
        check_experts(experts, count, remedy)
        if torch.is_grad_enabled():
            check_trained(weights, process_group.rank())
        return [sorted(trained), name_code(experts, hooks=hooks)]

    agree(process_group, describe, [experts])
    calls = open_layer(process_group, weights, **options)
    check_unchanged(calls, experts, hooks=hooks)
    return calls, weights
