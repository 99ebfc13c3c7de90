"""Fabric ``shm``: anonymous shared memory between the processes of one machine.

Each rank owns a memfd without a name and passes its descriptor to its peers over a socket in the
abstract namespace, so a job killed at any moment leaves nothing behind. The sockets stay open:
their end-of-file is how a peer's death is noticed at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import socket
import struct
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from ultraep_comm import _core
from ultraep_comm.errors import BootstrapError, OutOfSharedMemoryError
from ultraep_comm.fabrics import SharedRegion
from ultraep_comm.fabrics.bootstrap import Hello, Meeting
from ultraep_comm.forks import watch_forks

# Values of linux/fcntl.h that Python 3.10's fcntl does not export everywhere.
_ADD_SEALS, _GET_SEALS = 1033, 1034
_SEAL_SEAL, _SEAL_SHRINK, _SEAL_GROW = 1, 2, 4
_FIXED_SIZE = _SEAL_SEAL | _SEAL_SHRINK | _SEAL_GROW
_HELLO = struct.Struct("<i16s")


def machine_id() -> bytes:
    """Name this boot of this machine and its network namespace: equal ids can connect."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
    namespace = os.stat("/proc/self/ns/net").st_ino
    return bytes.fromhex(boot) + struct.pack("<Q", namespace)


