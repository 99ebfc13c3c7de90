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

from ultraep_comm.adapters import checks
from ultraep_comm.errors import UnsupportedError

Contents = Mapping[str, Any] | Sequence[Any]  # of a module: by name, or with names of their own


@contextmanager
def installed(
    version: str,
    modules: Mapping[str, Contents],
    others: Mapping[str, Any] | None = None,
    adapter: str | ModuleType = "",
) -> Iterator[Any]:
    """Let imports of frameworks find stand-ins, and return their adapter.

    Args:
        version: of the frameworks.
        modules: what each has, by path.
        others: replace what has their names.
        adapter: imported anew on top of the stand-ins, if given by name.
    """
    made: dict[str, Any] = {}
    for path, contents in modules.items():
        parts = path.split(".")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            made.setdefault(name, ModuleType(name)).__path__ = []
        named = contents if isinstance(contents, Mapping) else {m.__name__: m for m in contents}
        vars(made[path]).update({n: (others or {}).get(n, member) for n, member in named.items()})
    roots = {name.partition(".")[0] for name in made}

    def take_out() -> dict[str, ModuleType]:
        names = [n for n in sys.modules if n == adapter or n.partition(".")[0] in roots]
        return {name: sys.modules.pop(name) for name in names}

    kept = take_out()  # and not mock.patch.dict: what else is imported in here stays
    sys.modules.update(made)
    try:
        with mock.patch.object(importlib.metadata, "version", return_value=version):
            is_new = isinstance(adapter, str) and adapter
            yield importlib.import_module(adapter) if is_new else adapter
    finally:
        take_out()
        sys.modules.update(kept)


def differences(
    members: Mapping[str, Sequence[Any]], own: Sequence[str] = (), *, exact: bool = True
) -> list[str]:
    """Return where an installed release has other parameters than its stand-ins.

    Args:
        members: classes and functions, by the path of their module.
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
