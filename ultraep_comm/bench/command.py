"""A command of the benchmark. docs/developing.md shows how to add one."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ultraep_comm.bench.options import Settings


@dataclass(frozen=True, kw_only=True)
class Command:
    """One command.

    Attributes:
        name: on the command line.
        help: its line in the list of commands.
        description: first paragraph of its ``--help``.
        add_arguments: adds its arguments to a parser.
        make_settings: checks the arguments before anything runs. Raises InvalidArgumentError or
            OSError.
        module: has ``run(settings, report) -> int``, which measures on every rank and returns the
            exit status, usually that of `Report.finish`. Imported only when the command runs.
    """

    name: str
    help: str
    description: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    make_settings: Callable[[argparse.Namespace], Settings]
    module: str


def add_commands(parser: argparse.ArgumentParser, commands: tuple[Command, ...]) -> None:
    """Add a subparser for each command."""
    added: Any = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in commands:
        own = added.add_parser(command.name, help=command.help, description=command.description)
        command.add_arguments(own)
        own.set_defaults(parser=own)


def parse_arguments(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None
) -> argparse.Namespace:
    """Parse a command line with commands; unknown arguments are an error of their command."""
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return options
