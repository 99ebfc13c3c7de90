"""Aligned plain text, and colours on a terminal where rich is installed."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Lines = Sequence[Sequence[str]]
Line = Sequence[tuple[str, str]]  # text and style


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


# ---- tables of records --------------------------------------------------------------------------

Source = str | Callable[[Mapping[str, Any]], Any]


@dataclass(frozen=True)
class Column:
    """A column of a table of records.

    Attributes:
        title: its first line.
        unit: its second.
        of: where a record has the value, as in ``"time_us.p50"``; or what makes it of a record.
        form: as for ``format``. A value that is not there, None or not a number is a dash.
    """

    title: str
    unit: str
    of: Source
    form: str = ""

    def cell(self, record: Mapping[str, Any]) -> str:
        """Return the text of one row."""
        value: Any = find(record, self.of) if isinstance(self.of, str) else self.of(record)
        if value is None or (isinstance(value, float) and math.isnan(value)):
            return "-"
        return format(value, self.form)


def find(record: Mapping[str, Any], path: str) -> Any:
    """Return what a record has at the end of a path of names; None: it has no such thing."""
    value: Any = record
    for name in path.split("."):
        if value is None:
            return None
        value = value.get(name)
    return value


class RecordTable:
    """A table that grows by records."""

    def __init__(self, columns: Sequence[Column], least: int = 0) -> None:
        """Begin a table whose columns are at least so wide."""
        self._columns = columns
        self._table = GrowingTable([[c.title for c in columns], [c.unit for c in columns]], least)

    def add(self, records: Sequence[Mapping[str, Any]]) -> str:
        """Return the rows of some records, the first time with the titles before them."""
        return self._table.add([[c.cell(record) for c in self._columns] for record in records])


def format_records(columns: Sequence[Column], records: Sequence[Mapping[str, Any]]) -> str:
    """Return the whole table of some records."""
    return RecordTable(columns).add(records)


# ---- colours ------------------------------------------------------------------------------------


def print_coloured(lines: Sequence[Line], console: Any = None) -> None:
    """Print lines that are never wrapped; without a terminal, or rich, without their colours."""
    if console is None:
        console = _terminal()
    for line in lines:
        if console is None:
            print("".join(text for text, _ in line).rstrip())
        else:
            from rich.text import Text

            console.print(Text.assemble(*line), soft_wrap=True, highlight=False)


def _terminal() -> Any:
    """Return rich's console; None: nobody would see colours, or there is no rich."""
    try:
        from rich.console import Console
    except ImportError:  # an extra
        return None
    return Console() if sys.stdout.isatty() else None
