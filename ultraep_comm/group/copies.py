"""Copies of what a process has once: they are the same object, and nothing of it is saved."""

from __future__ import annotations

from typing import Any, NoReturn, TypeVar

from ultraep_comm.errors import GroupClosedError

T = TypeVar("T", bound="Shared")


class Shared:
    """A part of a group: a copy of a module that holds it shares it, and a saved one lacks it."""

    def __copy__(self: T) -> T:
        return self

    def __deepcopy__(self: T, _memo: object) -> T:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Absent, ()


class Absent:
    """Takes the place of a part of a group that is not there: every use raises GroupClosedError.

    By default the place of what a loaded module was saved without.
    """

    def __init__(
        self,
        why: str = "this was saved and loaded without its group, which belongs to one process; set"
        " its attribute group to one of this process: module.group = new_group(...)",
    ) -> None:
        self._why = why

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # copy and pickle ask for such
            raise AttributeError(name)
        raise GroupClosedError(self._why)
