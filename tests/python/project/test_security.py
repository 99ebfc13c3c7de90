"""What SECURITY.md says: nothing is deserialised, and strangers get nothing and hold nobody up."""

from __future__ import annotations

import array
import ast
import contextlib
import errno
import fcntl
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankPool

import ultraep_comm as uec
from ultraep_comm import errors
from ultraep_comm.fabrics import shm, sockets
from ultraep_comm.fabrics.sockets import Address, Connections, Listener

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


# ---- connections -----------------------------------------------------------------------------


class Pair:
    """The ends of ranks 0 and 1, in one process, and a door for strangers."""

    def __init__(self, timeout: float = 20.0) -> None:
        self.listeners = [Listener(rank) for rank in (0, 1)]
        self.addresses = [x.address for x in self.listeners]
        self.ends = [
            Connections(x, self.addresses, [1 - x.rank], timeout, lambda: None)
            for x in self.listeners
        ]

    def connect(self) -> float:
        """Connect both; return the seconds that it took."""
        start, found = time.monotonic(), []

        def one() -> None:
            try:
                self.ends[1].connect()
            except Exception as error:
                found.append(error)

        thread = threading.Thread(target=one)
        thread.start()
        self.ends[0].connect()
        thread.join()
        if found:
            raise found[0]
        return time.monotonic() - start

    def stranger(self, data: bytes = b"") -> socket.socket:
        """Call rank 0, which is called by rank 1 alone."""
        caller = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        caller.settimeout(5)
        caller.connect(sockets._name(self.addresses[0].name))
        if data:
            caller.sendall(data)
        return caller

    def close(self) -> None:
        for thing in (*self.ends, *self.listeners):
            thing.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    before = len(os.listdir("/proc/self/fd"))
    made = Pair()
    yield made
    made.close()
    assert len(os.listdir("/proc/self/fd")) == before


def _proof(rank: int, other: int, token: str, magic: bytes = sockets.MAGIC) -> bytes:
    return sockets._PROOF.pack(magic, rank, other, token.encode())


STRANGERS: dict[str, Callable[[Pair], bytes]] = {
    "silent": lambda p: b"",
    "half a proof": lambda p: _proof(1, 0, p.addresses[1].token)[:-1],
    "wrong token": lambda p: _proof(1, 0, "0" * 32),
    "token of another rank": lambda p: _proof(1, 0, p.addresses[0].token),
    "rank out of range": lambda p: _proof(9, 0, p.addresses[1].token),
    "negative rank": lambda p: _proof(-1, 0, p.addresses[1].token),
    "for another rank": lambda p: _proof(1, 1, p.addresses[1].token),
    "another program": lambda p: _proof(1, 0, p.addresses[1].token, b"GET / HT"),
}


@pytest.mark.parametrize("kind", list(STRANGERS))
def test_strangers_get_nothing_and_hold_nobody_up(pair: Pair, kind: str) -> None:
    callers = [pair.stranger(STRANGERS[kind](pair)) for _ in range(3)]
    assert pair.connect() < 3
    for caller in callers:
        assert caller.recv(100) == b""  # closed, without a byte
        caller.close()


def test_a_crowd_of_silent_callers_is_thinned_out(pair: Pair) -> None:
    callers = [pair.stranger() for _ in range(60)]
    assert pair.connect() < 4
    for caller in callers:
        caller.close()


