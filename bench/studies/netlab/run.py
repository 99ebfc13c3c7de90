"""``netlab``: measurement."""

from __future__ import annotations

import os
from dataclasses import dataclass

from studies.netlab import NetlabSettings
from studies.netlab.lab import Lab
from ultraep_comm.bench import cli
from ultraep_comm.bench.report import Report


@dataclass(frozen=True)
class Enter:
    """Moves a rank into its machine."""

    lab: Lab

    def __call__(self, rank: int, num_ranks: int) -> None:
        self.lab.enter(rank * self.lab.machines // num_ranks)
        os.environ["GLOO_SOCKET_IFNAME"] = self.lab.interface


def run(settings: NetlabSettings, report: Report) -> int:
    """Run the command in a lab; return its exit status.

    Raises:
        UnsupportedError: there can be no lab here.
    """
    with Lab(machines=settings.machines, gbit=settings.gbit) as lab:
        machines = f"{lab.machines} machine{'s' if lab.machines > 1 else ''}"
        report.show(f"# netlab: {machines}, each with a link of {lab.gbit:g} Gbit/s, one way")
        return cli.main(settings.arguments, prepare=Enter(lab))
