"""Arguments that several commands share."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping

from ultraep_comm.bench import gpu
from ultraep_comm.bench.launch import launched_ranks
from ultraep_comm.bench.sizes import format_size, parse_size
from ultraep_comm.errors import InvalidArgumentError
from ultraep_comm.fabrics.shm import available_bytes

DEFAULT_RANKS = 4
MAX_RANKS = 1024
DEFAULT_EXPERTS = 32
DEFAULT_EXPERT_BYTES = 16 << 20
DEFAULT_IMBALANCE = 3.0


def choose_engine(engine: str, fabric: str, launched: int | None) -> tuple[str, str]:
    """Return engine and fabric of a run, neither of them "auto".

    Raises:
        InvalidArgumentError: they do not go together, or not with a launcher.
    """
    if engine == "auto":
        if fabric == "auto":
            engine = "cuda" if gpu.is_usable() else "host"
        else:
            engine = "host" if fabric == "shm" else "cuda"
    fabrics = ("shm",) if engine == "host" else ("loopback", "torch", "nvshmem")
    if fabric == "auto":
        fabric = fabrics[0] if launched is None else fabrics[-1]
    if fabric not in fabrics:
        raise InvalidArgumentError(
            f"--engine {engine} does not run over --fabric {fabric}; expected {', '.join(fabrics)}"
        )
    if fabric == "loopback" and launched is not None:
        raise InvalidArgumentError(
            f"--fabric loopback is for one process, but {launched} ranks were launched; start it"
            " without the launcher, or use --fabric nvshmem or torch"
        )
    return engine, fabric


def check_minima(options: argparse.Namespace, minima: Mapping[str, int]) -> None:
    """Raise InvalidArgumentError if an option that was given is below its least value."""
    for name, least in minima.items():
        value = getattr(options, name)
        if value is not None and value < least:
            flag = name.replace("_", "-")
            raise InvalidArgumentError(f"--{flag} is {value}; expected at least {least}")


def add_round_arguments(add: Callable[..., argparse.Action]) -> None:
    """Add how often is measured, and what is checked, as nccl-tests writes it."""
    add("-n", "--iters", type=int, default=20, help="measured iterations (default 20)")
    add("-w", "--warmup", type=int, default=3, help="iterations before them (default 3)")
    add(
        *("-c", "--check"),
        type=int,
        choices=[0, 1],
        nargs="?",
        const=1,
        default=0,
        help="1, or nothing behind it: check every iteration; 0, the default: the last one",
    )


def count_ranks(options: argparse.Namespace) -> int:
    """Return G: the launcher's, else ``--ranks``.

    Raises:
        InvalidArgumentError: they are not the same, or far too many.
    """
    launched = launched_ranks()
    if options.ranks is not None and options.ranks > MAX_RANKS:
        raise InvalidArgumentError(f"--ranks is {options.ranks}; expected at most {MAX_RANKS}")
    if launched is None:
        return DEFAULT_RANKS if options.ranks is None else int(options.ranks)
    if options.ranks not in (None, launched):
        raise InvalidArgumentError(
            f"--ranks is {options.ranks}, but {launched} ranks were launched; leave it out"
        )
    return launched


def default_imbalance(num_ranks: int) -> float:
    """Return the imbalance of a generated load: 3, or three quarters of fewer ranks."""
    return max(1.0, min(DEFAULT_IMBALANCE, 0.75 * num_ranks))


def parse_expert_bytes(options: argparse.Namespace) -> int | None:
    """Return the bytes of ``--expert-bytes``; None: it was not given."""
    given = options.expert_bytes
    return None if given is None else parse_size(given, "--expert-bytes")


def parse_tile_bytes(options: argparse.Namespace) -> int | None:
    """Return the bytes of ``--tile-bytes``; None: the engine's."""
    return None if options.tile_bytes is None else parse_size(options.tile_bytes, "--tile-bytes")


def check_memory(num_bytes: int, engine: str) -> None:
    """Raise InvalidArgumentError if the largest size of a run on the CPU cannot fit into memory.

    A sweep would find out after hours, by a rank that the system kills, and keep no record.
    """
    available = available_bytes()
    if engine == "host" and num_bytes > available:
        raise InvalidArgumentError(
            f"experts and slots of all ranks take {format_size(num_bytes)}, but this machine has"
            f" {format_size(available)} of memory available; give smaller sizes, or fewer experts,"
            " slots or ranks"
        )
