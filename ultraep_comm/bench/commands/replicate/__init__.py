"""``replicate``: arguments and settings, partly shared with ``reduce``."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from ultraep_comm.bench.command import Command
from ultraep_comm.bench.options import (
    ALL_MODES,
    DEFAULT_EXPERT_BYTES,
    DEFAULT_EXPERTS,
    DEFAULT_IMBALANCE,
    DEFAULT_RANKS,
    DEFAULT_TIMES,
    TIMES,
    Settings,
    add_bandwidth_limit,
    add_bound_limit,
    add_engine,
    add_lab,
    add_outputs,
    add_rounds,
    add_sweep,
    add_trace,
    check_lab,
    check_memory,
    check_ranks,
    check_rate_known,
    check_shared,
    default_imbalance,
    parse_times,
    read_trace,
    sweep_segments,
)
from ultraep_comm.bench.sizes import parse_counts

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

GENERATED_TOPK = 8
_MINIMA = {"ranks": 1, "experts": 1, "slots": 1, "tokens": 1, "iters": 1, "warmup": 0, "seed": 0}


@dataclass(frozen=True, kw_only=True)
class ReplicateSettings(Settings):
    """Checked arguments of ``replicate``.

    Attributes:
        load: int32 ``[G, E]``.
        load_source: description of the load, for the header.
        slots: S.
        segments: bytes of one expert, by segment.
        sweep: segments of further sizes, ascending; empty if there is one size.
        modes: to measure.
        times: time columns of the table, of `options.TIMES`.
        num_sms: workers of a rank, one measurement for each; empty: the engine's default.
    """

    op: ClassVar[str] = "replicate"

    load: NDArray[np.int32]
    load_source: str
    slots: int
    segments: dict[str, int]
    sweep: tuple[dict[str, int], ...] = ()
    modes: tuple[str, ...] = ALL_MODES
    times: tuple[str, ...] = DEFAULT_TIMES
    num_sms: tuple[int, ...] = ()

    @property
    def num_experts(self) -> int:
        """Return E."""
        return int(self.load.shape[1])

    @property
    def expert_bytes(self) -> int:
        """Return W."""
        return sum(self.segments.values())

    @property
    def sizes(self) -> tuple[dict[str, int], ...]:
        """Return the segments of every size, ascending."""
        return (self.segments, *self.sweep)

    @property
    def needed_bytes(self) -> int:
        """Return the bytes of experts and slots on all ranks, at the largest size."""
        instances = self.num_experts + self.num_ranks * self.slots
        return instances * sum(self.sizes[-1].values())

    @property
    def more(self) -> dict[str, Any]:
        """Return further settings for header and JSON."""
        return {}


Sized = TypeVar("Sized", bound=ReplicateSettings)


def each_size(settings: Sized) -> Iterator[Sized]:
    """Yield settings for each size of a sweep alone."""
    for segments in settings.sizes:
        yield replace(settings, segments=segments, sweep=())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``replicate``."""
    add_transfer_arguments(parser, modes=ALL_MODES, expert_bytes="bytes of one expert")


