"""Aligned plain text."""

from __future__ import annotations

from collections.abc import Sequence

Lines = Sequence[Sequence[str]]


def format_table(headers: Lines, rows: Lines) -> str:
    """Return right-aligned columns, the first left-aligned; header lines start with ``#``."""
    return GrowingTable(headers).add(rows)


class GrowingTable:
    """The same, for rows that become known one after the other; columns never get narrower."""

    def __init__(self, headers: Lines, least: int = 0) -> None:
        """Begin a table whose columns are at least so wide."""
        self._headers: Lines = headers
        self._widths = [least] * len(headers[0])

    def add(self, rows: Lines) -> str:
        """Return the lines of more rows, the first time with the headers before them."""
        lines = [*self._headers, *rows]
        self._widths = [
            max(width, *(len(line[i]) for line in lines)) for i, width in enumerate(self._widths)
        ]
        text = [
            ("# " if i < len(self._headers) else "  ") + self._join(line)
            for i, line in enumerate(lines)
        ]
        self._headers = []
        return "\n".join(text)

    def _join(self, line: Sequence[str]) -> str:
        rest = zip(line[1:], self._widths[1:], strict=True)
        cells = [line[0].ljust(self._widths[0]), *(cell.rjust(width) for cell, width in rest)]
        return "  ".join(cells).rstrip()
