"""Segments: the tensors of an expert, and their layout in bytes."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from ultraep_comm.errors import InvalidArgumentError

Weights = Mapping[str, torch.Tensor | Sequence[torch.Tensor]]


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
