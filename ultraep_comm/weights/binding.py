"""Main weights and gradients of one rank: checked, and turned into addresses."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from ultraep_comm import _core
from ultraep_comm.errors import (
    InvalidArgumentError,
    InvalidGradientsError,
    InvalidWeightsError,
    UnsupportedError,
)
from ultraep_comm.weights.segments import (
    Addresses,
    Bound,
    BoundWeights,
    Segment,
    Source,
    Weights,
    bind_weights,
)


class AddressTables(Protocol):
    """Addresses in device memory, int64 ``[num_segments, M]``, for kernels to read."""

    def frozen(self, addresses: Addresses) -> torch.Tensor | None:
        """Return a table that never changes; None if the current stream is being captured."""

    def own(self) -> torch.Tensor:
        """Return the table that the caller updates; its address is stable."""

    def update(self, addresses: Addresses) -> None:
        """Write new addresses to the caller's table, in stream order."""


class RankWeights:
    """Binds weights for one rank of one group.

    Args:
        rank: this rank.
        segments: an expert's segments, by name.
        num_mains: M.
        owner: identifies the group.
        device: where weights must be.
        tables: address tables on the device of a CUDA group; None for the host engine.
    """

    def __init__(
        self,
        *,
        rank: int,
        segments: Mapping[str, Segment],
        num_mains: int,
        owner: object,
        device: torch.device,
        tables: AddressTables | None,
    ) -> None:
        self._rank = rank
        self._segments = segments
        self._names = tuple(segments)
        self._num_mains = num_mains
        self._owner = owner
        self._source = Source(rank, device)
        self._tables = tables
        self._region_of: dict[tuple[int, int], int] = {}  # by segment and address of its first main

    def add_region(self, begins: Sequence[int], index: int) -> None:
        """Register weights that peers can address, by the address of each segment's first main."""
        self._region_of.update(dict.fromkeys(enumerate(begins), index))

    def bind(self, weights: Weights | BoundWeights | torch.Tensor) -> BoundWeights:
        """Check weights in any form that a call accepts, and return their addresses.

        Raises:
            InvalidWeightsError: they do not match the group's experts, or are another group's.
        """
        if isinstance(weights, torch.Tensor):
            return self._bind_table(weights)
        if isinstance(weights, BoundWeights):
            if weights.owner is not self._owner:
                raise InvalidWeightsError(
                    f"rank {self._rank}: the weights are bound to another group; bind them to this"
                    " one"
                )
            return weights
        addresses, names = bind_weights(weights, self._segments, self._num_mains, self._source)
        return BoundWeights(
            addresses=addresses,
            names=names,
            region=self._find_region(weights, addresses, names) if self._region_of else -1,
            owner=self._owner,
            weights=dict(weights),
        )

    def addresses_of(self, weights: Weights | BoundWeights) -> BoundWeights:
        """Bind weights whose addresses are known on the CPU.

        Raises:
            InvalidWeightsError: as :meth:`bind`, or for ``Group.weight_table``, whose addresses are
                on the device.
        """
        bound = self.bind(weights)
        if not bound.addresses and self._num_mains > 0:
            raise InvalidWeightsError(
                f"rank {self._rank}: weights is group.weight_table, whose addresses are on the"
                " device; expected the weights themselves"
            )
        return bound

    def bind_for_good(self, weights: Weights | BoundWeights) -> BoundWeights:
        """Bind weights, with a frozen table of their addresses on a CUDA group's device."""
        bound = self.bind(weights)
        if self._tables is None or bound.table is not None:
            return bound
        return replace(bound, table=self._tables.frozen(bound.addresses))

    @property
    def table(self) -> torch.Tensor:
        """Return the caller's table; see ``Group.weight_table``."""
        return self._require_tables().own()

    def update_table(self, weights: Weights | BoundWeights) -> None:
        """Update the caller's table; see ``Group.update_weight_table``."""
        self._require_tables().update(self.addresses_of(weights).addresses)

    def _require_tables(self) -> AddressTables:
        if self._tables is None:
            raise UnsupportedError(
                f"rank {self._rank}: weight_table is for CUDA graphs, and this group's engine is"
                " not the CUDA engine; pass the weights"
            )
        return self._tables

    def _bind_table(self, weights: torch.Tensor) -> BoundWeights:
        if self._tables is None or weights.data_ptr() != self._tables.own().data_ptr():
            raise InvalidWeightsError(
                f"rank {self._rank}: weights is a tensor; expected {{name: tensor or sequence of"
                " tensors}, what group.bind returned, or group.weight_table of a CUDA group"
            )
        return BoundWeights(
            addresses=array("Q"),
            names=frozenset(self._names),
            owner=self._owner,
            table=weights,
        )

    def _find_region(self, weights: Weights, addresses: Addresses, names: frozenset[str]) -> int:
        """Return the region that has these addresses as its mains, else -1."""
        if not names:
            return -1
        count = self._num_mains
        found = set()
        if count == 0:  # empty tensors have no address, but their storage has that of segment 0
            for t in weights.values():
                at = t.untyped_storage().data_ptr() if isinstance(t, torch.Tensor) else 0
                found.add(self._region_of.get((0, at), -1))
            return found.pop() if len(found) == 1 else -1
        for i, (name, segment) in enumerate(self._segments.items()):
            if name in names:
                at, step = addresses[i * count], segment.nbytes
                found.add(self._region_of.get((i, at), -1))
                if -1 in found or len(found) > 1:
                    return -1
                filled = array("Q", range(at, at + count * step, step))
                if addresses[i * count : (i + 1) * count] != filled:
                    return -1
        return found.pop()


