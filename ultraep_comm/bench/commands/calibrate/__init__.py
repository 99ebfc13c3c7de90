"""``calibrate``: arguments and settings."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ultraep_comm.bench.command import Command
from ultraep_comm.bench.options import (
    DEFAULT_RANKS,
    Settings,
    add_engine,
    check_ranks,
    check_shared,
    check_writable,
    take,
)
from ultraep_comm.bench.sizes import parse_size
from ultraep_comm.errors import InvalidArgumentError

if TYPE_CHECKING:
    from ultraep_comm.calibration import MeasuredCosts

TINY = 64  # bytes of a segment whose flag costs more than its copy
SHORTER = 16  # ratio of the large expert to the short one
_SMALLEST = 4096  # bytes of a copy
_MINIMA = {"ranks": 3, "iters": 1, "num_sms": 1, "seed": 0}


@dataclass(frozen=True, kw_only=True)
class CalibrateSettings(Settings):
    """Checked arguments of ``calibrate``. The fastest iteration counts.

    Attributes:
        copy_bytes: bytes of the expert whose copies are timed.
        output: file to write or extend; None: only print.
        kept: figures of other engines in that file.
        num_sms: workers of a rank; None: the engine's default.
    """

    warmup: int = 0
    copy_bytes: int = 16 << 20
    output: Path | None = None
    kept: Mapping[str, MeasuredCosts] = field(default_factory=dict)
    num_sms: int | None = None

    @property
    def section(self) -> str:
        """Return the name of this engine in the file."""
        return "loopback" if self.fabric == "loopback" else self.engine

    @property
    def short_bytes(self) -> int:
        """Return the bytes of the expert that hops are timed with.

        On a GPU next to none. On the host enough for the waiting rank to fall asleep, as it does
        during real copies, since waking it takes longer than a flag.
        """
        return self.copy_bytes // SHORTER if self.engine == "host" else TINY


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``calibrate``."""
    add = parser.add_argument
    add("--ranks", type=int, help=f"at least 3 (default {DEFAULT_RANKS}, or the launcher's)")
    add(
        *("-b", "--bytes"),
        dest="copy_bytes",
        metavar="SIZE",
        help="bytes of one copy (default 16M; in loopback 256M, more than a GPU's cache)",
    )
    add_engine(add, "c10d")
    add("--num-sms", "--sms", type=int, help="workers of a rank (default: the engine's)")
    add("-n", "--iters", type=int, default=20, help="iterations; the fastest counts (default 20)")
    add("--seed", type=int, default=1, help="seed of the payload (default 1)")
    add("-o", "--output", type=Path, metavar="FILE", help="write or extend this file")


def make_settings(options: argparse.Namespace) -> CalibrateSettings:
    """Check the arguments of ``calibrate``, and read an existing file.

    Raises:
        InvalidArgumentError: an argument is invalid, or the existing file, which is extended.
    """
    found = check_shared(options, _MINIMA) | check_ranks(options)
    num_ranks, fabric = found["num_ranks"], found["fabric"]
    default = "256M" if fabric == "loopback" else "16M"
    copy_bytes = parse_size(options.copy_bytes or default)
    if copy_bytes < _SMALLEST:
        raise InvalidArgumentError(
            f"--bytes is {options.copy_bytes}; expected at least {_SMALLEST}, to time a copy"
        )
    if num_ranks < 3:
        raise InvalidArgumentError(f"there are {num_ranks} ranks; expected at least 3")
    kept: Mapping[str, MeasuredCosts] = {}
    if options.output is not None:
        check_writable(options.output, "--output")
        if options.output.is_file():
            from ultraep_comm.calibration import read_calibration

            kept = read_calibration(options.output)
    return CalibrateSettings(
        **found,
        copy_bytes=copy_bytes,
        kept=kept,
        **take(options, "output", "num_sms"),
    )


COMMAND = Command(
    name="calibrate",
    help='measure the constants of mode="auto" on this machine',
    description="Measure copy bandwidth, hop latency and flag cost of an engine, and write them"
    " to a file. new_group on rank 0 reads the file that ULTRAEP_CALIBRATION names, and"
    ' mode="auto" uses its figures.',
    add_arguments=add_arguments,
    make_settings=make_settings,
    module="ultraep_comm.bench.commands.calibrate.run",
)
