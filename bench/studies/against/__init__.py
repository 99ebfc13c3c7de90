"""``against``: arguments and settings."""

from __future__ import annotations

import argparse
import importlib.util
from dataclasses import dataclass

from studies.options import MOONEP_CASES, PEER_NAMES, WORKLOADS
from ultraep_comm.bench.command import Command
from ultraep_comm.bench.commands.plan import (
    LOADS_MINIMA,
    MAX_ONE_DOMAIN,
    TRACE,
    PlanSettings,
    add_plans,
    add_sizes,
    check_plans,
    parse_plan_sizes,
)
from ultraep_comm.bench.options import FAMILIES, ZIPF, add_outputs, check_shared, parse_families
from ultraep_comm.errors import InvalidArgumentError

DEFAULT_SIZES = "64/256/2"
DEFAULT_FAMILIES = (*ZIPF, "lognormal", *WORKLOADS)


@dataclass(frozen=True, kw_only=True)
class AgainstSettings(PlanSettings):
    """Checked arguments of ``against``.

    Attributes:
        peers: names of `peers.PEERS` to compare with.
    """

    peers: tuple[str, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``against``."""
    add = parser.add_argument
    add_sizes(add, DEFAULT_SIZES)
    add(
        "--families",
        metavar="NAME,...",
        help=f"families of loads: {', '.join(FAMILIES)}; {TRACE}, with --trace; the public"
        f" workloads {', '.join(WORKLOADS)}; {MOONEP_CASES}, its planning cases (default:"
        f" {', '.join(DEFAULT_FAMILIES)})",
    )
    add(
        "--peers",
        default=",".join(PEER_NAMES),
        metavar="NAME,...",
        help=f"other planners, of {', '.join(PEER_NAMES)} (default: all)",
    )
    add_plans(add)
    add_outputs(add)


def make_settings(options: argparse.Namespace) -> AgainstSettings:
    """Check the arguments of ``against``, and read the trace.

    Raises:
        InvalidArgumentError: an argument is invalid.
        TraceError: the file is no trace.
        OSError: the trace cannot be read.
    """
    from studies.peers.moonep_cases import cases_of, sizes_text
    from studies.workloads import check_pools

    found = check_shared(options, LOADS_MINIMA)
    peers = parse_families(options.peers, PEER_NAMES, "--peers")
    if "lplb" in peers and importlib.util.find_spec("scipy") is None:
        raise InvalidArgumentError(
            "--peers lplb needs SciPy, for its linear program; run: pip install"
            " 'ultraep_comm[bench]'"
        )
    sizes = parse_plan_sizes(options.sizes, None)
    for size in sizes:
        if size.num_ranks > size.domain_size:
            raise InvalidArgumentError(
                f"planners are compared within one domain, but --sizes has {size}; expected at"
                f" most {MAX_ONE_DOMAIN} ranks"
            )
    plans = check_plans(
        options, sizes, default=DEFAULT_FAMILIES, more=tuple(WORKLOADS), fixed=(MOONEP_CASES,)
    )
    for size in sizes:
        workloads = [family for family in plans["families"] if family in WORKLOADS]
        check_pools(workloads, size.num_experts, options.topk, f"--sizes has {size}")
    if MOONEP_CASES in plans["families"] and not any(
        cases_of(size.num_ranks, size.num_experts) for size in sizes
    ):
        raise InvalidArgumentError(
            f"--families has {MOONEP_CASES}, but its cases have none of --sizes; expected one"
            f" of {sizes_text()}"
        )
    return AgainstSettings(**found, **plans, peers=peers)


COMMAND = Command(
    name="against",
    help="our planner and other systems', on the same loads",
    description="Plan loads of many kinds and sizes with our planner and with our readings of other"
    " systems' planners, and print a row for each: imbalance, replicas, and the modelled time of"
    " the transfer.",
    add_arguments=add_arguments,
    make_settings=make_settings,
    module="studies.against.run",
)
