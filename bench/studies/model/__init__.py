"""``model``: options and settings."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ultraep_comm.bench import options
from ultraep_comm.bench.command import Command
from ultraep_comm.bench.commands.plan import SEEDS, SIZES, LoadsSettings, PlanSize, parse_sizes
from ultraep_comm.bench.options import FAMILIES, IMBALANCE, PUBLISHED, option, parse_names
from ultraep_comm.errors import InvalidArgumentError

if TYPE_CHECKING:
    from typing_extensions import Self

    from ultraep_comm.model import Machine

DEFAULT_SIZES = "64/256/2,64/128/2,64/128/1,40/160/4,72/288/2"
MACHINES = ("gb200", "hgx8", "nvl72", "nvl72-links", "nvl72-racks")  # of `ultraep_comm.model`


def parse_families(text: str, flag: str) -> tuple[str, ...]:
    """Return the names of families, none of ``""``."""
    possible = tuple(family for family in FAMILIES if family not in PUBLISHED)
    given = ",".join(filter(None, (part.strip() for part in text.split(","))))
    return parse_names(given, flag, possible) if given else ()


def parse_imbalances(text: str, flag: str) -> tuple[float, ...]:
    """Return the numbers of ``"1.5,2"``, none of ``""``."""
    values = []
    for part in filter(None, text.split(",")):
        try:
            value = float(part)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value > 1):
            raise InvalidArgumentError(
                f"{flag} {text!r}: {part!r} is not a number above 1; expected for example 1.5,2"
            )
        values.append(value)
    return tuple(dict.fromkeys(values))


@dataclass(frozen=True, kw_only=True)
class ModelSettings(LoadsSettings):
    """Checked options of ``model``.

    Attributes:
        machine: to predict times of.
    """

    sizes: tuple[PlanSize, ...] = SIZES((), shown=DEFAULT_SIZES)
    imbalances: tuple[float, ...] = options.IMBALANCE_OF_LOAD(
        (1.5, 2, 3, 4, 6, 8),
        parse=parse_imbalances,
        metavar="X,...",
        help="of generated loads without replicas",
        shown=None,
    )
    families: tuple[str, ...] = options.WORKLOAD(
        ("zipf0.6", "zipf1.0", "zipf1.4", "lognormal", "adversarial"),
        parse=parse_families,
        help="kinds of further loads",
    )
    seeds: int = SEEDS(3)
    expert_bytes: int = options.EXPERT_BYTES(36 << 20)  # 37.75 MB: Qwen3-235B in bf16
    machine_name: str = option(
        "--machine", choices=MACHINES, default="nvl72", help="machine to predict times of"
    )
    machine: Machine = None  # type: ignore[assignment]

    @property
    def kinds(self) -> tuple[str, ...]:
        """Return the kinds of load."""
        return (*(f"{IMBALANCE}{x:g}" for x in self.imbalances), *self.families)

    def checked(self) -> Self:
        """Return the settings with their machine, and sizes of its domains.

        See `Settings.checked`.
        """
        from ultraep_comm.model import find_machine

        machine = find_machine(self.machine_name)
        sizes = tuple(
            replace(size, domain_size=min(machine.domain_size or size.num_ranks, size.num_ranks))
            for size in self.sizes or parse_sizes(DEFAULT_SIZES, "--sizes")
        )
        made = replace(super().checked(), machine=machine, sizes=sizes)
        made.check_loads()
        if not made.kinds:
            raise InvalidArgumentError("--imbalance and --workload are both empty; expected a load")
        return made


COMMAND = Command(
    name="model",
    help="predict transfer times on a described machine",
    description="Plan loads of many kinds, predict the times of push, pull, direct fan-out and a"
    " published relay on a described machine, and print them over the bound.",
    settings=ModelSettings,
    module="studies.model.run",
)
