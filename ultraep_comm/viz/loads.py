"""Loads of ranks before and after replication, by step and layer: from a trace or a recording."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ultraep_comm.bench.progress import show_progress
from ultraep_comm.bench.traces import Trace
from ultraep_comm.errors import InvalidArgumentError
from ultraep_comm.planning import plan_replicas
from ultraep_comm.recording import OPERATIONS, Known, Recording
from ultraep_comm.topology import contiguous_home

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadSeries:
    """Plans over steps (T of them) and layers (L), with all that their quotas say.

    Attributes:
        source: where the loads come from, for a subtitle.
        steps: ``[T]``, the steps' numbers.
        layers: ``[L]``, the layers' numbers.
        known: bool ``[T, L]``: of which there is a plan. Arrays are 0 elsewhere, slots empty.
        home: ``[E]``.
        slot_expert: ``[T, L, G, S]``.
        slot_quota: ``[T, L, G, S]`` tokens.
        home_quota: ``[T, L, E]`` tokens.
    """

    source: str
    steps: Ints
    layers: Ints
    known: NDArray[np.bool_]
    home: Ints
    slot_expert: Ints
    slot_quota: Ints
    home_quota: Ints

    @property
    def num_ranks(self) -> int:
        """Return G."""
        return int(self.slot_expert.shape[2])

    @property
    def expert_load(self) -> Ints:
        """Return the tokens of each expert, ``[T, L, E]``: its quotas' sum."""
        load: Ints = self.home_quota.copy()
        t, layer, rank, slot = np.nonzero(self.slot_expert >= 0)
        experts = self.slot_expert[t, layer, rank, slot]
        np.add.at(load, (t, layer, experts), self.slot_quota[t, layer, rank, slot])
        return load

    @property
    def before(self) -> Ints:
        """Return the tokens of each rank if every expert were at home only, ``[T, L, G]``."""
        return self._at_home(self.expert_load)

    @property
    def after(self) -> Ints:
        """Return the tokens of each rank under the plans, ``[T, L, G]``."""
        total: Ints = self._at_home(self.home_quota) + self.slot_quota.sum(axis=3)
        return total

    def _at_home(self, tokens: Ints) -> Ints:
        ranks = np.zeros((*tokens.shape[:2], self.num_ranks), np.int64)
        for rank in range(self.num_ranks):
            ranks[..., rank] = tokens[..., self.home == rank].sum(axis=-1)
        return ranks


