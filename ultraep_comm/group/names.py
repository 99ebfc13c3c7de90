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
    """Return a name for a new group: the number of groups created before in this process.

    If all ranks create their groups in one order, names, and so compiled graphs, are the same.
    """
    return str(next(_numbers))


def register_group(group: uec.Group) -> None:
    """Register a group under its name, without keeping it alive."""
    _groups[group.name] = group


def find_group(name: str) -> uec.Group:
    """Return the group with this name.

    Raises:
        GroupClosedError: there is none, or it has been garbage-collected.
    """
    group = _groups.get(name)
    if group is None:
        raise GroupClosedError(
            f"there is no group named {name!r} in this process; keep the group that a compiled"
            " function uses, and compile again for a new one"
        )
    return group