def add_transfer_arguments(
    parser: argparse.ArgumentParser, *, modes: Sequence[str], expert_bytes: str
) -> None:
    """Add the arguments of a command that times one collective on one plan."""
    add = parser.add_argument_group("transfer").add_argument
    add("--ranks", type=int, help=f"ranks (default {DEFAULT_RANKS}, or the launcher's)")
    add("--experts", type=int, help=f"experts (default {DEFAULT_EXPERTS}, or the trace's)")
    add("--slots", type=int, default=2, help="slots of a rank (default 2)")
    add_sweep(add, expert_bytes=expert_bytes, default="16M")
    add(
        "--segments",
        default="2",
        metavar="N|NAME=SIZE,...",
        help="tensors of an expert: a number (2: w13 with two thirds, and w2; more: also scales"
        " of a 64th each), or names and sizes (default 2)",
    )
    add("--imbalance", type=float, help=f"of the generated load (default {DEFAULT_IMBALANCE:g})")
    add_trace(add, "recorded routing instead of generated load")
    add("--tokens", type=int, default=4096, help="tokens of each rank (default 4096)")
    add = parser.add_argument_group("engine").add_argument
    add_engine(add, "c10d")
    add(
        *("--num-sms", "--sms"),
        metavar="N,...",
        help="workers of a rank: threads, or blocks on the GPU; a list, such as 4,8,16, is"
        " measured one after another (default: the engine's)",
    )
    add("--mode", choices=[*modes, "all"], default="all", help="mode to measure (default all)")
    add("--tile-bytes", metavar="SIZE", help="unit of the transfer (default: the engine's)")
    add_lab(parser.add_argument_group("lab").add_argument)
    add_rounds(parser.add_argument_group("iterations").add_argument, "load and payload")
    add = parser.add_argument_group("limits").add_argument
    add_bandwidth_limit(add, "critbw")
    add_bound_limit(add, "a time is more than X times its bound")
    add(
        "--link-gbps",
        type=float,
        metavar="GBPS",
        help="rate of a rank's link, one way, for the bound T* (default: the lab's, if each of its"
        " machines has one rank; on several GPUs what the calibration or else the driver says; the"
        " measured copy rate, if all ranks share one memory)",
    )
    add = parser.add_argument_group("results").add_argument
    add_outputs(add)
    add(
        "--times",
        default=",".join(DEFAULT_TIMES),
        metavar="NAME,...",
        help=f"time columns of the table, of {', '.join(TIMES)} (default"
        f" {','.join(DEFAULT_TIMES)}); rank-...: statistics of the ranks' mean times",
    )


def make_settings(options: argparse.Namespace) -> ReplicateSettings:
    """Check the arguments of ``replicate`` and make or read the load.

    Raises:
        InvalidArgumentError: an argument is invalid.
        OSError: the trace cannot be read.
    """
    # Over a process group nobody reads a peer's memory: there, pull is push.
    modes = tuple(m for m in ALL_MODES if m != "pull" or options.engine != "c10d")
    settings = ReplicateSettings(**check_transfer(options, modes))
    check_memory(settings.needed_bytes, settings.engine)
    return settings


def check_transfer(options: argparse.Namespace, modes: tuple[str, ...]) -> dict[str, Any]:
    """Check the arguments of :func:`add_transfer_arguments`; return fields of settings.

    Raises:
        InvalidArgumentError: an argument is invalid.
        OSError: the trace cannot be read.
    """
    found = check_shared(options, _MINIMA)
    sweep = sweep_segments(options, DEFAULT_EXPERT_BYTES)
    found |= check_ranks(options)
    found |= check_lab(options, found)
    check_rate_known(found["gate"], found["fabric"], found["link_gbps"])
    load, source = _make_load(options, found["num_ranks"])
    return {
        **found,
        "load": load,
        "load_source": source,
        "slots": options.slots,
        "segments": sweep[0],
        "sweep": sweep[1:],
        "modes": modes if options.mode == "all" else (options.mode,),
        "times": parse_times(options.times),
        "num_sms": () if options.num_sms is None else parse_counts(options.num_sms, "--num-sms"),
    }


def _make_load(options: argparse.Namespace, num_ranks: int) -> tuple[NDArray[np.int32], str]:
    from ultraep_comm.bench.loads import generate_load

    if options.trace is None:
        imbalance, experts = options.imbalance, options.experts
        load = generate_load(
            num_ranks=num_ranks,
            num_experts=max(DEFAULT_EXPERTS, num_ranks) if experts is None else experts,
            imbalance=default_imbalance(num_ranks) if imbalance is None else imbalance,
            num_tokens=num_ranks * options.tokens * GENERATED_TOPK,
            seed=options.seed,
        )
        return load, f"generated, seed {options.seed}"
    load = read_trace(options, num_ranks)[1]
    return load, f"{options.trace.name}, step {options.step}, layer {options.layer}"


COMMAND = Command(
    name="replicate",
    help="copy the experts of a plan into slots",
    description="Time replicate_experts against batch_isend_irecv and memcpy (the engine c10d:"
    " batch_isend_irecv and broadcast), on one plan, with interleaved iterations. Sizes take the"
    " suffixes K, M and G. The exit status is 1 if any byte is wrong, 3 if a limit is not met, 2"
    " after other errors.",
    add_arguments=add_arguments,
    make_settings=make_settings,
    module="ultraep_comm.bench.commands.replicate.run",
)
