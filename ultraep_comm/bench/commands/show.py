"""``show``: print the file of a run as the run did."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ultraep_comm.bench.command import Command
from ultraep_comm.bench.options import Settings, option
from ultraep_comm.bench.report import Report
from ultraep_comm.bench.table import Column, format_markdown, format_records
from ultraep_comm.errors import InvalidArgumentError
from ultraep_comm.system import read_json

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, kw_only=True)
class ShowSettings(Settings):
    """Checked options of ``show``, and the document of the file."""

    path: Path = option("path", parse=Path, metavar="FILE.json", help="written by --json")
    markdown: bool = option("--markdown", default=False, help="print the table in Markdown")
    document: Mapping[str, Any] = field(default_factory=dict)

    def checked(self) -> Self:
        """Return the settings with the document of the file. See `Settings.checked`."""
        try:
            document = read_json(self.path)
            columns = [Column(*map(str, column)) for column in document["columns"]]
            if not document["records"] or not columns:
                raise ValueError("no records or no columns")
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidArgumentError(
                f"{self.path} is not a file of records with their columns: {_describe(error)};"
                " expected one written by --json"
            ) from None
        return replace(self, document=dict(document))

    @property
    def alone(self) -> bool:
        """Return True: nothing is measured."""
        return True


def run(settings: ShowSettings, report: Report) -> int:
    """Print a file; return the exit status.

    Raises:
        InvalidArgumentError: it has figures that cannot be shown.
    """
    text = io.StringIO()
    try:  # discard a first pass, so that invalid records print no partial table
        with contextlib.redirect_stdout(text):
            print_document(settings.document, markdown=settings.markdown)
        text.getvalue().encode(sys.stdout.encoding or "utf-8")
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise InvalidArgumentError(
            f"{settings.path} has records that cannot be shown: {_describe(error)}; expected a file"
            " written by --json"
        ) from None
    print_document(settings.document, markdown=settings.markdown)
    return 0


def print_document(document: Mapping[str, Any], *, markdown: bool = False) -> None:
    """Print a document as its run did, or its table alone in Markdown."""
    columns = [Column(*column) for column in document["columns"]]
    if markdown:
        print(format_markdown(columns, document["records"]))
        return
    print("\n".join(document["header"]))
    if "matrix_gbps" in document:
        from ultraep_comm.bench.commands.links.report import print_links

        print_links(document)
    else:
        print(format_records(columns, document["records"]))
    if document["notes"]:
        print("\n".join(document["notes"]))


def _describe(error: Exception) -> str:
    """Return the start of an error's text, which may be from a file, on one line."""
    return repr(f"{type(error).__name__}: {error}"[:200])[1:-1]


COMMAND = Command(
    name="show",
    help="print a run again, from its --json file",
    description="Print the header and the table of a file that a command or a study has written"
    " with --json.",
    settings=ShowSettings,
    module="ultraep_comm.bench.commands.show",
)
