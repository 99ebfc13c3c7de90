"""``validate``: arguments and settings."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

from ultraep_comm.bench.command import Command
from ultraep_comm.bench.options import Settings, add_outputs, check_ranks, check_shared, take
from ultraep_comm.bench.sizes import parse_size
from ultraep_comm.errors import InvalidArgumentError

STATISTICS = ("median", "min")
_MINIMA = {"ranks": 2, "plans": 1, "slots": 1, "iters": 1, "seed": 0}
_DEFAULT_RANKS = 2
_SMALLEST = 4096


@dataclass(frozen=True, kw_only=True)
class ValidateSettings(Settings):
    """Checked arguments of ``validate``. Each iteration times every plan and figure once.

    Attributes:
        plans: number of plans to measure and predict.
        sizes: of experts, ascending; copies are calibrated with the largest.
        slots: S, also the number of experts of a rank that may be replicated.
        statistic: "median" or "min" over rounds, of both measured and calibration times.
        max_error: gate on the median error, as a fraction; None: no gate.
    """

    warmup: int = 0
    plans: int = 20
    sizes: tuple[int, ...] = tuple(1 << i for i in range(18, 25))
    slots: int = 4
    statistic: str = "median"
    max_error: float | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``validate``."""
    add = parser.add_argument
    add("--ranks", type=int, help=f"at least 2 (default {_DEFAULT_RANKS}, or the launcher's)")
    add("--plans", type=int, default=20, help="number of plans (default 20)")
    add(
        *("-b", "--minbytes"),
        metavar="SIZE",
        default="256K",
        help="the smallest expert (default 256K)",
    )
    add(
        *("-e", "--maxbytes"),
        metavar="SIZE",
        default="16M",
        help="the largest expert, from the smallest by doubling (default 16M)",
    )
    add("--slots", type=int, default=4, help="slots of a rank (default 4)")
    add("-n", "--iters", type=int, default=15, help="rounds of all measurements (default 15)")
    add(
        "--statistic",
        choices=STATISTICS,
        default="median",
        help="statistic over rounds, of both measured and calibration times (default median)",
    )
    add("--max-error", type=float, metavar="X", help="gate on the median error, for example 0.2")
    add("--seed", type=int, default=1, help="seed of plans, payload and order (default 1)")
    add_outputs(add)


def make_settings(options: argparse.Namespace) -> ValidateSettings:
    """Check the arguments of ``validate``.

    Raises:
        InvalidArgumentError: an argument is invalid.
    """
    found = check_shared(options, _MINIMA)
    limit = options.max_error
    if limit is not None and not (math.isfinite(limit) and limit > 0):
        raise InvalidArgumentError(f"--max-error is {limit}; expected a number above 0, e.g. 0.2")
    found |= check_ranks(options, engine="host", default=_DEFAULT_RANKS)
    num_ranks = found["num_ranks"]
    if num_ranks < 2:
        raise InvalidArgumentError(f"there is {num_ranks} rank; expected at least 2")
    least, most = parse_size(options.minbytes), parse_size(options.maxbytes)
    if not _SMALLEST <= least <= most:
        raise InvalidArgumentError(
            f"--minbytes is {options.minbytes} and --maxbytes is {options.maxbytes}; expected at"
            f" least {_SMALLEST} bytes, in ascending order"
        )
    sizes = [least]
    while sizes[-1] * 2 <= most:
        sizes.append(sizes[-1] * 2)
    return ValidateSettings(
        **found,
        sizes=tuple(sizes),
        **take(options, "plans", "slots", "statistic", "max_error"),
    )


COMMAND = Command(
    name="validate",
    help="compare the model's predictions with the host engine",
    description="Calibrate the host engine and measure plans of many shapes, interleaved; predict"
    " every plan from the calibration alone, and print the errors of the predictions. The exit"
    " status is 1 if any byte is wrong, 3 if --max-error is not met, 2 after other errors.",
    add_arguments=add_arguments,
    make_settings=make_settings,
    module="studies.validate.run",
)
