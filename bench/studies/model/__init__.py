"""``model``: arguments and settings."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ultraep_comm.bench.command import Command
from ultraep_comm.bench.commands.plan import (
    LoadsSettings,
    add_loads,
    add_sizes,
    check_load,
    parse_plan_sizes,
)
from ultraep_comm.bench.options import (
    FAMILIES,
    IMBALANCE,
    PUBLISHED,
    add_outputs,
    check_shared,
    parse_families,
    take,
)
from ultraep_comm.bench.sizes import parse_size
from ultraep_comm.errors import InvalidArgumentError

if TYPE_CHECKING:
    from ultraep_comm.model import Machine

DEFAULT_SIZES = "64/256/2,64/128/2,64/128/1,40/160/4,72/288/2"
DEFAULT_IMBALANCES = "1.5,2,3,4,6,8"
DEFAULT_FAMILIES = "zipf0.6,zipf1.0,zipf1.4,lognormal,adversarial"
MACHINES = ("gb200", "hgx8", "nvl72", "nvl72-links", "nvl72-racks")  # of `ultraep_comm.model`
DEFAULT_EXPERT_BYTES = "36M"  # 37.75 MB: Qwen3-235B in bf16


@dataclass(frozen=True, kw_only=True)
class ModelSettings(LoadsSettings):
    """Checked arguments of ``model``.

    Attributes:
        imbalances: of generated loads without replicas, further kinds of load.
        expert_bytes: W.
        machine: to predict times of.
    """

    imbalances: tuple[float, ...]
    expert_bytes: int
    machine: Machine

    @property
    def kinds(self) -> tuple[str, ...]:
        """Return the kinds of load."""
        return (*(f"{IMBALANCE}{x:g}" for x in self.imbalances), *self.families)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``model``."""
    add = parser.add_argument
    add_sizes(add, DEFAULT_SIZES)
    add(
        "--imbalances",
        default=DEFAULT_IMBALANCES,
        metavar="X,...",
        help=f"imbalances of loads (default {DEFAULT_IMBALANCES})",
    )
    add(
        "--families",
        default=DEFAULT_FAMILIES,
        metavar="NAME,...",
        help=f"families of further loads (default {DEFAULT_FAMILIES})",
    )
    add_loads(add, 3)
    add(
        "--expert-bytes",
        default=DEFAULT_EXPERT_BYTES,
        metavar="SIZE",
        help=f"bytes of one expert (default {DEFAULT_EXPERT_BYTES})",
    )
    add(
        "--machine",
        default="nvl72",
        choices=MACHINES,
        help="machine to predict times of (default nvl72)",
    )
    add_outputs(add)


def make_settings(options: argparse.Namespace) -> ModelSettings:
    """Check the arguments of ``model``.

    Raises:
        InvalidArgumentError: an argument is invalid.
    """
    from ultraep_comm.model import find_machine

    found = check_shared(options, {"seeds": 1, "tokens": 1, "topk": 1})
    machine = find_machine(options.machine)
    sizes = parse_plan_sizes(options.sizes, machine.domain_size)
    for size in sizes:
        check_load(size, options.tokens, options.topk)
    imbalances, families = _parse_imbalances(options.imbalances), _parse_families(options.families)
    if not imbalances and not families:
        raise InvalidArgumentError("--imbalances and --families are both empty; expected a load")
    return ModelSettings(
        **found,
        sizes=sizes,
        imbalances=imbalances,
        families=families,
        expert_bytes=parse_size(options.expert_bytes),
        machine=machine,
        **take(options, "seeds", "tokens", "topk"),
    )


def _parse_imbalances(text: str) -> tuple[float, ...]:
    values = []
    for part in filter(None, text.split(",")):
        try:
            value = float(part)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value > 1):
            raise InvalidArgumentError(
                f"--imbalances {text!r}: {part!r} is not a number above 1; expected for example"
                " 1.5,2"
            )
        values.append(value)
    return tuple(dict.fromkeys(values))


def _parse_families(text: str) -> tuple[str, ...]:
    possible = tuple(family for family in FAMILIES if family not in PUBLISHED)
    given = ",".join(filter(None, (part.strip() for part in text.split(","))))
    return parse_families(given, possible) if given else ()


COMMAND = Command(
    name="model",
    help="predict transfer times on a described machine",
    description="Plan loads of many kinds, predict the times of push, pull, direct fan-out and a"
    " published relay on a described machine, and print them over the bound.",
    add_arguments=add_arguments,
    make_settings=make_settings,
    module="studies.model.run",
)