GradSpec = torch.dtype | Mapping[str, torch.dtype] | None
GRAD_TYPES = {torch.float32: _core.GradType.FLOAT32, torch.bfloat16: _core.GradType.BFLOAT16}


def make_grads(grads: GradSpec, segments: Mapping[str, Segment]) -> dict[str, Segment]:
    """Check a ``grads=dtype or {name: dtype}`` argument; return slot gradients as segments.

    Raises:
        InvalidArgumentError: an unknown segment, or a dtype other than float32 and bfloat16.
    """
    if grads is None:
        return {}
    if isinstance(grads, torch.dtype):
        grads = dict.fromkeys(segments, grads)
    if not isinstance(grads, Mapping) or not grads:
        raise InvalidArgumentError(
            f"grads is {grads!r}; expected a dtype, or {{name: dtype}} for the segments that have"
            " gradients, or None"
        )
    unknown = [name for name in grads if name not in segments]
    if unknown:
        raise InvalidArgumentError(
            f"grads has a segment {unknown[0]!r}; expected names from {list(segments)}"
        )
    for name, dtype in grads.items():
        if dtype not in GRAD_TYPES:
            raise InvalidArgumentError(
                f"grads[{name!r}] is {dtype!r}; expected torch.float32 or torch.bfloat16"
            )
    return {name: replace(s, dtype=grads[name]) for name, s in segments.items() if name in grads}


@dataclass(frozen=True, kw_only=True)
class BoundGrads(Bound):
    """Main gradients checked once, with their addresses. Returned by ``Group.bind_grads``.

    The addresses are frozen: bind again after gradients have moved.

    Attributes:
        addresses: ``[num_grad_segments, M]``, flattened.
        types: ``[num_grad_segments]`` int32, values of `_core.GradType`.
        grads: the gradients as passed; keeps their memory alive.
        owner: identifies the group that bound them.
        table: the addresses on a CUDA group's device, int64 ``[num_grad_segments, M]``; None: they
            are on the CPU only.
    """

    addresses: Addresses
    types: array[int]
    grads: Weights = field(repr=False)
    owner: object = field(repr=False)
    table: torch.Tensor | None = field(default=None, repr=False)


