"""``steady``: arguments and settings."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ultraep_comm.bench.command import Command
from ultraep_comm.bench.options import (
    DEFAULT_TARGET,
    Settings,
    add_outputs,
    check_shared,
    take,
)
from ultraep_comm.bench.sizes import parse_counts, parse_size
from ultraep_comm.errors import InvalidArgumentError

if TYPE_CHECKING:
    from ultraep_comm.bench.traces import Trace

FORECASTS = ("last", "mean")
_MINIMA = {"ranks": 2, "experts": 2, "layers": 1, "steps": 2, "tokens": 1, "topk": 1, "seed": 0}
_MAX_BYTES = 1 << 34  # main weights and slots of all ranks


@dataclass(frozen=True, kw_only=True)
class SteadySettings(Settings):
    """Checked arguments of ``steady``.

    Attributes:
        trace: recorded routing; None: loads that drift.
        experts: E.
        layers: each with a load of its own.
        steps: of which all but the first count.
        slots: each a table's row: S.
        tokens: of each rank.
        topk: experts of a token, of loads that drift.
        rho: share of a step's logits that the next one keeps.
        target: of the plans.
        expert_bytes: what is moved for an expert.
        forecast: of `LoadForecast`.
    """

    trace: Trace | None
    experts: int
    layers: int
    steps: int
    slots: tuple[int, ...]
    tokens: int
    topk: int
    rho: float
    target: float
    expert_bytes: int
    forecast: str

    @property
    def alone(self) -> bool:
        """Return True: all ranks are in one process."""
        return True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``steady``."""
    add = parser.add_argument
    add("--trace", type=Path, metavar="FILE", help="recorded routing (.npz) instead of drift")
    add("--ranks", type=int, default=8, help="ranks (default 8)")
    add("--experts", type=int, default=32, help="experts of loads that drift (default 32)")
    add("--layers", type=int, default=4, help="layers, the first of a trace (default 4)")
    add("--steps", type=int, default=8, help="steps, the first of a trace (default 8)")
    add("--slots", default="1,2,4", metavar="S,...", help="slots of a rank (default 1,2,4)")
    add("--tokens", type=int, default=4096, help="tokens of each rank (default 4096)")
    add("--topk", type=int, default=8, help="experts of a token, of drift (default 8)")
    add("--rho", type=float, default=0.9, help="what logits keep from step to step (default 0.9)")
    add("--target", type=float, default=DEFAULT_TARGET, help="of the plans (default 1.01)")
    add("--expert-bytes", default="64K", metavar="SIZE", help="of an expert (default 64K)")
    add("--forecast", choices=FORECASTS, default="last", help="of the prefetch (default last)")
    add("--seed", type=int, default=1, help="seed of loads that drift (default 1)")
    add_outputs(add)


def make_settings(options: argparse.Namespace) -> SteadySettings:
    """Check the arguments of ``steady``.

    Raises:
        InvalidArgumentError: an argument is invalid.
    """
    found = check_shared(options, _MINIMA)
    trace, experts, layers, steps = None, options.experts, options.layers, options.steps
    if options.trace is not None:
        from ultraep_comm.bench.traces import open_trace

        trace = open_trace(options.trace)
        experts, layers = trace.num_experts, min(layers, trace.num_layers)
        recorded = trace.num_steps(num_ranks=options.ranks, tokens_per_rank=options.tokens)
        steps = min(steps, recorded)
        if steps < _MINIMA["steps"]:
            raise InvalidArgumentError(
                f"--trace {options.trace} has {recorded} steps of --ranks {options.ranks} times"
                f" --tokens {options.tokens}; expected at least {_MINIMA['steps']}"
            )
    if experts < options.ranks:
        raise InvalidArgumentError(
            f"there are {experts} experts for --ranks {options.ranks}; expected one for each"
        )
    if options.topk > experts or options.ranks * options.tokens * options.topk >= 2**31:
        raise InvalidArgumentError(
            f"--topk is {options.topk}; expected at most {experts}, the experts, and loads below"
            " 2**31"
        )
    if not 0 <= options.rho < 1:
        raise InvalidArgumentError(f"--rho is {options.rho}; expected 0 to below 1")
    if not 1 <= options.target <= 1000:
        raise InvalidArgumentError(f"--target is {options.target}; expected 1 to 1000")
    slots = parse_counts(options.slots, "--slots")
    expert_bytes = parse_size(options.expert_bytes, "--expert-bytes")
    taken = layers * (experts + options.ranks * sum(slots)) * expert_bytes
    if expert_bytes < 1 or taken > _MAX_BYTES:
        raise InvalidArgumentError(
            f"--expert-bytes {options.expert_bytes} of {experts} experts in {layers} layers, and"
            f" their slots, take {taken} bytes; expected 1 to {_MAX_BYTES}"
        )
    return SteadySettings(
        **found,
        num_ranks=options.ranks,
        trace=trace,
        experts=experts,
        layers=layers,
        steps=steps,
        slots=tuple(slots),
        expert_bytes=expert_bytes,
        **take(options, "tokens", "topk", "rho", "target", "forecast"),
    )


COMMAND = Command(
    name="steady",
    help="step after step: what residents, banks and prefetch save",
    description="Play loads through layers, step after step: from empty slots, with a bank for each"
    " layer, and with one bank that is prefetched. Every byte of every slot is checked after every"
    " call.",
    add_arguments=add_arguments,
    make_settings=make_settings,
    module="studies.steady.run",
)