def test_another_user_is_cut_off_before_a_byte_is_read(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = sockets._credentials
    asked: list[int] = []

    def of_another_user_first(connection: socket.socket) -> tuple[int, int]:
        asked.append(connection.fileno())
        pid, uid = good(connection)
        return (pid, uid + 1) if len(asked) == 1 else (pid, uid)

    caller = pair.stranger(_proof(1, 0, pair.addresses[1].token))  # who has even the token
    monkeypatch.setattr(sockets, "_credentials", of_another_user_first)
    pair.ends[0]._wait(1)
    with pytest.raises(ConnectionResetError):  # closed with all that it sent unread
        caller.recv(100)
    assert pair.ends[0].sockets == [-1, -1]
    caller.close()


@pytest.mark.parametrize("field, part", [("uid", "runs as user"), ("pid", "leads to process")])
def test_a_listener_of_somebody_else_is_told_nothing(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, field: str, part: str
) -> None:
    good = sockets._credentials
    wrong = {"uid": (0, 1), "pid": (1, 0)}[field]
    monkeypatch.setattr(
        sockets,
        "_credentials",
        lambda connection: tuple(a + b for a, b in zip(good(connection), wrong, strict=True)),
    )
    with pytest.raises(errors.BootstrapError, match=part):
        pair.ends[1].connect()
    connection, _ = pair.listeners[0].socket.accept()
    assert connection.recv(100) == b""
    connection.close()


def test_a_rank_that_cannot_prove_itself_is_an_error(pair: Pair) -> None:
    with contextlib.closing(pair.listeners[0]) as listener:

        def answer() -> None:
            time.sleep(0.2)
            connection, _ = listener.socket.accept()
            connection.sendall(_proof(0, 1, "0" * 32))
            time.sleep(0.5)
            connection.close()

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(errors.BootstrapError, match="rank 0 did not prove"):
            pair.ends[1].connect()
        thread.join()


def test_a_rank_that_does_not_come_is_named() -> None:
    pair = Pair(timeout=0.3)
    with pytest.raises(errors.BootstrapError, match=r"no connection to ranks \[1\]"):
        pair.ends[0].connect()
    pair.close()


# ---- memory that is passed ------------------------------------------------------------------


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
    with pytest.raises(errors.BootstrapError, match="rank 3 passed"):
        shm.map_peer(fd, 0, 3, 4096)
    assert len(os.listdir("/proc/self/fd")) == before


def test_memory_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(errors.BootstrapError, match="rank 3 passed"):
        shm.map_peer(_memfd(4096), 0, 3, 4096)


@pytest.mark.parametrize("count", [0, 2, 5, 20])
def test_exactly_one_descriptor_is_taken(pair: Pair, count: int) -> None:
    pair.connect()
    before = len(os.listdir("/proc/self/fd"))
    fds = [_memfd(4096) for _ in range(count)]
    part = array.array("i", fds)
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, part)] if fds else []
    pair.ends[1]._sockets[0].sendmsg([b"M"], ancillary)
    with pytest.raises(errors.BootstrapError, match=r"rank 1 passed .* descriptors"):
        pair.ends[0].receive_memory(1)
    for fd in fds:
        os.close(fd)
    assert len(os.listdir("/proc/self/fd")) == before


