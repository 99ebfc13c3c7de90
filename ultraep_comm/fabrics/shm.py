"""Fabric ``shm``: anonymous shared memory between the processes of one machine.

Each rank owns a memfd and passes its descriptor to its peers over a socket in the abstract
namespace, so a job killed at any moment leaves nothing behind. The sockets stay open: end-of-file,
or the end of the peer's process, shows a peer's death at once.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import struct
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from ultraep_comm import _core
from ultraep_comm.errors import (
    BootstrapError,
    OutOfSharedMemoryError,
    UnsupportedError,
    name_ranks,
)
from ultraep_comm.fabrics import SharedRegion
from ultraep_comm.fabrics.meeting import EchoError, Hello, Meeting
from ultraep_comm.fabrics.memory import available_memory
from ultraep_comm.fabrics.sockets import Connections, Listener, can_reach, reserve_descriptors
from ultraep_comm.system import boot_id

# Values of linux/fcntl.h that Python 3.10's fcntl does not export everywhere.
_ADD_SEALS, _GET_SEALS = 1033, 1034
_SEAL_SEAL, _SEAL_SHRINK, _SEAL_GROW = 1, 2, 4
UNKNOWN = b"unknown "  # how the id of a machine begins that is not known
_FIXED_SIZE = _SEAL_SEAL | _SEAL_SHRINK | _SEAL_GROW


def machine_id() -> bytes:
    """Return 24 bytes that name this machine's boot and network namespace; equal ids can connect.

    Unless the machines were cloned while they ran; see `find_apart`. Where /proc does not tell, the
    id is one that no other process has, and begins with `UNKNOWN`.
    """
    with contextlib.suppress(OSError):
        if boot := boot_id():
            return boot + struct.pack("<Q", os.stat("/proc/self/ns/net").st_ino)
    return _unknown_machine()


@lru_cache(1)
def _unknown_machine() -> bytes:
    return UNKNOWN + secrets.token_bytes(24 - len(UNKNOWN))


def say_unknown(hellos: list[Hello]) -> str:
    """Return why it is not known which ranks share memory; an empty text: it is."""
    unknown = [rank for rank, hello in enumerate(hellos) if hello.machine.startswith(UNKNOWN)]
    if not unknown or len(hellos) == 1:
        return ""
    return f"{name_ranks(unknown)}: /proc has no boot id or network namespace"


def find_apart(meeting: Meeting, hellos: list[Hello], error: Exception | None = None) -> list[int]:
    """Return the ranks that do not reach the first rank whose machine's id is theirs. Collective.

    Args:
        meeting: exchanges what each rank found.
        hellos: ``[G]`` records of all ranks, which listen until this returns.
        error: as in `Meeting.exchange`.
    """
    here = hellos[meeting.rank].machine
    first = next(r for r, hello in enumerate(hellos) if hello.machine == here)
    reached = first == meeting.rank or can_reach(hellos[first].address)
    found = meeting.exchange(Hello(values=(int(reached),)), error)
    return [r for r, hello in enumerate(found) if hello.values != (1,)]


def say_apart(ranks: list[int]) -> str:
    """Say why there is no shared memory with the ranks that `find_apart` returned."""
    return (
        f"{name_ranks(ranks)} cannot reach the sockets of a rank with the same boot id and network"
        " namespace: the machines were cloned while they ran, or a sandbox is between them"
    )


def create_memory(num_bytes: int, ranks_here: int, rank: int) -> int:
    """Return a memfd with its pages reserved and its size sealed.

    Raises:
        OutOfSharedMemoryError: the memory of the ranks here does not fit on this machine.
    """
    hint = "use fewer slots_per_rank, smaller experts, or a machine with more memory"
    available = available_memory()
    if num_bytes * ranks_here > available.bytes:
        raise OutOfSharedMemoryError(
            f"rank {rank}: {ranks_here} ranks on this machine need {num_bytes} bytes each, but only"
            f" {available.bytes} bytes are available ({available.limit}); {hint}",
            failed_rank=rank,
        )
    try:
        fd = os.memfd_create("ultraep_comm", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise OutOfSharedMemoryError(
            f"rank {rank}: shared memory could not be created ({error.strerror}); raise the limit"
            " of open files with ulimit -n",
            failed_rank=rank,
        ) from error
    try:
        # Reserves all pages now: running out of memory on first touch would be a SIGBUS.
        os.posix_fallocate(fd, 0, num_bytes)
        # A peer that shrinks the memory would cause the same signal.
        fcntl.fcntl(fd, _ADD_SEALS, _FIXED_SIZE)
    except OSError as error:
        os.close(fd)
        raise OutOfSharedMemoryError(
            f"rank {rank}: {num_bytes} bytes of shared memory could not be reserved"
            f" ({error.strerror}); {hint}",
            failed_rank=rank,
        ) from error
    except BaseException:  # Ctrl-C
        os.close(fd)
        raise
    return fd


def map_peer(fd: int, rank: int, peer: int, num_bytes: int) -> NDArray[np.uint8]:
    """Check and map the memory that a peer has passed; closes the descriptor.

    Raises:
        BootstrapError: it belongs to another user, has another size, or its size is not sealed.
        OSError: it cannot be mapped.
    """
    try:
        status = os.fstat(fd)
        try:
            seals = fcntl.fcntl(fd, _GET_SEALS)
        except OSError:  # not a memfd
            seals = 0
        if (
            not stat.S_ISREG(status.st_mode)
            or status.st_uid != os.geteuid()
            or status.st_size != num_bytes
            or seals != _FIXED_SIZE
        ):
            raise BootstrapError(
                f"rank {rank}: rank {peer} passed {status.st_size} bytes of user {status.st_uid}"
                f" with seals {seals}; expected {num_bytes} sealed bytes of user {os.geteuid()}",
                failed_rank=peer,
            )
        return _core.map_shared(fd, num_bytes)
    finally:
        os.close(fd)


class ShmFabric:
    """Memory of the ranks on this rank's machine. Constructing it is collective.

    Args:
        meeting: exchanges records with the peers.
        listener: this rank's listener; closed here.
        hellos: ``[G]`` records of all ranks.

    Raises:
        BootstrapError: a rank could not connect.
        UnsupportedError: ranks with one id of the machine are on several.
    """

    def __init__(self, meeting: Meeting, listener: Listener, hellos: list[Hello]) -> None:
        self._meeting = meeting
        self._rank = meeting.rank
        here = hellos[self._rank].machine
        self._peers = [
            r for r, hello in enumerate(hellos) if hello.machine == here and r != self._rank
        ]
        self._connections = Connections(
            listener, hellos, self._peers, meeting.timeout, meeting.raise_failure
        )
        with contextlib.closing(listener), meeting.making():
            error: Exception | None = None
            try:
                reserve_descriptors(self._rank, len(self._peers))
            except BootstrapError as too_few:
                error = too_few
            # Before any rank waits for this one's connections.
            if apart := find_apart(meeting, hellos, error):
                raise UnsupportedError(f"{say_apart(apart)}. Use engine='c10d'")
            try:
                self._connections.connect()
            except BootstrapError as trouble:
                self._connections.close()
                error = EchoError(str(trouble), failed_rank=trouble.failed_rank)
            except OSError as trouble:
                self._connections.close()
                error = BootstrapError(
                    f"rank {self._rank}: a connection to a rank on this machine failed: {trouble}",
                    failed_rank=self._rank,
                )
            except BaseException:
                self._connections.close()
                raise
            try:
                meeting.agree(error)
            except BaseException:
                self._connections.close()
                raise

    @property
    def peer_sockets(self) -> list[int]:
        """Descriptors of the connections, by rank; -1 for this rank and other machines."""
        return self._connections.sockets

    @property
    def peer_processes(self) -> list[int]:
        """Descriptors of the peers' processes, by rank; -1: unknown."""
        return self._connections.processes

    @property
    def can_pull(self) -> bool:
        """True: every rank of a machine maps the others' memory."""
        return True

    def begin(self, error: Exception | None) -> None:
        """See :class:`Fabric`."""
        self._meeting.begin(error)

    def allocate(self, num_bytes: int) -> SharedRegion:
        """Create this rank's memory, pass it to the peers, and map theirs.

        Raises:
            OutOfSharedMemoryError: it does not fit on the machine.
            BootstrapError: a peer ended, or passed something else.
        """
        with self._meeting.making():
            return self._allocate(num_bytes)

    def _allocate(self, num_bytes: int) -> SharedRegion:
        fd, error = -1, None
        mappings: list[NDArray[np.uint8] | None] = [None] * self._meeting.num_ranks
        failure: Exception | None = None
        try:
            try:
                fd = create_memory(num_bytes, len(self._peers) + 1, self._rank)
            except OutOfSharedMemoryError as out_of_memory:
                error = out_of_memory
            self._meeting.agree(error)  # before any rank waits for this one's descriptor
            try:
                mappings[self._rank] = _core.map_shared(fd, num_bytes)

                def take(peer: int, passed: int) -> None:
                    mappings[peer] = map_peer(passed, self._rank, peer, num_bytes)

                self._connections.pass_memory(fd, take)
            except EchoError as told:
                failure = told
            except BootstrapError as trouble:
                failure = EchoError(
                    f"rank {self._rank}: exchanging memory failed: {trouble}",
                    failed_rank=trouble.failed_rank,
                )
            except OSError as trouble:
                full = trouble.errno == errno.ENOMEM  # the mapping does not fit
                failure = (OutOfSharedMemoryError if full else BootstrapError)(
                    f"rank {self._rank}: exchanging memory failed: {trouble}",
                    failed_rank=self._rank,
                )
        except BaseException:
            self._connections.shut_down()
            raise
        finally:
            if fd >= 0:
                os.close(fd)
        if failure is not None:
            self._connections.shut_down()  # peers that are still waiting see end-of-file
        self._meeting.agree(failure, last=True)
        own = mappings[self._rank]
        assert own is not None
        return SharedRegion(
            bases=[0 if m is None else m.ctypes.data for m in mappings],
            local=torch.from_numpy(own),
            keep=tuple(mappings),
        )

    def close(self) -> None:
        """Close the connections, by which peers see that this rank has gone."""
        self._connections.close()
        self._meeting.leave()
