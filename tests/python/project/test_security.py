"""What SECURITY.md says: nothing is deserialised, and strangers get nothing."""

from __future__ import annotations

import ast
import ctypes
import fcntl
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankPool

import ultraep_comm as uec
from ultraep_comm import errors
from ultraep_comm.fabrics import shm
from ultraep_comm.fabrics.rendezvous import Rendezvous
from ultraep_comm.system import Process

ROOT = Path(__file__).resolve().parents[3]
SOURCES = sorted(
    p for part in ("ultraep_comm", "tools", "examples") for p in (ROOT / part).rglob("*.py")
)
FORBIDDEN_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve"}
FORBIDDEN_MODULES |= {"yaml", "joblib", "jsonpickle"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}


def forbidden(tree: ast.AST) -> Iterator[str]:
    """What in a source could make objects or code out of data."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = {alias.name.split(".")[0] for alias in node.names}
            yield from (f"import {name}" for name in names & FORBIDDEN_MODULES)
        elif isinstance(node, ast.ImportFrom):
            if (node.module or "").split(".")[0] in FORBIDDEN_MODULES:
                yield f"from {node.module} import"
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            keywords = {k.arg: ast.unparse(k.value) for k in node.keywords}
            if (
                name in FORBIDDEN_CALLS
                or name.endswith(("torch.load", "jit.load"))
                or name.endswith(("_object", "_object_list"))
            ):
                yield name
            elif name in ("np.load", "numpy.load", "np.lib.format.read_array", "format.read_array"):
                if keywords.get("allow_pickle") != "False":
                    yield f"{name} without allow_pickle=False"
            elif keywords.get("allow_pickle", "False") != "False":
                yield f"{name} with allow_pickle"
            elif keywords.get("shell", "False") != "False":
                yield f"{name} with a shell"


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from yaml import load",
        "import torch\ntorch.load('x')",
        "np.load(f)",
        "np.load(f, allow_pickle=True)",
        "np.savez(f, allow_pickle=True)",
        "eval('1')",
        "dist.all_gather_object(a, b)",
        "dist.broadcast_object_list(a)",
        "subprocess.run('ls', shell=True)",
    ],
)
def test_what_is_forbidden_is_found(text: str) -> None:
    assert list(forbidden(ast.parse(text)))


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_nothing_is_deserialised(path: Path) -> None:
    assert list(forbidden(ast.parse(path.read_text()))) == []


def test_the_library_reads_the_environment_in_one_place() -> None:
    readers = {
        path.relative_to(ROOT / "ultraep_comm").as_posix()
        for path in (ROOT / "ultraep_comm").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
    }
    assert readers <= {"env.py", "bench/launch.py"}


# ---- files of other processes ----------------------------------------------------------------


class Neighbour:
    """A process of this machine that does one thing and tells what came of it.

    Args:
        act: what it does; returns a text.
        prepare: what it does before.
    """

    def __init__(self, act: Callable[[], str], prepare: Callable[[], None] = lambda: None) -> None:
        self.found, other = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                prepare()
                text = act()
            except BaseException as error:
                text = type(error).__name__
            os.write(other, text.encode())
            os._exit(0)
        os.close(other)

    def text(self) -> str:
        with os.fdopen(self.found) as file:
            text = file.read()
        os.waitpid(self.pid, 0)
        return text


@pytest.fixture
def memory() -> Iterator[int]:
    before = len(os.listdir("/proc/self/fd"))
    fd = shm.create_named_memory(0)
    yield fd
    os.close(fd)
    assert len(os.listdir("/proc/self/fd")) == before


def _opens(process: Process, shared: tuple[int, str]) -> str:
    os.close(os.open(shm.find_shared(process, shared), os.O_RDWR))
    return "opened"


def test_a_rank_opens_the_memory_of_another(memory: int) -> None:
    owner, shared = Process.this(), shm.share(memory)
    assert Neighbour(lambda: _opens(owner, shared)).text() == "opened"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_gets_nothing(memory: int) -> None:
    owner, shared = Process.this(), shm.share(memory)
    for user in (lambda: os.setuid(65534), lambda: os.seteuid(65534)):
        assert Neighbour(lambda: _opens(owner, shared), user).text() == "PermissionError"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_cannot_pose_as_a_rank(memory: int) -> None:
    """Whatever is at the pid and number that a rank has sent, its name was random."""
    fd, link = shm.share(memory)
    asked, answer = os.pipe()

    def poses() -> str:
        forged = os.memfd_create(link[len("/memfd:") : link.index(" ")], os.MFD_ALLOW_SEALING)
        os.dup2(forged, fd)
        os.truncate(fd, 4096)
        fcntl.fcntl(fd, shm._ADD_SEALS, shm._FIXED_SIZE)
        os.write(answer, Process.this().pack())
        signal.pause()
        return ""

    neighbour = Neighbour(poses, lambda: os.setuid(65534))
    process = Process.unpack(os.read(asked, 100))
    assert process is not None
    found = os.open(shm.find_shared(process, (fd, link)), os.O_RDWR)  # by root, with even the name
    with pytest.raises(errors.BootstrapError, match="rank 3 shares 4096 bytes of user 65534"):
        shm.map_peer(found, 0, 3, 4096)
    os.kill(neighbour.pid, signal.SIGKILL)
    assert neighbour.text() == ""
    os.close(asked)
    os.close(answer)


def _enter_pid_namespace() -> None:
    """Continue in a child in a new pid namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(0x30000000) != 0:  # CLONE_NEWUSER | CLONE_NEWPID
        raise InterruptedError
    if (child := os.fork()) != 0:
        os.waitpid(child, 0)
        os._exit(0)


