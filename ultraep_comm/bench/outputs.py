"""Where records go: JSON with all that a run knows, and CSV with the same records, flat."""

from __future__ import annotations

import argparse
import csv
import io
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from ultraep_comm import files
from ultraep_comm.errors import InvalidArgumentError, UltraEPError

FORMAT = 1  # of the documents; under the same number fields are only added


def add_output_arguments(add: Callable[..., argparse.Action]) -> None:
    """Add ``--json`` and ``--csv``."""
    add("-J", "--json", type=Path, metavar="FILE", help="write records, machine and settings there")
    add("--csv", type=Path, metavar="FILE", help="write the same records there, flat")


def check_outputs(options: argparse.Namespace) -> None:
    """Raise InvalidArgumentError if records have nowhere to go, before anything runs."""
    given = {name: getattr(options, name) for name in ("json", "csv")}
    for name, path in given.items():
        if path is not None:
            check_writable(path, f"--{name}")
    if given["json"] is not None and given["csv"] is not None:
        one, other = (path.resolve() for path in given.values())
        if one == other and not _is_stream(given["json"]):
            raise InvalidArgumentError(f"--json and --csv are both {one}; expected two files")


def check_writable(path: Path, name: str) -> None:
    """Raise InvalidArgumentError if ``path`` cannot be written. Leaves nothing behind."""
    if path.is_dir():
        raise InvalidArgumentError(f"{name} {path} is a folder; expected a file")
    if _is_stream(path):
        return
    try:
        target = path.resolve()
    except RuntimeError:  # before Python 3.13
        raise InvalidArgumentError(f"{name} {path} is a link that leads to itself") from None
    if not target.parent.is_dir():
        raise InvalidArgumentError(f"{name} {path}: there is no such folder")
    try:
        with tempfile.TemporaryFile(dir=target.parent):
            pass
    except OSError as error:
        raise InvalidArgumentError(
            f"{name} {path}: the folder cannot be written to ({error.strerror}); choose another"
        ) from None


def write_outputs(
    document: Mapping[str, Any], *, json_path: Path | None, csv_path: Path | None
) -> None:
    """Write a document and its records. A file appears whole or not at all.

    Raises:
        UltraEPError: a file could not be written; the other one has been.
    """
    texts: dict[str, tuple[Path | None, Callable[[], str]]] = {
        "--json": (json_path, lambda: json.dumps({"format": FORMAT, **document}, indent=2) + "\n"),
        "--csv": (csv_path, lambda: format_csv(document["records"])),
    }
    failed = []
    for flag, (path, make_text) in texts.items():
        try:
            if path is not None:
                write_output(flag, path, make_text())
        except UltraEPError as error:
            failed.append(str(error))
    if failed:
        raise UltraEPError("; ".join(failed))


def write_output(flag: str, path: Path, text: str) -> None:
    """Write a file that is whole or not there, at the end of a link too; or into a stream.

    Raises:
        UltraEPError: it could not be written. Names the flag that asks for it.
    """

    def write(file: BinaryIO) -> None:
        file.write(text.encode())

    try:
        if _is_stream(path):
            with path.open("a") as stream:
                stream.write(text)
        else:
            files.write_whole(path.resolve(), write)
    except OSError as error:
        raise UltraEPError(f"{flag} {path}: {error.strerror}") from None


def format_csv(records: Sequence[Mapping[str, Any]]) -> str:
    """Return records as CSV, a column for each number in them; None is an empty cell."""
    flat = [flatten(record) for record in records]
    columns = list(dict.fromkeys(name for record in flat for name in record))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue()


def flatten(record: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return ``{"time_us.p50": 3.5}`` of ``{"time_us": {"p50": 3.5}}``; lists become JSON."""
    flat: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{name}."))
        else:
            text = json.dumps(value) if isinstance(value, list | tuple) else value
            flat[f"{prefix}{name}"] = text
    return flat


def _is_stream(path: Path) -> bool:
    """Return whether there is something to write into, such as a pipe, and not to replace.

    Standard output is one even where it goes to a file.
    """
    streams = str(path) in ("/dev/stdout", "/dev/stderr") or path.is_relative_to("/dev/fd")
    return streams or (path.exists() and not path.is_file())
