"""``imbalance``: arguments and settings."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from studies.options import (
    WORKLOAD_EXPERTS,
    WORKLOAD_RANKS,
    WORKLOAD_SEED,
    WORKLOAD_TOKENS,
    WORKLOAD_TOPK,
    WORKLOADS,
)
from ultraep_comm.bench.command import Command
from ultraep_comm.bench.options import (
    Settings,
    add_outputs,
    check_shared,
    parse_families,
    take,
)
from ultraep_comm.errors import InvalidArgumentError

_DEFAULTS = {  # and help
    "ranks": (WORKLOAD_RANKS, "ranks"),
    "experts": (WORKLOAD_EXPERTS, "experts"),
    "topk": (WORKLOAD_TOPK, "experts of a token"),
    "tokens": (WORKLOAD_TOKENS, "tokens of each rank"),
    "steps": (1, "steps, a row for each"),
    "slots": (2, "slots of a rank, for our plans"),
    "seed": (WORKLOAD_SEED, "seed of the routing"),
}
_MINIMA = {**dict.fromkeys(_DEFAULTS, 1), "slots": 0, "seed": 0}
_MAX_DRAWS = 1 << 24  # tokens of all workloads and steps, a few microseconds each


@dataclass(frozen=True, kw_only=True)
class ImbalanceSettings(Settings):
    """Checked arguments of ``imbalance``.

    Attributes:
        workloads: of `options.WORKLOADS`.
        experts: E.
        topk: experts of a token.
        tokens: of each rank.
        steps: of each workload, from 0.
        slots: S, for our plans.
    """

    workloads: tuple[str, ...]
    experts: int
    topk: int
    tokens: int
    steps: int
    slots: int

    @property
    def alone(self) -> bool:
        """Return True: one process plans for all ranks."""
        return True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``imbalance``; its defaults are the published ones."""
    add = parser.add_argument
    add(
        "--workloads",
        default=",".join(WORKLOADS),
        metavar="NAME,...",
        help=f"of {', '.join(WORKLOADS)} (default: all)",
    )
    for name, (default, text) in _DEFAULTS.items():
        add(f"--{name}", type=int, default=default, help=f"{text} (default {default})")
    add_outputs(add)


def make_settings(options: argparse.Namespace) -> ImbalanceSettings:
    """Check the arguments of ``imbalance``.

    Raises:
        InvalidArgumentError: an argument is invalid.
    """
    from studies.workloads import check_pools

    found = check_shared(options, _MINIMA)
    workloads = parse_families(options.workloads, tuple(WORKLOADS), "--workloads")
    if options.experts % options.ranks:
        raise InvalidArgumentError(
            f"--experts is {options.experts}, not a multiple of --ranks {options.ranks}; the"
            " workloads are defined with equally many experts on every rank"
        )
    if options.slots > options.experts:
        raise InvalidArgumentError(
            f"--slots is {options.slots}; expected at most --experts {options.experts}, since a"
            " rank has at most one instance of each"
        )
    check_pools(workloads, options.experts, options.topk, f"--experts is {options.experts}")
    draws = len(workloads) * options.steps * options.tokens
    if draws > _MAX_DRAWS or options.ranks * options.tokens * options.topk >= 2**31:
        raise InvalidArgumentError(
            f"--tokens {options.tokens} on --ranks {options.ranks} to --topk {options.topk}, for"
            f" --steps {options.steps} of {len(workloads)} workloads are too many; expected at most"
            f" {_MAX_DRAWS} tokens, and loads below 2**31"
        )
    return ImbalanceSettings(
        **found,
        workloads=workloads,
        num_ranks=options.ranks,
        **take(options, "experts", "topk", "tokens", "steps", "slots"),
    )


COMMAND = Command(
    name="imbalance",
    help="the public balance workloads W0 to W7, before and after our plans",
    description="Print the imbalance of the public workloads W0 to W7 between experts, between"
    " sources and between the ranks that own the experts, and what our plans leave of the last.",
    add_arguments=add_arguments,
    make_settings=make_settings,
    module="studies.imbalance.run",
)
