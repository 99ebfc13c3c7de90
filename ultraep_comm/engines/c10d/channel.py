"""Channels: process groups of one engine's own, on which nothing else issues operations.

What a framework does on its own process groups can therefore not get between an engine's messages.
Operations fail, they never hang: each wait has a limit, and a rank that gives up aborts its
channel, which ends what its peers wait for.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ultraep_comm.env import gloo_interface
from ultraep_comm.errors import first_line
from ultraep_comm.system import undocumented

_FOREVER = timedelta(days=365)
_CUT_TAG = 0x7FFFFFFF  # of no message


class BrokenChannelError(Exception):
    """An operation could not be issued, or did not end.

    Attributes:
        peer: the rank at the other end; -1: unknown.
        receives: whether it was to receive.
        seconds: how long it was waited for.
        timed_out: the limit has passed; else the backend reported an error.
        chunk: the expert, and which piece of it, that it moved; None: not known, or of no transfer.
    """

    chunk: tuple[int, int] | None = None

    def __init__(
        self, text: str, peer: int, *, receives: bool, seconds: float = 0.0, timed_out: bool = False
    ) -> None:
        super().__init__(text)
        self.peer, self.receives = peer, receives
        self.seconds, self.timed_out = seconds, timed_out


class Message(NamedTuple):
    """A dense tensor to send to a peer, or to receive from it. Both ends give the same tag."""

    peer: int
    tag: int
    tensor: torch.Tensor
    receives: bool


class Pending:
    """A message under way."""

    __slots__ = ("_work", "message")

    def __init__(self, message: Message, work: Any) -> None:
        self.message = message
        self._work = work

    def wait(self, limit: float) -> None:
        """Wait until the tensor may be used; with a device, the current stream waits.

        Args:
            limit: in seconds; 0: none.

        Raises:
            BrokenChannelError: it did not end within the limit, or the backend failed.
        """
        start = time.monotonic()
        try:
            self._work.wait(timedelta(seconds=limit) if limit else _FOREVER)
        except RuntimeError as error:
            seconds = time.monotonic() - start
            peer, _, _, receives = self.message
            timed_out = bool(limit) and seconds >= 0.99 * limit
            raise BrokenChannelError(
                first_line(error), peer, receives=receives, seconds=seconds, timed_out=timed_out
            ) from error


def gloo_is_local() -> bool:
    """Return whether gloo would listen at an address that other machines cannot reach.

    As torch chooses it: of the named interface, else the first address of the host's name that can
    be bound to, else the loopback address.
    """
    if interface := gloo_interface():
        return interface == "lo"
    with contextlib.suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(
            socket.gethostname(), None, type=socket.SOCK_STREAM
        ):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.bind(address)
                return ipaddress.ip_address(address[0]).is_loopback
    return True


class GlooChannel:
    """A channel between CPUs. All that is public here every channel has.

    Attributes:
        matches_tags: messages find their receive by the tag, in whatever order these are posted;
            else both ends issue rounds in their order.

    Args:
        store: where the ranks meet, with keys of this channel's own.
        rank, num_ranks: of this channel.
        timeout: for meeting, in seconds.
    """

    matches_tags = True

    def __init__(self, store: Any, rank: int, num_ranks: int, timeout: float) -> None:
        limit = timedelta(seconds=timeout) if timeout else _FOREVER
        self._group: Any = dist.ProcessGroupGloo(store, rank, num_ranks, limit)

    def post(self, messages: Sequence[Message]) -> list[Pending]:
        """Issue the messages of one round, in the order of rounds on every rank.

        Receives come first: a sender's bytes leave once its peer waits for them.

        Raises:
            BrokenChannelError: the backend refuses one.
        """
        group = self._group
        pending = []
        for message in messages:
            peer, tag, tensor, receives = message
            try:
                work = (group.recv if receives else group.send)([tensor], peer, tag)
            except RuntimeError as error:
                raise BrokenChannelError(first_line(error), peer, receives=receives) from error
            pending.append(Pending(message, work))
        return pending

    def abort(self) -> None:
        """Make all operations fail, on this rank and on its peers. From any thread."""
        if self._group is not None:
            _abort_gloo(self._group)

    def close(self) -> None:
        """Close the connections and end gloo's threads. Nothing is under way."""
        self._group = None


def _abort_gloo(group: Any) -> None:
    """Let an operation time out: gloo then closes all connections, which its ``abort`` does not.

    A connection that is closed already refuses it.
    """
    size = group.size()
    for other in range(1, size):
        with contextlib.suppress(RuntimeError):  # that is what is wanted
            never = group.recv(
                [torch.empty(1, dtype=torch.uint8, device="cpu")],
                (group.rank() + other) % size,
                _CUT_TAG,
            )
            never.wait(timedelta(milliseconds=1))


class BackendChannel:
    """A channel over any backend, by torch.distributed's registry of process groups.

    `torch.distributed.new_group` has to be called by all ranks of WORLD, or names the group after
    what a rank is a member of, so that members may not meet. This one is named by the caller.

    Args:
        store: where the ranks meet.
        name: the process group's; new, and the same on all ranks.
        ranks: the members' global ranks, in the order of their ranks here.
        rank: of this process here.
        backend: its name.
        device: of the tensors.
        timeout: in seconds; 0: none.
    """

    matches_tags = False

    def __init__(
        self,
        store: Any,
        name: str,
        ranks: Sequence[int],
        rank: int,
        backend: str,
        device: torch.device,
        timeout: float,
    ) -> None:
        self._device = device
        make = undocumented(distributed_c10d, "_new_process_group_helper")
        limit = timedelta(seconds=timeout) if timeout else _FOREVER
        group, _ = make(
            len(ranks), rank, list(ranks), dist.Backend(backend), store, name, timeout=limit
        )
        world = undocumented(distributed_c10d, "_world")
        world.pg_group_ranks[group] = {member: i for i, member in enumerate(ranks)}
        self._group: Any = group

    def post(self, messages: Sequence[Message]) -> list[Pending]:
        """Issue messages as one batch, which a backend may run in any order."""
        if not messages:
            return []
        group = self._group
        operations = [
            dist.P2POp(
                dist.irecv if m.receives else dist.isend,
                m.tensor,
                group=group,
                tag=m.tag,
                group_peer=m.peer,
            )
            for m in messages
        ]
        try:
            works = dist.batch_isend_irecv(operations)
        except RuntimeError as error:
            first, *others = messages
            peer = first.peer if all(m.peer == first.peer for m in others) else -1
            raise BrokenChannelError(first_line(error), peer, receives=first.receives) from error
        # A backend that runs a batch as one returns one work for all of it.
        shared = works[0]
        return [
            Pending(message, works[i] if len(works) == len(messages) else shared)
            for i, message in enumerate(messages)
        ]

    def abort(self) -> None:
        """Abort the process group."""
        if self._group is None:
            return
        backend = undocumented(self._group, "_get_backend")(self._device)
        if isinstance(backend, dist.ProcessGroupGloo):
            _abort_gloo(backend)
            return
        with contextlib.suppress(AttributeError, RuntimeError):
            backend.abort()

    def close(self) -> None:
        """Destroy the process group."""
        group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(RuntimeError, ValueError):  # it has failed, or torch has ended
                dist.destroy_process_group(group)


Channel = GlooChannel | BackendChannel
