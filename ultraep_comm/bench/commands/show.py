"""``show``: print the file of a run as the run did."""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ultraep_comm.bench.command import Command
from ultraep_comm.bench.options import Settings
from ultraep_comm.bench.report import Report
from ultraep_comm.errors import InvalidArgumentError
from ultraep_comm.system import read_json

_SHOWN = ("replicate", "reduce", "links")


@dataclass(frozen=True, kw_only=True)
class ShowSettings(Settings):
    """Checked arguments of ``show``: a file and its document."""

    path: Path
    document: Mapping[str, Any]

    @property
    def alone(self) -> bool:
        """Return True: nothing is measured."""
        return True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the argument of ``show``."""
    parser.add_argument("file", type=Path, metavar="FILE.json")


def make_settings(options: argparse.Namespace) -> ShowSettings:
    """Check the argument of ``show``, and read the file.

    Raises:
        InvalidArgumentError: the file has no records that ``show`` can print.
        OSError: the file cannot be read.
    """
    path: Path = options.file
    try:
        document = read_json(path)
        operations = {str(record["op"]) for record in document["records"]}
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidArgumentError(
            f"{path} is not a file of records: {_describe(error)}; expected one written by --json"
        ) from None
    complete = "header" in document and ("baselines" in document or operations == {"links"})
    if not (operations <= set(_SHOWN) and len(operations) == 1 and complete):
        found = _one_line(", ".join(sorted(operations))) or "no records"
        raise InvalidArgumentError(
            f"{path} has {found} and cannot be shown; expected records of {', '.join(_SHOWN)} by"
            " the host engine (links: any), with their header and baselines"
        )
    return ShowSettings(path=path, document=dict(document))


def run(settings: ShowSettings, report: Report) -> int:
    """Print a file; return the exit status.

    Raises:
        InvalidArgumentError: it has figures that cannot be shown.
    """
    text = io.StringIO()
    try:  # discard a first pass, so that invalid records print no partial table
        with contextlib.redirect_stdout(text):
            print_document(settings.document)
        text.getvalue().encode(sys.stdout.encoding or "utf-8")
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise InvalidArgumentError(
            f"{settings.path} has records that cannot be shown: {_describe(error)}; expected a file"
            " written by --json"
        ) from None
    print_document(settings.document)
    return 0


def print_document(document: Mapping[str, Any]) -> None:
    """Print a document as its run did."""
    from ultraep_comm.bench.commands.links.report import print_links
    from ultraep_comm.bench.commands.replicate.host import format_document

    if document["records"][0]["op"] == "links":
        print("\n".join(document["header"]))
        print_links(document)
    else:
        print(format_document(document))


def _describe(error: Exception) -> str:
    return _one_line(f"{type(error).__name__}: {error}")


def _one_line(text: str) -> str:
    """Return the start of a text from a file, with control characters escaped."""
    return repr(text[:200])[1:-1]


COMMAND = Command(
    name="show",
    help="print a run again, from its --json file",
    description="Print the header and the table of a file that replicate, reduce (both on the"
    " CPU) or links has written with --json.",
    add_arguments=add_arguments,
    make_settings=make_settings,
    module="ultraep_comm.bench.commands.show",
)
