"""``plan``: arguments and settings."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ultraep_comm.bench.command import Command
from ultraep_comm.bench.options import (
    DEFAULT_TARGET,
    FAMILIES,
    Add,
    Settings,
    add_bound_limit,
    add_outputs,
    check_shared,
    parse_families,
    take,
)
from ultraep_comm.bench.sizes import parse_count, parse_counts
from ultraep_comm.errors import InvalidArgumentError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ultraep_comm.bench.traces import Trace
    from ultraep_comm.plan.topology import Topology

TRACE = "trace"
DEFAULT_SIZES = (
    "8/128/2,8/32/1,32/32/1,32/32/2,40/160/4,64/128/1,64/128/2,64/256/2,72/288/2,256/512/2"
)
DEFAULT_SEEDS = 4
LOADS_MINIMA = {"seeds": 1, "tokens": 1, "topk": 1}  # of `add_loads`
DEFAULT_WARPS = "1,2,4,8,16"
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

    def describe(self) -> dict[str, int]:
        """Return the fields of a JSON record that name the size."""
        return {
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


@dataclass(frozen=True, kw_only=True)
class LoadsSettings(Settings):
    """Settings of a command that plans many loads for all ranks, in one process.

    Attributes:
        sizes: one row for each size and kind of load.
        families: of `options.FAMILIES`, or "trace".
        seeds: loads of each generated kind.
        tokens: of each rank.
        topk: experts of a token.
        trace: recorded routing, or None.
    """

    sizes: tuple[PlanSize, ...]
    families: tuple[str, ...]
    seeds: int
    tokens: int
    topk: int
    trace: Trace | None = None

    @property
    def alone(self) -> bool:
        """Return True: one process does all the work."""
        return True

    @property
    def kinds(self) -> tuple[str, ...]:
        """Return the kinds of load."""
        return self.families


@dataclass(frozen=True, kw_only=True)
class PlanSettings(LoadsSettings):
    """Checked arguments of ``plan``.

    Attributes:
        target: imbalance at which the planner stops.
        certify: print every plan's certificate.
        trace_name: file name of the trace.
        engine: "host" compares planners, "cuda" times kernels.
        warps: of the plan kernel, one measurement for each.
    """

    target: float
    certify: bool = False
    trace_name: str = ""
    warps: tuple[int, ...] = ()


def add_sizes(add: Add, default: str) -> None:
    """Add ``--sizes``."""
    text = f"ranks, experts and slots of a rank (default {default})"
    add("--sizes", default=default, metavar="G/E/S,...", help=text)


def add_loads(add: Add, seeds: int) -> None:
    """Add ``--seeds``, ``--tokens`` and ``--topk``."""
    add("--seeds", type=int, default=seeds, help=f"loads of a generated kind (default {seeds})")
    add("--tokens", type=int, default=4096, help="tokens of each rank (default 4096)")
    add("--topk", type=int, default=8, help="experts of a generated token (default 8)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``plan``."""
    add = parser.add_argument
    add_sizes(add, DEFAULT_SIZES)
    add(
        "--families",
        metavar="NAME,...",
        help=f"families of loads: {', '.join(FAMILIES)}; {TRACE}, with --trace (default: all)",
    )
    add_plans(add)
    add(
        "--domain-size",
        type=int,
        metavar="N",
        help=f"ranks of a domain (default: all up to {MAX_ONE_DOMAIN}, beyond {DEFAULT_DOMAIN})",
    )
    add(
        "--engine",
        choices=["host", "cuda"],
        default="host",
        help="cuda: instead of comparing planners, time the kernels of plan, counts and reroute on"
        " a GPU, and check them against the host (default host)",
    )
    add(
        "--warps",
        metavar="N,...",
        help=f"warps of the plan kernel, with --engine cuda (default {DEFAULT_WARPS})",
    )
    add_bound_limit(add, "a plan's imbalance is more than X times its lower bound")
    add_outputs(add)


def add_plans(add: Add) -> None:
    """Add the loads to plan, and how: `add_loads`, ``--trace``, ``--target`` and ``--certify``."""
    add("--trace", type=Path, metavar="FILE.npz", help="recorded routing, every step and layer")
    add_loads(add, DEFAULT_SEEDS)
    add(
        "--target",
        type=float,
        default=DEFAULT_TARGET,
        help=f"imbalance at which to stop (default {DEFAULT_TARGET:g})",
    )
    add(
        "--certify",
        action="store_true",
        help="print what holds for every plan: its balance and the best possible, its transfer, and"
        " the ranks that limit them; plans are verified with and without",
    )


def make_settings(options: argparse.Namespace) -> PlanSettings:
    """Check the arguments of ``plan``, and read the trace.

    Raises:
        InvalidArgumentError: an argument is invalid.
        TraceError: the file is no trace.
        OSError: the trace cannot be read.
    """
    found = check_shared(options, {**LOADS_MINIMA, "domain_size": 1})
    gate = found["gate"]
    if gate and options.engine == "cuda":
        raise InvalidArgumentError(
            f"--max-over-bound is {gate.max_over_bound:g}, but --engine cuda compares kernels with"
            " the host's plans; give one of the two"
        )
    if options.certify and options.engine == "cuda":
        raise InvalidArgumentError(
            "--certify was given, but --engine cuda compares kernels with the host's plans; certify"
            " those, with --engine host"
        )
    warps = _parse_warps(options)
    sizes = parse_plan_sizes(options.sizes, options.domain_size)
    return PlanSettings(
        **found,
        **check_plans(options, sizes, default=FAMILIES),
        warps=warps,
        **take(options, "engine"),
    )


