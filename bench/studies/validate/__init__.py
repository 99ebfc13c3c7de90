"""``validate``: options and settings."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ultraep_comm.bench import options
from ultraep_comm.bench.command import Command
from ultraep_comm.bench.options import Settings, option
from ultraep_comm.errors import InvalidArgumentError

if TYPE_CHECKING:
    from typing_extensions import Self

STATISTICS = ("median", "min")
_DEFAULT_RANKS = 2
_SMALLEST = 4096


@dataclass(frozen=True, kw_only=True)
class ValidateSettings(Settings):
    """Checked options of ``validate``. Each iteration times every plan and figure once.

    Attributes:
        sizes: of experts, ascending; copies are calibrated with the largest.
        slots: S, also the number of experts of a rank that may be replicated.
    """

    num_ranks: int = options.RANKS(0, minimum=2, shown=f"{_DEFAULT_RANKS}, or the launcher's")
    plans: int = option("--plans", parse=int, minimum=1, default=20, help="number of plans")
    first_bytes: int = options.EXPERT_BYTES(
        256 << 10, minimum=_SMALLEST, help="bytes of the smallest expert"
    )
    max_bytes: int = options.MAX_BYTES(
        16 << 20, help="bytes of the largest expert, from the smallest by doubling"
    )
    slots: int = options.SLOTS(4)
    iters: int = options.ITERS(15, help="rounds of all measurements")
    statistic: str = option(
        "--statistic",
        choices=STATISTICS,
        default="median",
        help="over rounds, of both measured and calibration times",
    )
    max_error: float | None = option(
        "--max-error", parse=float, positive=True, help="gate on the median error, such as 0.2"
    )
    seed: int = options.SEED(1)
    json: Path | None = options.JSON()
    csv: Path | None = options.CSV()
    warmup: int = 0
    sizes: tuple[int, ...] = ()

    def checked(self) -> Self:
        """Return the settings with their ranks and sizes. See `Settings.checked`."""
        made = options.resolve_ranks(super().checked(), default=_DEFAULT_RANKS, minimum=2)
        if self.max_bytes < self.first_bytes:
            raise InvalidArgumentError(
                f"--maxbytes is {self.max_bytes}, below --expert-bytes, {self.first_bytes}"
            )
        sizes = [self.first_bytes]
        while sizes[-1] * 2 <= self.max_bytes:
            sizes.append(sizes[-1] * 2)
        return replace(made, sizes=tuple(sizes))

    def describe(self) -> dict[str, Any]:
        """Return the options and the sizes, for JSON."""
        return {**super().describe(), "sizes": list(self.sizes)}


COMMAND = Command(
    name="validate",
    help="compare the model's predictions with the host engine",
    description="Calibrate the host engine and measure plans of many shapes, interleaved; predict"
    " every plan from the calibration alone, and print the errors of the predictions. The exit"
    " status is 1 if any byte is wrong, 3 if --max-error is not met, 2 after other errors.",
    settings=ValidateSettings,
    module="studies.validate.run",
)
