"""Bindings: one rank's main weights or gradients, checked, and their addresses."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, TypeAlias

import torch

from ultraep_comm import _core
from ultraep_comm.errors import InvalidArgumentError, InvalidWeightsError
from ultraep_comm.weights.segments import Segment, Weights, plain_mapping

Addresses: TypeAlias = "array[int]"  # 64 bits each
# Writes addresses of a shape to a table on the device; see `put_addresses` of the CUDA engine.
PutAddresses = Callable[[Addresses, tuple[int, int], torch.Tensor | None], torch.Tensor | None]
GradSpec = torch.dtype | Mapping[str, torch.dtype] | None
GRAD_TYPES = {torch.float32: _core.GradType.FLOAT32, torch.bfloat16: _core.GradType.BFLOAT16}
_PLAIN = {torch.Tensor, torch.nn.Parameter}
_DTYPE, _DEVICE, _LAYOUT, _SHAPE = map(attrgetter, ("dtype", "device", "layout", "shape"))


@dataclass(kw_only=True, eq=False)
class Binding:
    """Main weights or gradients that were checked once, with their addresses.

    Returned by ``Group.bind`` and ``Group.bind_grads``. Copies, also saved ones, lie elsewhere, and
    no group takes them.

    Attributes:
        tensors: by segment, as passed; keeps their memory alive.
        addresses: ``[num_segments, M]``, flattened; 0 for segments that were not passed.
        types: of gradients ``[num_segments]`` int32, values of `_core.GradType`; of weights empty.
        region: the region, by number, that peers can address and that holds all of them; -1: none.
        table: the addresses on a CUDA group's device, int64 ``[num_segments, M]``; None: they are
            on the CPU only.
        owner: the binder that made it; None: it is a copy.
    """

    tensors: Weights = field(repr=False)
    addresses: Addresses
    types: array[int]
    region: int
    table: torch.Tensor | None = field(default=None, repr=False)
    owner: Binder | None = field(repr=False)

    def update(self, tensors: Weights | Binding) -> None:
        """Take other tensors, of the same segments and dtypes, for all later calls.

        On a CUDA group this writes their addresses to the device, as work of the current stream:
        replays of graphs that were captured with this binding follow. Wait for calls that are in
        flight first. The tensors before may be freed once the calls that use them have finished.

        Args:
            tensors: as for the call that made this binding.

        Raises:
            InvalidWeightsError: as for the call that made this binding; or they are of other
                segments or dtypes, or not in the memory of ``group.empty_weights()`` that the
                binding was made for.
            InvalidArgumentError: this is a copy.
            UnsupportedError: the current stream is being captured.
        """
        if self.owner is None:
            raise InvalidArgumentError(
                "update() of a copy of a binding, which belongs to no group; bind the tensors"
            )
        self.owner.update(self, tensors)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"owner": None, "table": None}


class Binder:
    """Binds main weights for one rank of one group.

    Args:
        rank: this rank.
        segments: an expert's segments, by name.
        num_local_experts: M.
        device: where the tensors must be.
        put_addresses: for the device of a CUDA group; None: the engine reads them on the CPU.
    """

    _what = "weights"

    def __init__(
        self,
        *,
        rank: int,
        segments: Mapping[str, Segment],
        num_local_experts: int,
        device: torch.device,
        put_addresses: PutAddresses | None,
    ) -> None:
        self.put_addresses = put_addresses
        self._rank = rank
        self._segments = segments
        self._names = tuple(segments)
        self._count = num_local_experts
        self._device = device
        self._selected: dict[tuple[str, ...] | None, tuple[array[int], int]] = {}
        self._region_of: dict[tuple[int, int], int] = {}  # by segment and its first address

    def add_region(self, begins: Sequence[int], index: int) -> None:
        """Register weights that peers can address, by the first address of each segment."""
        self._region_of.update(dict.fromkeys(enumerate(begins), index))

    # ---- bindings -------------------------------------------------------------------------

    def bind(self, tensors: Weights | Binding) -> Binding:
        """Check tensors in any form that a call accepts, and return their addresses.

        Raises:
            InvalidWeightsError: they do not match the group's experts, or are bound to another
                group; or gradients share memory.
        """
        if isinstance(tensors, Binding):
            if tensors.owner is not self:
                raise self._refusal(" are bound to another group; bind them to this one")
            return tensors
        given = plain_mapping(tensors)
        if not isinstance(given, Mapping):
            raise self._refusal(
                f" is a {type(given).__name__}; expected {{name: tensor or sequence of tensors}}"
                f" with names from {list(self._names)}"
            )
        return self._bind(given)

    def bind_persistent(self, tensors: Weights | Binding) -> Binding:
        """Bind tensors, with a table of their addresses on a CUDA group's device."""
        bound = self.bind(tensors)
        if bound.table is None and self.put_addresses is not None:
            bound.table = self.put_addresses(bound.addresses, self._shape, None)
        return bound

    def update(self, bound: Binding, tensors: Weights | Binding) -> None:
        """Do :meth:`Binding.update`. Captured calls have all but the addresses in them."""
        new = self.bind(tensors)
        if new.tensors.keys() != bound.tensors.keys() or new.types != bound.types:
            raise self._refusal(
                f" have the segments {list(new.tensors)}, of other names or dtypes than those that"
                f" were bound, {list(bound.tensors)}; bind them anew"
            )
        if bound.region not in (-1, new.region):
            raise self._refusal(
                " are in other memory than that of group.empty_weights() which was bound, and which"
                " captured calls may pull from; bind them anew"
            )
        if bound.table is not None and self.put_addresses is not None:
            self.put_addresses(new.addresses, self._shape, bound.table)
        bound.tensors, bound.addresses = new.tensors, new.addresses

    @property
    def _shape(self) -> tuple[int, int]:
        return len(self._segments), self._count

    def _bind(self, weights: Weights) -> Binding:
        addresses = self._find_addresses(weights, self._segments)
        return Binding(
            tensors=dict(weights),
            addresses=addresses,
            types=array("i"),
            region=self._find_region(weights, addresses) if self._region_of else -1,
            owner=self,
        )

    def _find_region(self, weights: Weights, addresses: Addresses) -> int:
        """Return the region that has these addresses as its weights, else -1."""
        if not weights:
            return -1
        count = self._count
        found = set()
        if count == 0:  # empty tensors have no address, but their storage has that of segment 0
            for t in weights.values():
                at = t.untyped_storage().data_ptr() if isinstance(t, torch.Tensor) else 0
                found.add(self._region_of.get((0, at), -1))
            return found.pop() if len(found) == 1 else -1
        for i, (name, segment) in enumerate(self._segments.items()):
            if name in weights:
                at, step = addresses[i * count], segment.nbytes
                found.add(self._region_of.get((i, at), -1))
                if -1 in found or len(found) > 1:
                    return -1
                filled = array("Q", range(at, at + count * step, step))
                if addresses[i * count : (i + 1) * count] != filled:
                    return -1
        return found.pop()

    # ---- segments -------------------------------------------------------------------------

    def select(self, segments: Sequence[str] | None) -> tuple[array[int], int]:
        """Return the segments of a ``segments=`` argument: ascending int32 indices, and bytes.

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
        selected = self._selected.get(key)
        if selected is not None:
            return selected
        names = self._names if key is None else key
        unknown = [name for name in names if name not in self._names]
        if unknown or not names or len(set(names)) != len(names):
            raise InvalidArgumentError(
                f"rank {self._rank}: segments={key} is not a selection of {list(self._names)};"
                " expected one or more of these names, each once"
            )
        indices = array("i", sorted(self._names.index(name) for name in names))
        selected = indices, sum(self._segments[name].nbytes for name in names)
        self._selected[key] = selected
        return selected

    def require(self, bound: Binding, indices: Iterable[int]) -> None:
        """Raise InvalidWeightsError if weights lack a segment to transfer."""
        if len(bound.tensors) == len(self._names):
            return
        wanted = [self._names[i] for i in indices]
        missing = [name for name in wanted if name not in bound.tensors]
        if missing:
            raise self._refusal(
                f" lack segment {missing[0]!r}; expected {wanted}, or pass segments= to transfer"
                " fewer"
            )

    # ---- checks ---------------------------------------------------------------------------

    def _refusal(self, text: str) -> InvalidWeightsError:
        return InvalidWeightsError(f"rank {self._rank}: {self._what}{text}")

    def _find_addresses(self, tensors: Weights, segments: Mapping[str, Segment]) -> Addresses:
        """Check tensors against segments, and return their addresses."""
        unknown = [name for name in tensors if name not in segments]
        if unknown:
            raise self._refusal(f" have a segment {unknown[0]!r}; expected {list(segments)}")
        addresses = array("Q")
        for name, segment in segments.items():
            if name not in tensors:
                addresses.extend([0] * self._count)
                continue
            value = tensors[name]
            if isinstance(value, torch.Tensor):
                addresses.extend(self._stacked(value, name, segment))
            else:
                addresses.extend(self._listed(value, name, segment))
        return addresses

    def _stacked(self, tensor: torch.Tensor, name: str, segment: Segment) -> Sequence[int]:
        shape, count = tensor.shape, self._count
        if not shape or shape[0] != count:
            raise self._refusal(
                f"[{name!r}] has shape {tuple(shape)}; expected {(count, *segment.shape)}: one row"
                f" for each of this rank's {count} experts"
            )
        if count == 0:
            return []
        start = self._check(tensor, (count,), name, segment)
        step = tensor.stride()[0] * segment.dtype.itemsize
        return range(start, start + count * step, step) if step else [start] * count

    def _listed(self, tensors: Sequence[torch.Tensor], name: str, segment: Segment) -> list[int]:
        if not isinstance(tensors, Sequence) or len(tensors) != self._count:
            found = (
                f"{len(tensors)} entries"
                if isinstance(tensors, Sequence)
                else type(tensors).__name__
            )
            raise self._refusal(
                f"[{name!r}] has {found}; expected a tensor {(self._count, *segment.shape)} or a"
                f" sequence of {self._count} tensors"
            )
        addresses = _plain_addresses(tensors, segment, self._device)
        if 0 not in addresses:
            return addresses
        addresses = []
        for i, tensor in enumerate(tensors):
            if not isinstance(tensor, torch.Tensor):
                raise self._refusal(
                    f"[{name!r}][{i}] is a {type(tensor).__name__}; expected a tensor"
                )
            addresses.append(self._check(tensor, (), f"{name}][{i}", segment))
        return addresses

    def _check(
        self, tensor: torch.Tensor, stacked: tuple[int, ...], name: str, segment: Segment
    ) -> int:
        """Return the address of a tensor ``[*stacked, *segment.shape]``."""
        if tensor.dtype != segment.dtype:
            raise self._refusal(f"[{name}] has dtype {tensor.dtype}; expected {segment.dtype}")
        if tensor.device != self._device:
            raise self._refusal(
                f"[{name}] is on {tensor.device}; expected {self._device}, where the group's slots"
                " are"
            )
        # A wrapper (DTensor, FakeTensor) has no memory of its own.
        address = tensor.data_ptr() if tensor.layout == torch.strided else 0
        if address == 0:
            raise self._refusal(
                f"[{name}] is a {type(tensor).__name__} without dense memory; expected a plain"
                " tensor, for instance from .to_local()"
            )
        shape = tensor.shape
        if shape != (*stacked, *segment.shape):
            raise InvalidWeightsError(
                f"rank {self._rank}: an expert of {self._what}[{name}] has shape"
                f" {tuple(shape[len(stacked) :])}; expected {segment.shape}"
            )
        strides, layout = tensor.stride()[len(stacked) :], segment.layout
        if strides != layout and any(
            size > 1 and a != b for size, a, b in zip(segment.shape, strides, layout, strict=True)
        ):
            raise InvalidWeightsError(
                f"rank {self._rank}: an expert of {self._what}[{name}] has strides {strides};"
                f" expected {layout}. Make each expert one dense range, or declare"
                " Segment(strides=...)"
            )
        return address


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


class GradBinder(Binder):
    """Binds main gradients. ``segments``: of the slot gradients; empty: there are none."""

    _what = "grads"

    def _bind(self, grads: Weights) -> Binding:
        if not self._segments:
            raise InvalidWeightsError(
                f"rank {self._rank}: the slots of this group hold no gradients; create the group"
                " with new_group(grads=torch.float32)"
            )
        missing = [name for name in self._names if name not in grads]
        if missing:
            raise self._refusal(
                f" lack segment {missing[0]!r}; expected {list(self._names)}, since all of them are"
                " reduced"
            )
        given = {
            name: replace(segment, dtype=self._dtype_of(grads[name], name, segment))
            for name, segment in self._segments.items()
        }
        addresses, count = self._find_addresses(grads, given), self._count
        seen: set[int] = set()
        for i, (name, segment) in enumerate(given.items()):
            own = addresses[i * count : (i + 1) * count]
            seen.update(own)
            if len(seen) != (i + 1) * count:
                raise self._refusal(
                    f"[{name!r}] has rows that share memory with each other or with another"
                    " segment; expected separate memory for each expert's gradient"
                )
            size = segment.dtype.itemsize
            odd = [at for at in own if at % size] if self.put_addresses is not None else []
            if odd:
                raise self._refusal(
                    f"[{name!r}] has a row at the address {odd[0]:#x}; expected a multiple of"
                    f" {size} on a device"
                )
        types = array("i", [GRAD_TYPES[segment.dtype] for segment in given.values()])
        return Binding(tensors=dict(grads), addresses=addresses, types=types, region=-1, owner=self)

    def _dtype_of(self, grads: object, name: str, segment: Segment) -> torch.dtype:
        """Return the dtype of a segment's main gradients: that of the first one in a sequence."""
        if isinstance(grads, list | tuple):
            grads = grads[0] if grads else None
        if not isinstance(grads, torch.Tensor):
            return segment.dtype  # there is none, or the check of addresses will raise
        if grads.dtype not in GRAD_TYPES:
            raise self._refusal(
                f"[{name!r}] has dtype {grads.dtype}; expected torch.float32 or torch.bfloat16"
            )
        return grads.dtype


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
