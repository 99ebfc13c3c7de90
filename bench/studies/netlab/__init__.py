"""``netlab``: options and settings."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from studies.netlab.lab import Lab
from ultraep_comm.bench import cli
from ultraep_comm.bench.command import Command
from ultraep_comm.bench.launch import launched_ranks
from ultraep_comm.bench.options import DEFAULT_RANKS, Settings, option
from ultraep_comm.errors import InvalidArgumentError

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, kw_only=True)
class NetlabSettings(Settings):
    """Checked options of ``netlab``."""

    machines: int = option(
        "--machines", parse=int, default=DEFAULT_RANKS, help="network namespaces"
    )
    gbit: float = option(
        "--gbit", parse=float, default=1.0, metavar="RATE", help="Gbit/s of a link, one way"
    )
    arguments: tuple[str, ...] = option(
        "arguments",
        metavar="COMMAND",
        help="of python -m ultraep_comm.bench, with its options",
        add={"nargs": argparse.REMAINDER},
    )

    def checked(self) -> Self:
        """Return the settings with the whole command. See `Settings.checked`."""
        Lab(machines=self.machines, gbit=self.gbit)
        if launched_ranks() is not None:
            raise InvalidArgumentError(
                "netlab starts the ranks, but a launcher has started this one; run it alone"
            )
        given = tuple(self.arguments or ("replicate",))
        chosen = cli.make_parser().parse_args(given)
        needed = {"engine", "num_ranks", "link_gbps"}
        if not needed <= vars(chosen).keys() or chosen.engine not in (None, "c10d"):
            raise InvalidArgumentError(
                f"netlab was given {' '.join(given)!r}; expected a command with --engine c10d,"
                " whose ranks send experts over the links"
            )
        given += ("--engine", "c10d")
        if chosen.num_ranks is None:  # each has a machine, and its link
            given += ("--ranks", str(self.machines))
            if chosen.link_gbps is None:
                given += ("--link-gbps", str(self.gbit / 8))
        return replace(self, arguments=given)

    @property
    def alone(self) -> bool:
        """Return True: the command starts its ranks."""
        return True


COMMAND = Command(
    name="netlab",
    help="a command of ultraep_comm.bench over limited links",
    description="Run a command of python -m ultraep_comm.bench with its ranks on machines that are"
    " network namespaces, each with a limited link to a switch; needs root or user namespaces."
    " Without --ranks each machine has one, and bounds are those of its link; else each has a run"
    " of consecutive ranks. The engine is c10d.",
    settings=NetlabSettings,
    module="studies.netlab.run",
)
