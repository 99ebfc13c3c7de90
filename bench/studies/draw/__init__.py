"""``draw``: arguments and settings."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from ultraep_comm.bench.command import Command
from ultraep_comm.bench.options import Settings, check_writable, take
from ultraep_comm.errors import InvalidArgumentError


@dataclass(frozen=True, kw_only=True)
class DrawSettings(Settings):
    """Checked arguments of ``draw``: a file of records, and the picture to write."""

    file: Path
    out: Path

    @property
    def alone(self) -> bool:
        """Return True: nothing is measured."""
        return True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``draw``."""
    add = parser.add_argument
    add("file", type=Path, metavar="FILE.json", help="records of a study or of its recipe")
    add("--out", type=Path, metavar="FILE.png", required=True, help="picture to write")


def make_settings(options: argparse.Namespace) -> DrawSettings:
    """Check the arguments of ``draw``.

    Raises:
        InvalidArgumentError: the file has no records, or the picture cannot be written.
        OSError: the file cannot be read.
    """
    from ultraep_comm.viz.style import load_records

    if options.out.suffix.lower() != ".png":
        raise InvalidArgumentError(
            f"--out {options.out} has an unknown kind; expected a name that ends in .png"
        )
    check_writable(options.out, "--out")
    load_records(options.file)
    return DrawSettings(**take(options, "file", "out"))


COMMAND = Command(
    name="draw",
    help="draw the records of against, steady or model",
    description="Draw the file that a study has written with --json: of against, imbalance against"
    " transfer time; of steady, what each layer moves; of model, or of records with size (bytes),"
    " mode, fan_out and over_bound, time over the bound. docs/pictures.md describes the pictures.",
    add_arguments=add_arguments,
    make_settings=make_settings,
    module="studies.draw.run",
)
