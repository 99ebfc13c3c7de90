"""Segments: the tensors of an expert, their layout in bytes, and checks of weights against them."""

from __future__ import annotations

import math
import operator
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import Any, TypeAlias

import numpy as np
import torch

from ultraep_comm.errors import InvalidArgumentError, InvalidWeightsError, UltraEPError

Weights = Mapping[str, torch.Tensor | Sequence[torch.Tensor]]
Addresses: TypeAlias = "array[int]"  # 64 bits each
_PLAIN = {torch.Tensor, torch.nn.Parameter}
_DTYPE, _DEVICE, _LAYOUT, _SHAPE = map(attrgetter, ("dtype", "device", "layout", "shape"))


@dataclass(frozen=True)
class Segment:
    """One tensor of an expert: a dense range of bytes, opaque to the transfer.

    Attributes:
        shape: shape of one expert's tensor.
        dtype: any dtype of whole bytes.
        strides: in elements; None: row-major. Any permutation of a dense layout is legal.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, torch.dtype):
            raise InvalidArgumentError(f"a segment's dtype is {self.dtype!r}; expected torch.dtype")
        for name in ("shape", "strides"):
            value = getattr(self, name)
            if value is None and name == "strides":
                continue
            try:
                numbers = tuple(operator.index(n) for n in value)
            except TypeError:
                raise InvalidArgumentError(
                    f"a segment's {name} is {value!r}; expected a sequence of integers"
                ) from None
            object.__setattr__(self, name, numbers)

    @classmethod
    def like(cls, tensor: torch.Tensor) -> Segment:
        """Return the segment of which one expert's tensor is: its shape, dtype and strides."""
        segment = cls(tuple(tensor.shape), tensor.dtype, tuple(tensor.stride()))
        plain = cls(segment.shape, segment.dtype)
        return plain if plain.layout == segment.layout else segment

    @property
    def nbytes(self) -> int:
        """Return the bytes of one expert's tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    @cached_property
    def layout(self) -> tuple[int, ...]:
        """Return the strides in elements, row-major by default."""
        if self.strides is not None:
            return self.strides
        strides = [1] * len(self.shape)
        for i in range(len(self.shape) - 1, 0, -1):
            strides[i - 1] = strides[i] * self.shape[i]
        return tuple(strides)

    def view(self, storage: torch.Tensor, count: int) -> torch.Tensor:
        """Return ``count`` densely stacked experts in a uint8 tensor as ``[count, *shape]``."""
        elements = math.prod(self.shape)
        flat = storage.narrow(0, 0, count * self.nbytes).view(self.dtype)
        return flat.as_strided((count, *self.shape), (elements, *self.layout))


def make_segments(
    expert: Mapping[str, Segment | tuple[Sequence[int], torch.dtype]],
) -> dict[str, Segment]:
    """Check an ``expert={name: (shape, dtype) or Segment}`` argument.

    Raises:
        InvalidArgumentError: there is no segment, or one is empty or not dense.
    """
    if not isinstance(expert, Mapping) or not expert:
        raise InvalidArgumentError(
            f"expert is {expert!r}, without a segment; expected {{name: (shape, dtype)}}"
        )
    segments = {}
    for name, value in expert.items():
        if isinstance(value, Segment):
            segment = value
        elif isinstance(value, tuple | list) and len(value) == 2:
            shape, dtype = value
            segment = Segment(shape, dtype)  # type: ignore[arg-type]  # converted to a tuple
        else:
            raise InvalidArgumentError(
                f"segment {name!r} is {value!r}; expected (shape, dtype) or a Segment"
            )
        if segment.nbytes <= 0:
            raise InvalidArgumentError(
                f"segment {name!r} has shape {segment.shape}, which has no bytes; leave it out"
            )
        if not _is_dense(segment.shape, segment.layout):
            raise InvalidArgumentError(
                f"segment {name!r} of shape {segment.shape} has strides {segment.layout}, which are"
                " not dense; expected a permutation of a row-major layout"
            )
        segments[str(name)] = segment
    return segments


def _is_dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    if len(shape) != len(strides):
        return False
    expected = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


class Bound:
    """What has addresses. Its copies, also saved ones, lie elsewhere, and no group takes them."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _make_bound, (type(self), vars(self) | {"owner": None, "table": None})


