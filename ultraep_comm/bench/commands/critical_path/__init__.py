"""``critical-path``: arguments and settings."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ultraep_comm.bench.command import Command
from ultraep_comm.bench.options import (
    ALL_MODES,
    DEFAULT_EXPERT_BYTES,
    DEFAULT_EXPERTS,
    DEFAULT_RANKS,
    Settings,
    add_bound_limit,
    add_outputs,
    add_rounds,
    add_trace,
    check_ranks,
    check_rate_known,
    check_shared,
    default_imbalance,
    parse_expert_bytes,
    read_trace,
    take,
)
from ultraep_comm.bench.sizes import parse_segments
from ultraep_comm.errors import InvalidArgumentError

if TYPE_CHECKING:
    from ultraep_comm.bench.traces import Trace

_MINIMA = {
    **{"ranks": 1, "experts": 1, "slots": 1, "tokens": 1, "topk": 1, "iters": 1, "warmup": 0},
    **{"seed": 0, "num_sms": 1},
}
MAX_LOAD = 2**31  # of an expert, which may get all tokens


@dataclass(frozen=True, kw_only=True)
class PathSettings(Settings):
    """Checked arguments of ``critical-path``.

    Attributes:
        num_experts: E.
        slots: S.
        tokens: of each rank.
        topk: ids of a token.
        segments: bytes of one expert, by segment.
        mode: of the transfer.
        imbalance: of the drawn ids; unused with a trace.
        trace: recorded routing, or None.
        trace_name: file name of the trace.
        step: of the trace, in the first iteration; each iteration takes the next step.
        layer: of the trace.
        num_sms: blocks of a rank; None: the engine's default.
    """

    num_experts: int
    slots: int
    tokens: int
    topk: int
    segments: dict[str, int]
    mode: str
    imbalance: float
    trace: Trace | None = None
    trace_name: str = ""
    step: int = 0
    layer: int = 0
    num_sms: int | None = None

    @property
    def expert_bytes(self) -> int:
        """Return W."""
        return sum(self.segments.values())

    @property
    def source(self) -> str:
        """Return the source of the ids, for header and JSON."""
        if self.trace is None:
            return f"drawn for an imbalance of {self.imbalance:g}, seed {self.seed}"
        return f"drawn from {self.trace_name}, layer {self.layer}, from step {self.step} on"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``critical-path``."""
    add = parser.add_argument_group("the path").add_argument
    add("--ranks", type=int, help=f"ranks (default {DEFAULT_RANKS}, or the launcher's)")
    add("--experts", type=int, help=f"experts (default {DEFAULT_EXPERTS}, or the trace's)")
    add("--slots", type=int, default=2, help="slots of a rank (default 2)")
    add("--tokens", type=int, default=8192, help="tokens of each rank (default 8192)")
    add("--topk", type=int, default=8, help="ids of a token (default 8)")
    add("-b", "--expert-bytes", metavar="SIZE", help="bytes of one expert, e.g. 64K (default 16M)")
    add("--segments", default="2", metavar="N|NAME=SIZE,...", help="as for replicate (default 2)")
    add("--imbalance", type=float, help="imbalance of the drawn ids (default 3)")
    add_trace(add, "draw ids from recorded routing; each iteration takes the next step")
    add(
        "--fabric",
        choices=["auto", "nvshmem", "torch", "loopback"],
        default="auto",
        help="loopback, all ranks on one GPU in this process, or nvshmem or torch, a process and a"
        " GPU for each (default: nvshmem under torchrun or srun, else loopback)",
    )
    add("--mode", choices=ALL_MODES, default="auto", help="mode of the transfer (default auto)")
    add("--num-sms", type=int, metavar="N", help="blocks of a rank (default: the engine's)")
    add("--tile-bytes", metavar="SIZE", help="unit of the transfer (default: the engine's)")
    add(
        "--link-gbps",
        type=float,
        metavar="GB/S",
        help="rate of a GPU's link, one way, for the bound on several GPUs (default: what the"
        " calibration or else the driver says)",
    )
    add_rounds(parser.add_argument_group("iterations").add_argument, "ids and payload")
    add = parser.add_argument_group("results and limits").add_argument
    add_outputs(add)
    add_bound_limit(add, "a whole path takes more than X times the transfer's bound")


def make_settings(options: argparse.Namespace) -> PathSettings:
    """Check the arguments of ``critical-path``, and read the trace.

    Raises:
        InvalidArgumentError: an argument is invalid.
        TraceError: the file is no trace, or has no such step or layer.
        OSError: the trace cannot be read.
    """
    found = check_shared(options, _MINIMA) | check_ranks(options, engine="cuda")
    check_rate_known(found["gate"], found["fabric"], options.link_gbps)
    num_ranks = found["num_ranks"]
    total = num_ranks * options.tokens * options.topk
    if total >= MAX_LOAD:
        raise InvalidArgumentError(
            f"{num_ranks} ranks with --tokens {options.tokens} to --topk {options.topk} experts"
            f" make a load of {total}; expected less than 2**31"
        )
    trace = None if options.trace is None else read_trace(options, num_ranks)[0]
    num_experts = options.experts or max(DEFAULT_EXPERTS, num_ranks)
    return PathSettings(
        **found,
        num_experts=num_experts if trace is None else trace.num_experts,
        **take(options, "slots", "tokens", "topk", "mode", "step", "layer", "num_sms"),
        segments=parse_segments(
            options.segments, parse_expert_bytes(options), DEFAULT_EXPERT_BYTES
        ),
        imbalance=_imbalance(options, num_ranks, num_experts) if trace is None else 1.0,
        trace=trace,
        trace_name="" if trace is None else options.trace.name,
    )


def _imbalance(options: argparse.Namespace, num_ranks: int, num_experts: int) -> float:
    from ultraep_comm.bench.loads import generate_load

    given = options.imbalance
    imbalance = default_imbalance(num_ranks) if given is None else float(given)
    # Raises InvalidArgumentError for an impossible imbalance.
    generate_load(
        num_ranks=num_ranks,
        num_experts=num_experts,
        imbalance=imbalance,
        num_tokens=1,
        seed=options.seed,
    )
    return imbalance


COMMAND = Command(
    name="critical-path",
    help="time the path from topk_ids to filled slots, on GPUs",
    description="Time gather_load, plan_replicas, replicate_experts and reroute on the device:"
    " one by one, in sequence, as a CUDA graph, and with the plan on the host. Every"
    " iteration has fresh ids and bytes. The exit status is 1 if any plan, id or byte is wrong,"
    " 3 if a limit is not met, 2 after other errors.",
    add_arguments=add_arguments,
    make_settings=make_settings,
    module="ultraep_comm.bench.commands.critical_path.run",
)
