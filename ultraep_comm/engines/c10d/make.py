"""Creates the c10d engines of groups."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ultraep_comm.calibration import choose_constants
from ultraep_comm.engines.c10d.channel import (
    BackendChannel,
    BrokenChannelError,
    Channel,
    GlooChannel,
    gloo_is_local,
)
from ultraep_comm.engines.c10d.engine import C10dEngine
from ultraep_comm.engines.c10d.probe import measure
from ultraep_comm.engines.options import Options
from ultraep_comm.errors import BootstrapError, UnsupportedError, first_line, name_ranks
from ultraep_comm.fabrics.private import PrivateFabric
from ultraep_comm.fabrics.rendezvous import (
    DEFAULT_TIMEOUT,
    IFNAME,
    PeerFailureError,
    Rendezvous,
    check_same_arguments,
)
from ultraep_comm.fabrics.shm import UNKNOWN, find_apart, machine_id, say_apart, say_unknown
from ultraep_comm.plan.topology import Topology
from ultraep_comm.system import undocumented

_CONNECT_SECONDS = 60.0
_LOOPBACK_COST = (700_000, 0, 10_000_000, 100_000_000, 100)  # 1.5 GB/s, 100 us, one processor
_MOVES = {"gloo": "cpu", "mpi": "cpu", "nccl": "cuda"}  # others move what they are registered for


class WatchedStore(c10d.Store):
    """A store in which nobody waits for the key of a rank that has failed.

    Args:
        store: has the keys.
        rendezvous: knows of failures.
        limit: of a wait, in seconds.
    """

    def __init__(self, store: c10d.Store, rendezvous: Rendezvous, limit: float) -> None:
        super().__init__()
        self._store, self._rendezvous, self._limit = store, rendezvous, limit

    def set(self, key: str, value: Any) -> None:
        """Set a key."""
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """Wait for a key and return its value."""
        self.wait([key])
        value: bytes = self._store.get(key)
        return value

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait for keys.

        Raises:
            PeerFailureError: a rank is known to have failed or died.
            TimeoutError: they do not come.
        """
        if not self._rendezvous.wait_for(lambda: self._store.check(keys), self._limit):
            raise TimeoutError(f"a rank did not join within {self._limit:g} s")


def movers(process_group: dist.ProcessGroup) -> dict[str, str]:
    """Return the backend of a process group for each type of device whose tensors it sends."""
    return {
        kind: name
        for kind, name in _backends(process_group).items()
        if _MOVES.get(name, kind) == kind
    }


def _backends(process_group: dist.ProcessGroup) -> dict[str, str]:
    """Return the name of a process group's backend for each type of device."""
    try:
        config = dist.get_backend_config(process_group)
    except (ValueError, TypeError, RuntimeError):  # it is outside WORLD
        kinds: list[torch.device] = undocumented(process_group, "_device_types")
        get = undocumented(process_group, "_get_backend")
        return {kind.type: get(kind).name() for kind in kinds}
    return dict(pair.split(":") for pair in config.split(","))


def find_device(process_group: dist.ProcessGroup, wanted: torch.device | None) -> torch.device:
    """Return the device whose tensors a group moves over a process group.

    Args:
        process_group: whose backends move them.
        wanted: None: the accelerator, if there is one and a backend for it, else the CPU.

    Raises:
        UnsupportedError: no backend moves tensors of the device.
    """
    found = movers(process_group)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if wanted is None:
        kinds = [accelerator.type] if accelerator is not None else []
        kind = next((kind for kind in (*kinds, "cpu") if kind in found), None)
    else:
        kind = wanted.type if wanted.type in found else None
    if kind is None:
        what = "device=None" if wanted is None else f"device={str(wanted)!r}"
        given = ",".join(map(":".join, _backends(process_group).items()))
        raise UnsupportedError(
            f"{what} with engine='c10d': the process group has the backends {given}, of which none"
            f" moves tensors on {'a device of this machine' if wanted is None else wanted.type};"
            " create it with a backend for them, such as 'cpu:gloo,cuda:nccl'"
        )
    if kind == "cpu":
        return torch.device("cpu")
    if accelerator is None or accelerator.type != kind:
        raise UnsupportedError(f"device={str(wanted)!r}: torch finds no such device here")
    index = torch.accelerator.current_device_index() if wanted is None else wanted.index
    return torch.device(kind, torch.accelerator.current_device_index() if index is None else index)


def choose_engine(rendezvous: Rendezvous, wanted: torch.device | None) -> tuple[str, str]:
    """Return "host" or "c10d", where both may be used, and why. Collective, the same everywhere."""
    try:
        device = find_device(rendezvous.group, wanted).type
    except UnsupportedError:
        device = "cpu"
    records = rendezvous.exchange([device, machine_id()])
    devices, machines = map(list, zip(*records, strict=True))
    if "cpu" not in devices:
        return "c10d", ""
    if unknown := say_unknown(machines):
        return "c10d", unknown
    if (count := len(set(machines))) > 1:
        return "c10d", f"the ranks are on {count} machines"
    apart = find_apart(rendezvous)
    return ("c10d", say_apart(apart)) if apart else ("host", "")