def _make_bound(kind: Callable[..., Bound], fields: dict[str, Any]) -> Bound:
    return kind(**fields)


@dataclass(frozen=True, kw_only=True)
class BoundWeights(Bound):
    """Main weights checked once, with their addresses. Returned by ``Group.bind``.

    The addresses are frozen: bind again after weights have moved.

    Attributes:
        addresses: ``[num_segments, M]``, flattened; 0 for segments that were not passed.
        names: the segments that were passed.
        region: the region, by number, that peers can address and that holds all of them; -1: none.
        owner: identifies the group that bound them.
        weights: the weights as passed; keeps their memory alive.
        table: the addresses on a CUDA group's device, int64 ``[num_segments, M]``; None: they are
            on the CPU only.
    """

    addresses: Addresses
    names: frozenset[str]
    region: int = -1
    owner: object = field(default=None, repr=False)
    weights: Weights = field(default_factory=dict, repr=False)
    table: torch.Tensor | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Source:
    """The rank and device that tensors come from, and how errors name them."""

    rank: int
    device: torch.device
    what: str = "weights"
    error: type[UltraEPError] = InvalidWeightsError


def bind_weights(
    weights: Weights, segments: Mapping[str, Segment], num_mains: int, source: Source
) -> tuple[Addresses, frozenset[str]]:
    """Check weights or gradients against the segments and return their addresses and names.

    Raises:
        InvalidWeightsError: unknown segment, wrong number of experts, shape, dtype, device or
            strides. Raised as ``source.error``.
    """
    weights = plain_mapping(weights)
    if not isinstance(weights, Mapping):
        raise source.error(
            f"rank {source.rank}: {source.what} is a {type(weights).__name__}; expected {{name:"
            f" tensor or sequence of tensors}} with names from {list(segments)}"
        )
    unknown = [name for name in weights if name not in segments]
    if unknown:
        raise source.error(
            f"rank {source.rank}: {source.what} have a segment {unknown[0]!r}; expected"
            f" {list(segments)}"
        )
    addresses = array("Q")
    for name, segment in segments.items():
        if name not in weights:
            addresses.extend([0] * num_mains)
            continue
        value = weights[name]
        if isinstance(value, torch.Tensor):
            addresses.extend(_stacked(value, name, segment, num_mains, source))
        else:
            addresses.extend(_listed(value, name, segment, num_mains, source))
    return addresses, frozenset(weights)


def _stacked(
    tensor: torch.Tensor,
    name: str,
    segment: Segment,
    num_mains: int,
    source: Source,
) -> Sequence[int]:
    shape = tensor.shape
    if not shape or shape[0] != num_mains:
        raise source.error(
            f"rank {source.rank}: {source.what}[{name!r}] has shape {tuple(tensor.shape)}; expected"
            f" {(num_mains, *segment.shape)}: one row for each of this rank's {num_mains} experts"
        )
    if num_mains == 0:
        return []
    start = _check(tensor, (num_mains,), name, segment, source)
    step = tensor.stride()[0] * segment.dtype.itemsize
    return range(start, start + num_mains * step, step) if step else [start] * num_mains


def _listed(
    tensors: Sequence[torch.Tensor],
    name: str,
    segment: Segment,
    num_mains: int,
    source: Source,
) -> list[int]:
    if not isinstance(tensors, Sequence) or len(tensors) != num_mains:
        found = (
            f"{len(tensors)} entries" if isinstance(tensors, Sequence) else type(tensors).__name__
        )
        raise source.error(
            f"rank {source.rank}: {source.what}[{name!r}] has {found}; expected a tensor"
            f" {(num_mains, *segment.shape)} or a sequence of {num_mains} tensors"
        )
    addresses = _plain_addresses(tensors, segment, source.device)
    if 0 not in addresses:
        return addresses
    addresses = []
    for i, tensor in enumerate(tensors):
        if not isinstance(tensor, torch.Tensor):
            raise source.error(
                f"rank {source.rank}: {source.what}[{name!r}][{i}] is a {type(tensor).__name__};"
                " expected a tensor"
            )
        addresses.append(_check(tensor, (), f"{name}][{i}", segment, source))
    return addresses


