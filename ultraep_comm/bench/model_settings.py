"""What one run of the model's table does, and its options on the command line."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

from ultraep_comm.bench.families import FAMILIES, PUBLISHED
from ultraep_comm.bench.outputs import add_output_arguments, check_outputs
from ultraep_comm.bench.plan_settings import PlanSize, check_load, parse_plan_sizes
from ultraep_comm.bench.sizes import parse_size
from ultraep_comm.errors import InvalidArgumentError
from ultraep_comm.model import MACHINES, Machine, find_machine

DEFAULT_SIZES = "64/256/2,64/128/2,64/128/1,40/160/4,72/288/2"
DEFAULT_IMBALANCES = "1.5,2,3,4,6,8"
DEFAULT_FAMILIES = "zipf0.6,zipf1.0,zipf1.4,lognormal,adversarial"
DEFAULT_EXPERT_BYTES = "36M"  # 37.75 MB: of Qwen3-235B, bf16


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Checked arguments of ``model``.

    Attributes:
        sizes: ranks, experts and slots of the plans.
        imbalances: of generated loads, without replicas.
        families: further loads, of `bench.families`.
        seeds: loads of each imbalance and family.
        tokens: of each rank.
        topk: experts of a token.
        expert_bytes: W.
        machine: whose times are predicted.
        json: where records go; None: nowhere.
        csv: where they go flat; None: nowhere.
    """

    sizes: tuple[PlanSize, ...]
    imbalances: tuple[float, ...]
    families: tuple[str, ...]
    seeds: int
    tokens: int
    topk: int
    expert_bytes: int
    machine: Machine
    json: Path | None = None
    csv: Path | None = None


def add_model_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command ``model`` and its options."""
    parser = commands.add_parser(
        "model",
        help="predict transfer times of a machine that is not at hand",
        description="Plan loads of many kinds, predict what push, pull, direct fan-out and a"
        " published relay take on a described machine, and print their times over the bound.",
    )
    add = parser.add_argument
    add(
        "--sizes",
        default=DEFAULT_SIZES,
        metavar="G/E/S,...",
        help=f"ranks, experts, slots of a rank (default {DEFAULT_SIZES})",
    )
    add(
        "--imbalances",
        default=DEFAULT_IMBALANCES,
        metavar="X,...",
        help=f"busiest rank over the mean (default {DEFAULT_IMBALANCES})",
    )
    add(
        "--families",
        default=DEFAULT_FAMILIES,
        metavar="NAME,...",
        help=f"of further loads (default {DEFAULT_FAMILIES})",
    )
    add("--seeds", type=int, default=3, help="loads of a kind (default 3)")
    add("--tokens", type=int, default=4096, help="tokens of each rank (default 4096)")
    add("--topk", type=int, default=8, help="experts of a token (default 8)")
    add(
        "--expert-bytes",
        default=DEFAULT_EXPERT_BYTES,
        metavar="SIZE",
        help=f"of one expert (default {DEFAULT_EXPERT_BYTES})",
    )
    add(
        "--machine",
        default="nvl72",
        choices=sorted(MACHINES),
        help="whose times are predicted (default nvl72)",
    )
    add_output_arguments(add)


def make_model_settings(options: argparse.Namespace) -> ModelSettings:
    """Check the arguments of ``model``.

    Raises:
        InvalidArgumentError: as its text says.
    """
    for name in ("seeds", "tokens", "topk"):
        value = getattr(options, name)
        if value < 1:
            raise InvalidArgumentError(f"--{name} is {value}; expected at least 1")
    check_outputs(options)
    machine = find_machine(options.machine)
    sizes = parse_plan_sizes(options.sizes, machine.domain_size)
    for size in sizes:
        check_load(size, options.tokens, options.topk)
    imbalances, families = _parse_imbalances(options.imbalances), _parse_families(options.families)
    if not imbalances and not families:
        raise InvalidArgumentError("--imbalances and --families are both empty; expected a load")
    return ModelSettings(
        sizes=sizes,
        imbalances=imbalances,
        families=families,
        seeds=options.seeds,
        tokens=options.tokens,
        topk=options.topk,
        expert_bytes=parse_size(options.expert_bytes),
        machine=machine,
        json=options.json,
        csv=options.csv,
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
                f"--imbalances {text!r}: {part!r} is no number above 1; expected for instance 1.5,2"
            )
        values.append(value)
    return tuple(dict.fromkeys(values))


def _parse_families(text: str) -> tuple[str, ...]:
    possible = [family for family in FAMILIES if family not in PUBLISHED]
    families = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    for family in families:
        if family not in possible:
            raise InvalidArgumentError(
                f"--families has {family!r}; expected any of {', '.join(possible)}"
            )
    return families
