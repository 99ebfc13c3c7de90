"""What stand-ins for frameworks share."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any
from unittest import mock

import pytest

from ultraep_comm.adapters import checks
from ultraep_comm.errors import UnsupportedError


@contextmanager
def installed(members: Mapping[str, Sequence[Any]], **others: Any) -> Iterator[None]:
    """Let imports of a framework find stand-ins, in which ``others`` replace those of their names.

    Args:
        members: classes and functions, by the path of their module.
        others: by name.
    """
    root = next(iter(members)).partition(".")[0]

    def of_framework(name: str) -> bool:
        return name == root or name.startswith(f"{root}.")

    kept = {name: module for name, module in sys.modules.items() if of_framework(name)}
    for name in kept:
        del sys.modules[name]
    for path, each in members.items():
        parts = path.split(".")
        for i in range(1, len(parts) + 1):
            name = ".".join(parts[:i])
            sys.modules.setdefault(name, ModuleType(name)).__path__ = []
        for member in each:
            name = member.__name__
            setattr(sys.modules[path], name, others.get(name, member))
    try:
        yield
    finally:
        for name in [name for name in sys.modules if of_framework(name)]:
            del sys.modules[name]
        sys.modules.update(kept)


@contextmanager
def imported(
    adapter: str, version: str, members: Mapping[str, Sequence[Any]], others: Mapping[str, Any]
) -> Iterator[Any]:
    """Import an adapter anew on top of a fake of its framework.

    Args:
        adapter: its module.
        version: of the framework.
        members: as for :func:`installed`, of any number of frameworks.
        others: likewise.
    """
    modules: dict[str, ModuleType] = {}
    for path, each in members.items():
        parts = path.split(".")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            modules.setdefault(name, ModuleType(name))
        for member in each:
            setattr(modules[path], member.__name__, others.get(member.__name__, member))
    # Not mock.patch.dict: what else is imported in here stays.
    kept = {name: sys.modules.pop(name, None) for name in (*modules, adapter)}
    sys.modules.update(modules)
    try:
        with mock.patch.object(importlib.metadata, "version", return_value=version):
            yield importlib.import_module(adapter)
    finally:
        for name, module in kept.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module


@contextmanager
def plugged(
    variable: str, mode: str, version: str, modules: Mapping[str, Mapping[str, Any]]
) -> Iterator[None]:
    """Let a plugin find stand-ins for the modules of a server, and its mode in the environment.

    Args:
        variable: of the environment.
        mode: its value.
        version: of the server.
        modules: what each has, by path.
    """
    with pytest.MonkeyPatch.context() as context:
        context.setenv(variable, mode)
        context.setattr(importlib.metadata, "version", lambda _: version)
        for path, contents in modules.items():
            module = ModuleType(path)
            vars(module).update(contents)
            context.setitem(sys.modules, path, module)
        yield


def differences(
    members: Mapping[str, Sequence[Any]], own: Sequence[str] = (), *, exact: bool = True
) -> list[str]:
    """Return where an installed release has other parameters than its stand-ins.

    Args:
        members: as for :func:`installed`.
        own: methods of stand-ins that no adapter meets.
        exact: the release's parameters do not only begin like the stand-in's.

    Raises:
        ImportError: the framework is not installed.
    """
    found = []
    for path, each in members.items():
        module = importlib.import_module(path)
        for fake in each:
            real = getattr(module, fake.__name__, None)
            pairs = [(fake.__name__, fake, real)]
            if isinstance(fake, type):
                functions = [n for n, f in vars(fake).items() if isinstance(f, FUNCTIONS)]
                pairs = [
                    (f"{fake.__name__}.{name}", getattr(fake, name), getattr(real, name, None))
                    for name in functions
                    if name not in own
                ]
            for name, here, there in pairs:
                ours = list(inspect.signature(here).parameters)
                theirs = list(inspect.signature(there).parameters) if there else None
                if theirs is None or not (theirs == ours or (not exact and _begins(theirs, ours))):
                    found.append(f"{path}:{name} takes {theirs}, here {ours}")
    return found


FUNCTIONS = (FunctionType, classmethod, staticmethod)


def _begins(theirs: list[str], ours: list[str]) -> bool:
    """Return whether all own parameters are there, those without a keyword in their places."""
    return theirs[: len(ours)] == ours or (theirs[:3] == ours[:3] and set(ours) <= set(theirs))


def differences_at(points: Mapping[str, str]) -> list[str]:
    """Return where an installed release differs from what an adapter, and so its fake, expect."""
    found = []
    for path, parameters in points.items():
        try:
            checks.check_signature(path, parameters)
        except (AttributeError, ImportError, UnsupportedError) as error:
            found.append(f"{path}: {error}")
    return found
