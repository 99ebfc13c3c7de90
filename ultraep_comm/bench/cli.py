"""Command line of ``python -m ultraep_comm.bench``."""

from __future__ import annotations

import argparse
import functools
import importlib
import sys
from collections.abc import Callable, Sequence

from ultraep_comm.bench.command import Command, add_commands, parse_arguments
from ultraep_comm.bench.commands import (
    accept,
    calibrate,
    critical_path,
    links,
    plan,
    replicate,
    show,
)
from ultraep_comm.bench.launch import find_launcher, run_alone, run_ranks
from ultraep_comm.bench.options import Settings, make_settings
from ultraep_comm.bench.report import Report
from ultraep_comm.errors import InvalidArgumentError
from ultraep_comm.system import FAILED, INTERRUPTED

COMMANDS = (
    replicate.COMMAND,
    plan.COMMAND,
    critical_path.COMMAND,
    links.COMMAND,
    accept.COMMAND,
    calibrate.COMMAND,
    show.COMMAND,
)


def main(
    arguments: Sequence[str] | None = None, *, prepare: Callable[[int, int], None] | None = None
) -> int:
    """Run a command; return its exit status, as `run_commands` does."""
    return run_commands(COMMANDS, make_parser(), arguments, prepare=prepare)


def run_commands(
    commands: Sequence[Command],
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None = None,
    *,
    prepare: Callable[[int, int], None] | None = None,
) -> int:
    """Run the one of the commands that a command line names; return its exit status.

    ``prepare`` is that of `run_ranks`.

    0: success; 1: wrong bytes; 2: other errors; 3: a gate is not met; 130: interrupted; 128 plus a
    signal's number: the signal ended a rank.
    """
    options = parse_arguments(parser, arguments)
    command = next(one for one in commands if one.name == options.command)
    try:
        settings = make_settings(command.settings, options)
    except (InvalidArgumentError, OSError) as error:
        if _prints():
            print(f"error: {error}", file=sys.stderr)
        return FAILED
    run = functools.partial(run_command, module=command.module)
    try:
        if settings.alone:
            return run_alone(run, settings)
        return run_ranks(run, settings, settings.num_ranks, preload=command.module, prepare=prepare)
    except KeyboardInterrupt:
        return INTERRUPTED


def run_command(settings: Settings, module: str) -> int:
    """Run a command as one of its ranks; return the exit status."""
    status: int = importlib.import_module(module).run(settings, Report.of(settings))
    return status


def _prints() -> bool:
    try:
        launched = find_launcher()
    except InvalidArgumentError:
        return True
    return launched is None or launched.rank == 0


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="python -m ultraep_comm.bench",
        description="Measure transfers of experts, what surrounds them, and the links under them."
        " Flags are those of nccl-tests where it has them; COMMAND --help lists a command's.",
        epilog="Exit status: 0 success, 1 wrong bytes or values, 2 other errors, 3 a limit is"
        " not met, 130 interrupted.",
    )
    add_commands(parser, COMMANDS)
    return parser
