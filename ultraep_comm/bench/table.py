"""Aligned plain text."""

from __future__ import annotations

from collections.abc import Sequence


def format_table(headers: Sequence[Sequence[str]], rows: Sequence[Sequence[str]]) -> str:
    """Return right-aligned columns, the first left-aligned; header lines start with ``#``."""
    lines = [*headers, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]

    def join(line: Sequence[str]) -> str:
        rest = (cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))
        return "  ".join([line[0].ljust(widths[0]), *rest]).rstrip()

    return "\n".join(
        ("# " if i < len(headers) else "  ") + join(line) for i, line in enumerate(lines)
    )
