"""Meeting the peers: fixed-size byte records over a process group. Nothing is pickled."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from ultraep_comm.errors import BootstrapError

MAGIC = b"UEPCOMM1"
DEFAULT_TIMEOUT = 1800.0
_RECORD = struct.Struct("<8sI Q 32s 16s i I 5q 256s")  # see Hello


@dataclass(frozen=True, kw_only=True)
class Hello:
    """What every rank tells every other before a group exists.

    Attributes:
        digest: 64 bits over everything that must be equal on all ranks.
        machine: names the machine and network namespace: peers with equal values can connect.
        token: random, proves a connection to be from this rank of this group.
        pid: process id.
        cost: the cost model's constants, used from rank 0.
        error: why this rank cannot take part, shortened; empty: it can.
    """

    digest: int = 0
    machine: bytes = b""
    token: bytes = b""
    pid: int = 0
    cost: tuple[int, ...] = (0, 0, 0, 0, 0)
    error: str = ""

    def pack(self) -> bytes:
        """Return the record's bytes."""
        text = self.error.encode()[:256]
        return _RECORD.pack(
            MAGIC,
            1,
            self.digest,
            self.machine,
            self.token,
            self.pid,
            len(text),
            *self.cost,
            text,
        )

    @classmethod
    def unpack(cls, data: bytes, rank: int) -> Hello:
        """Read a peer's record.

        Raises:
            BootstrapError: it is not one of this version.
        """
        magic, version, digest, machine, token, pid, length, *rest = _RECORD.unpack(data)
        if magic != MAGIC or version != 1 or length > 256:
            raise BootstrapError(
                f"rank {rank} sent a record of another version of ultraep_comm; install the same"
                " version everywhere, and call new_group on every rank at the same point"
            )
        return cls(
            digest=digest,
            machine=machine,
            token=token,
            pid=pid,
            cost=tuple(rest[:5]),
            error=rest[5][:length].decode(errors="replace"),
        )


class Meeting:
    """The caller's process group, used to exchange records."""

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        if not dist.is_initialized():
            raise BootstrapError(
                "torch.distributed is not initialized; call torch.distributed.init_process_group"
                " first, or use new_loopback_groups for ranks in one process"
            )
        group = dist.group.WORLD if process_group is None else process_group
        if not isinstance(group, dist.ProcessGroup):
            raise BootstrapError(
                f"rank {dist.get_rank()} is not a member of the process group;"
                " call new_group on its members only"
            )
        self.group = group
        self.rank = dist.get_rank(group)
        self.num_ranks = dist.get_world_size(group)
        self._device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")

    @property
    def timeout(self) -> float:
        """Return the process group's timeout in seconds."""
        try:
            backend = self.group._get_backend(self._device)
            value = backend.options._timeout
        except (AttributeError, RuntimeError):
            return DEFAULT_TIMEOUT
        return value.total_seconds() if isinstance(value, timedelta) else DEFAULT_TIMEOUT

    def gather(self, mine: torch.Tensor) -> torch.Tensor:
        """Give this rank's tensor to all and return everybody's ``[G, *shape]``, on the CPU.

        Raises:
            BootstrapError: a rank left the process group.
        """
        mine = mine.to(self._device)
        everybody = torch.empty(
            (self.num_ranks, *mine.shape), dtype=mine.dtype, device=self._device
        )
        try:
            dist.all_gather(list(everybody), mine, group=self.group)
        except RuntimeError as error:
            raise BootstrapError(
                f"rank {self.rank}: the process group failed; has a rank left it?"
                f" ({str(error).splitlines()[0]})"
            ) from error
        return everybody.cpu()

    def gather_ints(self, *values: int) -> list[list[int]]:
        """Give integers to all and return everybody's, by rank."""
        rows: list[list[int]] = self.gather(torch.tensor(values, dtype=torch.int64)).tolist()
        return rows

    def exchange(self, hello: Hello) -> list[Hello]:
        """Give this rank's record to all and return everybody's, by rank.

        Raises:
            BootstrapError: a rank left the process group, or sent something else.
        """
        mine = torch.frombuffer(bytearray(hello.pack()), dtype=torch.uint8)
        data = bytes(self.gather(mine).numpy())
        return [
            Hello.unpack(data[r * _RECORD.size : (r + 1) * _RECORD.size], r)
            for r in range(self.num_ranks)
        ]

    def agree(self, error: Exception | None) -> None:
        """Return if no rank has an error; else raise on all: its own, or the first peer's.

        Raises:
            BootstrapError: a peer could not take part.
        """
        hellos = self.exchange(Hello(error="" if error is None else str(error) or "failed"))
        if error is not None:
            raise error
        for rank, hello in enumerate(hellos):
            if hello.error:
                raise BootstrapError(
                    f"rank {self.rank}: no group was made, because rank {rank} failed:"
                    f" {hello.error}"
                )


def check_same_arguments(hellos: list[Hello]) -> None:
    """Raise BootstrapError on every rank if one has called with other arguments."""
    for rank, hello in enumerate(hellos):
        if hello.digest != hellos[0].digest:
            raise BootstrapError(
                f"rank {rank} called new_group with other arguments than rank 0: num_experts,"
                " slots_per_rank, home, domains, expert, tile_bytes, check, engine,"
                " fabric and allow_cross_domain must be equal on every rank"
            )
