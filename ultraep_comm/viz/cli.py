"""Command line of ``python -m ultraep_comm.viz``. Loads neither torch nor numpy."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from ultraep_comm.bench import options
from ultraep_comm.bench.cli import run_commands
from ultraep_comm.bench.command import Command, add_commands
from ultraep_comm.bench.options import MAX_RANKS, Settings, check_writable, option, options_of
from ultraep_comm.bench.sizes import parse_count
from ultraep_comm.errors import InvalidArgumentError

if TYPE_CHECKING:
    from typing_extensions import Self

WIDTH = 12.0  # inches


@dataclass(frozen=True, kw_only=True)
class PictureSettings(Settings):
    """Checked options that commands share."""

    kinds: ClassVar[tuple[str, ...]]  # of files that the command writes
    files: Sequence[Path] = option(
        "files",
        parse=Path,
        metavar="RECORDING",
        add={"nargs": "*"},
        help="one run's files, written by recorder.dump(), or their folder",
    )
    out: Sequence[Path] = option(
        "--out",
        parse=Path,
        metavar="FILE",
        required=True,
        add={"nargs": "+"},
        help="files to write; the kind follows the name: .png, or what the command says above",
    )

    def checked(self) -> Self:
        """Return the settings. See `Settings.checked`."""
        for path in self.out:
            check_output(path, self.kinds)
        return self

    @property
    def alone(self) -> bool:
        """Return True: nothing is measured."""
        return True


def check_output(path: Path, kinds: Sequence[str]) -> None:
    """Raise InvalidArgumentError for a file that cannot be written, or is of another kind."""
    if path.suffix.lower() not in kinds:
        raise InvalidArgumentError(
            f"--out {path} has an unknown kind; expected a name that ends in {' or '.join(kinds)}"
        )
    check_writable(path, "--out")


@dataclass(frozen=True, kw_only=True)
class LoadSettings(PictureSettings):
    """Checked options of ``load``."""

    kinds = (".png", ".html")
    trace_file: Path | None = options.TRACE_FILE()
    num_ranks: int = options.RANKS(
        0, maximum=MAX_RANKS, shown="the file's", help="with --trace: ranks"
    )
    slots: int = options.SLOTS(2, minimum=0, help="with --trace: slots of a rank")
    tokens: int = options.TOKENS(4096, help="with a trace of tokens: tokens of each rank and step")
    target: float = options.TARGET(1.01, help="with --trace: imbalance at which the planner stops")
    layers: int | None = option(
        "--layers",
        parse=int,
        minimum=1,
        help="of a recording without saved plans: transfers per step (default: 1)",
    )

    def checked(self) -> Self:
        """Return the settings. See `Settings.checked`."""
        if (self.trace_file is None) == (not self.files):
            raise InvalidArgumentError(
                "expected --trace FILE, or files of a recording: one of the two"
            )
        if self.trace_file is not None and self.layers is not None:
            raise InvalidArgumentError("--layers is for recordings; a trace has its own layers")
        for field, stated in options_of(self):
            of_trace = field.name in ("num_ranks", "slots", "tokens", "target")
            if of_trace and self.files and getattr(self, field.name) != field.default:
                flag = stated.flags[0]
                raise InvalidArgumentError(f"{flag} is for --trace: a recording has its own")
        return super().checked()


def parse_calls(text: str, flag: str) -> range:
    """Return the epochs of ``"100:120"``, whose last one counts.

    Raises:
        InvalidArgumentError: it is malformed.
    """
    first, _, last = text.partition(":")
    begin, end = parse_count(first), parse_count(last)
    if not 0 <= begin <= end:
        raise InvalidArgumentError(f"{flag} is {text!r}; expected FIRST:LAST, for instance 100:120")
    return range(begin, end + 1)


@dataclass(frozen=True, kw_only=True)
class TimelineSettings(PictureSettings):
    """Checked options of ``timeline``."""

    kinds = (".png", ".json")
    calls: range | None = option(
        "--calls",
        parse=parse_calls,
        metavar="FIRST:LAST",
        help="their epochs (default: all)",
    )
    predict: int | None = option(
        "--predict", parse=int, metavar="EPOCH", help="draw this transfer instead"
    )
    machine: str = option("--machine", default="nvl72", help="of the prediction")
    mode: str = option("--mode", default="auto", help="of the prediction")
    expert_bytes: int | None = options.EXPERT_BYTES(shown="as recorded; 36M of a generated load")
    imbalance: float | None = option(
        "--imbalance", parse=float, help="draw the transfer for a generated load instead"
    )
    num_ranks: int = options.RANKS(8, maximum=MAX_RANKS, shown=None, help="of a generated load")
    experts: int = options.EXPERTS(options.DEFAULT_EXPERTS, help="of a generated load")
    slots: int = options.SLOTS(2, minimum=0, help="of a generated load, per rank")
    seed: int = options.SEED(1, help="of a generated load")
    width: float = option(
        "--width", parse=float, default=WIDTH, minimum=4, maximum=100, help="inches of the picture"
    )

    def checked(self) -> Self:
        """Return the settings. See `Settings.checked`."""
        if (self.imbalance is None) == (not self.files):
            raise InvalidArgumentError(
                "expected files of a recording, or --imbalance for a generated load: one of the two"
            )
        ways = ("calls", "predict", "imbalance")
        given = [f"--{name}" for name in ways if getattr(self, name) is not None]
        if len(given) > 1:
            raise InvalidArgumentError(
                f"{' and '.join(given)} are given; expected at most one of them"
            )
        return super().checked()


COMMANDS = (
    Command(
        name="load",
        help="tokens of every rank before and after replication",
        description="Draw the tokens of every rank, before and after replication, for every step"
        " and layer of recorded routing (which is planned here) or of a recorded run: a PNG"
        " picture, or an .html page.",
        settings=LoadSettings,
        module="ultraep_comm.viz.run",
    ),
    Command(
        name="timeline",
        help="what every rank did when",
        description="Draw the recorded calls of all ranks, or one predicted transfer, piece by"
        " piece: a PNG picture, or a .json file for https://ui.perfetto.dev or chrome://tracing.",
        settings=TimelineSettings,
        module="ultraep_comm.viz.run",
    ),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return its exit status: 0, or 2 for what cannot be drawn."""
    return run_commands(COMMANDS, make_parser(), arguments)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of both commands."""
    parser = argparse.ArgumentParser(
        prog="python -m ultraep_comm.viz",
        description="Pictures of loads and of transfers; docs/pictures.md has examples.",
        epilog="PNG pictures need matplotlib: pip install -c constraints.txt -e '.[viz]'.",
    )
    add_commands(parser, COMMANDS)
    return parser
