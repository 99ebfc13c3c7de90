"""``links``: arguments and settings."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from ultraep_comm.bench.command import Command
from ultraep_comm.bench.options import (
    DEFAULT_RANKS,
    Settings,
    add_bandwidth_limit,
    add_engine,
    add_outputs,
    add_rounds,
    check_memory,
    check_ranks,
    check_shared,
    take,
)
from ultraep_comm.bench.sizes import parse_size
from ultraep_comm.errors import InvalidArgumentError

DEFAULT_LINK_BYTES = 16 << 20
STATISTICS = ("median", "min")
PAIRS, INCAST, RING, BESIDE = PATTERNS = ("pairs", "incast", "ring", "ring-beside-incast")
_MINIMA = {"ranks": 2, "iters": 1, "warmup": 0, "seed": 0, "num_sms": 1, "slowest": 0}


@dataclass(frozen=True, kw_only=True)
class LinksSettings(Settings):
    """Checked arguments of ``links``.

    Attributes:
        link_bytes: bytes over each link in an iteration.
        one_at_a_time: measure no two links at the same time.
        pattern: which links are used at the same time, one of PATTERNS.
        statistic: bandwidth of the median iteration, or "min": of the slowest one.
        slowest: number of slowest links to name.
        num_sms: workers of a rank; None: the engine's default.
    """

    link_bytes: int = DEFAULT_LINK_BYTES
    one_at_a_time: bool = False
    pattern: str = PAIRS
    statistic: str = "median"
    slowest: int = 5
    num_sms: int | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``links``."""
    add = parser.add_argument_group("transfer").add_argument
    add("--ranks", type=int, help=f"ranks (default {DEFAULT_RANKS}, or the launcher's)")
    add(
        *("-b", "--bytes", "--expert-bytes", "--minbytes"),
        dest="link_bytes",
        metavar="SIZE",
        default=str(DEFAULT_LINK_BYTES),
        help="bytes over each link in an iteration, e.g. 64M (default 16M)",
    )
    add("--one-at-a-time", action="store_true", help="measure no two links at the same time")
    add(
        "--pattern",
        choices=PATTERNS,
        default=PAIRS,
        help="pairs that share no rank (default); all to one; a ring of all but rank 0, alone or"
        " while the same ranks also send to rank 0",
    )
    add(
        "--statistic",
        choices=STATISTICS,
        default="median",
        help="a link's bandwidth: that of the median iteration (default), or of the slowest one",
    )
    add("--slowest", type=int, default=5, metavar="N", help="slowest links to name (default 5)")
    add_engine(add)
    add("--num-sms", "--sms", type=int, help="workers of a rank (default: the engine's)")
    add("--tile-bytes", metavar="SIZE", help="unit of the transfer (default: the engine's)")
    add_rounds(parser.add_argument_group("iterations").add_argument, "the payload")
    add = parser.add_argument_group("results and limits").add_argument
    add_outputs(add)
    add_bandwidth_limit(add, "a link")


def make_settings(options: argparse.Namespace) -> LinksSettings:
    """Check the arguments of ``links``.

    Raises:
        InvalidArgumentError: an argument is invalid.
    """
    found = check_shared(options, _MINIMA) | check_ranks(options)
    num_ranks = found["num_ranks"]
    if num_ranks < 2:
        raise InvalidArgumentError(f"there is {num_ranks} rank; expected at least 2")
    if options.pattern in (RING, BESIDE) and num_ranks < 3:
        raise InvalidArgumentError(
            f"--pattern {options.pattern} has no links between {num_ranks} ranks; use at least 3"
        )
    if options.pattern != PAIRS and options.one_at_a_time:
        raise InvalidArgumentError(
            f"--pattern {options.pattern} is of links at the same time, and --one-at-a-time was"
            " given; omit one"
        )
    link_bytes = parse_size(options.link_bytes, "--bytes")
    per_rank = {PAIRS: 2, INCAST: num_ranks, RING: 2, BESIDE: num_ranks + 2}[options.pattern]
    check_memory(per_rank * num_ranks * link_bytes, found["engine"])
    return LinksSettings(
        **found,
        link_bytes=link_bytes,
        # Loopback has one clock for all ranks, so links at the same time cannot be told apart.
        one_at_a_time=options.one_at_a_time
        or (options.pattern == PAIRS and found["fabric"] == "loopback"),
        **take(options, "pattern", "statistic", "slowest", "num_sms"),
    )


COMMAND = Command(
    name="links",
    help="measure the bandwidth from every rank to every other",
    description="Copy one expert from every rank to every other, check it, and print a matrix"
    " of GB/s and the slowest links. Links that share no rank run at the same time. Over"
    " --fabric loopback no link is measured, but the command can be tried. Sizes take the"
    " suffixes K, M and G. The exit status is 1 if any byte is wrong, 3 if a limit is not"
    " met, 2 after other errors.",
    add_arguments=add_arguments,
    make_settings=make_settings,
    module="ultraep_comm.bench.commands.links.run",
)
