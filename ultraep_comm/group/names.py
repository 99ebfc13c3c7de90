"""Names of groups: operators take strings, not objects."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from ultraep_comm.errors import GroupClosedError

if TYPE_CHECKING:
    import ultraep_comm as uec

_groups: WeakValueDictionary[str, uec.Group] = WeakValueDictionary()
_numbers = itertools.count()


def new_name() -> str:
    """Return a name for a new group.

    Groups are numbered in the order in which the process makes them: where every rank makes the
    same groups, they have the same names, and compiled graphs are the same on all ranks.
    """
    return str(next(_numbers))


def register_group(group: uec.Group) -> None:
    """Have a group found by its name while it lives."""
    _groups[group.name] = group


def find_group(name: str) -> uec.Group:
    """Return the group of a name.

    Raises:
        GroupClosedError: there is none, or it lives no more.
    """
    group = _groups.get(name)
    if group is None:
        raise GroupClosedError(
            f"there is no group named {name!r} in this process; keep the group that a compiled"
            " function uses, and compile again for a new one"
        )
    return group
