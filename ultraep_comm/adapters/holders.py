"""Serving: all that a layer holds, where parts of its experts may be beside its parameters."""

from __future__ import annotations

import hashlib
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from enum import Enum
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch

from ultraep_comm.adapters.checks import refuse

Tensor = torch.Tensor

_DEEPEST = 12
_FEW = 8  # values that errors show
# Objects that are of no layer, or of all.
_APART = re.compile(
    r"(ultraep_comm|torch\.distributed|vllm\.(distributed|config)|transformers|triton|logging)\b"
)
_NO_HOLDERS = (str, bytes, type, ModuleType, Enum, torch.dtype, torch.device)
_SKIPPED = {  # of the router, of all layers, or of this rank's place among the others
    "e_score_correction_bias",
    "hash_indices_table",
    "custom_routing_function",
    "routing_sink",
    "vllm_config",
    "moe_parallel_config",
    "expert_map_manager",
    "replicas",
}


def walk(holder: Any, seen: dict[int, Any]) -> Iterator[tuple[str, Any]]:
    """Yield what an object holds, with paths: tensors, arrays as tensors, numbers, and containers.

    Of other objects only those named ``scale``. Goes through attributes, containers, closures,
    partials and bound methods, each object once.

    Args:
        holder: where it begins.
        seen: objects by id that are left out; in the end all.
    """
    pending = deque([("", 0, holder)])
    while pending:
        path, depth, value = pending.popleft()
        if isinstance(value, bool | int | float | complex):
            yield path, value
            continue
        if value is None or id(value) in seen or isinstance(value, _NO_HOLDERS):
            continue
        seen[id(value)] = value
        if torch.is_tensor(value) or hasattr(value, "__array_interface__"):
            with suppress(TypeError, ValueError):  # not of numbers
                is_tensor = torch.is_tensor(value)
                yield path, value if is_tensor else torch.as_tensor(value, device="cpu")
        elif isinstance(value, list | tuple | Mapping) or path.endswith(".scale"):
            yield path, value
        if depth and _APART.match(type(value).__module__):
            continue
        if depth < _DEEPEST:
            pending.extend(
                (f"{path}.{name}".lstrip("."), depth + 1, child)
                for name, child in _children(value)
                if name not in _SKIPPED
            )


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((str(key), child) for key, child in list(value.items()))
    elif isinstance(value, list | tuple | set | frozenset | deque):
        yield from ((str(i), child) for i, child in enumerate(list(value)))
    elif isinstance(value, MethodType):
        yield from (("__self__", value.__self__), ("__func__", value.__func__))
    elif isinstance(value, partial):
        yield from (("func", value.func), ("args", value.args), ("keywords", value.keywords))
    elif isinstance(value, FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            with suppress(ValueError):  # it is empty
                yield name, cell.cell_contents
        yield from (("__defaults__", value.__defaults__), ("__kwdefaults__", value.__kwdefaults__))
    slots = (vars(kind).get("__slots__", ()) for kind in type(value).__mro__)
    # In their order, the same in all processes: the first path to an object is its only one.
    for name in dict.fromkeys(n for own in slots for n in ([own] if isinstance(own, str) else own)):
        if name not in ("__dict__", "__weakref__"):
            with suppress(AttributeError):
                yield name, getattr(value, name)
    for name, child in list(getattr(value, "__dict__", {}).items()):
        if isinstance(value, torch.nn.Module) and name in ("_parameters", "_buffers", "_modules"):
            yield from list(child.items())
        elif not (torch.is_tensor(value) and callable(child)):  # its loader
            yield name, child


_OF_RANK = re.compile(r"(.*[._])?(\w*_)?(rank|offset|index|device)")  # numbers
_MAPS = re.compile(r".*(expert_map|expert_mask|_to_physical|_to_global|global_(expert_)?ids)\w*")


class Held:
    """What a layer holds beside its parameters, of which replicas have to be independent.

    Attributes:
        shares: something has the memory of segments, which therefore has to stay.
        facts: what has to be equal on all ranks, by path, for :func:`checks.agree`.
    """

    def __init__(
        self, layer: Any, segments: Iterable[Tensor], rows: int, remedy: str, *apart: Any
    ) -> None:
        """Look at all that a layer holds, except for ``apart``.

        Args:
            layer: its module.
            segments: its parameters with a row for each of this rank's experts.
            rows: L, the number of these.
            remedy: what to do, for the error.
            apart: what is of no layer.

        Raises:
            UnsupportedError: replicas would compute something else.
        """
        self._memory = [_place_of(weight) for weight in segments]
        self._rows = rows
        self.shares, self.facts = False, dict[str, Any]()
        parameters = {id(weight) for weight in layer.parameters()}
        for path, value in walk(layer, {id(thing): thing for thing in apart}):
            if id(value) in parameters:
                continue
            try:
                problem = self._find_problem(path, value)
            except RuntimeError as error:  # a sparse tensor, or one that was packed
                problem = f"cannot be read: {str(error).splitlines()[0]}"
            refuse((problem, f"its {path} {problem}; {remedy}"))

    def _find_problem(self, path: str, value: Any) -> str:
        """Return why replicas would compute something else; an empty text: they would not."""
        if torch.is_tensor(value):
            return self._look_at(path, value)
        if isinstance(value, list | tuple | Mapping):
            return self._look_into(value)
        if not isinstance(value, bool | int | float | complex):
            return f"is a {type(value).__name__}, which would stay behind"
        if isinstance(value, int) and any(start <= value < end for start, end in self._memory):
            self.shares = True
        elif not _OF_RANK.fullmatch(path):
            self.facts[path] = str(value) if isinstance(value, complex) else value
        return ""

    def _look_at(self, path: str, tensor: Tensor) -> str:
        if not tensor.numel() or tensor.is_meta:
            return ""
        if self._is_segment(tensor):
            self.shares = True
            return ""
        if not tensor.is_floating_point() and _MAPS.fullmatch(path):
            return ""
        if tensor.dtype in (torch.int64, torch.uint64):
            values = tensor.detach().flatten().view(torch.int64)
            inside = torch.zeros_like(values, dtype=torch.bool)
            for first, last in self._memory:
                inside |= (values >= first) & (values < last)
            self.shares |= bool(inside.any())
            if inside.all():
                return ""
        own = [d for d, size in enumerate(tensor.shape) if size == self._rows]
        for dim in own or [d for d, size in enumerate(tensor.shape) if size % self._rows == 0]:
            if not _is_uniform(tensor, dim):
                return (
                    f"of shape {tuple(tensor.shape)} with {_show(tensor)} has other values for each"
                    f" of {self._rows} experts, and is in no parameter of the layer: it would stay"
                    " behind"
                )
        for dim in own:
            tensor = tensor.narrow(dim, 0, 1)
        self.facts[path] = [str(tensor.dtype), list(tensor.shape), _show(tensor)]
        return ""

    def _look_into(self, holder: Any) -> str:
        """Look for a number or a tensor for each expert."""
        has_keys = isinstance(holder, Mapping)
        if has_keys and not all(isinstance(key, int) for key in holder):
            return ""
        parts = list(holder.values() if has_keys else holder)
        if not parts or len(parts) % self._rows:
            return ""
        if all(torch.is_tensor(p) and p.numel() and not p.is_meta for p in parts):
            if any(map(self._is_segment, parts)):
                return ""
            shown = [[*part.shape, _show(part)] for part in parts]
        elif all(isinstance(p, int | float) for p in parts) and not all(
            isinstance(p, int) for p in parts
        ):
            shown = parts
        else:
            return ""
        if all(part == shown[0] for part in shown):
            return ""
        return (
            f"with {shown[: self._rows]} has other values for each of {self._rows} experts, and"
            " would stay behind"
        )

    def _is_segment(self, tensor: Tensor) -> bool:
        start, end = _place_of(tensor)
        return any(start < last and first < end for first, last in self._memory)


def _place_of(tensor: Tensor) -> tuple[int, int]:
    """Return the addresses of all of a tensor's storage."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def _is_uniform(tensor: Tensor, dim: int) -> bool:
    rows = tensor.detach().movedim(dim, 0).contiguous().flatten().view(torch.uint8)
    rows = rows.view(tensor.shape[dim], -1)
    return bool((rows == rows[:1]).all())


def _show(tensor: Tensor) -> Any:
    """Return a few values, or a digest of many."""
    flat = tensor.detach().contiguous().flatten().cpu()
    if flat.is_complex():
        flat = torch.view_as_real(flat).flatten()
    if len(flat) <= _FEW:
        return (flat if flat.element_size() > 1 else flat.view(torch.uint8)).tolist()
    digest = hashlib.sha256(bytes(flat.view(torch.uint8).numpy())).hexdigest()
    return f"values of digest {digest[:16]}"
