"""Fabric ``shm``: anonymous shared memory between the processes of one machine.

Each rank owns a memfd, so a job killed at any moment leaves nothing behind. A peer opens it as
/proc/PID/fd/FD, which the kernel allows to processes of the same user alone, and only if the link
there has the memfd's random name, which its owner has sent over the store: it is the right process
of the right machine. Each rank also holds a pipe: end-of-file, or the end of the peer's process,
shows a peer's death at once.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Sequence
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
from ultraep_comm.fabrics.memory import HINT, require_memory
from ultraep_comm.fabrics.rendezvous import PeerFailureError, Rendezvous
from ultraep_comm.system import Process, boot_id, watch_forks

# Values of linux/fcntl.h that Python 3.10's fcntl does not export everywhere.
_ADD_SEALS, _GET_SEALS = 1033, 1034
_SEAL_SEAL, _SEAL_SHRINK, _SEAL_GROW = 1, 2, 4
UNKNOWN = "unknown "  # how the id of a machine begins that is not known
_FIXED_SIZE = _SEAL_SEAL | _SEAL_SHRINK | _SEAL_GROW


def machine_id() -> str:
    """Return a text that names this machine's boot and network namespace; equal ids share memory.

    Unless the machines were cloned while they ran; see `find_apart`. Where /proc does not tell, the
    id is one that no other process has, and begins with `UNKNOWN`.
    """
    with contextlib.suppress(OSError):
        if boot := boot_id():
            return f"{boot}-{os.stat('/proc/self/ns/net').st_ino}"
    return _unknown_machine()


@lru_cache(1)
def _unknown_machine() -> str:
    return UNKNOWN + secrets.token_hex(16)


def say_unknown(machines: list[str]) -> str:
    """Return why it is not known which ranks share memory; an empty text: it is."""
    unknown = [rank for rank, machine in enumerate(machines) if machine.startswith(UNKNOWN)]
    if not unknown or len(machines) == 1:
        return ""
    return f"{name_ranks(unknown)}: /proc has no boot id or network namespace"


# ---- files of other ranks -----------------------------------------------------------------------


def share(fd: int) -> tuple[int, str]:
    """Return the record by which a peer finds a file that this process has open."""
    return fd, os.readlink(f"/proc/self/fd/{fd}")


def find_shared(process: Process, shared: Sequence[int | str]) -> str:
    """Return the path of a file that a process shares, by its record of :func:`share`.

    Raises:
        OSError: the process has no such file: it has ended, runs in another pid namespace or on
            another machine, or this one must not look at it.
    """
    fd, link = shared
    path = f"/proc/{process.pid}/fd/{fd}"
    if not process.is_here() or os.readlink(path) != link:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    return path


def open_shared(rendezvous: Rendezvous, peer: int, shared: Sequence[int | str], flags: int) -> int:
    """Open a file that a peer shares, or this rank itself.

    Raises:
        PeerFailureError: the peer no longer has it.
        BootstrapError: no descriptor is left.
    """
    try:
        if peer == rendezvous.rank:
            return os.open(f"/proc/self/fd/{shared[0]}", flags)
        return os.open(find_shared(rendezvous.processes[peer], shared), flags)
    except (FileNotFoundError, PermissionError, ProcessLookupError) as error:
        raise PeerFailureError(
            f"rank {rendezvous.rank}: no access to a file of rank {peer} ({error}); has its process"
            " ended?",
            failed_rank=peer,
        ) from error
    except OSError as error:
        raise _no_descriptor(rendezvous.rank, error) from error


def _no_descriptor(rank: int, error: OSError) -> BootstrapError:
    return BootstrapError(
        f"rank {rank}: files to share memory with the ranks on this machine, two for each, cannot"
        f" be opened ({error.strerror}); raise the limit with ulimit -n, or close files",
        failed_rank=rank,
    )


def create_named_memory(rank: int) -> int:
    """Return an empty memfd that :func:`find_shared` takes for no other.

    Raises:
        BootstrapError: no descriptor is left.
    """
    name = f"ultraep_comm-{secrets.token_hex(16)}"
    try:
        return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise _no_descriptor(rank, error) from error


def find_apart(rendezvous: Rendezvous) -> list[int]:
    """Return the ranks that cannot open rank 0's memory, of ranks with equal ids. Collective.

    Raises:
        BootstrapError: a rank failed.
    """
    with rendezvous.failure_scope():
        fd = create_named_memory(rendezvous.rank)
        try:
            shared = rendezvous.exchange(share(fd))[0]
            reached = rendezvous.rank == 0
            with contextlib.suppress(OSError):
                reached = reached or bool(find_shared(rendezvous.processes[0], shared))
            return [r for r, found in enumerate(rendezvous.exchange(reached)) if not found]
        finally:
            os.close(fd)


def say_apart(ranks: list[int]) -> str:
    """Say why there is no shared memory with the ranks that `find_apart` returned."""
    return (
        f"{name_ranks(ranks)} cannot open the memory of rank 0 in /proc, though the boot id and"
        " network namespace are the same: the ranks run in different pid namespaces or as"
        " different users, a sandbox forbids it, or the machines were cloned while they ran"
    )


# ---- memory -------------------------------------------------------------------------------------


def create_memory(num_bytes: int, ranks_here: int, rank: int) -> int:
    """Return a memfd with its pages reserved and its size sealed.

    Raises:
        OutOfSharedMemoryError: the memory of the ranks here does not fit on this machine.
        BootstrapError: no descriptor is left.
    """
    require_memory(num_bytes, rank, ranks_here)
    fd = create_named_memory(rank)
    try:
        # Reserves all pages now: running out of memory on first touch would be a SIGBUS.
        os.posix_fallocate(fd, 0, num_bytes)
        # A peer that shrinks the memory would cause the same signal.
        fcntl.fcntl(fd, _ADD_SEALS, _FIXED_SIZE)
    except OSError as error:
        os.close(fd)
        raise OutOfSharedMemoryError(
            f"rank {rank}: {num_bytes} bytes of shared memory could not be reserved"
            f" ({error.strerror}); {HINT}",
            failed_rank=rank,
        ) from error
    except BaseException:  # Ctrl-C
        os.close(fd)
        raise
    return fd


def map_peer(fd: int, rank: int, peer: int, num_bytes: int) -> NDArray[np.uint8]:
    """Check and map the memory that a peer shares; closes the descriptor.

    Raises:
        PeerFailureError: it belongs to another user, has another size, or its size is not sealed.
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
            raise PeerFailureError(
                f"rank {rank}: rank {peer} shares {status.st_size} bytes of user {status.st_uid}"
                f" with seals {seals}; expected {num_bytes} sealed bytes of user {os.geteuid()}",
                failed_rank=peer,
            )
        return _core.map_shared(fd, num_bytes)
    finally:
        os.close(fd)


