"""Gradients: which segments have them in slots, and checking the main gradients of a call."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from ultraep_comm.cuda.weights import WeightTables
from ultraep_comm.errors import InvalidArgumentError, InvalidGradientsError
from ultraep_comm.segments import Addresses, Giver, Segment, Weights, bind_weights

GradSpec = torch.dtype | Mapping[str, torch.dtype] | None
# In the order of `enum class GradType` in src/core/gradients.hpp.
GRAD_DTYPES = (torch.float32, torch.bfloat16)


def make_grads(grads: GradSpec, segments: Mapping[str, Segment]) -> dict[str, Segment]:
    """Check a ``grads=dtype or {name: dtype}`` argument; return slot gradients as segments.

    Raises:
        InvalidArgumentError: an unknown segment, or a dtype that is not added up.
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
        if dtype not in GRAD_DTYPES:
            raise InvalidArgumentError(
                f"grads[{name!r}] is {dtype!r}; expected torch.float32 or torch.bfloat16"
            )
    return {name: replace(s, dtype=grads[name]) for name, s in segments.items() if name in grads}


@dataclass(frozen=True, kw_only=True)
class BoundGrads:
    """Main gradients checked once, with their addresses. Made by ``Group.bind_grads``.

    The addresses are frozen: bind again after gradients have moved.

    Attributes:
        addresses: ``[num_grad_segments, M]`` in a row.
        types: ``[num_grad_segments]`` int32, indices into GRAD_DTYPES.
        grads: as they were given; keeps the memory alive.
        owner: identifies the group that bound them.
        table: the addresses on the device of a CUDA group, int64 ``[num_grad_segments, M]``; None:
            they are on the CPU alone.
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
        segments: of the slot gradients, by name; none: slots hold no gradients.
        num_mains: M.
        device: where gradients are.
        tables: addresses on the device of a CUDA group; None: the host engine's.
    """

    def __init__(
        self,
        *,
        rank: int,
        segments: Mapping[str, Segment],
        num_mains: int,
        device: torch.device,
        tables: WeightTables | None,
    ) -> None:
        self._segments = segments
        self._num_mains = num_mains
        self._tables = tables
        self._giver = Giver(rank, device, "grads", InvalidGradientsError)

    @property
    def expert_bytes(self) -> int:
        """Return the bytes of one replica's gradients."""
        return sum(segment.nbytes for segment in self._segments.values())

    def bind(self, grads: Weights | BoundGrads) -> BoundGrads:
        """Check main gradients and take their addresses.

        Raises:
            InvalidGradientsError: as the text says.
        """
        rank = self._giver.rank
        if isinstance(grads, BoundGrads):
            if grads.owner is not self:
                raise InvalidGradientsError(
                    f"rank {rank}: the bound gradients are of another group; bind them on this one"
                )
            return grads
        if not self._segments:
            raise InvalidGradientsError(
                f"rank {rank}: the slots of this group hold no gradients; make the group with"
                " new_group(grads=torch.float32)"
            )
        if isinstance(grads, Mapping):
            missing = [name for name in self._segments if name not in grads]
            if missing:
                raise InvalidGradientsError(
                    f"rank {rank}: grads lack segment {missing[0]!r}; expected"
                    f" {list(self._segments)}: replicas of all of them are added up"
                )
        given = {
            name: replace(segment, dtype=self._dtype_of(grads, name, segment))
            for name, segment in self._segments.items()
        }
        addresses, _ = bind_weights(grads, given, self._num_mains, self._giver)
        seen: set[int] = set()
        for i, name in enumerate(given):
            own = addresses[i * self._num_mains : (i + 1) * self._num_mains]
            seen.update(own)
            if len(seen) != (i + 1) * self._num_mains:
                raise InvalidGradientsError(
                    f"rank {rank}: rows of grads[{name!r}] share memory, with each other or with"
                    " another segment's; expected a gradient of its own for each expert"
                )
            size = given[name].dtype.itemsize
            odd = [at for at in own if at % size] if self._tables is not None else []
            if odd:
                raise InvalidGradientsError(
                    f"rank {rank}: a row of grads[{name!r}] begins at the address {odd[0]:#x};"
                    f" expected a multiple of {size} on a device"
                )
        types = array("i", [GRAD_DTYPES.index(s.dtype) for s in given.values()])
        return BoundGrads(addresses=addresses, types=types, grads=grads, owner=self)

    def bind_for_good(self, grads: Weights | BoundGrads) -> BoundGrads:
        """Do the same, with addresses on the device too, where there is one."""
        bound = self.bind(grads)
        if self._tables is None or bound.table is not None:
            return bound
        return replace(bound, table=self._tables.frozen(bound.addresses))

    def _dtype_of(self, grads: Weights, name: str, segment: Segment) -> torch.dtype:
        """Return the dtype of a main gradient: of the first one, where there are several."""
        first: object = grads[name] if isinstance(grads, Mapping) else None
        if isinstance(first, list | tuple):
            first = first[0] if first else None
        if not isinstance(first, torch.Tensor):
            return segment.dtype  # there are none, or the check that follows says what is wrong
        if first.dtype not in GRAD_DTYPES:
            raise InvalidGradientsError(
                f"rank {self._giver.rank}: grads[{name!r}] has dtype {first.dtype}; expected"
                " torch.float32 or torch.bfloat16"
            )
        return first.dtype