def available_bytes() -> int:
    """Return how much memory can still be taken without swapping, inside this cgroup."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
            break
    else:
        return 2**63 - 1
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists():
        text = limit.read_text().strip()
        if text != "max":
            available = min(available, int(text) - int(used.read_text()))
    return available


def create_memory(num_bytes: int, ranks_here: int, rank: int) -> int:
    """Return a memfd with its pages reserved and its size sealed.

    Raises:
        OutOfSharedMemoryError: the machine cannot hold the memory of its ranks.
    """
    hint = "use fewer slots_per_rank, smaller experts, or a machine with more memory"
    if num_bytes * ranks_here > available_bytes():
        raise OutOfSharedMemoryError(
            f"rank {rank}: {ranks_here} ranks on this machine need {num_bytes} bytes each, but only"
            f" {available_bytes()} bytes are available; {hint}"
        )
    fd = os.memfd_create("ultraep_comm", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        # Reserved, not hoped for: a page that cannot be had would otherwise be a SIGBUS later.
        os.posix_fallocate(fd, 0, num_bytes)
        # A peer that could shrink the memory could kill us with the same signal.
        fcntl.fcntl(fd, _ADD_SEALS, _FIXED_SIZE)
    except OSError as error:
        os.close(fd)
        raise OutOfSharedMemoryError(
            f"rank {rank}: {num_bytes} bytes of shared memory could not be reserved"
            f" ({error.strerror}); {hint}"
        ) from error
    return fd


class ShmFabric:
    """Connections of one rank to the other ranks on its machine."""

    def __init__(self, meeting: Meeting, listener: socket.socket, hellos: list[Hello]) -> None:
        self._meeting = meeting
        self._rank = meeting.rank
        self._hellos = hellos
        self._timeout = meeting.timeout
        self._sockets: list[socket.socket | None] = [None] * meeting.num_ranks
        here = hellos[self._rank].machine
        self._local = [r for r, hello in enumerate(hellos) if hello.machine == here]
        watch_forks(self)
        try:
            self._connect(listener)
        except OSError as error:
            self.close()
            raise BootstrapError(
                f"rank {self._rank}: a connection to a rank on this machine failed: {error}"
            ) from error
        finally:
            listener.close()

    @staticmethod
    def listen() -> tuple[socket.socket, bytes]:
        """Open this rank's listening socket; its random token is its name and its password."""
        token = secrets.token_bytes(16)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(ShmFabric._name(token))
        listener.listen(1024)
        return listener, token

    @staticmethod
    def _name(token: bytes) -> bytes:
        return b"\0ultraep_comm-" + token.hex()[:16].encode()

    @property
    def peer_sockets(self) -> list[int]:
        """Descriptors of the connections, by rank."""
        return [-1 if s is None else s.fileno() for s in self._sockets]

    @property
    def can_pull(self) -> bool:
        """Every rank of a machine maps the others' memory."""
        return True

    def _connect(self, listener: socket.socket) -> None:
        # Lower ranks are called, higher ranks call. Every listener exists before anyone connects,
        # and the kernel queues connections, so the order cannot deadlock.
        listener.settimeout(self._timeout)
        own = self._hellos[self._rank]
        for peer in self._local:
            if peer < self._rank:
                connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                connection.settimeout(self._timeout)
                connection.connect(self._name(self._hellos[peer].token))
                connection.sendall(_HELLO.pack(self._rank, own.token))
                self._accept_peer(connection, peer)
        for _ in range(sum(peer > self._rank for peer in self._local)):
            connection, _ = listener.accept()
            connection.settimeout(self._timeout)
            peer, token = _HELLO.unpack(self._receive(connection, _HELLO.size))
            if peer not in self._local or token != self._hellos[peer].token:
                connection.close()
                raise BootstrapError(
                    f"rank {self._rank}: a process outside this group connected as rank {peer}"
                )
            self._accept_peer(connection, peer)

    def _accept_peer(self, connection: socket.socket, peer: int) -> None:
        _, uid, _ = struct.unpack(
            "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        )
        if uid != os.getuid():
            connection.close()
            raise BootstrapError(
                f"rank {self._rank}: rank {peer} runs as user {uid}; expected {os.getuid()}"
            )
        self._sockets[peer] = connection

    @staticmethod
    def _receive(connection: socket.socket, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = connection.recv(size - len(data))
            if not part:
                raise ConnectionError("the peer closed the connection")
            data += part
        return data

    def allocate(self, num_bytes: int) -> SharedRegion:
        """Make this rank's memory, pass it to the peers, and map theirs.

        Raises:
            OutOfSharedMemoryError: the machine cannot hold it.
            BootstrapError: a peer ended, or passed something else.
        """
        fd, error = -1, None
        try:
            fd = create_memory(num_bytes, len(self._local), self._rank)
        except OutOfSharedMemoryError as out_of_memory:
            error = out_of_memory
        self._meeting.agree(error)  # nobody waits for the descriptor of a rank without memory
        mappings: list[NDArray[np.uint8] | None] = [None] * len(self._sockets)
        failure: Exception | None = None
        try:
            mappings[self._rank] = _core.map_shared(fd, num_bytes)
            self._exchange(fd, num_bytes, mappings)
        except (OSError, BootstrapError) as trouble:
            self._shut_down()  # peers that still wait for us see the end of the connection
            failure = BootstrapError(f"rank {self._rank}: exchanging memory failed: {trouble}")
        finally:
            os.close(fd)
        self._meeting.agree(failure)
        own = mappings[self._rank]
        assert own is not None
        return SharedRegion(
            bases=[0 if m is None else m.ctypes.data for m in mappings],
            local=torch.from_numpy(own),
            keep=tuple(mappings),
        )

    def _exchange(self, fd: int, num_bytes: int, mappings: list[NDArray[np.uint8] | None]) -> None:
        peers = [(r, s) for r, s in enumerate(self._sockets) if s is not None]
        for _, connection in peers:
            socket.send_fds(connection, [b"M"], [fd])
        for peer, connection in peers:
            mappings[peer] = self._map_peer(connection, peer, num_bytes)

    def _map_peer(self, connection: socket.socket, peer: int, num_bytes: int) -> NDArray[np.uint8]:
        _, fds, _, _ = socket.recv_fds(connection, 1, 1)
        if len(fds) != 1:
            raise BootstrapError(f"rank {self._rank}: rank {peer} ended while memory was exchanged")
        try:
            status = os.fstat(fds[0])
            seals = fcntl.fcntl(fds[0], _GET_SEALS)
            if status.st_uid != os.getuid() or status.st_size != num_bytes or seals != _FIXED_SIZE:
                raise BootstrapError(
                    f"rank {self._rank}: rank {peer} passed {status.st_size} bytes of user"
                    f" {status.st_uid}; expected {num_bytes} sealed bytes of user {os.getuid()}"
                )
            return _core.map_shared(fds[0], num_bytes)
        finally:
            os.close(fds[0])

    def _shut_down(self) -> None:
        """End the connections but keep their descriptors, which the engine looks at."""
        for connection in self._sockets:
            if connection is not None:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def leave_to_parent(self) -> None:
        """Close this process's copies of the descriptors, which would hide the parent's end."""
        self.close()

    def close(self) -> None:
        """Close the connections: peers see that this rank is gone."""
        for connection in self._sockets:
            if connection is not None:
                connection.close()
        self._sockets = [None] * len(self._sockets)
