"""Ranks that live for one test, in processes that may fork, die, or be stopped."""

from __future__ import annotations

import os
import signal
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.distributed as dist
from ranks import forkserver, prepare_forked


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _serve(rank: int, num_ranks: int, store: str, pipe: Connection, task: Any) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    prepare_forked()
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=num_ranks)
    function, args = task
    try:
        pipe.send(("ok", function(rank, *args)))
    except BaseException:
        pipe.send(("error", traceback.format_exc()))
    pipe.recv()  # wait for the others: peers notice when a process group is destroyed
    os._exit(0)


def run_ranks(
    folder: Path,
    num_ranks: int,
    function: Callable[..., Any],
    *args: Any,
    silent: tuple[int, ...] = (),
    timeout: float = 60,
    hosted: bool = False,
) -> list[Any]:
    """Run ``function(rank, *args)`` in new processes with a gloo process group as WORLD.

    Args:
        folder: for the process group's file.
        silent: ranks that end, or hang, without a result; their result is None.
        timeout: seconds for all ranks together.
        hosted: the process group's store is in rank 0's process and ends with it; else in a file.

    Returns:
        The results by rank.
    """
    context = forkserver()
    store = f"tcp://127.0.0.1:{_free_port()}" if hosted else f"file://{folder / 'store'}"
    pipes, processes = [], []
    for rank in range(num_ranks):
        here, there = context.Pipe()
        arguments = (rank, num_ranks, store, there, (function, args))
        processes.append(context.Process(target=_serve, args=arguments))
        processes[-1].start()
        there.close()
        pipes.append(here)
    end, results = time.monotonic() + timeout, []
    try:
        for rank, pipe in enumerate(pipes):
            if rank in silent:
                results.append(None)
                continue
            assert pipe.poll(max(end - time.monotonic(), 0.1)), f"rank {rank} hangs"
            kind, value = pipe.recv()
            assert kind == "ok", f"rank {rank} failed:\n{value}"
            results.append(value)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return results
