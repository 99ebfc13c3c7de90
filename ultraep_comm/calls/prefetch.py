"""prefetch_experts: fill a bank for a load that is only expected."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ultraep_comm.calls.plan import plan_replicas
from ultraep_comm.calls.replicate import replicate_experts
from ultraep_comm.group.bank import Bank
from ultraep_comm.group.group import Group, session_of
from ultraep_comm.group.work import Work
from ultraep_comm.plan.forecast import LoadForecast
from ultraep_comm.weights.binding import Binding
from ultraep_comm.weights.segments import Weights


def prefetch_experts(
    weights: Weights | Binding,
    forecast: LoadForecast | torch.Tensor,
    *,
    bank: Bank | int,
    group: Group,
    target: float = 1.01,
    async_op: bool = False,
    mode: str = "auto",
    segments: Sequence[str] | None = None,
    version: int | None = None,
    layer: int | None = None,
) -> Work | None:
    """Replicate the experts that a bank will need if the forecast comes true. Collective.

    Meant for a layer's bank while its attention, or the layer before, still runs: once the load is
    known, ``plan_replicas(load, group=group, bank=bank, reuse=True)`` plans on top of what the
    prefetch brings, and its transfer moves what the forecast has missed. That one may be submitted
    while the prefetch is under way: calls on a group run in the order in which they are made.

    Args:
        weights: as for :func:`replicate_experts`, of the bank's layer.
        forecast: the same on every rank; or the expected load itself, ``[G, E]`` or ``[E]``.
        bank: of the group; no kernel may read its slots that the plan moves.
        group: the group.
        target: as for :func:`plan_replicas`.
        async_op: return a :class:`Work` at once, instead of waiting; a prefetch is meant to
            overlap, so most callers pass True.
        mode, segments, version, layer: as for :func:`replicate_experts`.

    Returns:
        The Work; None without ``async_op``, or where the forecast has seen no load yet.

    Raises:
        InvalidArgumentError, InvalidLoadError, UnsupportedError: as :func:`plan_replicas`; its
            peers fail at once, and the group takes no more calls.
        UltraEPError: as :func:`replicate_experts`.
    """
    with session_of(group).rejecting():
        load = forecast.predict() if isinstance(forecast, LoadForecast) else forecast
        if load is None:
            return None
        plan = plan_replicas(load, group=group, bank=bank, reuse=True, target=target)
    return replicate_experts(
        weights,
        plan,
        group=group,
        async_op=async_op,
        mode=mode,
        segments=segments,
        version=version,
        layer=layer,
    )