class ShmFabric:
    """Memory of ranks on one machine. Constructing it is collective.

    Attributes:
        peer_pipes: read ends of the peers' pipes, by rank, at end-of-file once the peer has ended
            or closed its fabric; -1 for this rank.
        peer_processes: pidfds of the peers, by rank, readable once they have ended, even if a child
            holds their pipes; -1: unknown.

    Args:
        rendezvous: exchanges records with the peers.

    Raises:
        BootstrapError: a rank failed.
        UnsupportedError: a rank cannot open the others' memory.
    """

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._rendezvous = rendezvous
        self._opened: list[int] = []
        self.peer_pipes = [-1] * rendezvous.num_ranks
        self.peer_processes = [-1] * rendezvous.num_ranks
        watch_forks(self)
        with rendezvous.failure_scope(), contextlib.ExitStack() as undo:
            undo.callback(self.leave_to_parent)
            if apart := find_apart(rendezvous):
                raise UnsupportedError(f"{say_apart(apart)}. Use engine='c10d'")
            self._watch_peers()
            rendezvous.raise_if_any_failed()
            undo.pop_all()

    def _watch_peers(self) -> None:
        try:
            reader, writer = os.pipe()
        except OSError as error:
            raise _no_descriptor(self._rendezvous.rank, error) from error
        self._opened += [reader, writer]
        for peer, shared in enumerate(self._rendezvous.exchange(share(writer))):
            if peer != self._rendezvous.rank:
                flags = os.O_RDONLY | os.O_NONBLOCK
                self.peer_pipes[peer] = open_shared(self._rendezvous, peer, shared, flags)
                self._opened.append(self.peer_pipes[peer])
                self.peer_processes[peer] = self._open_process(peer)

    def _open_process(self, peer: int) -> int:
        """Return a pidfd; -1: a sandbox forbids it, or the process has ended, as its pipe shows."""
        if not hasattr(os, "pidfd_open"):
            return -1
        try:
            fd = os.pidfd_open(self._rendezvous.processes[peer].pid)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                raise _no_descriptor(self._rendezvous.rank, error) from error
            return -1
        self._opened.append(fd)
        return fd

    def allocate(self, num_bytes: int) -> SharedRegion:
        """Create this rank's memory, and map that of all ranks.

        Raises:
            OutOfSharedMemoryError: it does not fit on the machine.
            BootstrapError: a peer ended, or shares something else.
        """
        rendezvous = self._rendezvous
        with rendezvous.failure_scope():
            fd = create_memory(num_bytes, rendezvous.num_ranks, rendezvous.rank)
            try:
                mappings = [
                    self._map(rank, shared, num_bytes)
                    for rank, shared in enumerate(rendezvous.exchange(share(fd)))
                ]
                rendezvous.raise_if_any_failed()  # until then the peers may be opening the memory
            finally:
                os.close(fd)
        return SharedRegion(
            bases=[mapping.ctypes.data for mapping in mappings],
            local=torch.from_numpy(mappings[rendezvous.rank]),
            keep=tuple(mappings),
        )

    def _map(self, rank: int, shared: Sequence[int | str], num_bytes: int) -> NDArray[np.uint8]:
        here = self._rendezvous.rank
        fd = open_shared(self._rendezvous, rank, shared, os.O_RDWR)
        try:
            return map_peer(fd, here, rank, num_bytes)
        except OSError as error:  # the mapping does not fit
            raise OutOfSharedMemoryError(
                f"rank {here}: {num_bytes} bytes of rank {rank} cannot be mapped"
                f" ({error.strerror}); raise the limit with ulimit -v",
                failed_rank=here,
            ) from error

    def leave_to_parent(self) -> None:
        """Close the files: a forked child's copies would hide the parent's death."""
        while self._opened:
            # Removed before it is closed: after Ctrl-C or a fork here, a second close could hit
            # another file with the same number.
            os.close(self._opened.pop())

    def close(self) -> None:
        """Close the pipe, by which peers see that this rank has gone."""
        self.leave_to_parent()
        self._rendezvous.leave()
