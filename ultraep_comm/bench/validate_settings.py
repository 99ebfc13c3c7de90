"""Arguments of ``validate``, the settings that they make, and the plans that it measures."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ultraep_comm.bench.arguments import check_minima, count_ranks
from ultraep_comm.bench.launch import launched_ranks
from ultraep_comm.bench.outputs import add_output_arguments, check_outputs
from ultraep_comm.bench.sizes import parse_size
from ultraep_comm.bench.turns import Filling
from ultraep_comm.errors import InvalidArgumentError

MODES = ("auto", "push", "pull", "direct")
STATISTICS = ("median", "min")
_MINIMA = {"ranks": 2, "plans": 1, "slots": 1, "iters": 1, "seed": 0}
_DEFAULT_RANKS = 2
_SMALLEST = 4096


@dataclass(frozen=True, kw_only=True)
class ValidateSettings:
    """Checked arguments of ``validate``. Equal on every rank.

    Attributes:
        num_ranks: G, at least 2.
        plans: to measure and predict.
        sizes: of experts, ascending; the largest is what copies are calibrated with.
        slots: S, also the most that a rank exports to one slot row of a peer.
        iters: rounds; each times every plan and every figure of the calibration once.
        statistic: "median" or "min", over rounds, of measured times and of calibrated ones.
        max_error: gate on the median error, as a part of 1; None: there is none.
        seed: of plans, payload and order.
        json: where the records go; None: nowhere.
        csv: where they go flat; None: nowhere.
    """

    num_ranks: int
    plans: int = 20
    sizes: tuple[int, ...] = tuple(1 << i for i in range(18, 25))
    slots: int = 4
    iters: int = 15
    statistic: str = "median"
    max_error: float | None = None
    seed: int = 1
    json: Path | None = None
    csv: Path | None = None
    fabric: str = "shm"


@dataclass(frozen=True, kw_only=True)
class PlannedCase:
    """One of the plans.

    Attributes:
        mode: as asked for.
        expert_bytes: W.
        filling: what each rank's slots hold, with experts' numbers below S.
    """

    mode: str
    expert_bytes: int
    filling: Filling

    @property
    def replicas(self) -> int:
        """Return the filled slots."""
        return sum(map(len, self.filling))

    @property
    def imports(self) -> list[int]:
        """Return the filled slots of each rank."""
        return [len(row) for row in self.filling]


def make_cases(settings: ValidateSettings) -> list[PlannedCase]:
    """Draw the plans: sizes and modes dealt out evenly, each rank with 0 to S filled slots."""
    rng = np.random.default_rng(settings.seed)
    every = [(size, mode) for mode in MODES for size in settings.sizes]
    dealt = [every[i % len(every)] for i in range(settings.plans)]
    # Neighbours in `every` differ in size; with few plans all modes have to come as well.
    dealt = [(size, MODES[i % len(MODES)]) for i, (size, _) in enumerate(dealt)]
    return [
        PlannedCase(mode=mode, expert_bytes=size, filling=_draw_filling(settings, rng))
        for size, mode in dealt
    ]


def _draw_filling(settings: ValidateSettings, rng: np.random.Generator) -> Filling:
    while True:
        rows = []
        for rank in range(settings.num_ranks):
            others = [r for r in range(settings.num_ranks) if r != rank]
            possible = [(home, number) for home in others for number in range(settings.slots)]
            count = int(rng.integers(0, settings.slots + 1))
            taken = rng.choice(len(possible), size=count, replace=False)
            rows.append([possible[i] for i in sorted(taken.tolist())])
        if any(rows):
            return rows


def add_validate_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``validate`` and its arguments."""
    add = commands.add_parser(
        "validate",
        help="hold the model's predictions against the host engine",
        description="Calibrate the host engine and measure plans of many shapes, in turns, predict"
        " every plan by the calibration alone, and print how far off the predictions are. The exit"
        " status is 1 if any byte is wrong, 3 if --max-error is not met, 2 after other errors.",
    ).add_argument
    add("--ranks", type=int, help=f"at least 2 (default {_DEFAULT_RANKS}; torchrun's under it)")
    add("--plans", type=int, default=20, help="(default 20)")
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
    add("--slots", type=int, default=4, help="of a rank (default 4)")
    add("-n", "--iters", type=int, default=15, help="rounds of all measurements (default 15)")
    add(
        "--statistic",
        choices=STATISTICS,
        default="median",
        help="over rounds, of times that are predicted and that figures are made of alike",
    )
    add("--max-error", type=float, metavar="X", help="gate on the median error, for instance 0.2")
    add("--seed", type=int, default=1, help="of plans, payload and order (default 1)")
    add_output_arguments(add)


def make_validate_settings(options: argparse.Namespace) -> ValidateSettings:
    """Check the arguments of ``validate``.

    Raises:
        InvalidArgumentError: as its text says.
    """
    check_minima(options, _MINIMA)
    check_outputs(options)
    limit = options.max_error
    if limit is not None and not (math.isfinite(limit) and limit > 0):
        raise InvalidArgumentError(f"--max-error is {limit}; expected a number above 0, as 0.2")
    if options.ranks is None and launched_ranks() is None:
        options.ranks = _DEFAULT_RANKS
    num_ranks = count_ranks(options)
    if num_ranks < 2:
        raise InvalidArgumentError(f"there is {num_ranks} rank; expected two for a transfer")
    least, most = parse_size(options.minbytes), parse_size(options.maxbytes)
    if not _SMALLEST <= least <= most:
        raise InvalidArgumentError(
            f"experts are of {options.minbytes} to {options.maxbytes}; expected at least"
            f" {_SMALLEST} bytes, and the smallest first"
        )
    sizes = [least]
    while sizes[-1] * 2 <= most:
        sizes.append(sizes[-1] * 2)
    return ValidateSettings(
        num_ranks=num_ranks,
        plans=options.plans,
        sizes=tuple(sizes),
        slots=options.slots,
        iters=options.iters,
        statistic=options.statistic,
        max_error=limit,
        seed=options.seed,
        json=options.json,
        csv=options.csv,
    )
