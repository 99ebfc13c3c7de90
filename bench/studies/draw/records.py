"""Reads the records that a picture is drawn from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ultraep_comm.bench.table import find
from ultraep_comm.errors import InvalidArgumentError
from ultraep_comm.system import read_json
from ultraep_comm.viz.style import count


def load_records(path: Path) -> list[Any]:
    """Read a JSON file: a list of records, or a document that has them under ``records``.

    Raises:
        InvalidArgumentError: the file has no records; the text names the file.
        OSError: the file cannot be read.
    """
    try:
        document = read_json(path)
    except ValueError as error:
        raise InvalidArgumentError(f"{path} is not a JSON file: {error}") from None
    records = document.get("records") if isinstance(document, dict) else document
    if not isinstance(records, list) or not records:
        raise InvalidArgumentError(
            f"{path} has no records; expected a list of them, or an object with 'records'"
        )
    return records


def figure(record: Mapping[str, Any], of: str, least: float = 0.0, most: float = 1e9) -> float:
    """Return the number at a dotted path in a record.

    Raises:
        ValueError: it is missing, no number, or not within ``[least, most]``.
    """
    value = find(record, of)
    if not isinstance(value, int | float) or not least <= value <= most:
        raise ValueError(f"{of} is {value}; expected a number from {least:g} to {most:g}")
    return float(value)


def size_of(record: Mapping[str, Any]) -> str:
    """Return how large a record's group is, as the name of a panel."""
    return ", ".join(count(record[f"{what}s"], what) for what in ("rank", "expert", "slot"))
