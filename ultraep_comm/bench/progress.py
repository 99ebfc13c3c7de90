"""A line on the terminal that says how far a run has come."""

from __future__ import annotations

import sys

_WIDTH = 24
_LINE = 79


def show_progress(done: int, total: int, text: str) -> None:
    """Draw a bar and ``text``; at the end clear the line. Silent where nobody watches stderr."""
    if not sys.stderr.isatty():
        return
    filled = _WIDTH * done // max(total, 1)
    line = f"[{'#' * filled}{'.' * (_WIDTH - filled)}] {done} of {total} {text}"
    shown = "" if done >= total else line[:_LINE]
    print(f"\r{shown:<{_LINE}}\r", end="", file=sys.stderr, flush=True)
