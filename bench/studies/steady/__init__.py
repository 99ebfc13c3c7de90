"""``steady``: options and settings."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ultraep_comm.bench import options
from ultraep_comm.bench.command import Command
from ultraep_comm.bench.options import Settings, option
from ultraep_comm.bench.sizes import parse_counts
from ultraep_comm.errors import InvalidArgumentError

if TYPE_CHECKING:
    from typing_extensions import Self

    from ultraep_comm.bench.traces import Trace

FORECASTS = ("last", "mean")
_MIN_STEPS = 2
_MAX_BYTES = 1 << 34  # local weights and slots of all ranks


@dataclass(frozen=True, kw_only=True)
class SteadySettings(Settings):
    """Checked options of ``steady``: of a trace, or of loads that drift."""

    trace_file: Path | None = options.TRACE_FILE(help="recorded routing instead of drift")
    num_ranks: int = options.RANKS(8, minimum=2, shown=None)
    experts: int = options.EXPERTS(32, minimum=2, help="experts of loads that drift")
    layers: int = option(
        "--layers", parse=int, minimum=1, default=4, help="layers, the first of a trace"
    )
    steps: int = option(
        "--steps", parse=int, minimum=_MIN_STEPS, default=8, help="steps, the first of a trace"
    )
    slots: tuple[int, ...] = options.SLOTS(
        (1, 2, 4),
        parse=parse_counts,
        minimum=None,
        metavar="S,...",
        help="slots of a rank, one by one",
    )
    tokens: int = options.TOKENS(4096)
    topk: int = options.TOPK(8)
    rho: float = option(
        "--rho", parse=float, default=0.9, help="what logits keep from step to step, below 1"
    )
    target: float = options.TARGET(options.DEFAULT_TARGET)
    expert_bytes: int = options.EXPERT_BYTES(64 << 10)
    forecast: str = option("--forecast", choices=FORECASTS, default="last", help="of the prefetch")
    seed: int = options.SEED(1)
    json: Path | None = options.JSON()
    csv: Path | None = options.CSV()
    trace: Trace | None = None

    def checked(self) -> Self:
        """Return the settings with the trace's experts, layers and steps.

        See `Settings.checked`.
        """
        made = super().checked()
        if self.trace_file is not None:
            from ultraep_comm.bench.traces import open_trace

            trace = open_trace(self.trace_file)
            steps = trace.num_steps(num_ranks=self.num_ranks, tokens_per_rank=self.tokens)
            if steps < _MIN_STEPS:
                raise InvalidArgumentError(
                    f"--trace {self.trace_file} has {steps} steps of --ranks {self.num_ranks} times"
                    f" --tokens {self.tokens}; expected at least {_MIN_STEPS}"
                )
            made = replace(
                made,
                trace=trace,
                experts=trace.num_experts,
                layers=min(self.layers, trace.num_layers),
                steps=min(self.steps, steps),
            )
        experts, layers = made.experts, made.layers
        if experts < self.num_ranks:
            raise InvalidArgumentError(
                f"there are {experts} experts for --ranks {self.num_ranks}; expected one for each"
            )
        if self.topk > experts:
            raise InvalidArgumentError(f"--topk is {self.topk}; expected at most {experts}")
        options.check_assignments(self.num_ranks, self.tokens, self.topk)
        if not 0 <= self.rho < 1:
            raise InvalidArgumentError(f"--rho is {self.rho}; expected 0 to below 1")
        taken = layers * (experts + self.num_ranks * sum(self.slots)) * self.expert_bytes
        if taken > _MAX_BYTES:
            raise InvalidArgumentError(
                f"--expert-bytes {self.expert_bytes} of {experts} experts in {layers} layers, and"
                f" their slots, take {taken} bytes; expected at most {_MAX_BYTES}"
            )
        return made

    @property
    def alone(self) -> bool:
        """Return True: all ranks are in one process."""
        return True


COMMAND = Command(
    name="steady",
    help="step after step: what residents, banks and prefetch save",
    description="Play loads through layers, step after step: from empty slots, with a bank for each"
    " layer, and with one bank that is prefetched. Every byte of every slot is checked after every"
    " call.",
    settings=SteadySettings,
    module="studies.steady.run",
)
