"""``imbalance``: options and settings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from studies.options import (
    WORKLOAD_EXPERTS,
    WORKLOAD_RANKS,
    WORKLOAD_SEED,
    WORKLOAD_TOKENS,
    WORKLOAD_TOPK,
    WORKLOADS,
    parse_workloads,
)
from ultraep_comm.bench import options
from ultraep_comm.bench.command import Command
from ultraep_comm.bench.options import Settings, option
from ultraep_comm.errors import InvalidArgumentError

if TYPE_CHECKING:
    from typing_extensions import Self

_MAX_DRAWS = 1 << 24  # tokens of all workloads and steps, a few microseconds each


@dataclass(frozen=True, kw_only=True)
class ImbalanceSettings(Settings):
    """Checked options of ``imbalance``; the defaults are the published ones."""

    workloads: tuple[str, ...] = options.WORKLOAD(tuple(WORKLOADS), parse=parse_workloads)
    num_ranks: int = options.RANKS(WORKLOAD_RANKS, shown=None)
    experts: int = options.EXPERTS(WORKLOAD_EXPERTS)
    topk: int = options.TOPK(WORKLOAD_TOPK)
    tokens: int = options.TOKENS(WORKLOAD_TOKENS)
    steps: int = option("--steps", parse=int, minimum=1, default=1, help="steps, a row for each")
    slots: int = options.SLOTS(2, minimum=0)
    seed: int = options.SEED(WORKLOAD_SEED)
    json: Path | None = options.JSON()
    csv: Path | None = options.CSV()

    def checked(self) -> Self:
        """Return the settings. See `Settings.checked`."""
        from studies.workloads import check_pools

        if self.experts % self.num_ranks:
            raise InvalidArgumentError(
                f"--experts is {self.experts}, not a multiple of --ranks {self.num_ranks}; the"
                " workloads are defined with equally many experts on every rank"
            )
        if self.slots > self.experts:
            raise InvalidArgumentError(
                f"--slots is {self.slots}; expected at most --experts {self.experts}, since a"
                " rank has at most one instance of each"
            )
        check_pools(self.workloads, self.experts, self.topk, f"--experts is {self.experts}")
        draws = len(self.workloads) * self.steps * self.tokens
        if draws > _MAX_DRAWS:
            raise InvalidArgumentError(
                f"--tokens {self.tokens} for --steps {self.steps} of {len(self.workloads)}"
                f" workloads are too many; expected at most {_MAX_DRAWS}"
            )
        options.check_assignments(self.num_ranks, self.tokens, self.topk)
        return super().checked()

    @property
    def alone(self) -> bool:
        """Return True: one process plans for all ranks."""
        return True


COMMAND = Command(
    name="imbalance",
    help="the public balance workloads W0 to W7, before and after our plans",
    description="Print the imbalance of the public workloads W0 to W7 between experts, between"
    " sources and between the ranks that own the experts, and what our plans leave of the last.",
    settings=ImbalanceSettings,
    module="studies.imbalance.run",
)
