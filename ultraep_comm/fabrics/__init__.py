"""Fabrics provide symmetric memory and peer addresses. Engines see only addresses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class SharedRegion:
    """One allocation of equal size on every rank.

    Attributes:
        bases: ``[G]``, the address of each rank's allocation on this rank; 0: out of reach.
        local: this rank's allocation, as a uint8 tensor.
        keep: objects that keep the peers' mappings alive.
    """

    bases: list[int]
    local: torch.Tensor
    keep: tuple[object, ...] = ()


class Place(NamedTuple):
    """Where memory is mapped a second time.

    Attributes:
        offset: in a region.
        address: of the memory.
        num_bytes: of it, whole pages.
    """

    offset: int
    address: int
    num_bytes: int


class Fabric(Protocol):
    """What a group needs from a fabric."""

    def allocate(self, num_bytes: int) -> SharedRegion:
        """Allocate zeroed memory on every rank. Collective; in the same order on every rank."""

    def close(self) -> None:
        """Let peers see that this rank has gone; memory stays mapped while tensors refer to it."""
