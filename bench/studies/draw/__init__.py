"""``draw``: options and settings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ultraep_comm.bench.command import Command
from ultraep_comm.bench.options import Settings, check_writable, option
from ultraep_comm.errors import InvalidArgumentError

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

    def checked(self) -> Self:
        """Return the settings. See `Settings.checked`."""
        from ultraep_comm.viz.style import load_records

        if self.out.suffix.lower() != ".png":
            raise InvalidArgumentError(
                f"--out {self.out} has an unknown kind; expected a name that ends in .png"
            )
        check_writable(self.out, "--out")
        load_records(self.file)
        return self

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
