"""Arguments of ``replicate``, and of what is like it, and the settings that they make."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ultraep_comm.bench.arguments import (
    DEFAULT_EXPERT_BYTES,
    DEFAULT_EXPERTS,
    DEFAULT_IMBALANCE,
    DEFAULT_RANKS,
    add_round_arguments,
    check_memory,
    check_minima,
    choose_engine,
    count_ranks,
    default_imbalance,
    parse_tile_bytes,
)
from ultraep_comm.bench.figures import DEFAULT_TIMES, TIMES, parse_times
from ultraep_comm.bench.gate import add_gate_arguments, check_rate_known, make_gate
from ultraep_comm.bench.launch import launched_ranks
from ultraep_comm.bench.outputs import add_output_arguments, check_outputs
from ultraep_comm.bench.settings import ALL_MODES, ReplicateSettings
from ultraep_comm.bench.sizes import parse_counts
from ultraep_comm.bench.skew import generate_load
from ultraep_comm.bench.sweep import add_sweep_arguments, sweep_segments
from ultraep_comm.bench.traces import load_trace
from ultraep_comm.errors import InvalidArgumentError

GENERATED_TOPK = 8
_MINIMA = {"ranks": 1, "experts": 1, "slots": 0, "tokens": 1, "iters": 1, "warmup": 0, "seed": 0}


def add_replicate_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``replicate`` and its arguments."""
    parser = commands.add_parser(
        "replicate",
        help="copy the experts of a plan into slots",
        description="Time replicate_experts against batch_isend_irecv and memcpy, on one plan, with"
        " interleaved iterations. Sizes take the suffixes K, M and G. The exit status is 1 if any"
        " byte is wrong, 3 if a limit is not met, 2 after other errors.",
    )
    add_transfer_arguments(parser, modes=ALL_MODES, expert_bytes="bytes of one expert")


def add_transfer_arguments(
    parser: argparse.ArgumentParser, *, modes: Sequence[str], expert_bytes: str
) -> None:
    """Add the arguments of a command that times one collective on one plan."""
    add = parser.add_argument_group("what is moved").add_argument
    add("--ranks", type=int, help=f"ranks to start (default {DEFAULT_RANKS}; torchrun's under it)")
    add("--experts", type=int, help=f"(default {DEFAULT_EXPERTS}, or the trace's)")
    add("--slots", type=int, default=2, help="replicas that a rank can hold (default 2)")
    add_sweep_arguments(add, expert_bytes=expert_bytes, default="16M")
    add(
        "--segments",
        default="2",
        metavar="N|NAME=SIZE,...",
        help="tensors of an expert: a number (2: w13 with two thirds, and w2; more: besides, a"
        " scale of a 64th each), or names and sizes (default 2)",
    )
    add("--imbalance", type=float, help=f"of the generated load (default {DEFAULT_IMBALANCE:g})")
    add("--trace", type=Path, metavar="FILE.npz", help="recorded routing instead of generated load")
    add("--step", type=int, default=0, help="of the trace (default 0)")
    add("--layer", type=int, default=0, help="of the trace (default 0)")
    add("--tokens", type=int, default=4096, help="tokens of each rank (default 4096)")
    add = parser.add_argument_group("what moves it").add_argument
    add(
        "--engine",
        choices=["auto", "host", "cuda"],
        default="host",
        help='auto: cuda where there is a GPU and a kernel for it, else host (default "host")',
    )
    add(
        "--fabric",
        choices=["auto", "shm", "nvshmem", "torch", "loopback"],
        default="auto",
        help="of the CUDA engine: loopback, all ranks on one GPU in this process, or nvshmem or"
        " torch (its symmetric memory), a process and a GPU for each (default: nvshmem under"
        " torchrun or srun, else loopback)",
    )
    add(
        *("--num-sms", "--sms"),
        metavar="N,...",
        help="workers of a rank: threads, or blocks on the GPU; a list, such as 4,8,16, is"
        " measured one by one (default: the engine's)",
    )
    add("--mode", choices=[*modes, "all"], default="all", help="(default all)")
    add("--tile-bytes", metavar="SIZE", help="unit of the transfer (default: the engine's)")
    add = parser.add_argument_group("iterations").add_argument
    add_round_arguments(add)
    add("--seed", type=int, default=1, help="of load and payload (default 1)")
    add_gate_arguments(parser.add_argument_group("limits").add_argument, bound=True)
    add = parser.add_argument_group("results").add_argument
    add_output_arguments(add)
    add(
        "--times",
        default=",".join(DEFAULT_TIMES),
        metavar="NAME,...",
        help=f"time columns of the table, of {', '.join(TIMES)} (default"
        f" {','.join(DEFAULT_TIMES)}); rank-... are of the ranks' own means",
    )


def make_settings(options: argparse.Namespace) -> ReplicateSettings:
    """Check the arguments of ``replicate`` and make or read the load.

    Raises:
        InvalidArgumentError: as its text says.
        OSError: the trace cannot be read.
    """
    settings = ReplicateSettings(**check_transfer(options, ALL_MODES))
    check_memory(settings.needed_bytes, settings.engine)
    return settings


def check_transfer(options: argparse.Namespace, modes: tuple[str, ...]) -> dict[str, Any]:
    """Check the arguments of :func:`add_transfer_arguments`; return what they set.

    Raises:
        InvalidArgumentError: as its text says.
        OSError: the trace cannot be read.
    """
    check_minima(options, _MINIMA)
    check_outputs(options)
    sweep = sweep_segments(options, DEFAULT_EXPERT_BYTES)
    gate = make_gate(options)
    engine, fabric = choose_engine(options.engine, options.fabric, launched_ranks())
    num_sms = () if options.num_sms is None else parse_counts(options.num_sms, "--num-sms")
    check_rate_known(gate, fabric, options.link_gbps)
    load, source = _make_load(options, count_ranks(options))
    return {
        "load": load,
        "load_source": source,
        "slots": options.slots,
        "segments": sweep[0],
        "sweep": sweep[1:],
        "modes": modes if options.mode == "all" else (options.mode,),
        "tile_bytes": parse_tile_bytes(options),
        "iters": options.iters,
        "warmup": options.warmup,
        "check": bool(options.check),
        "json": options.json,
        "csv": options.csv,
        "gate": gate,
        "link_gbps": options.link_gbps,
        "times": parse_times(options.times),
        "seed": options.seed,
        "engine": engine,
        "fabric": fabric,
        "num_sms": num_sms,
    }


def _make_load(options: argparse.Namespace, num_ranks: int) -> tuple[NDArray[np.int32], str]:
    if options.trace is None:
        imbalance = options.imbalance
        if imbalance is None:
            imbalance = default_imbalance(num_ranks)
        load = generate_load(
            num_ranks=num_ranks,
            num_experts=max(DEFAULT_EXPERTS, num_ranks)
            if options.experts is None
            else options.experts,
            imbalance=imbalance,
            num_tokens=num_ranks * options.tokens * GENERATED_TOPK,
            seed=options.seed,
        )
        return load, f"generated, seed {options.seed}"
    if options.imbalance is not None:
        raise InvalidArgumentError("--imbalance is for generated load; the trace has its own")
    load = load_trace(
        options.trace,
        num_ranks=num_ranks,
        step=options.step,
        layer=options.layer,
        tokens_per_rank=options.tokens,
    )
    if options.experts not in (None, load.shape[1]):
        raise InvalidArgumentError(
            f"--experts is {options.experts}, but {options.trace} has {load.shape[1]}; leave it out"
        )
    return load, f"{options.trace.name}, step {options.step}, layer {options.layer}"
