"""Arguments of ``calibrate``, and the settings that they make."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ultraep_comm.bench.arguments import (
    DEFAULT_RANKS,
    check_minima,
    choose_engine,
    count_ranks,
)
from ultraep_comm.bench.device_sizes import TILE_BYTES
from ultraep_comm.bench.launch import launched_ranks
from ultraep_comm.bench.outputs import check_writable
from ultraep_comm.bench.sizes import parse_size
from ultraep_comm.calibration import MeasuredCosts, read_calibration
from ultraep_comm.errors import InvalidArgumentError
from ultraep_comm.options import HOST_TILE_BYTES

TINY = 64  # bytes of a segment that is all flag and no copy
SHORTER = 16  # times
_SMALLEST = 4096  # copies
_MINIMA = {"ranks": 3, "iters": 1, "num_sms": 1, "seed": 0}


@dataclass(frozen=True, kw_only=True)
class CalibrateSettings:
    """Checked arguments of ``calibrate``. Equal on every rank.

    Attributes:
        num_ranks: G, at least 3.
        copy_bytes: of the expert whose copies are timed.
        output: file to write or to add to; None: figures are only printed.
        kept: what that file says of other engines.
        iters: of which the fastest counts.
        seed: of the payload.
        engine: "host" or "cuda".
        fabric: "shm", "nvshmem", "torch" or "loopback".
        num_sms: workers of a rank; None: the engine's default.
    """

    num_ranks: int
    copy_bytes: int = 16 << 20
    output: Path | None = None
    kept: Mapping[str, MeasuredCosts] = field(default_factory=dict)
    iters: int = 20
    seed: int = 1
    engine: str = "host"
    fabric: str = "shm"
    num_sms: int | None = None

    @property
    def section(self) -> str:
        """Return which of the file's engines this is."""
        return "loopback" if self.fabric == "loopback" else self.engine

    @property
    def short_bytes(self) -> int:
        """Return the bytes of the expert that hops are timed with.

        On a GPU next to none. On the host enough for the waiting rank to have fallen asleep, as it
        does behind real copies; to wake it takes longer than a flag.
        """
        return self.copy_bytes // SHORTER if self.engine == "host" else TINY

    @property
    def tile_bytes(self) -> int:
        """Return the unit of the transfer."""
        return HOST_TILE_BYTES if self.engine == "host" else TILE_BYTES


def add_calibrate_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``calibrate`` and its arguments."""
    add = commands.add_parser(
        "calibrate",
        help='measure what mode="auto" goes by on this machine',
        description="Measure copy bandwidth, hop latency and flag cost of an engine, and write them"
        " to a file. new_group of rank 0 reads the file that ULTRAEP_CALIBRATION names, and"
        ' mode="auto" goes by its figures.',
    ).add_argument
    add("--ranks", type=int, help=f"at least 3 (default {DEFAULT_RANKS}; torchrun's under it)")
    add(
        *("-b", "--bytes"),
        dest="copy_bytes",
        metavar="SIZE",
        help="(default 16M; in loopback 256M, more than a GPU's cache has)",
    )
    add("--engine", choices=["auto", "host", "cuda"], default="host", help='(default "host")')
    add(
        "--fabric",
        choices=["auto", "shm", "nvshmem", "torch", "loopback"],
        default="auto",
        help="of the CUDA engine, as for replicate",
    )
    add("--num-sms", "--sms", type=int, help="workers of a rank (default: the engine's)")
    add("-n", "--iters", type=int, default=20, help="of which the fastest counts (default 20)")
    add("--seed", type=int, default=1, help="of the payload (default 1)")
    add("-o", "--output", type=Path, metavar="FILE", help="write or add to this file")


def make_calibrate_settings(options: argparse.Namespace) -> CalibrateSettings:
    """Check the arguments of ``calibrate``, and read what is in its file.

    Raises:
        InvalidArgumentError: as its text says.
        CalibrationError: the file is there, and cannot be added to.
    """
    check_minima(options, _MINIMA)
    engine, fabric = choose_engine(options.engine, options.fabric, launched_ranks())
    num_ranks = count_ranks(options)
    default = "256M" if fabric == "loopback" else "16M"
    copy_bytes = parse_size(options.copy_bytes or default)
    if copy_bytes < _SMALLEST:
        raise InvalidArgumentError(
            f"--bytes is {options.copy_bytes}; expected at least {_SMALLEST}, to time a copy"
        )
    if num_ranks < 3:
        raise InvalidArgumentError(f"there are {num_ranks} ranks; expected three or more")
    kept: Mapping[str, MeasuredCosts] = {}
    if options.output is not None:
        check_writable(options.output, "--output")
        if options.output.is_file():
            kept = read_calibration(options.output).costs
    return CalibrateSettings(
        num_ranks=num_ranks,
        copy_bytes=copy_bytes,
        output=options.output,
        kept=kept,
        iters=options.iters,
        seed=options.seed,
        engine=engine,
        fabric=fabric,
        num_sms=options.num_sms,
    )