def test_a_rank_of_another_pid_namespace_is_not_looked_for(memory: int) -> None:
    owner, shared = Process.this(), shm.share(memory)
    text = Neighbour(lambda: _opens(owner, shared), _enter_pid_namespace).text()
    if text == "InterruptedError":
        pytest.skip("no new namespaces here")
    assert text == "FileNotFoundError"


STRANGERS: dict[str, Callable[[Process, int, str], tuple[Process, tuple[int, str]]]] = {
    "another number": lambda owner, fd, link: (owner, (0, link)),
    "a number that is free": lambda owner, fd, link: (owner, (1 << 20, link)),
    "another name": lambda owner, fd, link: (owner, (fd, link.replace("-", "_"))),
    "another process": lambda owner, fd, link: (replace(owner, pid=1), (fd, link)),
    "no process": lambda owner, fd, link: (replace(owner, pid=1 << 30), (fd, link)),
    "another boot": lambda owner, fd, link: (replace(owner, boot=bytes(16)), (fd, link)),
}


@pytest.mark.parametrize("kind", list(STRANGERS))
def test_another_job_is_not_taken_for_the_rank(memory: int, kind: str) -> None:
    process, shared = STRANGERS[kind](Process.this(), *shm.share(memory))
    with pytest.raises((FileNotFoundError, PermissionError)):
        shm.find_shared(process, shared)


# ---- memory that is shared ------------------------------------------------------------------


def _memfd(size: int, seals: int = shm._FIXED_SIZE) -> int:
    fd = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.truncate(fd, size)
    fcntl.fcntl(fd, shm._ADD_SEALS, seals)
    return fd


@pytest.mark.parametrize("kind", ["too small", "too large", "not sealed", "a file", "a pipe"])
def test_memory_is_checked_before_it_is_mapped(tmp_path: Path, kind: str) -> None:
    before = len(os.listdir("/proc/self/fd"))
    if kind == "a file":
        (tmp_path / "x").write_bytes(bytes(4096))
        fd = os.open(tmp_path / "x", os.O_RDWR)
    elif kind == "a pipe":
        fd, other = os.pipe()
        os.close(other)
    else:
        size = {"too small": 4095, "too large": 8192}.get(kind, 4096)
        fd = _memfd(size, 0 if kind == "not sealed" else shm._FIXED_SIZE)
    with pytest.raises(errors.BootstrapError, match="rank 3 shares"):
        shm.map_peer(fd, 0, 3, 4096)
    assert len(os.listdir("/proc/self/fd")) == before


def test_memory_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(errors.BootstrapError, match="rank 3 shares"):
        shm.map_peer(_memfd(4096), 0, 3, 4096)


def _closes_within_a_close(rank: int, process_group: Any) -> Any:
    """As a fork, or Ctrl-C, in the middle of it has it."""
    fabric = shm.ShmFabric(Rendezvous(process_group))
    opened = list(fabric._opened)
    inheritable = [fd for fd in opened if os.get_inheritable(fd)]
    closed: list[int] = []
    close = os.close

    def close_again(fd: int) -> None:
        closed.append(fd)
        if len(closed) == 1:
            fabric.close()
        close(fd)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "close", close_again)
        fabric.close()
    return sorted(closed) == sorted(opened), inheritable


def test_a_close_within_a_close_closes_no_number_twice(ranks: RankPool) -> None:
    assert ranks.run(2, _closes_within_a_close) == [(True, [])] * 2


def _two_jobs(rank: int, process_group: Any) -> Any:
    """Groups of the same shape, at once, as two jobs on a machine make them."""
    options: dict[str, Any] = {"expert": {"w": ((64,), torch.uint8)}, "timeout": 20.0}
    groups = [
        uec.new_group(process_group, num_experts=2, slots_per_rank=1, **options) for _ in range(4)
    ]
    loads = [uec.gather_load(torch.full((i + 1, 1), i % 2), group=g) for i, g in enumerate(groups)]
    for group in groups:
        group.close()
    return [int(load.sum()) for load in loads]


def test_groups_of_the_same_shape_do_not_meet(ranks: RankPool) -> None:
    assert ranks.run(2, _two_jobs) == [[2, 4, 6, 8]] * 2