class Swap:
    """Both ends of a pair pass memory."""

    def __init__(self, pair: Pair, num_bytes: tuple[int, int] = (4096, 8192)) -> None:
        self.pair, self.num_bytes = pair, num_bytes
        self.sizes: list[int] = []
        self.found: list[Exception] = []

    def one(self, rank: int) -> None:
        fd = _memfd(self.num_bytes[rank])
        try:
            self.pair.ends[rank].pass_memory(fd, self.take)
        except Exception as error:
            self.found.append(error)
        finally:
            os.close(fd)

    def take(self, peer: int, fd: int) -> None:
        self.sizes.append(os.fstat(fd).st_size)
        os.close(fd)

    def both(self) -> None:
        threads = [threading.Thread(target=self.one, args=(rank,)) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def test_descriptors_are_passed_again_when_too_many_are_on_their_way(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.connect()
    refused: list[int] = []
    send = socket.send_fds

    def send_later(*arguments: Any) -> int:
        if len(refused) < 5:
            refused.append(1)
            raise OSError(errno.ETOOMANYREFS, "Too many references")
        return send(*arguments)

    monkeypatch.setattr(socket, "send_fds", send_later)
    swap = Swap(pair)
    swap.both()
    assert not swap.found
    assert sorted(swap.sizes) == [4096, 8192]


def test_a_rank_receives_while_it_cannot_send(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are on their way to it are what keeps it from sending."""
    pair.connect()
    swap = Swap(pair)
    fd = _memfd(8192)
    assert pair.ends[1].send_memory(0, fd)
    os.close(fd)
    send = socket.send_fds

    def send_when_received(*arguments: Any) -> int:
        if not swap.sizes:
            raise OSError(errno.ETOOMANYREFS, "Too many references")
        return send(*arguments)

    monkeypatch.setattr(socket, "send_fds", send_when_received)
    swap.one(0)
    assert not swap.found
    assert swap.sizes == [8192]


def test_descriptors_that_are_never_passed_name_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*arguments: Any) -> int:
        raise OSError(errno.ETOOMANYREFS, "Too many references")

    pair = Pair(timeout=0.5)
    with contextlib.closing(pair):
        pair.connect()
        monkeypatch.setattr(socket, "send_fds", refuse)
        swap = Swap(pair)
        swap.both()
        assert len(swap.found) == 2
        for error in swap.found:
            assert isinstance(error, OSError)
            assert error.errno == errno.ETOOMANYREFS
            assert "ulimit -n" in str(error)


def test_few_descriptors_are_on_their_way_at_a_time() -> None:
    """A rank sends one more only when it has received as many; all the same all get theirs."""
    num_ranks = 7
    listeners = [Listener(rank) for rank in range(num_ranks)]
    addresses = [Address("", "", 0, 0)] * num_ranks
    ends = [
        Connections(x, addresses, [r for r in range(num_ranks) if r != x.rank], 0.3, lambda: None)
        for x in listeners
    ]
    for one in range(num_ranks):
        for other in range(one):
            ends[one]._sockets[other], ends[other]._sockets[one] = socket.socketpair()
    fd = _memfd(4096)
    taken: list[list[int]] = [[] for _ in range(num_ranks)]
    found: list[Exception] = []

    def run(rank: int) -> None:
        def take(peer: int, passed: int) -> None:
            taken[rank].append(peer)
            os.close(passed)

        try:
            ends[rank].pass_memory(fd, take)
        except Exception as error:
            found.append(error)

    run(3)  # nobody sends anything to it
    assert [str(error) for error in found] == ["rank 3: rank 0 passed no memory within 0.3 s"]
    unread = [bool(select.select([ends[r].sockets[3]], [], [], 0)[0]) for r in (0, 1, 2, 4, 5, 6)]
    assert unread == [False, False, False, True, False, False]
    os.close(ends[4].receive_memory(3))

    found.clear()
    threads = []
    for end in ends:
        end._timeout = 20.0
        threads.append(threading.Thread(target=run, args=(end._rank,)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    for thing in (*ends, *listeners):
        thing.close()
    os.close(fd)
    assert not found
    assert [sorted(t) for t in taken] == [[p for p in range(num_ranks) if p != r] for r in range(7)]


def test_a_caller_that_comes_all_the_time_hides_no_death(pair: Pair) -> None:
    """Whether the peers live is looked at by the clock, not when nothing happens."""

    def died() -> None:
        raise errors.BootstrapError("rank 1 died")

    stop = threading.Event()

    def call() -> None:
        while not stop.is_set():
            with contextlib.suppress(OSError):
                pair.stranger().close()
            time.sleep(0.005)

    thread = threading.Thread(target=call)
    thread.start()
    pair.ends[0]._timeout = 4.0
    pair.ends[0]._check = died
    pair.ends[0]._checked = time.monotonic()
    try:
        with pytest.raises(errors.BootstrapError, match="rank 1 died"):
            pair.ends[0].connect()
    finally:
        stop.set()
        thread.join()


def test_a_close_within_a_close_closes_no_number_twice(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a fork, or Ctrl-C, in the middle of it has it."""
    pair.connect()
    end = pair.ends[0]
    end._processes[5] = os.dup(end._processes[1])
    closed: list[int] = []
    close = os.close

    def close_again(fd: int) -> None:
        closed.append(fd)
        if len(closed) == 1:
            end.close()
        close(fd)

    monkeypatch.setattr(os, "close", close_again)
    end.close()
    monkeypatch.undo()
    assert len(closed) == len(set(closed)) == 2


def test_descriptors_are_not_inherited_by_programs(pair: Pair) -> None:
    pair.connect()
    fd = _memfd(4096)
    assert pair.ends[1].send_memory(0, fd)
    passed = pair.ends[0].receive_memory(1)
    kept = [passed, pair.ends[0].sockets[1], pair.ends[0].processes[1]]
    assert not any(os.get_inheritable(one) for one in kept)
    os.close(passed)
    os.close(fd)


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
