"""What a command of the benchmark is. docs/developing.md shows how to add one."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ultraep_comm.bench.options import Settings


@dataclass(frozen=True, kw_only=True)
class Command:
    """One command; everything that is not its own business is done for it.

    Attributes:
        name: on the command line.
        help: its line in the list of commands.
        description: what its own ``--help`` begins with.
        add_arguments: gives a parser the command's arguments.
        make_settings: checks them. Raises InvalidArgumentError or OSError; nothing has run then.
        module: has ``run(settings, report) -> int``, which measures on every rank and returns the
            exit status, mostly that of `Report.finish`. Imported only when the command runs.
    """

    name: str
    help: str
    description: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    make_settings: Callable[[argparse.Namespace], Settings]
    module: str


def add_commands(parser: argparse.ArgumentParser, commands: tuple[Command, ...]) -> None:
    """Give each command a parser of its own."""
    added: Any = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in commands:
        own = added.add_parser(command.name, help=command.help, description=command.description)
        command.add_arguments(own)
