"""Launchers, found by the environment, and the end of a run."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from benched import SMALL, cells_of
from tiers import sampled

from ultraep_comm.bench.launch import Launched, _join, find_launcher, first_host, meeting_point
from ultraep_comm.errors import InvalidArgumentError
from ultraep_comm.system import run_main

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
SRUN = {
    **{"SLURM_PROCID": "5", "SLURM_NTASKS": "72", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "0"},
    **{"SLURM_JOB_ID": "1234", "SLURM_STEP_NODELIST": "gb[07-09,12],gb20"},
}
NAMES = ["MASTER_ADDR", "MASTER_PORT", *TORCHRUN]


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in [*os.environ]:
        if name in NAMES or name.startswith("SLURM_"):
            monkeypatch.delenv(name)
    return monkeypatch


def _set(patch: pytest.MonkeyPatch, **values: str) -> None:
    for name, value in values.items():
        patch.setenv(name, value)


LAUNCHED: dict[str, tuple[dict[str, str], Launched | None]] = {
    "none": ({}, None),
    "torchrun": (TORCHRUN, Launched(3, 8, 1)),
    "torchrun inside a step": (SRUN | TORCHRUN, Launched(3, 8, 1)),
    "srun": (SRUN, Launched(5, 72, 1)),
    "a step smaller than its job": (SRUN | {"SLURM_STEP_NUM_TASKS": "16"}, Launched(5, 16, 1)),
    "a step that may start ranks itself": (SRUN | {"SLURM_STEP_NUM_TASKS": "1"}, None),
    "a batch script": (SRUN | {"SLURM_STEP_ID": "4294967291"}, None),
    "no step": (SRUN | {"SLURM_STEP_ID": ""}, None),
}


@pytest.mark.parametrize("launcher", LAUNCHED)
def test_launchers(plain: pytest.MonkeyPatch, launcher: str) -> None:
    variables, found = LAUNCHED[launcher]
    _set(plain, **variables)
    assert find_launcher() == found


@pytest.mark.parametrize("change", [{"RANK": "x"}, {"RANK": "8"}])
def test_variables_that_describe_no_rank(plain: pytest.MonkeyPatch, change: dict[str, str]) -> None:
    _set(plain, **{**TORCHRUN, **change})
    with pytest.raises(InvalidArgumentError, match="a rank below G"):
        find_launcher()


FIRST_HOSTS = {
    "gb[07-09,12],gb20": "gb07",
    "rack-1-n[3-5]-x,y": "rack-1-n3-x",
    "": "",
}


@pytest.mark.parametrize("nodes", FIRST_HOSTS)
def test_first_host_of_a_list(nodes: str) -> None:
    assert first_host(nodes) == FIRST_HOSTS[nodes]


def test_rendezvous_of_srun(plain: pytest.MonkeyPatch) -> None:
    _set(plain, **SRUN)
    assert meeting_point() == ("gb07", 21234)
    _set(plain, SLURM_STEP_ID="1")  # another step of the job: another port
    assert meeting_point() == ("gb07", 21241)
    _set(plain, MASTER_ADDR="10.0.0.1", MASTER_PORT="999")
    assert meeting_point() == ("10.0.0.1", 999)
    _set(plain, MASTER_PORT="x")
    with pytest.raises(InvalidArgumentError, match="MASTER_PORT"):
        meeting_point()
    plain.delenv("MASTER_ADDR")
    plain.delenv("SLURM_STEP_NODELIST")
    with pytest.raises(InvalidArgumentError, match="MASTER_ADDR"):
        meeting_point()


def test_the_benchmark_as_a_step_of_srun(plain: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two processes with the environment that srun gives, and no Slurm; records on stdout."""
    _set(plain, **{**SRUN, "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2"})
    _set(plain, SLURM_JOB_ID=str(os.getpid() % 10_000))
    few = ["--engine", "host", *SMALL, "--mode", "push", "--check", "--csv", "/dev/stdout"]
    started = []
    for rank in "01":
        _set(plain, SLURM_PROCID=rank, SLURM_LOCALID=rank)
        command = [sys.executable, "-m", "ultraep_comm.bench", "replicate", *few]
        started.append(subprocess.Popen(command, cwd=tmp_path, stdout=PIPE, stderr=PIPE, text=True))
    texts = [process.communicate(timeout=120) for process in started]
    assert [process.returncode for process in started] == [0, 0], texts
    assert [out.count("#wrong") for out, _ in texts] == [1, 0]  # one rank prints
    assert "ranks 2, experts 16" in texts[0][0]
    records = cells_of(texts[0][0][texts[0][0].index("\nop,") + 1 :])
    assert {(r["op"], r["mode"]) for r in records} > {("replicate", "push")}
    assert {r["wrong_bytes"] for r in records} == {"0"}
    assert not list(tmp_path.iterdir())


# ---- the end of a run ---------------------------------------------------------------------------

LONG = ["replicate", "--ranks", "2", "-b", "1M", "-n", "1000000", "--json", "o.json"]


