"""Reads the records that a picture is drawn from."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from ultraep_comm.errors import InvalidArgumentError
from ultraep_comm.viz.style import load_records

T = TypeVar("T")


def read_records(
    path: Path, op: str, study: str, parse: Callable[[Mapping[str, Any]], T]
) -> list[tuple[T, str]]:
    """Return what ``parse`` makes of each record of a study, and the record's place.

    Raises:
        InvalidArgumentError: the file has others; the text names the file and the record.
        OSError: the file cannot be read.
    """
    found = []
    for i, record in enumerate(load_records(path)):
        place = f"{path}: record {i}"
        given = record.get("op") if isinstance(record, dict) else record
        if given != op:
            raise InvalidArgumentError(
                f"{place} has op {reprlib.repr(given)}; expected {op!r}, of {study} --json"
            )
        try:
            found.append((parse(record), place))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise InvalidArgumentError(
                f"{place} is not of {study}: {reprlib.repr(error)} is wrong or missing"
            ) from None
    return found
