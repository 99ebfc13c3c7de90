"""A command of the benchmark. docs/developing.md shows how to add one."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ultraep_comm.bench.options import Settings, add_options


@dataclass(frozen=True, kw_only=True)
class Command:
    """One command.

    Attributes:
        name: on the command line.
        help: its line in the list of commands.
        description: first paragraph of its ``--help``.
        settings: the class whose fields are the options.
        module: has ``run(settings, report) -> int``, which measures on every rank and returns the
            exit status, usually that of `Report.finish`. Imported only when the command runs.
    """

    name: str
    help: str
    description: str
    settings: type[Settings]
    module: str


def add_commands(parser: argparse.ArgumentParser, commands: tuple[Command, ...]) -> None:
    """Add a subparser for each command."""
    added: Any = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in commands:
        own = added.add_parser(command.name, help=command.help, description=command.description)
        add_options(own, command.settings)
        own.set_defaults(parser=own)


def parse_arguments(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None
) -> argparse.Namespace:
    """Parse a command line with commands; unknown arguments are an error of their command."""
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return options
