"""group_for: one group for all layers of a process group whose experts have the same shape."""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist

from ultraep_comm.errors import InvalidArgumentError, UltraEPError
from ultraep_comm.fabrics.rendezvous import Rendezvous
from ultraep_comm.group.create import new_group
from ultraep_comm.group.group import Group, session_of
from ultraep_comm.plan.topology import Topology
from ultraep_comm.weights.segments import Weights, segments_like


class LayerGroup(NamedTuple):
    """What :func:`group_for` returns.

    Attributes:
        group: shared with other layers.
        layer: the number of this layer among those of the group, for ``group.save``.
    """

    group: Group
    layer: int


# The latest layer of each group, by the group's options.
_groups: WeakKeyDictionary[dist.ProcessGroup, dict[Hashable, LayerGroup]] = WeakKeyDictionary()


def group_for(
    process_group: dist.ProcessGroup | None = None,
    *,
    like: Weights,
    slots_per_rank: int,
    num_experts: int | None = None,
    **options: Any,
) -> LayerGroup:
    """Return the group of a layer: one for each process group, shape of experts and options.

    The first layer that asks creates it. Collective, for further layers too: every rank has to ask
    for the same layers in the same order. A group that was closed, or has failed, is replaced by a
    new one. Groups are closed when the process ends, without an error if plans are still saved;
    close them earlier with ``group.close()``.

    Args:
        process_group: as for :func:`new_group`.
        like: this rank's main weights, of which shapes, dtypes and strides are taken: ``{name:
            tensor [M, *shape] or sequence of M tensors}``. A DTensor means its local part.
        slots_per_rank: S.
        num_experts: E; None: the sum of the ranks' M.
        options: as for :func:`new_group`.

    Raises:
        InvalidArgumentError: ``like`` is no mapping of tensors, or the experts of a segment differ
            in shape, dtype or strides; or a rank has another number of them than its home map says.
        BootstrapError, OutOfSharedMemoryError, UnsupportedError: as :func:`new_group`.
    """
    rendezvous = Rendezvous(process_group)
    known = _groups.setdefault(rendezvous.group, {})
    options.update(num_experts=num_experts, slots_per_rank=slots_per_rank)
    with rendezvous.failure_scope():
        segments, num_local = segments_like(like)
        key = _hashable({**options, "expert": segments})
        last = known.get(key)
        if last is not None and not session_of(last.group).takes_calls:
            last = None
        # A rank may not know a group that its peers have: it asked for other experts, or its own
        # has failed. Then all create one, and differing arguments are noticed there.
        run = "" if last is None else session_of(last.group).run
        records = rendezvous.exchange([num_local, run])
        counts = [record[0] for record in records]
        if num_experts is None:
            options["num_experts"] = sum(counts)
        _check_counts(counts, options)  # options may differ by rank
        rendezvous.raise_if_any_failed()
    if last is None or any(record[1] != run for record in records):
        found = LayerGroup(new_group(process_group, expert=segments, **options), 0)
    else:
        found = LayerGroup(last.group, last.layer + 1)
    known[key] = found
    return found


def _check_counts(counts: Sequence[int], options: Mapping[str, Any]) -> None:
    """Raise on every rank if one has another number of experts than its home map gives."""
    home = Topology.make(
        num_ranks=len(counts),
        num_experts=options["num_experts"],
        slots_per_rank=options["slots_per_rank"],
        home=options.get("home"),
    ).home
    for rank, (count, expected) in enumerate(
        zip(counts, np.bincount(home, minlength=len(counts)), strict=True)
    ):
        if count != expected:
            raise InvalidArgumentError(
                f"like has {count} experts on rank {rank}; expected {expected}, as home= gives it"
                " (by default experts are contiguous, as even as possible, the first ranks with one"
                " more). Pass home= [E], or num_experts="
            )


def _hashable(value: Any) -> Hashable:
    """Return what is equal for equal options."""
    if isinstance(value, Mapping):
        return tuple((name, _hashable(value[name])) for name in sorted(value))
    if isinstance(value, torch.Tensor | np.ndarray):
        value = value.tolist()
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(map(_hashable, value))
    result: Hashable = value
    return result


def _close_all() -> None:
    """Close groups at the end of the process, before modules that they need are gone."""
    for group in [last.group for known in _groups.values() for last in known.values()]:
        session = session_of(group)
        if session.takes_calls and session.engine.is_completed(session.engine.epoch):
            with contextlib.suppress(UltraEPError):  # plans that nobody will reduce any more
                group.close()
    _groups.clear()


atexit.register(_close_all)
