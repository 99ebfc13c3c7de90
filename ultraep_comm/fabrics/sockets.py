"""Authenticated connections between the ranks of one machine, and descriptors passed over them.

Every process of the machine can see a listener's name in the abstract namespace and connect to it.
So a caller is trusted only by its credentials from the kernel (user and process) and by the token
that its rank sent over the process group. Both ends prove their tokens. A caller that cannot is
disconnected, and creating the group continues.
"""

from __future__ import annotations

import array
import contextlib
import errno
import hmac
import os
import resource
import secrets
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, NoReturn

from ultraep_comm.errors import BootstrapError
from ultraep_comm.fabrics.rendezvous import PeerFailureError
from ultraep_comm.system import pid_namespace, watch_forks

MAGIC = b"UEPSOCK3"
_PROOF = struct.Struct("<8sii32s")  # magic, sending rank, receiving rank, the sender's token
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid
_MEMORY = b"M"
STRANGER_SECONDS = 5.0  # for a caller to prove its rank
MAX_STRANGERS = 16  # unproved callers at a time
_SLICE = 0.05  # seconds between checks whether the peers are alive
_PAUSE = 0.001  # seconds before the first retry of passing a descriptor
SPARE_DESCRIPTORS = MAX_STRANGERS + 4  # for callers, this rank's memory, and one being received


def reserve_descriptors(rank: int, num_peers: int) -> None:
    """Check that this process can open enough descriptors for ``num_peers`` connections.

    Raises:
        BootstrapError: it cannot; says how many are needed and how many are left.
    """
    needed = 2 * num_peers + SPARE_DESCRIPTORS
    opened: list[int] = []
    try:
        first = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        opened.append(first)
        while len(opened) < needed:
            opened.append(os.dup(first))
    except OSError as error:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        raise BootstrapError(
            f"rank {rank}: a group with {num_peers} peers on this machine needs {needed} file"
            f" descriptors, and only {len(opened)} are left of the process's {limit}"
            f" ({error.strerror}); raise the limit with ulimit -n, or close files",
            failed_rank=rank,
        ) from error
    finally:
        for fd in opened:
            os.close(fd)


class Address(NamedTuple):
    """Where a rank listens, and what proves that a connection comes from it.

    Attributes:
        name: random; of its socket.
        token: random; secret.
        pid: of its process.
        pid_namespace: of its process.
    """

    name: str
    token: str
    pid: int
    pid_namespace: int


class Listener:
    """This rank's listening socket, under a random name, and its secret token.

    Raises:
        BootstrapError: no descriptor is left.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        name, token = secrets.token_hex(16), secrets.token_hex(16)
        self.address = Address(name, token, os.getpid(), pid_namespace())
        with contextlib.ExitStack() as undo:
            try:
                self.socket = socket.socket(
                    socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK
                )
                undo.callback(self.socket.close)
                self.socket.bind(_name(name))
                self.socket.listen(1024)
            except OSError as refused:
                raise BootstrapError(
                    f"rank {rank}: cannot listen for connections ({refused.strerror}); if too many"
                    " files are open, raise the limit with ulimit -n, or close some",
                    failed_rank=rank,
                ) from refused
            undo.pop_all()
        watch_forks(self)

    def leave_to_parent(self) -> None:
        """Close this process's copy."""
        self.close()

    def close(self) -> None:
        """Stop accepting callers."""
        self.socket.close()


def _name(name: str) -> str:
    return f"\0ultraep_comm-{name}"


def can_reach(address: Address) -> bool:
    """Return False if a rank that listens at ``address`` is known to be out of reach."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
            probe.connect(_name(address.name))
    except OSError as error:  # others: its queue is full, or this rank has no descriptor left
        return error.errno not in (errno.ECONNREFUSED, errno.EACCES, errno.EPERM)
    return True


def _credentials(connection: socket.socket) -> tuple[int, int]:
    """Return pid and user of the other end, from the kernel; pid 0: in another pid namespace."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    return pid, uid


