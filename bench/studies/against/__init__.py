"""``against``: options and settings."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from studies.options import MOONEP_CASES, PEER_NAMES, WORKLOADS
from ultraep_comm.bench import options
from ultraep_comm.bench.command import Command
from ultraep_comm.bench.commands.plan import MAX_ONE_DOMAIN, SIZES, TRACE, PlanSettings, PlanSize
from ultraep_comm.bench.options import FAMILIES, ZIPF, option, parse_names
from ultraep_comm.errors import InvalidArgumentError

if TYPE_CHECKING:
    from typing_extensions import Self

_DEFAULT_FAMILIES = (*ZIPF, "lognormal", *WORKLOADS)


def parse_peers(text: str, flag: str) -> tuple[str, ...]:
    """Return the names of planners, of PEER_NAMES."""
    return parse_names(text, flag, PEER_NAMES)


@dataclass(frozen=True, kw_only=True)
class AgainstSettings(PlanSettings):
    """Checked options of ``against``."""

    default_sizes: ClassVar[str] = "64/256/2"
    default_families: ClassVar[tuple[str, ...]] = _DEFAULT_FAMILIES
    possible_families: ClassVar[tuple[str, ...]] = (*FAMILIES, *WORKLOADS)
    fixed_families: ClassVar[tuple[str, ...]] = (MOONEP_CASES,)

    sizes: tuple[PlanSize, ...] = SIZES((), shown=default_sizes)
    workload: str | None = options.WORKLOAD(
        help=f"kinds of load: {', '.join(FAMILIES)}; {TRACE}, with --trace; the public workloads"
        f" {', '.join(WORKLOADS)}; {MOONEP_CASES}, its planning cases",
        shown=", ".join(_DEFAULT_FAMILIES),
    )
    peers: tuple[str, ...] = option(
        "--peers",
        parse=parse_peers,
        default=PEER_NAMES,
        metavar="NAME,...",
        help="other planners",
    )
    domain_size: int | None = None
    engine: str = "host"
    warps: tuple[int, ...] = ()
    max_over_bound: float | None = None

    def checked(self) -> Self:
        """Return the settings with their families and trace. See `Settings.checked`."""
        from studies.peers.moonep_cases import cases_of, sizes_text
        from studies.workloads import check_pools

        if "lplb" in self.peers and importlib.util.find_spec("scipy") is None:
            raise InvalidArgumentError(
                "--peers lplb needs SciPy, for its linear program; run: pip install"
                " 'ultraep_comm[bench]'"
            )
        made = super().checked()
        for size in made.sizes:
            if size.num_ranks > size.domain_size:
                raise InvalidArgumentError(
                    f"planners are compared within one domain, but --sizes has {size}; expected at"
                    f" most {MAX_ONE_DOMAIN} ranks"
                )
            workloads = [family for family in made.families if family in WORKLOADS]
            check_pools(workloads, size.num_experts, self.topk, f"--sizes has {size}")
        if MOONEP_CASES in made.families and not any(
            cases_of(size.num_ranks, size.num_experts) for size in made.sizes
        ):
            raise InvalidArgumentError(
                f"--workload has {MOONEP_CASES}, but its cases have none of --sizes; expected one"
                f" of {sizes_text()}"
            )
        return made


COMMAND = Command(
    name="against",
    help="our planner and other systems', on the same loads",
    description="Plan loads of many kinds and sizes with our planner and with our readings of other"
    " systems' planners, and print a row for each: imbalance, replicas, and the modelled time of"
    " the transfer.",
    settings=AgainstSettings,
    module="studies.against.run",
)
