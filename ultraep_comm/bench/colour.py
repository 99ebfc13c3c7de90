"""Colours on a terminal, with rich where it is installed; elsewhere plain text."""

from __future__ import annotations

import sys
from collections.abc import Sequence

try:
    import rich.console
    import rich.text
except ImportError:  # an extra
    HAS_RICH = False
else:
    HAS_RICH = True

Line = Sequence[tuple[str, str]]  # text and style


def print_coloured(lines: Sequence[Line], console: rich.console.Console | None = None) -> None:
    """Print lines that are never wrapped. rich leaves colours out where nobody looks at them."""
    if console is None and not (HAS_RICH and sys.stdout.isatty()):
        for line in lines:
            print("".join(text for text, _ in line).rstrip())
        return
    console = console or rich.console.Console()
    for line in lines:
        console.print(rich.text.Text.assemble(*line), soft_wrap=True, highlight=False)