class RankGrads:
    """Binds main gradients for one rank of one group.

    Args:
        rank: this rank.
        segments: the slot gradients' segments, by name; empty: the slots have no gradients.
        num_mains: M.
        device: where gradients must be.
        tables: address tables on the device of a CUDA group; None for the host engine.
    """

    def __init__(
        self,
        *,
        rank: int,
        segments: Mapping[str, Segment],
        num_mains: int,
        device: torch.device,
        tables: AddressTables | None,
    ) -> None:
        self._segments = segments
        self._num_mains = num_mains
        self._tables = tables
        self._source = Source(rank, device, "grads", InvalidGradientsError)

    @property
    def expert_bytes(self) -> int:
        """Return the bytes of one replica's gradients."""
        return sum(segment.nbytes for segment in self._segments.values())

    def bind(self, grads: Weights | BoundGrads) -> BoundGrads:
        """Check main gradients and return their addresses.

        Raises:
            InvalidGradientsError: they do not match the group's slot gradients, share memory, or
                are bound to another group.
        """
        rank = self._source.rank
        if isinstance(grads, BoundGrads):
            if grads.owner is not self:
                raise InvalidGradientsError(
                    f"rank {rank}: the gradients are bound to another group; bind them to this one"
                )
            return grads
        if not self._segments:
            raise InvalidGradientsError(
                f"rank {rank}: the slots of this group hold no gradients; create the group with"
                " new_group(grads=torch.float32)"
            )
        if isinstance(grads, Mapping):
            missing = [name for name in self._segments if name not in grads]
            if missing:
                raise InvalidGradientsError(
                    f"rank {rank}: grads lack segment {missing[0]!r}; expected"
                    f" {list(self._segments)}, since all of them are reduced"
                )
        given = {
            name: replace(segment, dtype=self._dtype_of(grads, name, segment))
            for name, segment in self._segments.items()
        }
        addresses, _ = bind_weights(grads, given, self._num_mains, self._source)
        seen: set[int] = set()
        for i, name in enumerate(given):
            own = addresses[i * self._num_mains : (i + 1) * self._num_mains]
            seen.update(own)
            if len(seen) != (i + 1) * self._num_mains:
                raise InvalidGradientsError(
                    f"rank {rank}: rows of grads[{name!r}] share memory with each other or with"
                    " another segment; expected separate memory for each expert's gradient"
                )
            size = given[name].dtype.itemsize
            odd = [at for at in own if at % size] if self._tables is not None else []
            if odd:
                raise InvalidGradientsError(
                    f"rank {rank}: a row of grads[{name!r}] begins at the address {odd[0]:#x};"
                    f" expected a multiple of {size} on a device"
                )
        types = array("i", [GRAD_TYPES[s.dtype] for s in given.values()])
        return BoundGrads(addresses=addresses, types=types, grads=grads, owner=self)

    def bind_for_good(self, grads: Weights | BoundGrads) -> BoundGrads:
        """Bind gradients, with a frozen table of their addresses on a CUDA group's device."""
        bound = self.bind(grads)
        if self._tables is None or bound.table is not None:
            return bound
        return replace(bound, table=self._tables.frozen(bound.addresses))

    def _dtype_of(self, grads: Weights, name: str, segment: Segment) -> torch.dtype:
        """Return the dtype of a segment's main gradients: that of the first one in a sequence."""
        first: object = grads[name] if isinstance(grads, Mapping) else None
        if isinstance(first, list | tuple):
            first = first[0] if first else None
        if not isinstance(first, torch.Tensor):
            return segment.dtype  # none is there, or bind_weights will raise
        if first.dtype not in GRAD_TYPES:
            raise InvalidGradientsError(
                f"rank {self._source.rank}: grads[{name!r}] has dtype {first.dtype}; expected"
                " torch.float32 or torch.bfloat16"
            )
        return first.dtype
