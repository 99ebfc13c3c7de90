"""Tables of aligned plain text."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Lines = Sequence[Sequence[str]]


def format_table(headers: Lines, rows: Lines) -> str:
    """Return right-aligned columns, the first left-aligned. Header lines start with ``#``."""
    return GrowingTable(headers).add(rows)


class GrowingTable:
    """A table printed piece by piece. Columns never get narrower."""

    def __init__(self, headers: Lines, least: int = 0) -> None:
        """Create an empty table; ``least`` is the minimum width of a column."""
        self._headers: Lines = headers
        self._widths = [least] * len(headers[0])

    def add(self, rows: Lines) -> str:
        """Return the text of more rows, the first time preceded by the headers."""
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


@dataclass(frozen=True)
class Column:
    """A column of a table of records. A file has its columns, so that any file can be shown.

    Attributes:
        title: first header line.
        unit: second header line.
        of: path of the value in a record, as in ``"time_us.p50"``.
        form: format specification: digits behind the point, maybe a sign, maybe per cent. A
            missing value, None or NaN is printed as a dash.

    Raises:
        ValueError: another specification, as of a stranger's file: it may ask for gigabytes.
    """

    title: str
    unit: str
    of: str
    form: str = ""

    def __post_init__(self) -> None:
        """Check the specification."""
        if re.fullmatch(r"\+?(\.\d[f%])?", self.form) is None:
            raise ValueError(f"format {self.form!r}")

    def cell(self, record: Mapping[str, Any]) -> str:
        """Return the text of one row."""
        value = find(record, self.of)
        if value is None or (isinstance(value, float) and math.isnan(value)):
            return "-"
        return format(value, self.form)


def find(record: Mapping[str, Any], path: str) -> Any:
    """Return the value at a dotted path in a record; None if it is missing."""
    value: Any = record
    for name in path.split("."):
        if value is None:
            return None
        value = value.get(name)
    return value


class RecordTable:
    """A table of records, printed piece by piece."""

    def __init__(self, columns: Sequence[Column], least: int = 0) -> None:
        """Create an empty table; ``least`` is the minimum width of a column."""
        self._columns = columns
        self._table = GrowingTable([[c.title for c in columns], [c.unit for c in columns]], least)

    def add(self, records: Sequence[Mapping[str, Any]]) -> str:
        """Return the rows of records, the first time preceded by the titles."""
        return self._table.add([[c.cell(record) for c in self._columns] for record in records])


def format_records(columns: Sequence[Column], records: Sequence[Mapping[str, Any]]) -> str:
    """Return the whole table of records."""
    return RecordTable(columns).add(records)


def format_markdown(columns: Sequence[Column], records: Sequence[Mapping[str, Any]]) -> str:
    """Return the whole table of records in Markdown."""
    lines = [[f"{c.title} {c.unit}".strip() for c in columns], ["---"] * len(columns)]
    lines += [[c.cell(record) for c in columns] for record in records]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
