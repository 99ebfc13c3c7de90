"""The command that prints a file of records as its run was printed."""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ultraep_comm.bench.link_report import print_links
from ultraep_comm.bench.report_table import format_document
from ultraep_comm.errors import InvalidArgumentError
from ultraep_comm.files import read_json

_SHOWN = ("replicate", "reduce", "links")


def add_show_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``show`` and its argument."""
    commands.add_parser(
        "show",
        help="print again what a run printed, out of its --json",
        description="Print the header and the table of a file that replicate, reduce (both on the"
        " CPU) or links has written with --json. Its figures are formatted anew.",
    ).add_argument("file", type=Path, metavar="FILE.json")


def read_document(path: Path) -> dict[str, Any]:
    """Return a file's document.

    Raises:
        InvalidArgumentError: it holds none that could be shown.
        OSError: it cannot be read.
    """
    try:
        document = read_json(path)
        operations = {str(record["op"]) for record in document["records"]}
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidArgumentError(
            f"{path} is no file of records: {_describe(error)}; expected one that --json has"
            " written"
        ) from None
    complete = "header" in document and ("baselines" in document or operations == {"links"})
    if not (operations <= set(_SHOWN) and len(operations) == 1 and complete):
        found = _one_line(", ".join(sorted(operations))) or "no records"
        raise InvalidArgumentError(
            f"{path} has {found} and cannot be shown; expected records of {', '.join(_SHOWN)} by"
            " the host engine (links: any), with their header and baselines"
        )
    return dict(document)


def show(path: Path) -> int:
    """Print a file; return the exit status.

    Raises:
        InvalidArgumentError: as for `read_document`.
        OSError: likewise.
    """
    document = read_document(path)
    text = io.StringIO()
    try:  # once for nobody: half a table would be no answer
        with contextlib.redirect_stdout(text):
            print_document(document)
        text.getvalue().encode(sys.stdout.encoding or "utf-8")
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise InvalidArgumentError(
            f"{path} has records that cannot be shown: {_describe(error)}; expected a file as"
            " --json has written it"
        ) from None
    print_document(document)
    return 0


def print_document(document: Mapping[str, Any]) -> None:
    """Print what the run of a document printed."""
    if document["records"][0]["op"] == "links":
        print("\n".join(document["header"]))
        print_links(document)
    else:
        print(format_document(document))


def _describe(error: Exception) -> str:
    return _one_line(f"{type(error).__name__}: {error}")


def _one_line(text: str) -> str:
    """Return what a file says, as far as a line has room, and without what would break it."""
    return repr(text[:200])[1:-1]
