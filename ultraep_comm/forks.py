"""Forked children: they share memory and descriptors with their parent, and have no threads of it.

A group belongs to the process that made it. A child that is forked while it exists has to keep its
hands off the engine, and to close its copies of the connections at once: peers notice the parent's
end by their end-of-file.
"""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet


class Inheritable(Protocol):
    """What a forked child puts out of use."""

    def leave_to_parent(self) -> None:
        """Give up in this process what belongs to its parent. Must not block or tell anybody."""


_watched: WeakSet[Inheritable] = WeakSet()


def watch_forks(thing: Inheritable) -> None:
    """Have ``thing.leave_to_parent()`` called in every child that is forked while it lives."""
    _watched.add(thing)


def _in_child() -> None:
    failed: Exception | None = None
    for thing in list(_watched):
        try:
            thing.leave_to_parent()
        except Exception as error:  # the others hold their parent's descriptors all the same
            failed = error
    if failed is not None:
        raise failed


os.register_at_fork(after_in_child=_in_child)