def check_plans(
    options: argparse.Namespace,
    sizes: tuple[PlanSize, ...],
    *,
    default: tuple[str, ...],
    more: tuple[str, ...] = (),
    fixed: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Check families and the options of `add_plans`, and read the trace.

    Args:
        options: parsed command line.
        sizes: to plan for.
        default: families without ``--families``, beside that of a trace.
        more: names that ``--families`` may have beside `options.FAMILIES`.
        fixed: further ones, whose loads have their own tokens.

    Returns:
        Fields of `PlanSettings`.

    Raises:
        InvalidArgumentError: an argument is invalid.
        TraceError: the file is no trace.
        OSError: the trace cannot be read.
    """
    from ultraep_comm.plan.planner import target_to_ppm

    try:
        target_to_ppm(options.target)
    except ValueError as error:
        raise InvalidArgumentError(f"--target: {error}") from None
    families = _parse_families(options, default, (*FAMILIES, *more, *fixed))
    if set(families) - {TRACE, *fixed}:
        for size in sizes:
            check_load(size, options.tokens, options.topk)
    trace = None
    if TRACE in families:
        from ultraep_comm.bench.traces import open_trace

        trace = open_trace(options.trace)
        if all(size.num_experts != trace.num_experts for size in sizes):
            raise InvalidArgumentError(
                f"{options.trace} has {trace.num_experts} experts, but none of --sizes has"
            )
    return {
        "sizes": sizes,
        "families": families,
        "trace": trace,
        "trace_name": "" if trace is None else options.trace.name,
        **take(options, "seeds", "tokens", "topk", "target", "certify"),
    }


def parse_plan_sizes(text: str, domain_size: int | None) -> tuple[PlanSize, ...]:
    """Return the sizes of ``"64/256/2,8/32/1"``.

    Raises:
        InvalidArgumentError: a size is not three positive numbers, or is repeated.
    """
    from ultraep_comm.plan.topology import MAX_COUNT

    sizes = []
    for part in text.split(","):
        numbers = [parse_count(number.strip()) for number in part.split("/")]
        if len(numbers) != 3 or not all(0 < n <= MAX_COUNT for n in numbers):
            raise InvalidArgumentError(
                f"--sizes {text!r}: {part!r} is not ranks/experts/slots, each at least 1; expected"
                " for instance 64/256/2,8/32/1"
            )
        ranks, experts, slots = numbers
        default = ranks if ranks <= MAX_ONE_DOMAIN else DEFAULT_DOMAIN
        size = PlanSize(
            num_ranks=ranks,
            num_experts=experts,
            slots_per_rank=slots,
            domain_size=min(domain_size or default, ranks),
        )
        if slots > experts:
            raise InvalidArgumentError(
                f"--sizes has {size}, with more slots than experts; a rank has at most one instance"
                " of each"
            )
        if size in sizes:
            raise InvalidArgumentError(f"--sizes {text!r} has {size} twice")
        sizes.append(size)
    return tuple(sizes)


def _parse_families(
    options: argparse.Namespace, default: tuple[str, ...], possible: tuple[str, ...]
) -> tuple[str, ...]:
    text, has_trace = options.families, options.trace is not None
    more = (TRACE,) if has_trace else ()
    if text is None:
        return (*default, *more)
    if has_trace and TRACE not in text:
        raise InvalidArgumentError(f"--families {text}: --trace was given; expected {TRACE} too")
    if TRACE in text and not has_trace:
        raise InvalidArgumentError(f"--families {text}: {TRACE} needs --trace FILE.npz")
    return parse_families(text, (*possible, *more))


def _parse_warps(options: argparse.Namespace) -> tuple[int, ...]:
    if options.engine == "host":
        if options.warps is not None:
            raise InvalidArgumentError(f"--warps is {options.warps}, but is for --engine cuda")
        return ()
    from ultraep_comm import _core

    warps = parse_counts(options.warps or DEFAULT_WARPS, "--warps")
    if warps[-1] > _core.CUDA_MAX_PLAN_WARPS:
        raise InvalidArgumentError(
            f"--warps has {warps[-1]}; the plan kernel takes at most {_core.CUDA_MAX_PLAN_WARPS}"
        )
    return warps


def check_load(size: PlanSize, tokens: int, topk: int) -> None:
    """Raise InvalidArgumentError if a generated load has too few experts or too many tokens."""
    if size.num_experts < topk:
        raise InvalidArgumentError(
            f"--sizes has {size}, with fewer experts than --topk {topk}; a token takes different"
            " experts"
        )
    total = size.num_ranks * tokens * topk
    if total >= 2**31:
        raise InvalidArgumentError(
            f"--sizes has {size}: {size.num_ranks} ranks with {tokens} tokens to {topk} experts"
            f" each make a load of {total}; expected less than 2**31"
        )


COMMAND = Command(
    name="plan",
    help="compare the planner with the published one",
    description="Plan loads of many kinds and sizes, and print imbalance, replicas, transfer"
    " bound and time, next to the published planner.",
    add_arguments=add_arguments,
    make_settings=make_settings,
    module="ultraep_comm.bench.commands.plan.run",
)
