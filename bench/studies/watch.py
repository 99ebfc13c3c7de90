"""Time that a process spends in the library's calls around a layer."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from ultraep_comm.nn import hooks, replication

# Before the dispatch; in the rest of the forward pass; in the backward pass.
PHASES = ("begin", "forward", "backward")
_CALLS: dict[str, list[tuple[Any, str]]] = {
    "begin": [(replication.Replication, "begin")],
    "forward": [
        (replication.LayerPass, name)
        for name in ("before_dispatch", "before_experts", "after_experts", "after_combine")
    ],
    "backward": [(hooks.Hook, "backward")],
}


class Stopwatch:
    """Time in our calls, by phase, since the last `take`."""

    def __init__(self) -> None:
        self.spent = dict.fromkeys(PHASES, 0)

    def take(self) -> list[int]:
        """Return the time of each phase, in ns, and forget it."""
        spent = list(self.spent.values())
        self.spent = dict.fromkeys(PHASES, 0)
        return spent

    def timed(self, phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a call whose time counts."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter_ns()
            try:
                return call(*args, **kwargs)
            finally:
                self.spent[phase] += time.perf_counter_ns() - start

        return timed


@contextlib.contextmanager
def watching() -> Iterator[Stopwatch]:
    """Replace the calls by timed ones, and yield their stopwatch."""
    watch = Stopwatch()
    with contextlib.ExitStack() as replaced:
        for phase, calls in _CALLS.items():
            for owner, name in calls:
                timed = watch.timed(phase, getattr(owner, name))
                call: Any = staticmethod(timed) if owner is hooks.Hook else timed
                replaced.enter_context(mock.patch.object(owner, name, call))
        yield watch