def _plain_addresses(
    tensors: Sequence[torch.Tensor], segment: Segment, device: torch.device
) -> list[int]:
    """Return the addresses of tensors that all match the segment exactly, else [0].

    There may be hundreds: each property is compared for all of them at C speed.
    """
    count = len(tensors)
    if (
        _PLAIN.issuperset(map(type, tensors))
        and list(map(_DTYPE, tensors)).count(segment.dtype) == count
        and list(map(_DEVICE, tensors)).count(device) == count
        and list(map(_LAYOUT, tensors)).count(torch.strided) == count
        and list(map(_SHAPE, tensors)).count(segment.shape) == count
        and list(map(torch.Tensor.stride, tensors)).count(segment.layout) == count
    ):
        return list(map(torch.Tensor.data_ptr, tensors))
    return [0]


def _check(
    tensor: torch.Tensor,
    stacked: tuple[int, ...],
    name: str,
    segment: Segment,
    source: Source,
) -> int:
    """Return the address of a tensor ``[*stacked, *segment.shape]``."""
    if tensor.dtype != segment.dtype:
        raise source.error(
            f"rank {source.rank}: {source.what}[{name}] has dtype {tensor.dtype}; expected"
            f" {segment.dtype}"
        )
    device = source.device
    if tensor.device != device:
        raise source.error(
            f"rank {source.rank}: {source.what}[{name}] is on {tensor.device}; expected {device},"
            " where the group's slots are"
        )
    # A wrapper (DTensor, FakeTensor) has no memory of its own.
    address = tensor.data_ptr() if tensor.layout == torch.strided else 0
    if address == 0:
        raise source.error(
            f"rank {source.rank}: {source.what}[{name}] is a {type(tensor).__name__} without dense"
            " memory; expected a plain tensor, for instance from .to_local()"
        )
    shape = tensor.shape
    if shape != (*stacked, *segment.shape):
        raise source.error(
            f"rank {source.rank}: an expert of {source.what}[{name}] has shape"
            f" {tuple(shape[len(stacked) :])}; expected {segment.shape}"
        )
    strides, layout = tensor.stride()[len(stacked) :], segment.layout
    if strides != layout and any(
        size > 1 and a != b for size, a, b in zip(segment.shape, strides, layout, strict=True)
    ):
        raise source.error(
            f"rank {source.rank}: an expert of {source.what}[{name}] has strides {strides};"
            f" expected {layout}. Make each expert one dense range, or declare Segment(strides=...)"
        )
    return address


