"""Names of groups: operators take strings, not objects."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from ultraep_comm.errors import GroupClosedError

if TYPE_CHECKING:
    from ultraep_comm.group import Group

_groups: WeakValueDictionary[str, Group] = WeakValueDictionary()
_numbers = itertools.count()


def register_group(group: Group) -> str:
    """Return a new name, by which the group is found while it lives.

    Groups are numbered in the order in which the process makes them: where every rank makes the
    same groups, they have the same names, and compiled graphs are the same on all ranks.
    """
    name = str(next(_numbers))
    _groups[name] = group
    return name


def find_group(name: str) -> Group:
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
