"""One rank's main weights: what callers give, as addresses."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from ultraep_comm.cuda.weights import WeightTables
from ultraep_comm.errors import InvalidWeightsError, UnsupportedError
from ultraep_comm.segments import Addresses, BoundWeights, Giver, Segment, Weights, bind_weights


class RankWeights:
    """Binds weights for one rank of one group.

    Args:
        rank: this rank.
        segments: of an expert, by name.
        num_mains: M.
        region_offset: bytes from the start of a region of ``Group.empty_weights`` to each segment.
        owner: identifies the group.
        device: where weights are.
        tables: addresses on the device of a CUDA group; None: the host engine's.
    """

    def __init__(
        self,
        *,
        rank: int,
        segments: Mapping[str, Segment],
        num_mains: int,
        region_offset: Sequence[int],
        owner: object,
        device: torch.device,
        tables: WeightTables | None,
    ) -> None:
        self._rank = rank
        self._segments = segments
        self._names = tuple(segments)
        self._num_mains = num_mains
        self._region_offset = region_offset
        self._owner = owner
        self._giver = Giver(rank, device)
        self._tables = tables
        self._region_of: dict[int, int] = {}

    def add_region(self, start: int, index: int) -> None:
        """Remember a region of weights that peers can address."""
        self._region_of[start] = index

    def bind(self, weights: Weights | BoundWeights | torch.Tensor) -> BoundWeights:
        """Check weights, of any kind that a call takes, and take their addresses.

        Raises:
            InvalidWeightsError: as the text says.
        """
        if isinstance(weights, torch.Tensor):
            return self._bind_table(weights)
        if isinstance(weights, BoundWeights):
            if weights.owner is not self._owner:
                raise InvalidWeightsError(
                    f"rank {self._rank}: the bound weights are of another group; bind them on this"
                    " one"
                )
            return weights
        addresses, names = bind_weights(weights, self._segments, self._num_mains, self._giver)
        return BoundWeights(
            addresses=addresses,
            names=names,
            region=self._find_region(weights, addresses, names) if self._region_of else -1,
            owner=self._owner,
            weights=dict(weights),
        )

    def addresses_of(self, weights: Weights | BoundWeights) -> BoundWeights:
        """Do the same for weights whose addresses are known here.

        Raises:
            InvalidWeightsError: also for ``Group.weight_table``, which has them on the device.
        """
        bound = self.bind(weights)
        if not bound.addresses and self._num_mains > 0:
            raise InvalidWeightsError(
                f"rank {self._rank}: group.weight_table has its addresses on the device; expected"
                " the weights themselves"
            )
        return bound

    def bind_for_good(self, weights: Weights | BoundWeights) -> BoundWeights:
        """Do the same, with addresses on the device too, where there is one."""
        bound = self.bind(weights)
        if self._tables is None or bound.table is not None:
            return bound
        return replace(bound, table=self._tables.frozen(bound.addresses))

    @property
    def table(self) -> torch.Tensor:
        """Return what ``Group.weight_table`` does."""
        return self._require_tables().own()

    def update_table(self, weights: Weights | BoundWeights) -> None:
        """Do what ``Group.update_weight_table`` does."""
        self._require_tables().update(self.addresses_of(weights).addresses)

    def _require_tables(self) -> WeightTables:
        if self._tables is None:
            raise UnsupportedError(
                f"rank {self._rank}: weight_table is for CUDA graphs, and this group is on the"
                " host; pass the weights"
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
        """Return the region of ``empty_weights`` that these addresses fill exactly, else -1."""
        if not names:
            return -1
        count = self._num_mains
        if count == 0:  # empty tensors have no address, but they know their storage
            found = {
                self._region_of.get(t.untyped_storage().data_ptr(), -1)
                if isinstance(t, torch.Tensor)
                else -1
                for t in weights.values()
            }
            return found.pop() if len(found) == 1 else -1
        first = next(i for i, name in enumerate(self._names) if name in names)
        start = addresses[first * count] - self._region_offset[first]
        index = self._region_of.get(start, -1)
        if index < 0:
            return -1
        for i, (name, segment) in enumerate(self._segments.items()):
            if name in names:
                at, step = start + self._region_offset[i], segment.nbytes
                filled = array("Q", range(at, at + count * step, step))
                if addresses[i * count : (i + 1) * count] != filled:
                    return -1
        return index
