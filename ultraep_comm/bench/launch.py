"""Rank processes: those of a launcher such as torchrun, or our own."""

from __future__ import annotations

import multiprocessing as mp
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import TypeVar, cast

import torch.distributed as dist

from ultraep_comm.errors import InvalidArgumentError, UltraEPError

Settings = TypeVar("Settings")
FAILED = 2
INTERRUPTED = 130
_GRACE_SECONDS = 5.0  # for ranks to report, after one of them has failed


def launched_ranks() -> int | None:
    """Return the number of ranks that a launcher has started; None: this is a plain process."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    return None


def launched_rank() -> int:
    """Return this process's rank among those of a launcher; 0 in a plain process."""
    return int(os.environ["RANK"]) if launched_ranks() is not None else 0


def run_ranks(run: Callable[[Settings], int], settings: Settings, num_ranks: int) -> int:
    """Run ``run(settings)`` on every rank over a gloo process group; return the exit code.

    Under a launcher this process is one of the ranks. Otherwise it starts ``num_ranks`` processes,
    which meet in a file, so no port can be taken.
    """
    if launched_ranks() is not None:
        dist.init_process_group("gloo")
        return _run_rank(run, settings)
    # One process imports everything once, and the ranks are its forks.
    context = mp.get_context("forkserver")
    context.set_forkserver_preload([__name__, run.__module__])
    with tempfile.TemporaryDirectory(prefix="ultraep_comm-") as folder:
        meeting = f"file://{folder}/ranks"
        ranks = [
            context.Process(
                target=_start_rank, args=(run, settings, meeting, rank, num_ranks), daemon=True
            )
            for rank in range(num_ranks)
        ]
        try:
            for process in ranks:
                process.start()
            return _join(ranks)
        finally:
            for process in ranks:
                if process.is_alive():
                    process.terminate()
                    process.join()


def _join(ranks: Sequence[BaseProcess]) -> int:
    waiting = {process.sentinel: process for process in ranks}
    code = 0
    while waiting:
        ended = wait(list(waiting), timeout=_GRACE_SECONDS if code else None)
        if not ended:
            break  # the rest waits for a rank that is gone
        for sentinel in ended:
            process = waiting.pop(cast(int, sentinel))
            process.join()
            code = code or abs(process.exitcode or 0)
    return code


def _start_rank(
    run: Callable[[Settings], int], settings: Settings, meeting: str, rank: int, num_ranks: int
) -> None:
    try:
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=num_ranks)
        sys.exit(_run_rank(run, settings))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _run_rank(run: Callable[[Settings], int], settings: Settings) -> int:
    try:
        code = run(settings)
    except UltraEPError as error:
        # Settings are equal on all ranks, so all reject the same argument.
        if dist.get_rank() == 0 or not isinstance(error, InvalidArgumentError):
            print(f"error: {error}", file=sys.stderr, flush=True)
        return FAILED
    except Exception:
        traceback.print_exc()
        return FAILED
    dist.destroy_process_group()
    return code
