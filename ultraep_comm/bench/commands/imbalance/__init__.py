"""``imbalance``: arguments and settings."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from ultraep_comm.bench.command import Command
from ultraep_comm.bench.options import (
    WORKLOADS,
    Settings,
    add_outputs,
    check_shared,
    parse_families,
    take,
)
from ultraep_comm.errors import InvalidArgumentError

_MINIMA = {
    **{"ranks": 1, "experts": 1, "topk": 1, "tokens": 1, "steps": 1, "slots": 0, "seed": 0},
}
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
    add("--ranks", type=int, default=4, help="ranks (default 4)")
    add("--experts", type=int, default=8, help="experts (default 8)")
    add("--topk", type=int, default=2, help="experts of a token (default 2)")
    add("--tokens", type=int, default=128, help="tokens of each rank (default 128)")
    add("--steps", type=int, default=1, help="steps, a row for each (default 1)")
    add("--slots", type=int, default=2, help="slots of a rank, for our plans (default 2)")
    add("--seed", type=int, default=1234, help="seed of the routing (default 1234)")
    add_outputs(add)


def make_settings(options: argparse.Namespace) -> ImbalanceSettings:
    """Check the arguments of ``imbalance``.

    Raises:
        InvalidArgumentError: an argument is invalid.
    """
    found = check_shared(options, _MINIMA)
    workloads = parse_families(options.workloads, tuple(WORKLOADS), "--workloads")
    if options.experts % options.ranks:
        raise InvalidArgumentError(
            f"--experts is {options.experts}, not a multiple of --ranks {options.ranks}; the"
            " workloads are defined with equally many experts on every rank"
        )
    least = options.experts - options.experts // 2 if "W5" in workloads else options.experts
    if options.topk > least:
        raise InvalidArgumentError(
            f"--topk is {options.topk}, but a token draws from as few as {least} experts; expected"
            " a smaller --topk, or more --experts"
        )
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
    module="ultraep_comm.bench.commands.imbalance.run",
)
