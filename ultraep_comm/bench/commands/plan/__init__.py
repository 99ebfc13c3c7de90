"""``plan``: options and settings."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ultraep_comm.bench import options
from ultraep_comm.bench.command import Command
from ultraep_comm.bench.options import FAMILIES, Settings, option, parse_names
from ultraep_comm.bench.sizes import parse_count, parse_counts
from ultraep_comm.errors import InvalidArgumentError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from typing_extensions import Self

    from ultraep_comm.bench.traces import Trace
    from ultraep_comm.plan.topology import Topology

TRACE = "trace"
DEFAULT_SIZES = (
    "8/128/2,8/32/1,32/32/1,32/32/2,40/160/4,64/128/1,64/128/2,64/256/2,72/288/2,256/512/2"
)
DEFAULT_DOMAIN = 64
MAX_ONE_DOMAIN = 72  # ranks; the largest NVLink domain


@dataclass(frozen=True, kw_only=True)
class PlanSize:
    """Ranks, experts and slots of a plan.

    Attributes:
        num_ranks: G.
        num_experts: E.
        slots_per_rank: S.
        domain_size: ranks of a domain; the last domain may be smaller.
    """

    num_ranks: int
    num_experts: int
    slots_per_rank: int
    domain_size: int

    def __str__(self) -> str:
        text = f"{self.num_ranks}/{self.num_experts}/{self.slots_per_rank}"
        return text if self.domain_size >= self.num_ranks else f"{text} by {self.domain_size}"

    def describe(self) -> dict[str, int | str]:
        """Return the fields of a JSON record that name the size."""
        return {
            "size": str(self),
            "ranks": self.num_ranks,
            "experts": self.num_experts,
            "slots": self.slots_per_rank,
            "domain_size": self.domain_size,
        }

    @property
    def topology(self) -> Topology:
        """Return the same as the planner takes it."""
        from ultraep_comm.plan.topology import Topology

        return Topology.make(
            num_ranks=self.num_ranks,
            num_experts=self.num_experts,
            slots_per_rank=self.slots_per_rank,
            domains=self.domain,
        )

    @property
    def home(self) -> NDArray[np.int32]:
        """Return the home map ``[E]``: contiguous."""
        from ultraep_comm.plan.topology import contiguous_home

        return contiguous_home(self.num_experts, self.num_ranks)

    @property
    def domain(self) -> NDArray[np.int32]:
        """Return the domains ``[G]``."""
        import numpy as np

        return np.arange(self.num_ranks, dtype=np.int32) // self.domain_size


def parse_sizes(text: str, flag: str) -> tuple[PlanSize, ...]:
    """Return the sizes of ``"64/256/2,8/32/1"``, each of one domain up to MAX_ONE_DOMAIN ranks.

    Raises:
        InvalidArgumentError: a size is not three positive numbers, or is repeated.
    """
    from ultraep_comm.plan.topology import MAX_COUNT

    sizes = []
    for part in text.split(","):
        numbers = [parse_count(number.strip()) for number in part.split("/")]
        if len(numbers) != 3 or not all(0 < n <= MAX_COUNT for n in numbers):
            raise InvalidArgumentError(
                f"{flag} {text!r}: {part!r} is not ranks/experts/slots, each at least 1; expected"
                " for instance 64/256/2,8/32/1"
            )
        ranks, experts, slots = numbers
        size = PlanSize(
            num_ranks=ranks,
            num_experts=experts,
            slots_per_rank=slots,
            domain_size=ranks if ranks <= MAX_ONE_DOMAIN else DEFAULT_DOMAIN,
        )
        if slots > experts:
            raise InvalidArgumentError(
                f"{flag} has {size}, with more slots than experts; a rank has at most one instance"
                " of each"
            )
        if size in sizes:
            raise InvalidArgumentError(f"{flag} {text!r} has {size} twice")
        sizes.append(size)
    return tuple(sizes)


SIZES = options.Option(
    flags=("--sizes",),
    parse=parse_sizes,
    metavar="G/E/S,...",
    help="ranks, experts and slots of a rank",
)
SEEDS = options.Option(flags=("--seeds",), parse=int, minimum=1, help="loads of a generated kind")


@dataclass(frozen=True, kw_only=True)
class LoadsSettings(Settings):
    """Checked options of a command that plans many loads for all ranks, in one process.

    Attributes:
        families: the kinds of load, of `options.FAMILIES`, or "trace".
        trace: recorded routing, or None.
    """

    sizes: tuple[PlanSize, ...] = SIZES(())
    families: tuple[str, ...] = ()
    seeds: int = SEEDS(4)
    tokens: int = options.TOKENS(4096)
    topk: int = options.TOPK(8)
    json: Path | None = options.JSON()
    csv: Path | None = options.CSV()
    trace: Trace | None = None

    @property
    def alone(self) -> bool:
        """Return True: one process does all the work."""
        return True

    @property
    def kinds(self) -> tuple[str, ...]:
        """Return the kinds of load."""
        return self.families

    def check_loads(self) -> None:
        """Raise InvalidArgumentError if a size has too few experts, or a load too many tokens."""
        for size in self.sizes:
            if size.num_experts < self.topk:
                raise InvalidArgumentError(
                    f"--sizes has {size}, with fewer experts than --topk {self.topk}; a token takes"
                    " different experts"
                )
            options.check_assignments(
                size.num_ranks, self.tokens, self.topk, f"--sizes has {size}: "
            )


@dataclass(frozen=True, kw_only=True)
class PlanSettings(LoadsSettings):
    """Checked options of ``plan``: "host" plans loads, "cuda" times kernels."""

    default_sizes: ClassVar[str] = DEFAULT_SIZES
    default_families: ClassVar[tuple[str, ...]] = FAMILIES
    possible_families: ClassVar[tuple[str, ...]] = FAMILIES
    fixed_families: ClassVar[tuple[str, ...]] = ()  # further ones, whose loads have their tokens

    sizes: tuple[PlanSize, ...] = SIZES((), shown=DEFAULT_SIZES)
    workload: str | None = options.WORKLOAD(
        help=f"kinds of load: {', '.join(FAMILIES)}; {TRACE}, with --trace (default: all)"
    )
    trace_file: Path | None = options.TRACE_FILE(help="recorded routing, every step and layer")
    domain_size: int | None = option(
        "--domain-size",
        parse=int,
        minimum=1,
        help="ranks of a domain",
        shown=f"all up to {MAX_ONE_DOMAIN}, beyond {DEFAULT_DOMAIN}",
    )
    target: float = options.TARGET(options.DEFAULT_TARGET)
    certify: bool = option(
        "--certify",
        default=False,
        help="print what holds for every plan: its balance and the best possible, its transfer, and"
        " the ranks that limit them; plans are verified with and without",
    )
    engine: str = options.ENGINE(
        "host",
        choices=("host", "cuda"),
        help="cuda: instead of judging plans, time the kernels of plan, counts and reroute on"
        " a GPU, and check them against the host",
    )
    warps: tuple[int, ...] = option(
        "--warps",
        parse=parse_counts,
        default=(),
        metavar="N,...",
        help="warps of the plan kernel, with --engine cuda",
        shown="1,2,4,8,16",
    )
    max_over_bound: float | None = options.MAX_OVER_BOUND(
        help="fail, with exit status 3, if a plan's imbalance is more than X times its lower bound"
    )

    def checked(self) -> Self:
        """Return the settings with their families and trace. See `Settings.checked`."""
        super().checked()
        for flag in ("--max-over-bound", "--certify") if self.engine == "cuda" else ():
            if getattr(self, flag[2:].replace("-", "_")):
                raise InvalidArgumentError(
                    f"{flag} was given, but --engine cuda compares kernels with the host's plans;"
                    " give one of the two"
                )
        sizes = self.sizes or parse_sizes(self.default_sizes, "--sizes")
        if (limit := self.domain_size) is not None:
            sizes = tuple(replace(s, domain_size=min(limit, s.num_ranks)) for s in sizes)
        made = replace(self, sizes=sizes, families=self._find_families(), warps=self._find_warps())
        if set(made.families) - {TRACE, *self.fixed_families}:
            made.check_loads()
        if self.trace_file is None:
            return made
        from ultraep_comm.bench.traces import open_trace

        trace = open_trace(self.trace_file)
        if all(size.num_experts != trace.num_experts for size in sizes):
            raise InvalidArgumentError(
                f"{self.trace_file} has {trace.num_experts} experts, but none of --sizes has"
            )
        return replace(made, trace=trace)

    def _find_families(self) -> tuple[str, ...]:
        text, has_trace = self.workload, self.trace_file is not None
        more = (TRACE,) if has_trace else ()
        if text is None:
            return (*self.default_families, *more)
        if has_trace != (TRACE in text.split(",")):
            raise InvalidArgumentError(
                f"--workload {text}: {TRACE} and --trace FILE.npz belong together"
            )
        possible = (*self.possible_families, *self.fixed_families, *more)
        return parse_names(text, "--workload", possible)

    def _find_warps(self) -> tuple[int, ...]:
        if self.engine == "host":
            if self.warps:
                raise InvalidArgumentError(f"--warps is {self.warps}, but is for --engine cuda")
            return ()
        from ultraep_comm import _core

        warps = self.warps or (1, 2, 4, 8, 16)
        if warps[-1] > _core.CUDA_MAX_PLAN_WARPS:
            raise InvalidArgumentError(
                f"--warps has {warps[-1]}; the plan kernel takes at most"
                f" {_core.CUDA_MAX_PLAN_WARPS}"
            )
        return warps

    def describe(self) -> dict[str, Any]:
        """Return the options and the kinds of load, for JSON."""
        return {**super().describe(), "families": list(self.families)}


COMMAND = Command(
    name="plan",
    help="judge the planner on loads of many kinds, or time its kernels",
    description="Plan loads of many kinds and sizes, and print imbalance, replicas, transfer"
    " bound and time.",
    settings=PlanSettings,
    module="ultraep_comm.bench.commands.plan.run",
)
