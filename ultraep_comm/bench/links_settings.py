"""Arguments of ``links``, and the settings that they make."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ultraep_comm.bench.arguments import (
    DEFAULT_RANKS,
    add_round_arguments,
    check_memory,
    check_minima,
    choose_engine,
    count_ranks,
    parse_tile_bytes,
)
from ultraep_comm.bench.gate import Gate, add_gate_arguments, make_gate
from ultraep_comm.bench.launch import launched_ranks
from ultraep_comm.bench.outputs import add_output_arguments, check_outputs
from ultraep_comm.bench.sizes import parse_size
from ultraep_comm.errors import InvalidArgumentError

DEFAULT_LINK_BYTES = 16 << 20
SEGMENT = "w"
STATISTICS = ("median", "min")
_MINIMA = {"ranks": 2, "iters": 1, "warmup": 0, "seed": 0, "num_sms": 1, "slowest": 0}


@dataclass(frozen=True, kw_only=True)
class LinksSettings:
    """Checked arguments of ``links``. Equal on every rank.

    Attributes:
        num_ranks: G.
        link_bytes: that a link carries in an iteration.
        one_at_a_time: no two links at the same time.
        statistic: bandwidth of the median iteration, or "min": of the slowest one.
        slowest: how many of the slowest links are named.
        iters: measured iterations of each link.
        warmup: iterations before them.
        check: compare every iteration instead of the last one.
        json: where records go; None: nowhere.
        csv: where they go flat; None: nowhere.
        gate: what every link has to reach.
        seed: of the payload.
        engine: "host" or "cuda".
        fabric: "shm", "nvshmem", "torch" or "loopback".
        num_sms: workers of a rank; None: the engine's default.
        tile_bytes: None: the engine's default.
    """

    num_ranks: int
    link_bytes: int = DEFAULT_LINK_BYTES
    one_at_a_time: bool = False
    statistic: str = "median"
    slowest: int = 5
    iters: int = 20
    warmup: int = 3
    check: bool = False
    json: Path | None = None
    csv: Path | None = None
    gate: Gate = field(default_factory=Gate)
    seed: int = 1
    engine: str = "host"
    fabric: str = "shm"
    num_sms: int | None = None
    tile_bytes: int | None = None

    @property
    def expert(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return ``new_group``'s argument: rank r's expert is what it sends."""
        return {SEGMENT: ((self.link_bytes,), torch.uint8)}


def add_links_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``links`` and its arguments."""
    parser = commands.add_parser(
        "links",
        help="bandwidth from every rank to every other",
        description="Copy one expert from every rank to every other, check it, and print a matrix"
        " of GB/s and the slowest links. Links that share no rank run at the same time. Sizes take"
        " the suffixes K, M and G. The exit status is 1 if any byte is wrong, 3 if a limit is not"
        " met, 2 after other errors.",
    )
    add = parser.add_argument_group("what is moved").add_argument
    add("--ranks", type=int, help=f"ranks to start (default {DEFAULT_RANKS}; torchrun's under it)")
    add(
        *("-b", "--bytes", "--expert-bytes", "--minbytes"),
        dest="link_bytes",
        metavar="SIZE",
        default=str(DEFAULT_LINK_BYTES),
        help="that a link carries in an iteration, e.g. 64M (default 16M)",
    )
    add("--one-at-a-time", action="store_true", help="no two links at the same time")
    add(
        "--statistic",
        choices=STATISTICS,
        default="median",
        help="a link's bandwidth: that of the median iteration (default), or of the slowest one",
    )
    add("--slowest", type=int, default=5, metavar="N", help="links to name (default 5)")
    add("--engine", choices=["auto", "host", "cuda"], default="host", help='(default "host")')
    add(
        "--fabric",
        choices=["auto", "shm", "nvshmem", "torch", "loopback"],
        default="auto",
        help="of the CUDA engine, as for replicate; loopback, on one GPU, has no links and serves"
        " to try the command",
    )
    add("--num-sms", "--sms", type=int, help="workers of a rank (default: the engine's)")
    add("--tile-bytes", metavar="SIZE", help="unit of the transfer (default: the engine's)")
    add = parser.add_argument_group("iterations").add_argument
    add_round_arguments(add)
    add("--seed", type=int, default=1, help="of the payload (default 1)")
    add = parser.add_argument_group("results and limits").add_argument
    add_output_arguments(add)
    add_gate_arguments(add, bound=False)


def make_links_settings(options: argparse.Namespace) -> LinksSettings:
    """Check the arguments of ``links``.

    Raises:
        InvalidArgumentError: as its text says.
    """
    check_minima(options, _MINIMA)
    check_outputs(options)
    gate = make_gate(options)
    engine, fabric = choose_engine(options.engine, options.fabric, launched_ranks())
    num_ranks = count_ranks(options)
    if num_ranks < 2:
        raise InvalidArgumentError(f"there is {num_ranks} rank; expected two for a link")
    link_bytes = parse_size(options.link_bytes, "--bytes")
    check_memory(2 * num_ranks * link_bytes, engine)
    return LinksSettings(
        num_ranks=num_ranks,
        link_bytes=link_bytes,
        # Ranks in one process share its clock, so theirs cannot be told apart.
        one_at_a_time=options.one_at_a_time or fabric == "loopback",
        statistic=options.statistic,
        slowest=options.slowest,
        iters=options.iters,
        warmup=options.warmup,
        check=bool(options.check),
        json=options.json,
        csv=options.csv,
        gate=gate,
        seed=options.seed,
        engine=engine,
        fabric=fabric,
        num_sms=options.num_sms,
        tile_bytes=parse_tile_bytes(options),
    )