def plain_mapping(weights: Weights) -> Weights:
    """Return a ParameterDict, which is no Mapping, as a dict; others as they are."""
    return dict(weights) if isinstance(weights, torch.nn.ParameterDict) else weights


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, which gradients flow through; others as they are."""
    to_local = getattr(tensor, "to_local", None)  # DTensor's module is slow to import
    part: torch.Tensor = tensor if to_local is None else to_local()
    return part


def segments_like(weights: Weights) -> tuple[dict[str, Segment], int]:
    """Return the segments of which weights are, and the number M of experts in them.

    Raises:
        InvalidArgumentError: they are no mapping of tensors, or experts differ.
    """
    weights = plain_mapping(weights)
    if (
        not isinstance(weights, Mapping)
        or not weights
        or not all(isinstance(t, Iterable) for t in weights.values())
    ):
        raise InvalidArgumentError(
            f"like is {weights!r}; expected {{name: tensor [M, *shape] or sequence of M tensors}}"
        )
    segments: dict[str, Segment] = {}
    counts: dict[str, int] = {}
    for name, value in weights.items():
        each = local_part(value) if isinstance(value, torch.Tensor) else list(value)
        experts = [local_part(t) for t in each]
        counts[name] = len(experts)
        if experts:
            first = experts[0]
        elif isinstance(each, torch.Tensor):
            first = torch.empty_strided(
                each.shape[1:], each.stride()[1:], dtype=each.dtype, device="meta"
            )
        else:
            raise InvalidArgumentError(
                f"like[{name!r}] is an empty sequence, so an expert's shape is unknown; expected"
                " tensors, or on a rank without experts one of shape [0, *shape]"
            )
        segments[name] = Segment.like(first)
        odd = next((i for i, t in enumerate(experts) if Segment.like(t) != segments[name]), None)
        if odd is not None:
            raise InvalidArgumentError(
                f"like[{name!r}][{odd}] is {Segment.like(experts[odd])}, and the first expert's is"
                f" {segments[name]}; expected experts of one shape, dtype and strides"
            )
    if len(set(counts.values())) != 1:
        raise InvalidArgumentError(
            f"like has different numbers of experts by segment: {counts}; expected one of each for"
            " every expert: scales and biases travel with their weights"
        )
    return segments, next(iter(counts.values()))


def with_own_storage(view: torch.Tensor) -> torch.Tensor:
    """Return the same memory as a tensor whose storage has only these bytes.

    torch.compile treats tensors of one storage as one, and copies all of it.
    """
    start = view.storage_offset() * view.element_size()
    storage = view.untyped_storage()[start : start + view.numel() * view.element_size()]
    tensor = torch.empty(0, dtype=view.dtype, device=view.device)
    return tensor.set_(storage, 0, view.shape, view.stride())


@dataclass(frozen=True)
class Selection:
    """Segments to transfer: ascending int32 indices, their address and number, and total bytes."""

    indices: np.ndarray
    address: int
    count: int
    nbytes: int


class Selections:
    """Checks a rank's ``segments=`` arguments and caches their selections.

    Args:
        rank: this rank.
        segments: the group's segments.
    """

    def __init__(self, rank: int, segments: Mapping[str, Segment]) -> None:
        self._rank = rank
        self._names = tuple(segments)
        self._nbytes = [segment.nbytes for segment in segments.values()]
        self._found: dict[tuple[str, ...] | None, Selection] = {}

    def find(self, segments: Sequence[str] | None) -> Selection:
        """Return the segments to transfer; None: all.

        Raises:
            InvalidArgumentError: it is not a sequence of distinct known names, or is empty.
        """
        if segments is not None and (
            isinstance(segments, str)
            or not isinstance(segments, Sequence)
            or not all(isinstance(s, str) for s in segments)
        ):
            raise InvalidArgumentError(
                f"rank {self._rank}: segments is {segments!r}; expected a sequence of names"
            )
        key = None if segments is None else tuple(segments)
        found = self._found.get(key)
        if found is not None:
            return found
        names = self._names if key is None else key
        unknown = [name for name in names if name not in self._names]
        if unknown or not names or len(set(names)) != len(names):
            raise InvalidArgumentError(
                f"rank {self._rank}: segments={key} is not a selection of {list(self._names)};"
                " expected one or more of these names, each once"
            )
        indices = np.array(sorted(self._names.index(n) for n in names), np.int32)
        nbytes = sum(self._nbytes[i] for i in indices)
        chosen = Selection(indices, indices.ctypes.data, len(indices), nbytes)
        self._found[key] = chosen
        return chosen

    def require(self, bound: BoundWeights, chosen: Selection) -> None:
        """Raise InvalidWeightsError if weights lack a segment to transfer."""
        if len(bound.names) == len(self._names):
            return
        wanted = [self._names[i] for i in chosen.indices]
        missing = [name for name in wanted if name not in bound.names]
        if missing:
            raise InvalidWeightsError(
                f"rank {self._rank}: weights lack segment {missing[0]!r}; expected"
                f" {wanted}, or pass segments= to transfer fewer"
            )
