"""Command line of ``python bench/studies``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from studies import against, draw, layer, model, netlab, steady
from ultraep_comm.bench.cli import run_commands
from ultraep_comm.bench.command import add_commands

COMMANDS = (
    against.COMMAND,
    steady.COMMAND,
    model.COMMAND,
    layer.COMMAND,
    netlab.COMMAND,
    draw.COMMAND,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a study; return its exit status, as `run_commands` does."""
    return run_commands(COMMANDS, make_parser(), arguments)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all studies."""
    parser = argparse.ArgumentParser(
        prog="python bench/studies",
        description="Studies of plans, of the model, of whole layers, and over limited links, on"
        " the CPU of this machine. bench/README.md has examples, bench/METRICS.md the figures.",
        epilog="Exit status: as of python -m ultraep_comm.bench.",
    )
    add_commands(parser, COMMANDS)
    return parser