class _Caller:
    """A connection whose other end has not proved its rank yet."""

    def __init__(self, connection: socket.socket, peer: int, end: float) -> None:
        self.socket = connection
        self.peer = peer  # the rank that this rank called; -1: an incoming connection
        self.end = end
        self.data = b""


class Connections:
    """Connections of one rank to ``peers``, opened by :meth:`connect`; owns their descriptors.

    Args:
        listener: this rank's listener; the caller closes it.
        addresses: of all ranks ``[G]``.
        peers: the other ranks on this machine.
        timeout: seconds for each wait.
        check: raises if a rank is known to have failed; called repeatedly during waits.
    """

    def __init__(
        self,
        listener: Listener,
        addresses: Sequence[Address],
        peers: Sequence[int],
        timeout: float,
        check: Callable[[], None],
    ) -> None:
        self._rank = listener.rank
        self._listener = listener
        self._addresses = addresses
        self._peers = frozenset(peers)
        self._timeout = timeout
        self._check = check
        self._sockets: dict[int, socket.socket] = {}
        self._processes: dict[int, int] = {}
        self._callers: list[_Caller] = []
        self._checked = 0.0
        watch_forks(self)

    @property
    def sockets(self) -> list[int]:
        """Descriptors of the connections, by rank; -1: none."""
        found = self._sockets
        return [found[r].fileno() if r in found else -1 for r in range(len(self._addresses))]

    @property
    def processes(self) -> list[int]:
        """Pidfds of the peers' processes, by rank, readable once they have ended; -1: none."""
        return [self._processes.get(r, -1) for r in range(len(self._addresses))]

    # ---- connecting -----------------------------------------------------------------------

    def connect(self) -> None:
        """Connect to all peers: this rank calls lower ranks and is called by higher ones.

        Raises:
            PeerFailureError: a peer failed or died, is another process, or timed out.
            OSError: this process cannot open connections.
        """
        end = time.monotonic() + self._timeout
        try:
            uncalled = {peer for peer in self._peers if peer < self._rank}
            while len(self._sockets) < len(self._peers):
                uncalled -= {peer for peer in sorted(uncalled) if self._call(peer, end)}
                self._wait(_SLICE)
                if time.monotonic() > end:
                    missing = sorted(self._peers - set(self._sockets))
                    raise PeerFailureError(
                        f"rank {self._rank}: no connection to ranks {missing} within"
                        f" {self._timeout:g} s",
                        failed_rank=missing[0],
                    )
        finally:
            for caller in self._callers:
                caller.socket.close()
            self._callers.clear()

    def _call(self, peer: int, end: float) -> bool:
        """Connect to a peer and prove this rank to it; False if the peer's backlog is full."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        caller = _Caller(connection, peer, end)
        self._callers.append(caller)  # first, so that it is closed on any error
        try:
            connection.connect(_name(self._addresses[peer].name))
        except BlockingIOError:
            self._drop(caller)
            return False
        except ConnectionRefusedError:
            self._check()
            raise PeerFailureError(
                f"rank {self._rank}: rank {peer} no longer listens; it failed or its process ended",
                failed_rank=peer,
            ) from None
        self._require_process(connection, peer)
        self._prove(connection, peer)
        return True

    def _require_process(self, connection: socket.socket, peer: int) -> None:
        """Raise PeerFailureError unless the kernel's credentials are of the peer's process."""
        pid, uid = _credentials(connection)
        address = self._addresses[peer]
        if uid != os.geteuid():
            raise PeerFailureError(
                f"rank {self._rank}: rank {peer} runs as user {uid}; expected {os.geteuid()}",
                failed_rank=peer,
            )
        if pid > 0 and address.pid_namespace == pid_namespace() != 0 and pid != address.pid:
            raise PeerFailureError(
                f"rank {self._rank}: the connection to rank {peer} leads to process {pid}; expected"
                f" {address.pid}",
                failed_rank=peer,
            )

    def _prove(self, connection: socket.socket, peer: int) -> None:
        token = self._addresses[self._rank].token.encode()
        with self._talking_to(peer):
            connection.sendall(_PROOF.pack(MAGIC, self._rank, peer, token))

    @contextlib.contextmanager
    def _talking_to(self, peer: int) -> Iterator[None]:
        """Turn the end of a connection into a PeerFailureError that names the peer."""
        try:
            yield
        except ConnectionError as error:
            raise PeerFailureError(
                f"rank {self._rank}: rank {peer} closed the connection ({error.strerror})",
                failed_rank=peer,
            ) from error

    def _wait(self, seconds: float) -> None:
        """Wait at most ``seconds`` for callers or their proofs, and handle those that arrived."""
        poll = select.poll()
        poll.register(self._listener.socket, select.POLLIN)
        for caller in self._callers:
            poll.register(caller.socket, select.POLLIN)
        ready = {fd for fd, _ in poll.poll(1000 * seconds)}
        now = time.monotonic()
        if now - self._checked >= _SLICE:  # by the clock, since strangers may call all the time
            self._checked = now
            self._check()
        for caller in list(self._callers):
            if caller.socket.fileno() in ready:
                self._read(caller)
            elif caller.end < now:
                self._drop(caller)
        if self._listener.socket.fileno() in ready:
            self._take(now)

    def _take(self, now: float) -> None:
        try:
            connection, _ = self._listener.socket.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        caller = _Caller(connection, -1, now + STRANGER_SECONDS)
        self._callers.append(caller)
        connection.setblocking(False)
        if _credentials(connection)[1] != os.geteuid():
            self._drop(caller)  # another user: read nothing from it
            return
        strangers = [caller for caller in self._callers if caller.peer < 0]
        if len(strangers) > MAX_STRANGERS:
            self._drop(strangers[0])

    def _drop(self, caller: _Caller) -> None:
        caller.socket.close()
        self._callers.remove(caller)

    def _read(self, caller: _Caller) -> None:
        """Read a caller's proof; keep the connection once it is valid, drop it if it is not."""
        try:
            data = caller.socket.recv(_PROOF.size - len(caller.data))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        caller.data += data
        if data and len(caller.data) < _PROOF.size:
            return
        peer = self._proved(caller)
        if peer >= 0:
            self._callers.remove(caller)
            self._keep(peer, caller.socket, answer=caller.peer < 0)
            return
        self._drop(caller)
        if caller.peer >= 0:  # its process was checked, so the rank failed or is in another group
            self._check()
            raise PeerFailureError(
                f"rank {self._rank}: rank {caller.peer} "
                + ("did not prove that it is in this group" if data else "closed the connection"),
                failed_rank=caller.peer,
            )

    def _proved(self, caller: _Caller) -> int:
        """Return the rank that a caller has proved to be; -1 if its proof is invalid."""
        if len(caller.data) != _PROOF.size:
            return -1
        magic, peer, other, token = _PROOF.unpack(caller.data)
        if magic != MAGIC or other != self._rank or peer not in self._peers:
            return -1
        expected = peer > self._rank if caller.peer < 0 else peer == caller.peer
        if not expected or peer in self._sockets:
            return -1
        if not hmac.compare_digest(token, self._addresses[peer].token.encode()):
            return -1
        try:
            self._require_process(caller.socket, peer)
        except PeerFailureError:
            return -1
        return int(peer)

    def _keep(self, peer: int, connection: socket.socket, *, answer: bool) -> None:
        self._sockets[peer] = connection
        if answer:
            self._prove(connection, peer)
        pid, _ = _credentials(connection)
        if pid > 0 and hasattr(os, "pidfd_open"):
            try:
                self._processes[peer] = os.pidfd_open(pid)
            except OSError as error:
                # Some sandboxes forbid it; if the process has ended, the socket shows it.
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                    raise

    # ---- passing memory -------------------------------------------------------------------

    def pass_memory(self, fd: int, take: Callable[[int, int], None]) -> None:
        """Pass a descriptor to every peer, and receive theirs.

        The kernel limits a user's descriptors in flight. So each rank starts with the next rank,
        and sends no more descriptors than it has received, plus one.

        Args:
            fd: this rank's descriptor.
            take: called with a peer and its descriptor, which it owns.

        Raises:
            PeerFailureError: a peer failed, timed out, or passed something else.
            OSError: a connection failed, or too many descriptors were in flight for too long.
        """
        end, pause = time.monotonic() + self._timeout, _PAUSE
        unsent = deque(sorted(self._peers, key=lambda peer: (peer < self._rank, peer)))
        awaited = set(self._peers)
        while unsent or awaited:
            may_send = bool(unsent) and len(unsent) >= len(awaited)
            sent = may_send and self.send_memory(unsent[0], fd)
            if sent:
                unsent.popleft()
            ready = self._speaking(awaited, 0 if sent else pause if may_send else _SLICE)
            for peer in ready:
                take(peer, self.receive_memory(peer))
                awaited.remove(peer)
            if sent or ready:
                end, pause = time.monotonic() + self._timeout, _PAUSE
                continue
            self._check()
            pause = min(2 * pause, _SLICE)
            if time.monotonic() > end:
                self._raise_stuck(may_send, awaited)

    def _speaking(self, peers: set[int], seconds: float) -> list[int]:
        """Wait at most ``seconds`` until peers have sent something; return those peers."""
        poll = select.poll()
        by_socket = {self._sockets[peer].fileno(): peer for peer in peers}
        for fd in by_socket:
            poll.register(fd, select.POLLIN)
        return [by_socket[fd] for fd, _ in poll.poll(1000 * seconds)]

    def _raise_stuck(self, may_send: bool, awaited: set[int]) -> NoReturn:
        if may_send:
            raise OSError(
                errno.ETOOMANYREFS,
                f"for {self._timeout:g} s too many descriptors were in flight between processes of"
                " this user; raise the limit with ulimit -n",
            )
        peer = min(awaited)
        raise PeerFailureError(
            f"rank {self._rank}: rank {peer} passed no memory within {self._timeout:g} s",
            failed_rank=peer,
        )

    def send_memory(self, peer: int, fd: int) -> bool:
        """Pass a descriptor to a peer; False if too many are in flight and the caller must retry.

        Raises:
            PeerFailureError: the peer is gone.
        """
        try:
            with self._talking_to(peer):
                socket.send_fds(self._sockets[peer], [_MEMORY], [fd])
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS:
                raise
            return False
        return True

    def receive_memory(self, peer: int) -> int:
        """Return the descriptor that a peer has passed; the caller owns it.

        Raises:
            PeerFailureError: the peer failed, or passed something else.
            OSError: the connection failed.
        """
        size = array.array("i").itemsize
        with self._talking_to(peer):
            data, parts, flags, _ = self._sockets[peer].recvmsg(
                len(_MEMORY), socket.CMSG_SPACE(8 * size), socket.MSG_CMSG_CLOEXEC
            )
        passed = array.array("i")
        for level, kind, part in parts:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                passed.frombytes(part[: len(part) - len(part) % size])
        fds: list[int] = passed.tolist()
        if data == _MEMORY and len(fds) == 1 and not flags & socket.MSG_CTRUNC:
            return fds[0]
        for fd in fds:
            os.close(fd)
        if not data:
            self._check()
            what = "ended"
        else:
            what = f"passed {len(fds)} descriptors instead of one"
        raise PeerFailureError(
            f"rank {self._rank}: rank {peer} {what} while memory was exchanged", failed_rank=peer
        )

    # ---- ending ---------------------------------------------------------------------------

    def shut_down(self) -> None:
        """Shut down the connections but keep their descriptors, which the engine watches."""
        for connection in self._sockets.values():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def leave_to_parent(self) -> None:
        """Close this child's copies of the descriptors, which would hide the parent's death."""
        self.close()

    def close(self) -> None:
        """Close the connections, by which peers see that this rank has gone."""
        for connection in [c.socket for c in self._callers] + list(self._sockets.values()):
            connection.close()  # idempotent
        while self._processes:
            # Removed before it is closed: after Ctrl-C or a fork here, a second close could hit
            # another file with the same number.
            os.close(self._processes.popitem()[1])
        self._callers.clear()
        self._sockets.clear()
