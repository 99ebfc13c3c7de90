"""``draw``: options and settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from studies.draw.records import load_records
from ultraep_comm.bench.command import Command
from ultraep_comm.bench.options import Settings, option
from ultraep_comm.viz.cli import check_output

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, kw_only=True)
class DrawSettings(Settings):
    """Checked options of ``draw``."""

    file: Path = option(
        "file", parse=Path, metavar="FILE.json", help="records of a study or of its recipe"
    )
    out: Path = option(
        "--out", parse=Path, metavar="FILE.png", required=True, help="picture to write"
    )

    records: Sequence[Any] = ()  # of the file

    def checked(self) -> Self:
        """Return the settings with the records of the file. See `Settings.checked`."""
        check_output(self.out, (".png",))
        return replace(self, records=load_records(self.file))

    @property
    def alone(self) -> bool:
        """Return True: nothing is measured."""
        return True


COMMAND = Command(
    name="draw",
    help="draw the records of against, steady or model",
    description="Draw the file that a study has written with --json: of against, imbalance against"
    " transfer time; of steady, what each layer moves; of model, or of records with size (bytes),"
    " mode, fan_out and over_bound, time over the bound; or that of bench/recipes/critical_path.py:"
    " the parts of each path. docs/pictures.md describes the pictures.",
    settings=DrawSettings,
    module="studies.draw.run",
)
