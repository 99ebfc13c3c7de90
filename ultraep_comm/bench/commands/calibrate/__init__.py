"""``calibrate``: options and settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ultraep_comm.bench import options
from ultraep_comm.bench.command import Command
from ultraep_comm.bench.options import Settings, check_writable

if TYPE_CHECKING:
    from typing_extensions import Self

    from ultraep_comm.calibration import MeasuredCosts

TINY = 64  # bytes of a segment whose flag costs more than its copy
SHORTER = 16  # ratio of the large expert to the short one
_SMALLEST = 4096  # bytes of a copy


@dataclass(frozen=True, kw_only=True)
class CalibrateSettings(Settings):
    """Checked options of ``calibrate``. The fastest iteration counts.

    Attributes:
        kept: figures of other engines in the file that is extended.
    """

    num_ranks: int = options.RANKS(0, minimum=3)
    copy_bytes: int = options.EXPERT_BYTES(
        0,
        minimum=_SMALLEST,
        help="bytes of one copy",
        shown="16M; in loopback 256M, more than a GPU's cache",
    )
    engine: str = options.ANY_ENGINE("host")
    fabric: str = options.FABRIC("auto")
    num_sms: int | None = options.NUM_WORKERS()
    iters: int = options.ITERS(20, help="iterations; the fastest counts")
    seed: int = options.SEED(1)
    output: Path | None = options.OUTPUT()
    warmup: int = 0
    kept: Mapping[str, MeasuredCosts] = field(default_factory=dict)

    def checked(self) -> Self:
        """Return the settings with the file that is extended. See `Settings.checked`."""
        made = options.resolve_ranks(super().checked(), minimum=3)
        kept: Mapping[str, MeasuredCosts] = {}
        if self.output is not None:
            check_writable(self.output, "--output")
            if self.output.is_file():
                from ultraep_comm.calibration import read_calibration

                kept = read_calibration(self.output)
        size = self.copy_bytes or (256 << 20 if made.loopback else 16 << 20)
        return replace(made, copy_bytes=size, kept=kept)

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


COMMAND = Command(
    name="calibrate",
    help='measure the constants of mode="auto" on this machine',
    description="Measure copy bandwidth, hop latency and flag cost of an engine, and write them"
    " to a file. new_group on rank 0 reads the file that ULTRAEP_CALIBRATION names, and"
    ' mode="auto" uses its figures.',
    settings=CalibrateSettings,
    module="ultraep_comm.bench.commands.calibrate.run",
)
