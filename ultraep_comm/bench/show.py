"""The command that prints a file of records as its run was printed."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ultraep_comm.bench.link_report import print_links
from ultraep_comm.bench.report_table import format_document
from ultraep_comm.errors import InvalidArgumentError

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
        document = json.loads(path.read_text())
        operations = {record["op"] for record in document["records"]}
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidArgumentError(
            f"{path} is no file of records: {error!r}; expected one that --json has written"
        ) from None
    complete = "header" in document and ("baselines" in document or operations == {"links"})
    if not (operations <= set(_SHOWN) and len(operations) == 1 and complete):
        found = ", ".join(sorted(operations)) or "no records"
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
    print_document(read_document(path))
    return 0


def print_document(document: Mapping[str, Any]) -> None:
    """Print what the run of a document printed."""
    if document["records"][0]["op"] == "links":
        print("\n".join(document["header"]))
        print_links(document)
    else:
        print(format_document(document))
