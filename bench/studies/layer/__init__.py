"""``layer``: arguments and settings."""

from __future__ import annotations

import argparse
import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING

from studies.options import WORKLOAD_EXPERTS, WORKLOAD_TOKENS, WORKLOAD_TOPK, WORKLOADS
from ultraep_comm.bench.command import Command
from ultraep_comm.bench.options import (
    DEFAULT_EXPERTS,
    DEFAULT_IMBALANCE,
    Settings,
    add_bound_limit,
    add_outputs,
    add_rounds,
    check_ranks,
    check_shared,
    default_imbalance,
    parse_families,
    take,
)
from ultraep_comm.errors import InvalidArgumentError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

DEFAULT_RANKS = 2
_OF_FRAMEWORKS = "W1"  # their tokens have to go to different experts
_WORKLOAD_STEPS = 12  # whose mean is the workload's: a turn of W6 and of W7
_SHARES_TOKENS = 1 << 24  # of a generated load; enough for smooth shares
_MINIMA = {
    **{"ranks": 1, "experts": 1, "slots": 0, "tokens": 1, "topk": 1, "hidden": 1, "inner": 1},
    **{"iters": 1, "warmup": 0, "seed": 0},
}


_FRAMEWORKS = {  # what is imported, and what brings it
    "transformers": ("transformers", "-c constraints.txt transformers accelerate"),
    "megatron": ("megatron.core", "-c constraints.txt megatron-core"),
}


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Where tokens go.

    Attributes:
        workload: of `options.WORKLOADS`, whose next step an iteration is; "": ids are drawn by
            shares, which else are those of the workload's first steps.
        shares: float64 ``[E]``, the probability of each expert.
        imbalance: of the ranks under these shares.
    """

    workload: str
    shares: NDArray[np.float64]
    imbalance: float


@dataclass(frozen=True, kw_only=True)
class LayerSettings(Settings):
    """Checked arguments of ``layer``.

    Attributes:
        framework: whose layer is measured; "": the benchmark's own.
        routings: one after the other.
        experts: E.
        slots: S.
        tokens: of each rank.
        topk: experts of a token.
        hidden, inner: H and I.
    """

    framework: str
    routings: tuple[Routing, ...]
    experts: int
    slots: int
    tokens: int
    topk: int
    hidden: int
    inner: int

    @property
    def workload(self) -> str:
        """Return the names of the workloads; "" for none."""
        return ",".join(routing.workload for routing in self.routings)

    @property
    def imbalance(self) -> float:
        """Return the imbalance, mean over the routings."""
        return sum(routing.imbalance for routing in self.routings) / len(self.routings)

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """Return the shapes of one expert's tensors."""
        return {"w13": (2 * self.inner, self.hidden), "w2": (self.hidden, self.inner)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``layer``."""
    add = parser.add_argument_group("the layer").add_argument
    add(
        "--framework",
        choices=tuple(_FRAMEWORKS),
        default="",
        help="its own layer, without and with its adapter (default: the benchmark's layer)",
    )
    add("--ranks", type=int, help=f"ranks, at most one per core (default {DEFAULT_RANKS})")
    add("--experts", type=int, default=DEFAULT_EXPERTS, help=f"experts (default {DEFAULT_EXPERTS})")
    add("--slots", type=int, default=2, help="slots of a rank (default 2)")
    add("--tokens", type=int, default=1024, help="tokens of each rank (default 1024)")
    add("--topk", type=int, default=4, help="experts of a token (default 4)")
    add("--hidden", type=int, default=256, help="width of a token (default 256)")
    add("--inner", type=int, default=512, help="width inside an expert (default 512)")
    add(
        "--imbalance",
        type=float,
        help=f"of the routing (default {DEFAULT_IMBALANCE:g}, or less for few ranks)",
    )
    add(
        "--workload",
        default="",
        metavar="NAME,...",
        help=f"routing of public workloads instead, of {', '.join(WORKLOADS)} (with --framework:"
        f" default {_OF_FRAMEWORKS}); --experts {WORKLOAD_EXPERTS} --topk {WORKLOAD_TOPK} --tokens"
        f" {WORKLOAD_TOKENS} --hidden 512 --inner 1024 -w 5 is their published shape",
    )
    add_rounds(parser.add_argument_group("iterations").add_argument, "routing, weights and tokens")
    add = parser.add_argument_group("results and limits").add_argument
    add_outputs(add)
    add_bound_limit(add, "a step with replicas takes more than X times a balanced one")


def make_settings(options: argparse.Namespace) -> LayerSettings:
    """Check the arguments of ``layer``.

    Raises:
        InvalidArgumentError: an argument is invalid.
    """
    found = check_shared(options, _MINIMA)
    found |= check_ranks(options, engine="host", default=DEFAULT_RANKS)
    num_ranks = found["num_ranks"]
    if options.experts < num_ranks:
        raise InvalidArgumentError(
            f"--experts is {options.experts}; expected at least one for each of {num_ranks} ranks"
        )
    if options.framework:
        _check_framework(options, num_ranks)
    return LayerSettings(
        **found,
        routings=_make_routings(options, num_ranks),
        **take(options, "framework", "experts", "slots", "tokens", "topk", "hidden", "inner"),
    )


def _check_framework(options: argparse.Namespace, num_ranks: int) -> None:
    """Raise InvalidArgumentError if there is no framework, or its layer cannot have this size."""
    module, packages = _FRAMEWORKS[options.framework]
    try:
        found = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        found = False
    if not found:
        raise InvalidArgumentError(
            f"--framework is {options.framework}, which is not installed: pip install {packages}"
        )
    if options.experts % num_ranks or not options.slots or num_ranks < 2:
        raise InvalidArgumentError(
            f"--framework {options.framework} was given --experts {options.experts} on {num_ranks}"
            f" ranks with --slots {options.slots}; expected equally many experts on each of at"
            " least two ranks, and at least one slot"
        )


def _make_routings(options: argparse.Namespace, num_ranks: int) -> tuple[Routing, ...]:
    """Return the routings.

    Raises:
        InvalidArgumentError: both ways to give one are used, or it is impossible.
    """
    import numpy as np

    from studies.loads import make_loads
    from studies.workloads import check_pools
    from ultraep_comm.bench.loads import generate_load, rank_imbalance

    shape = {"num_ranks": num_ranks, "num_experts": options.experts}
    given = options.workload or (_OF_FRAMEWORKS if options.framework else "")
    if not given:
        imbalance = default_imbalance(num_ranks) if options.imbalance is None else options.imbalance
        load = generate_load(
            **shape, imbalance=imbalance, num_tokens=_SHARES_TOKENS, seed=options.seed
        ).sum(axis=0)
        return (Routing(workload="", shares=load / load.sum(), imbalance=imbalance),)
    workloads = parse_families(given, tuple(WORKLOADS), "--workload")
    if options.imbalance is not None:
        raise InvalidArgumentError(
            f"--imbalance is {options.imbalance:g}, but --workload {given} has its own; give one of"
            " the two"
        )
    check_pools(workloads, options.experts, options.topk, f"--experts is {options.experts}")
    routings = []
    for workload in workloads:
        loads = make_loads(
            workload,
            **shape,
            num_tokens=num_ranks * options.tokens,
            topk=options.topk,
            seeds=_WORKLOAD_STEPS,
        )
        mean = sum(rank_imbalance(load, num_ranks) for load in loads) / len(loads)
        total = np.sum(loads, axis=0)
        routings.append(Routing(workload=workload, shares=total / total.sum(), imbalance=mean))
    return tuple(routings)


COMMAND = Command(
    name="layer",
    help="time a whole MoE layer, forward and backward, with and without replicas",
    description="Time a MoE layer, forward and backward, on the CPU: with skewed routing, with"
    " skewed routing and replicas, and with balanced routing, interleaved. The exit status is 1"
    " if any value is wrong, 3 if a limit is not met, 2 after other errors.",
    add_arguments=add_arguments,
    make_settings=make_settings,
    module="studies.layer.run",
)
