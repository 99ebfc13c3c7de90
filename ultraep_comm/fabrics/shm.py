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
from ultraep_comm.fabrics.memory import available_memory
from ultraep_comm.fabrics.rendezvous import PeerFailureError, Rendezvous
from ultraep_comm.fabrics.sockets import (
    Address,
    Connections,
    Listener,
    can_reach,
    reserve_descriptors,
)
from ultraep_comm.system import boot_id

# Values of linux/fcntl.h that Python 3.10's fcntl does not export everywhere.
_ADD_SEALS, _GET_SEALS = 1033, 1034
_SEAL_SEAL, _SEAL_SHRINK, _SEAL_GROW = 1, 2, 4
UNKNOWN = "unknown "  # how the id of a machine begins that is not known
_FIXED_SIZE = _SEAL_SEAL | _SEAL_SHRINK | _SEAL_GROW


def machine_id() -> str:
    """Return a text that names this machine's boot and network namespace; equal ids can connect.

    Unless the machines were cloned while they ran; see `find_apart`. Where /proc does not tell, the
    id is one that no other process has, and begins with `UNKNOWN`.
    """
    with contextlib.suppress(OSError):
        if boot := boot_id():
            return f"{boot.hex()}-{os.stat('/proc/self/ns/net').st_ino}"
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


def find_apart(rendezvous: Rendezvous, addresses: Sequence[Address]) -> list[int]:
    """Return the ranks that do not reach rank 0, though their machines' ids are equal. Collective.

    Args:
        rendezvous: exchanges what each rank found.
        addresses: of all ranks, which listen until this returns.
    """
    reached = rendezvous.rank == 0 or can_reach(addresses[0])
    return [r for r, found in enumerate(rendezvous.exchange(reached)) if not found]


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
                f"rank {rank}: rank {peer} passed {status.st_size} bytes of user {status.st_uid}"
                f" with seals {seals}; expected {num_bytes} sealed bytes of user {os.geteuid()}",
                failed_rank=peer,
            )
        return _core.map_shared(fd, num_bytes)
    finally:
        os.close(fd)


class ShmFabric:
    """Memory of ranks on one machine. Constructing it is collective.

    Args:
        rendezvous: exchanges records with the peers.
        listener: this rank's listener; the caller closes it.
        addresses: of all ranks ``[G]``.

    Raises:
        BootstrapError: a rank could not connect.
        UnsupportedError: ranks with one id of the machine are on several.
    """

    def __init__(
        self, rendezvous: Rendezvous, listener: Listener, addresses: Sequence[Address]
    ) -> None:
        self._rendezvous = rendezvous
        self._rank = rank = rendezvous.rank
        self._peers = [peer for peer in range(rendezvous.num_ranks) if peer != rank]
        self._connections = Connections(
            listener, addresses, self._peers, rendezvous.timeout, rendezvous.raise_failure
        )
        with rendezvous.failure_scope(), contextlib.ExitStack() as undo:
            undo.callback(self._connections.close)
            # Before any rank waits for this one's connections.
            reserve_descriptors(rank, len(self._peers))
            if apart := find_apart(rendezvous, addresses):
                raise UnsupportedError(f"{say_apart(apart)}. Use engine='c10d'")
            try:
                self._connections.connect()
            except OSError as trouble:
                raise BootstrapError(
                    f"rank {rank}: a connection to a rank on this machine failed: {trouble}",
                    failed_rank=rank,
                ) from trouble
            rendezvous.raise_if_any_failed()
            undo.pop_all()

    @property
    def peer_sockets(self) -> list[int]:
        """Descriptors of the connections, by rank; -1 for this rank."""
        return self._connections.sockets

    @property
    def peer_processes(self) -> list[int]:
        """Descriptors of the peers' processes, by rank; -1: unknown."""
        return self._connections.processes

    @property
    def can_pull(self) -> bool:
        """True: every rank of a machine maps the others' memory."""
        return True

    def allocate(self, num_bytes: int) -> SharedRegion:
        """Create this rank's memory, pass it to the peers, and map theirs.

        Raises:
            OutOfSharedMemoryError: it does not fit on the machine.
            BootstrapError: a peer ended, or passed something else.
        """
        with self._rendezvous.failure_scope(), contextlib.ExitStack() as undo:
            undo.callback(self._connections.shut_down)  # peers that wait see end-of-file
            fd = create_memory(num_bytes, len(self._peers) + 1, self._rank)
            try:
                self._rendezvous.raise_if_any_failed()  # before any rank waits for a descriptor
                mappings = self._map(fd, num_bytes)
            finally:
                os.close(fd)
            self._rendezvous.raise_if_any_failed()
            undo.pop_all()
        own = mappings[self._rank]
        assert own is not None
        return SharedRegion(
            bases=[0 if m is None else m.ctypes.data for m in mappings],
            local=torch.from_numpy(own),
            keep=tuple(mappings),
        )

    def _map(self, fd: int, num_bytes: int) -> list[NDArray[np.uint8] | None]:
        """Map this rank's memory and that of its peers; return the mappings by rank."""
        mappings: list[NDArray[np.uint8] | None] = [None] * self._rendezvous.num_ranks

        def take(peer: int, passed: int) -> None:
            mappings[peer] = map_peer(passed, self._rank, peer, num_bytes)

        try:
            mappings[self._rank] = _core.map_shared(fd, num_bytes)
            self._connections.pass_memory(fd, take)
        except OSError as trouble:
            full = trouble.errno == errno.ENOMEM  # the mapping does not fit
            raise (OutOfSharedMemoryError if full else BootstrapError)(
                f"rank {self._rank}: exchanging memory failed: {trouble}", failed_rank=self._rank
            ) from trouble
        return mappings

    def close(self) -> None:
        """Close the connections, by which peers see that this rank has gone."""
        self._connections.close()
        self._rendezvous.leave()