@pytest.fixture
def heeds_ctrl_c() -> Iterator[None]:
    """Restore SIGINT for processes that a test starts, since a background job ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def scratch() -> Iterator[str]:
    """A folder whose path is short enough for that of a socket in it."""
    with tempfile.TemporaryDirectory() as folder:
        yield folder


@pytest.mark.usefixtures("heeds_ctrl_c")
@pytest.mark.parametrize(
    ("number", "to_all", "status"),
    [
        (signal.SIGINT, True, 130),  # a terminal's
        pytest.param(signal.SIGTERM, False, 128 + signal.SIGTERM, marks=pytest.mark.exhaustive),
        (signal.SIGKILL, False, -signal.SIGKILL),
    ],
)
def test_nothing_outlives_a_run(
    tmp_path: Path, scratch: str, number: signal.Signals, to_all: bool, status: int
) -> None:
    """Ranks hold standard output open, so it ends only with the last rank."""
    shared = set(os.listdir("/dev/shm"))
    with subprocess.Popen(
        [sys.executable, "-m", "ultraep_comm.bench", *LONG],
        stdout=PIPE,
        stderr=PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": scratch},
        start_new_session=True,
    ) as bench:
        assert bench.stdout is not None
        try:
            while not bench.stdout.readline().startswith("# 1000000 iterations"):
                assert bench.poll() is None, bench.communicate()
            (os.killpg if to_all else os.kill)(bench.pid, number)
            _, errors = bench.communicate(timeout=60)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(bench.pid, signal.SIGKILL)
    assert bench.returncode == status
    # Killed, it cannot stop the ranks first: the last one may see the other's end.
    assert "Traceback" not in errors or number == signal.SIGKILL, errors
    assert not (tmp_path / "o.json").exists()
    assert not os.listdir(scratch) or number == signal.SIGKILL
    assert not {name for name in set(os.listdir("/dev/shm")) - shared if "ultraep" in name}


def watch_the_first(folder: str) -> int:
    """Leave a file if another rank sees the first one end."""
    rank, pid = dist.get_rank(), Path(folder, "pid")
    if rank == 0:
        pid.write_text(str(os.getpid()))
    dist.barrier()
    first = os.pidfd_open(int(pid.read_text()))
    Path(folder, f"ready{rank}").touch()
    if select.select([first], [], [], 60)[0]:
        Path(folder, f"seen{rank}").touch()
    return 0


@pytest.mark.usefixtures("plain")
def test_no_rank_sees_another_end_with_the_run(tmp_path: Path) -> None:
    program = (
        "import sys; from test_bench_launch import watch_the_first; "
        "from ultraep_comm.bench.launch import run_ranks; "
        "sys.exit(run_ranks(watch_the_first, sys.argv[1], 4))"
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], env=environ) as run:
        while len(list(tmp_path.glob("ready*"))) < 4:
            assert run.poll() is None
            time.sleep(0.01)
        run.terminate()
    assert run.returncode == 128 + signal.SIGTERM
    assert not list(tmp_path.glob("seen*"))


@pytest.mark.parametrize("codes", [(2, 7), (7, 2), (2, 7, 1), (0, 7)])
def test_how_a_rank_ended_counts_more_than_what_its_peers_report(codes: tuple[int, ...]) -> None:
    ranks = [subprocess.Popen(["sh", "-c", f"exit {code}"]) for code in codes]
    ended = [SimpleNamespace(sentinel=os.pidfd_open(rank.pid), join=rank.wait) for rank in ranks]
    for stand_in, rank in zip(ended, ranks, strict=True):
        stand_in.exitcode = rank.wait()
        assert select.select([stand_in.sentinel], [], [], 10)[0]
    assert _join(ended) == 7  # type: ignore[arg-type]
    for stand_in in ended:
        os.close(stand_in.sentinel)


CLOSED, FULL = "was closed by its reader", "cannot be written: No space left"


@pytest.mark.parametrize(
    ("program", "why"),
    sampled(
        [("bench", CLOSED), ("bench", FULL), ("doctor", CLOSED), ("doctor", FULL)],
        ("bench", CLOSED).__eq__,
    ),
)
def test_an_output_that_cannot_be_written_is_one_line(program: str, why: str) -> None:
    arguments = [*LONG[:-2], "-n", "1", "-w", "0"] if program == "bench" else ["--json"]
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "wb") as closed, Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", f"ultraep_comm.{program}", *arguments],
            stdout=closed if why == CLOSED else full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr.count(f"error: standard output {why}") == 1
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("when", ["import", "run"])
def test_an_interrupt_is_no_traceback(
    when: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: Any
) -> None:
    interrupt = "raise KeyboardInterrupt"
    body = interrupt if when == "import" else f"def main():\n    {interrupt}"
    (tmp_path / f"interrupted_{when}.py").write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    assert run_main(f"interrupted_{when}") == 130
    assert capfd.readouterr() == ("", "")
