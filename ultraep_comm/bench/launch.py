"""Rank processes: started by torchrun or srun, or by the benchmark itself."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import re
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import TypeVar, cast

from ultraep_comm.bench.sizes import parse_count
from ultraep_comm.errors import InvalidArgumentError, UltraEPError
from ultraep_comm.system import FAILED, INTERRUPTED, report_output

Settings = TypeVar("Settings")
# Exit statuses. If a signal ended a rank: 128 plus its number, as in a shell.
WRONG = 1  # a byte or a value
GATE_MISSED = 3
_FIRST_SPECIAL_STEP = 0xFFFFFFF0  # from here on Slurm's steps are batch scripts and shells
_FIRST_PORT, _NUM_PORTS = 20_000, 10_000
_GRACE_SECONDS = 5.0  # for the other ranks to report, after one has failed


@dataclass(frozen=True)
class Launched:
    """This process's place among the ranks of a launcher.

    Attributes:
        rank: of this process.
        num_ranks: G.
        local_rank: rank on this machine; the global rank if the launcher does not set it.
    """

    rank: int
    num_ranks: int
    local_rank: int


def find_launcher() -> Launched | None:
    """Return this process's place among the ranks of torchrun or srun; None without a launcher.

    An srun step with one task counts as no launcher, so it can start ranks itself.

    Raises:
        InvalidArgumentError: the launcher's variables do not describe a rank.
    """
    environ = os.environ
    if "RANK" in environ and "WORLD_SIZE" in environ:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    elif environ.get("SLURM_STEP_ID", "").isdecimal() and "SLURM_PROCID" in environ:
        if not 0 <= parse_count(environ["SLURM_STEP_ID"]) < _FIRST_SPECIAL_STEP:
            return None
        tasks = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
        names = ("SLURM_PROCID", tasks, "SLURM_LOCALID")
        if environ.get(tasks, "1") == "1":
            return None
    else:
        return None
    texts = [environ[names[0]], environ[names[1]], environ.get(names[2], environ[names[0]])]
    found = dict(zip(names, texts, strict=True))
    rank, num_ranks, local_rank = map(parse_count, texts)
    if not 0 <= rank < num_ranks or local_rank < 0:
        raise InvalidArgumentError(f"the launcher's variables are {found}; expected a rank below G")
    return Launched(rank, num_ranks, local_rank)


def launched_ranks() -> int | None:
    """Return the number of ranks that a launcher has started; None without a launcher."""
    launched = find_launcher()
    return None if launched is None else launched.num_ranks


def first_host(nodes: str) -> str:
    """Return the first node of a Slurm list: ``gb07`` of ``gb[07-09,12],gb20``."""
    found = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\]([^,\[]*))?", nodes)
    return "" if found is None else "".join(part or "" for part in found.groups())


def meeting_point() -> tuple[str, int]:
    """Return the rendezvous host and port of srun's ranks.

    ``MASTER_ADDR`` and ``MASTER_PORT``, or else rank 0's node and a port by job and step.

    Raises:
        InvalidArgumentError: no host is known, or the port is invalid.
    """
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST", "")
    host = os.environ.get("MASTER_ADDR") or first_host(nodes)
    if not host:
        raise InvalidArgumentError(
            "Slurm names no nodes in SLURM_STEP_NODELIST; set MASTER_ADDR to rank 0's machine"
        )
    step = int(os.environ.get("SLURM_JOB_ID", "0")) + 7 * int(os.environ["SLURM_STEP_ID"])
    port = os.environ.get("MASTER_PORT") or str(_FIRST_PORT + step % _NUM_PORTS)
    if not 0 <= parse_count(port) < 1 << 16:
        raise InvalidArgumentError(f"MASTER_PORT is {port!r}; expected a number below 65536")
    return host, int(port)


def _join_launched(launched: Launched) -> None:
    import torch.distributed as dist

    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
        return
    host, port = meeting_point()
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{host}:{port}",
        rank=launched.rank,
        world_size=launched.num_ranks,
    )


def run_ranks(
    run: Callable[[Settings], int],
    settings: Settings,
    num_ranks: int,
    *,
    preload: str = "",
    prepare: Callable[[int, int], None] | None = None,
) -> int:
    """Run ``run(settings)`` on every rank over a gloo process group; return the exit code.

    Under a launcher this process is one of the ranks. Otherwise it starts ``num_ranks`` processes,
    which rendezvous through a file, so no port is needed. ``preload`` names a module to import
    before they are forked; default: the module of ``run``. Each of them begins with ``prepare``, of
    its rank and their number.
    """
    launched = find_launcher()
    if launched is not None:
        _join_launched(launched)
        return run_alone(run, settings)
    # A server process imports everything once; the ranks are its forks.
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", preload or run.__module__])
    with (
        _signals_raise(),
        tempfile.TemporaryDirectory(prefix="ultraep_comm-") as folder,
    ):
        meeting = f"file://{folder}/ranks"
        given = [(run, settings, meeting, rank, num_ranks, prepare) for rank in range(num_ranks)]
        ranks = [context.Process(target=_start_rank, args=own, daemon=True) for own in given]
        try:
            for process in ranks:
                process.start()
            return _join(ranks)
        finally:
            _end([process for process in ranks if process.is_alive()])


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into SystemExit, so that this process ends its ranks."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_with_parent() -> None:
    """End this rank when the process that started it has ended for any reason."""
    parent = mp.parent_process()
    if parent is None:
        return
    sentinel = parent.sentinel

    def watch() -> None:
        wait([sentinel])
        os._exit(FAILED)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def _join(ranks: Sequence[BaseProcess]) -> int:
    waiting = {process.sentinel: process for process in ranks}
    code = 0
    while waiting:
        ended = wait(list(waiting), timeout=_GRACE_SECONDS if code else None)
        if not ended:
            break  # the others still wait for a rank that has ended
        for sentinel in ended:
            process = waiting.pop(cast(int, sentinel))
            process.join()
            ended_with = process.exitcode or 0
            if ended_with and code in (0, FAILED):  # a rank that reports its peer's end says less
                code = 128 - ended_with if ended_with < 0 else ended_with
    return code


def _end(ranks: Sequence[BaseProcess]) -> None:
    # All are stopped before the first ends: the others would report a peer that is gone.
    for number in (signal.SIGSTOP, signal.SIGTERM, signal.SIGCONT):
        for process in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(cast(int, process.pid), number)
    for process in ranks:
        process.join()


def _start_rank(
    run: Callable[[Settings], int],
    settings: Settings,
    meeting: str,
    rank: int,
    num_ranks: int,
    prepare: Callable[[int, int], None] | None,
) -> None:
    import torch.distributed as dist

    if prepare is not None:  # before there are threads: they would stay in this network namespace
        prepare(rank, num_ranks)
    _end_with_parent()
    try:
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=num_ranks)
        sys.exit(run_alone(run, settings))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def run_alone(run: Callable[[Settings], int], settings: Settings) -> int:
    """Run ``run(settings)`` in this process, as a rank or without others; return the exit code."""
    import torch.distributed as dist

    try:
        code = run(settings)
    except UltraEPError as error:
        # Settings are equal on all ranks, so all ranks reject the same argument.
        first = not dist.is_initialized() or dist.get_rank() == 0
        if first or not isinstance(error, InvalidArgumentError):
            print(f"error: {error}", file=sys.stderr, flush=True)
        return FAILED
    except Exception as error:
        if not report_output(error):
            traceback.print_exc()
        return FAILED
    if dist.is_initialized():
        dist.destroy_process_group()
    return code