def relative(loads: Ints, known: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return loads ``[T, L, G]`` over their mean; nan where nothing is known, 1 without tokens."""
    mean = loads.mean(axis=-1, keepdims=True)
    shares: NDArray[np.float64] = np.ones(loads.shape)
    np.divide(loads, mean, out=shares, where=mean > 0)
    shares[~known] = np.nan
    return shares


def imbalance(loads: Ints, known: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return the largest load of a rank over the mean, ``[T, L]``; nan where nothing is known."""
    largest: NDArray[np.float64] = relative(loads, known).max(axis=-1)
    return largest


# ---- traces -------------------------------------------------------------------------------------


def plan_trace(
    trace: Trace,
    *,
    source: str,
    num_ranks: int,
    slots_per_rank: int,
    tokens_per_rank: int,
    target: float,
    steps: Sequence[int] | None = None,
    layers: Sequence[int] | None = None,
) -> LoadSeries:
    """Plan every step and layer of recorded routing.

    Args:
        trace: an open file.
        source: for the subtitle.
        num_ranks: G.
        slots_per_rank: S.
        tokens_per_rank: length of a rank's window, of files of tokens.
        target: imbalance that is good enough.
        steps: their numbers; None: all.
        layers: likewise.

    Raises:
        TraceError: the file has no such step or layer, or no whole step.
        InvalidArgumentError: a number is out of range.
    """
    total = trace.num_steps(num_ranks=num_ranks, tokens_per_rank=tokens_per_rank)
    steps = range(total) if steps is None else steps
    layers = range(trace.num_layers) if layers is None else layers
    shape = (len(steps), len(layers))
    if 0 in shape:
        raise InvalidArgumentError(
            f"{source} has {total} whole steps of {num_ranks} ranks and {tokens_per_rank} tokens"
            " per rank; expected at least one. Choose fewer ranks or tokens"
        )
    experts = trace.num_experts
    slots = np.full((*shape, num_ranks, slots_per_rank), -1, np.int64)
    slot_quota, home_quota = np.zeros_like(slots), np.zeros((*shape, experts), np.int64)
    for i, step in enumerate(steps):
        for j, layer in enumerate(layers):
            load = trace.load(
                num_ranks=num_ranks, step=step, layer=layer, tokens_per_rank=tokens_per_rank
            )
            plan = plan_replicas(
                torch.from_numpy(load), slots_per_rank=slots_per_rank, target=target
            )
            assert plan.slot_quota is not None
            assert plan.home_quota is not None
            slots[i, j] = plan.slot_expert.numpy()
            slot_quota[i, j] = plan.slot_quota.numpy()
            home_quota[i, j] = plan.home_quota.numpy()
            show_progress(i * shape[1] + j + 1, shape[0] * shape[1], "plans")
    return LoadSeries(
        source=source,
        steps=np.array(steps, np.int64),
        layers=np.array(layers, np.int64),
        known=np.ones(shape, bool),
        home=contiguous_home(experts, num_ranks).astype(np.int64),
        slot_expert=slots,
        slot_quota=slot_quota,
        home_quota=home_quota,
    )


# ---- recordings ---------------------------------------------------------------------------------


def series_of(
    recordings: Sequence[Recording], *, source: str, num_layers: int | None = None
) -> LoadSeries:
    """Return the plans that a recorded run transferred by.

    Steps and layers are microbatches and layers of saved plans. Of several transfers of one plan
    (forward and backward) the first counts, and all ranks' files say the same of it. Plans that
    were not saved take turns as layers, ``num_layers`` of them to a step.

    Args:
        recordings: of one run.
        source: for the subtitle.
        num_layers: of plans that were not saved; None: 1.

    Raises:
        InvalidArgumentError: no transfer has a plan with quotas, or ``num_layers`` is below 1.
    """
    if num_layers is not None and num_layers < 1:
        raise InvalidArgumentError(f"layers is {num_layers}; expected at least 1")
    place: dict[tuple[int, int], tuple[Recording, int]] = {}
    for recording, i in _transfers(recordings):
        call = recording.calls[i]
        key = (int(call["microbatch"]), int(call["layer"]))
        if key[1] < 0:
            key = divmod(len(place), num_layers or 1)
        if key not in place:
            place[key] = (recording, i)
    if not place:
        raise InvalidArgumentError(
            f"{source} has no replicate_experts with the quotas of its plan; expected plans on the"
            " CPU, with quotas"
        )
    steps, step_of = _numbered(step for step, _ in place)
    layers, layer_of = _numbered(layer for _, layer in place)
    first = recordings[0]
    shape = (len(steps), len(layers))
    slots = np.full((*shape, first.num_ranks, first.slots_per_rank), -1, np.int64)
    slot_quota, home_quota = np.zeros_like(slots), np.zeros((*shape, first.num_experts), np.int64)
    known = np.zeros(shape, bool)
    for (step, layer), (recording, i) in place.items():
        at = step_of(step), layer_of(layer)
        known[at] = True
        slots[at] = recording.slot_expert[i]
        slot_quota[at] = recording.slot_quota[i]
        home_quota[at] = recording.home_quota[i]
    return LoadSeries(
        source=source,
        steps=steps,
        layers=layers,
        known=known,
        home=first.home.astype(np.int64),
        slot_expert=slots,
        slot_quota=slot_quota,
        home_quota=home_quota,
    )


def _transfers(recordings: Sequence[Recording]) -> list[tuple[Recording, int]]:
    """Return every transfer with quotas once, by epoch: a recording that knows it, and where."""
    found: dict[int, tuple[Recording, int]] = {}
    for recording in recordings:
        calls = recording.calls
        wanted = (calls["operation"] == OPERATIONS.index("replicate_experts")) & (
            calls["known"] & Known.QUOTAS > 0
        )
        for i in np.flatnonzero(wanted).tolist():
            found.setdefault(int(calls["epoch"][i]), (recording, i))
    return [found[epoch] for epoch in sorted(found)]


def _numbered(values: Iterable[int]) -> tuple[Ints, Callable[[int], int]]:
    """Return the distinct values in order, and where each is."""
    array = np.unique(np.fromiter(values, np.int64))
    return array, {int(value): i for i, value in enumerate(array)}.__getitem__