def make_group_engine(rendezvous: Rendezvous, options: Options, topology: Topology) -> C10dEngine:
    """Create one rank's engine. Collective; arguments have been checked on every rank.

    Raises:
        UnsupportedError: no backend of the process group moves the device's tensors, or torch has
            no gloo, which compares calls.
        BootstrapError: ranks disagree, or a rank left or cannot take part.
        OutOfSharedMemoryError: this rank's slots do not fit in memory.
    """
    options.refuse_check("c10d")
    device = find_device(rendezvous.group, options.device)
    if not dist.is_gloo_available():
        raise UnsupportedError("engine='c10d' compares calls over gloo, which torch lacks here")
    rank, num_ranks = rendezvous.rank, rendezvous.num_ranks
    records = rendezvous.exchange(
        {"device": device.type, "machine": machine_id(), "local": gloo_is_local()}
    )
    check_same_arguments([{"device": record["device"]} for record in records])
    machines = [record["machine"] for record in records]
    check_addresses(machines, [record["local"] for record in records])
    if not options.given_domains:
        different = list(dict.fromkeys(machines))
        topology = topology.with_domains(
            np.array([different.index(machine) for machine in machines], np.int32)
        )
    channels: list[Channel] = []
    with ExitStack() as undo:
        try:
            for channel in open_channels(rendezvous, device):
                channels.append(channel)
                undo.callback(channel.close)
        except PeerFailureError:
            raise
        except Exception as refused:
            raise BootstrapError(
                f"rank {rank}: the engine's process groups could not be created;"
                f" if they cannot connect, {IFNAME}"
                f" ({first_line(refused)})",
                failed_rank=rank,
            ) from refused
        rendezvous.raise_if_any_failed()
        cost: Sequence[int] = choose_constants(
            options.calibration, "c10d", num_ranks, (0, 0, 0, 0, 0)
        )
        if not any(rendezvous.exchange(cost)[0]):
            cost = _measure(channels[0], rank, num_ranks, device)
        cost = rendezvous.exchange(cost)[0]
        engine = _make_one(rank, topology, options, rendezvous.timeout, cost, device, channels)
        undo.callback(engine.close)
        rendezvous.raise_if_any_failed()
        undo.pop_all()
    return engine


def _measure(channel: Channel, rank: int, num_ranks: int, device: torch.device) -> tuple[int, ...]:
    """Return the cost model's constants, as this rank has measured them. Collective."""
    try:
        return measure(channel, rank, num_ranks, device).constants(num_ranks, scales=False)
    except Exception as broken:
        channel.abort()  # or peers would wait for this rank
        text = f"rank {rank}: {str(broken) or type(broken).__name__}"
        if isinstance(broken, BrokenChannelError):  # a peer failed first, or is gone
            raise PeerFailureError(text, failed_rank=broken.peer) from broken
        raise BootstrapError(text, failed_rank=rank) from broken


def check_addresses(machines: Sequence[str], is_local: Sequence[bool]) -> None:
    """Raise BootstrapError on every rank if gloo could not connect ranks of several machines."""
    known = {machine for machine in machines if not machine.startswith(UNKNOWN)}
    local = [r for r, machine in enumerate(machines) if is_local[r] and machine in known]
    if local and len(known) > 1:
        raise BootstrapError(
            f"{name_ranks(local)}: gloo would listen at a loopback address, to which the host name"
            f" resolves; expected one that the ranks on all {len(known)} machines reach: {IFNAME},"
            " or correct /etc/hosts",
            failed_rank=local[0],
        )


def make_loopback_engines(options: Options, topology: Topology) -> list[C10dEngine]:
    """Create the engines of all ranks in this process, over gloo on this machine."""
    num_ranks, cpu = topology.num_ranks, torch.device("cpu")
    store = undocumented(dist, "HashStore")()
    cost = choose_constants(options.calibration, "c10d", num_ranks, _LOOPBACK_COST)

    def connect(rank: int) -> list[Channel]:
        return [
            GlooChannel(c10d.PrefixStore(what, store), rank, num_ranks, _CONNECT_SECONDS)
            for what in ("calls", "alarms")
        ]

    # Each waits for all others.
    with ThreadPoolExecutor(num_ranks) as pool:
        channels = list(pool.map(connect, range(num_ranks)))
    return [
        _make_one(rank, topology, options, DEFAULT_TIMEOUT, cost, cpu, own)
        for rank, own in enumerate(channels)
    ]


def open_channels(rendezvous: Rendezvous, device: torch.device) -> Iterator[Channel]:
    """Yield channels for data (unless the next carries it), calls, and failures. Collective."""
    rank, num_ranks = rendezvous.rank, rendezvous.num_ranks
    limit = min(rendezvous.timeout or _CONNECT_SECONDS, _CONNECT_SECONDS)
    backend = movers(rendezvous.group)[device.type]
    if backend != "gloo":
        ranks = dist.get_process_group_ranks(rendezvous.group)
        run = rendezvous.exchange(secrets.token_hex(16))[0]  # new in torch's registry
        name = f"ultraep_comm/{run}"
        yield BackendChannel(
            rendezvous.store, name, ranks, rank, backend, device, rendezvous.timeout
        )
    # Else one channel carries both, as every process group of gloo has a thread of its own.
    for what in ("calls", "alarms"):
        store = c10d.PrefixStore(what, rendezvous.store)
        yield GlooChannel(WatchedStore(store, rendezvous, limit), rank, num_ranks, limit)


def _make_one(
    rank: int,
    topology: Topology,
    options: Options,
    call_timeout: float,
    cost: Sequence[int],
    device: torch.device,
    channels: Sequence[Channel],
) -> C10dEngine:
    config = options.config(topology, rank, call_timeout, cost)
    setup = options, config, PrivateFabric(rank, topology.num_ranks, device)
    return C10dEngine(topology, rank, setup, channels, call_timeout)
