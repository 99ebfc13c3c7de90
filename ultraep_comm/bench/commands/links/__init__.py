"""``links``: options and settings."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ultraep_comm.bench import options
from ultraep_comm.bench.command import Command
from ultraep_comm.bench.options import Settings, option
from ultraep_comm.errors import InvalidArgumentError

if TYPE_CHECKING:
    from typing_extensions import Self

STATISTICS = ("median", "min")
PAIRS, INCAST, RING, BESIDE = PATTERNS = ("pairs", "incast", "ring", "ring-beside-incast")


@dataclass(frozen=True, kw_only=True)
class LinksSettings(Settings):
    """Checked options of ``links``."""

    num_ranks: int = options.RANKS(0, minimum=2)
    link_bytes: int = options.EXPERT_BYTES(
        16 << 20, help="bytes over each link in an iteration, such as 64M"
    )
    one_at_a_time: bool = option(
        "--one-at-a-time", default=False, help="measure no two links at the same time"
    )
    pattern: str = option(
        "--pattern",
        choices=PATTERNS,
        default=PAIRS,
        help="pairs that share no rank; all to one; a ring of all but rank 0, alone or while the"
        " same ranks also send to rank 0",
    )
    statistic: str = option(
        "--statistic",
        choices=STATISTICS,
        default="median",
        help="a link's bandwidth: of the median iteration, or of the slowest one",
    )
    slowest: int = option(
        "--slowest", parse=int, minimum=0, default=5, metavar="N", help="slowest links to name"
    )
    engine: str = options.ENGINE("host")
    fabric: str = options.FABRIC("auto")
    num_sms: int | None = options.NUM_WORKERS()
    tile_bytes: int | None = options.TILE_BYTES()
    iters: int = options.ITERS(20)
    warmup: int = options.WARMUP(3)
    check: bool = options.CHECK(False)
    seed: int = options.SEED(1)
    min_bandwidth: float | None = options.MIN_BANDWIDTH()
    json: Path | None = options.JSON()
    csv: Path | None = options.CSV()

    def checked(self) -> Self:
        """Return the settings with their ranks. See `Settings.checked`."""
        made = options.resolve_ranks(super().checked(), minimum=2)
        num_ranks, pattern = made.num_ranks, made.pattern
        if pattern in (RING, BESIDE) and num_ranks < 3:
            raise InvalidArgumentError(
                f"--pattern {pattern} has no links between {num_ranks} ranks; use at least 3"
            )
        if pattern != PAIRS and made.one_at_a_time:
            raise InvalidArgumentError(
                f"--pattern {pattern} is of links at the same time, and --one-at-a-time was given;"
                " omit one"
            )
        per_rank = {PAIRS: 2, INCAST: num_ranks, RING: 2, BESIDE: num_ranks + 2}[pattern]
        options.check_memory(per_rank * num_ranks * made.link_bytes, made.engine)
        # Loopback has one clock for all ranks, so links at the same time cannot be told apart.
        return replace(
            made, one_at_a_time=made.one_at_a_time or (pattern == PAIRS and made.loopback)
        )


COMMAND = Command(
    name="links",
    help="measure the bandwidth from every rank to every other",
    description="Copy one expert from every rank to every other, check it, and print a matrix"
    " of GB/s and the slowest links. Links that share no rank run at the same time. Over"
    " --fabric loopback no link is measured, but the command can be tried. Sizes take the"
    " suffixes K, M and G. The exit status is 1 if any byte is wrong, 3 if a limit is not"
    " met, 2 after other errors.",
    settings=LinksSettings,
    module="ultraep_comm.bench.commands.links.run",
)
