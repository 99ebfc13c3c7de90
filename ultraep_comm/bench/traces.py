"""Read recorded routing from .npz files: the load ``[G, E]`` of one step and layer.

A file has one of two arrays:

- ``counts_src`` ``[steps, layers, G, E]``: tokens by source rank and expert. For another number of
  ranks the sources are regrouped: their tokens are concatenated, evenly spread within a source, and
  cut into one equal part per rank. So 4 ranks add pairs of 8 sources, and 16 ranks halve each.
- ``topk`` ``[tokens, layers, k]``: the experts of every token, with ``n_experts`` (default: the
  largest id plus 1). A step is a window of ``ranks * tokens_per_rank`` consecutive tokens, and each
  rank takes its consecutive part. -1 is padding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ultraep_comm.errors import InvalidLoadError
from ultraep_comm.plan.topology import MAX_COUNT
from ultraep_comm.recording.file import read_arrays

MAX_LOAD = 2**31 - 1
_AXES = {"counts_src": 4, "topk": 3}
Ints = NDArray[np.integer]


class TraceError(InvalidLoadError):
    """A trace file is invalid, or has no such step or layer."""


@dataclass(frozen=True, eq=False)
class Trace:
    """The routing in a trace file.

    Attributes:
        array: ``counts_src`` if it has four axes, ``topk`` if it has three.
        num_experts: E.
        place: file and array, for error texts.
    """

    array: Ints
    num_experts: int
    place: str

    @property
    def num_layers(self) -> int:
        """Return the number of layers."""
        return int(self.array.shape[1])

    def num_steps(self, *, num_ranks: int, tokens_per_rank: int) -> int:
        """Return the number of steps; for ``counts_src`` independent of the arguments."""
        steps = len(self.array)
        return steps if self.array.ndim == 4 else steps // (num_ranks * tokens_per_rank)

    def load(
        self, *, num_ranks: int, step: int, layer: int, tokens_per_rank: int
    ) -> NDArray[np.int32]:
        """Return the load ``[G, E]`` of one step and layer, both counted from 0.

        ``tokens_per_rank`` is the length of a rank's window in ``topk``; ``counts_src`` ignores it.

        Raises:
            TraceError: there is no such step or layer, or it has impossible counts or ids.
        """
        place, array = self.place, self.array
        steps = self.num_steps(num_ranks=num_ranks, tokens_per_rank=tokens_per_rank)
        _check_range(place, {"step": (step, steps), "layer": (layer, self.num_layers)})
        if array.ndim == 4:
            counts = array[step, layer]
            if counts.size == 0 or counts.min() < 0 or counts.max() > MAX_LOAD:
                raise TraceError(f"{place} has no ranks or experts, or counts outside [0, 2**31)")
            counts = regroup(counts, num_ranks)
        else:
            window = num_ranks * tokens_per_rank
            ids = array[step * window : (step + 1) * window, layer]
            counts = _count(ids.reshape(num_ranks, -1), self.num_experts, place)
        if counts.sum(axis=0).max() > MAX_LOAD:
            raise TraceError(f"{place} has an expert with 2**31 or more tokens")
        return np.ascontiguousarray(counts, dtype=np.int32)


def open_trace(path: Path) -> Trace:
    """Return the trace in a file.

    Raises:
        TraceError: the file is not as this module describes.
        OSError: it cannot be read.
    """
    names = ("counts_src", "topk", "n_experts")
    what = "an .npz file with 'counts_src' [steps, layers, G, E] or 'topk' [tokens, layers, k]"
    arrays = read_arrays(path, names, TraceError, what)
    name = next((name for name in names if name in arrays), "")
    array, num_experts = arrays[name], arrays.get("n_experts")
    place = f"{path}: {name}"
    if array.dtype.kind not in "iu" or array.ndim != _AXES.get(name):
        raise TraceError(
            f"{place} has shape {array.shape} and dtype {array.dtype}; expected integers"
            " [steps, layers, G, E] in counts_src, [tokens, layers, k] in topk"
        )
    if 0 in array.shape[1:]:
        raise TraceError(f"{place} has shape {array.shape}; expected only the first axis to be 0")
    experts = array.shape[3] if array.ndim == 4 else _read_experts(array, num_experts, place)
    if experts > MAX_COUNT:
        raise TraceError(f"{place} has {experts} experts; expected at most {MAX_COUNT}")
    return Trace(array, experts, place)


def _check_range(place: str, values: Mapping[str, tuple[int, int]]) -> None:
    for name, (value, size) in values.items():
        if not 0 <= value < size:
            raise TraceError(f"{place} has {size} {name}s; {name} {value} is not one of them")


def regroup(counts: Ints, num_ranks: int) -> NDArray[np.int64]:
    """Return counts ``[sources, E]`` regrouped to ``[num_ranks, E]``, with the same sums."""
    sources, num_experts = counts.shape
    cuts = np.arange(num_ranks + 1, dtype=np.int64)[:, None]
    pieces = np.diff(counts.astype(np.int64)[:, None] * cuts // num_ranks, axis=1)
    line = pieces.reshape(sources * num_ranks, num_experts)
    grouped: NDArray[np.int64] = line.reshape(num_ranks, sources, num_experts).sum(axis=1)
    return grouped


def _read_experts(ids: Ints, given: Ints | None, place: str) -> int:
    if given is None:
        return int(ids.max(initial=0)) + 1
    if given.size != 1 or given.dtype.kind not in "iu" or given.item() < 1:
        raise TraceError(f"{place}: n_experts is {given!r}; expected one positive integer")
    return int(given.item())


def _count(ids: Ints, num_experts: int, place: str) -> NDArray[np.int64]:
    if ids.size and (ids.min() < -1 or ids.max() >= num_experts):
        raise TraceError(
            f"{place} has ids from {ids.min()} to {ids.max()}; expected [0, {num_experts}), or -1"
        )
    ids = ids.astype(np.int64)
    rows = [np.bincount(row[row >= 0], minlength=num_experts) for row in ids]
    return np.stack(rows).astype(np.int64)
