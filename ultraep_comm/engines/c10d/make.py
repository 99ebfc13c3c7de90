"""Creates the c10d engines of groups."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ultraep_comm import _core
from ultraep_comm.engines.base import start_engine
from ultraep_comm.engines.c10d.agreement import Agreement
from ultraep_comm.engines.c10d.channel import (
    BackendChannel,
    BrokenChannelError,
    Channel,
    GlooChannel,
    gloo_is_local,
)
from ultraep_comm.engines.c10d.engine import C10dEngine, Slots
from ultraep_comm.engines.c10d.order import DeviceOrder, HostOrder
from ultraep_comm.engines.c10d.probe import measure
from ultraep_comm.engines.options import WAIT_TIMEOUT, Options
from ultraep_comm.errors import BootstrapError, UnsupportedError, name_ranks
from ultraep_comm.fabrics.meeting import (
    DEFAULT_TIMEOUT,
    IFNAME,
    EchoError,
    Hello,
    Meeting,
    check_same_arguments,
)
from ultraep_comm.fabrics.private import PrivateFabric
from ultraep_comm.fabrics.shm import (
    UNKNOWN,
    find_apart,
    machine_id,
    say_apart,
    say_unknown,
)
from ultraep_comm.fabrics.sockets import Listener, cannot_listen
from ultraep_comm.plan.topology import Topology
from ultraep_comm.system import undocumented

_CONNECT_SECONDS = 60.0
_POLL = 0.1  # seconds between looks for a failure
_LOOPBACK_COST = (700_000, 0, 10_000_000, 100_000_000, 100)  # 1.5 GB/s, 100 us, one processor
_MOVES = {"gloo": "cpu", "mpi": "cpu", "nccl": "cuda"}  # others move what they are registered for


class WatchedStore(c10d.Store):
    """A store in which nobody waits for the key of a rank that has failed.

    Args:
        store: has the keys.
        meeting: knows of failures.
        limit: of a wait, in seconds.
    """

    def __init__(self, store: c10d.Store, meeting: Meeting, limit: float) -> None:
        super().__init__()
        self._store, self._meeting, self._limit = store, meeting, limit

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
            EchoError: a rank is known to have failed or died.
            TimeoutError: they do not come.
        """
        start = polled = time.monotonic()
        pause = 2e-4
        while not self._store.check(keys):
            time.sleep(pause)
            pause = min(1.5 * pause, 0.02)
            if (now := time.monotonic()) - polled > _POLL:
                polled = now
                self._meeting.raise_failure()
                if now - start > self._limit:
                    raise TimeoutError(f"a rank has not come within {self._limit:g} s")


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


def choose_engine(meeting: Meeting, wanted: torch.device | None) -> tuple[str, str]:
    """Return "host" or "c10d", where both may be used, and why. Collective, the same everywhere."""
    try:
        device = find_device(meeting.group, wanted).type
    except UnsupportedError:
        device = "cpu"
    error, hello, listening = None, Hello(), ExitStack()
    try:
        listener = listening.enter_context(closing(Listener(meeting.rank)))
        values = (int(device != "cpu"),)
        hello = Hello(machine=machine_id(), address=listener.address, values=values)
    except OSError as refused:
        error = cannot_listen(meeting.rank, refused)
    with listening:
        hellos = meeting.exchange(hello, error)
        machines = {hello.machine for hello in hellos}
        if all(hello.values[0] for hello in hellos):
            return "c10d", ""
        if unknown := say_unknown(hellos):
            return "c10d", unknown
        if len(machines) > 1:
            return "c10d", f"the ranks are on {len(machines)} machines"
        apart = find_apart(meeting, hellos)
        return ("c10d", say_apart(apart)) if apart else ("host", "")


def make_group_engine(
    meeting: Meeting, options: Options, topology: Topology, given_domains: bool
) -> C10dEngine:
    """Create one rank's engine. Collective; arguments have been checked on every rank.

    Raises:
        UnsupportedError: no backend of the process group moves the device's tensors, or torch has
            no gloo, which compares calls.
        BootstrapError: ranks disagree, or a rank left or cannot take part.
        OutOfSharedMemoryError: this rank's slots do not fit in memory.
    """
    error: Exception | None = None
    device, machine = torch.device("cpu"), b""
    try:
        options.refuse_check("the c10d engine")
        device, machine = find_device(meeting.group, options.device), machine_id()
        if not dist.is_gloo_available():
            raise UnsupportedError("engine='c10d' compares calls over gloo, which torch lacks here")
    except Exception as refused:  # of any type: peers must not wait for this rank
        error = refused
    meeting.agree(error)
    kind = sum(ord(letter) << 8 * i for i, letter in enumerate(device.type[:7]))
    digest = options.digest(topology, given_domains) ^ kind  # the same kind of device on all ranks
    hello = Hello(
        digest=digest,
        machine=machine,
        token=secrets.token_bytes(16),
        values=(int(gloo_is_local()),),
    )
    hellos = meeting.exchange(hello)
    check_same_arguments(hellos)
    check_addresses(hellos)
    if not given_domains:
        machines = {m: i for i, m in enumerate(dict.fromkeys(h.machine for h in hellos))}
        topology = topology.with_domains(np.array([machines[h.machine] for h in hellos], np.int32))
    channels: list[Channel] = []
    engine = None
    try:
        try:
            channels.extend(open_channels(meeting, device, hellos[0].token))
        except EchoError as failure:
            error = failure
        except Exception as refused:
            error = BootstrapError(
                f"rank {meeting.rank}: the engine's process groups could not be created;"
                f" if they cannot connect, {IFNAME}"
                f" ({(str(refused) or type(refused).__name__).splitlines()[0]})",
                failed_rank=meeting.rank,
            )
            error.__cause__ = refused
        meeting.agree(error)
        cost: tuple[int, ...] = options.calibration.constants(
            "c10d", meeting.num_ranks, (0, 0, 0, 0, 0)
        )
        if not any(meeting.exchange(Hello(cost=cost))[0].cost):
            try:
                found = measure(channels[0], meeting.rank, meeting.num_ranks, device)
                cost = found.constants(meeting.num_ranks, scales=False)
            except Exception as broken:
                text = f"rank {meeting.rank}: {str(broken) or type(broken).__name__}"
                if isinstance(broken, BrokenChannelError):  # a peer failed first, or is gone
                    error = EchoError(text, failed_rank=broken.peer)
                else:
                    error = BootstrapError(text, failed_rank=meeting.rank)
                error.__cause__ = broken
                channels[0].abort()  # or peers would wait for this rank
        cost = meeting.exchange(Hello(cost=cost), error)[0].cost
        try:
            engine = _make_one(
                meeting.rank, topology, options, meeting.timeout, cost, device, channels
            )
        except Exception as refused:
            error = refused
        meeting.agree(error, last=True)
    except BaseException:
        if engine is not None:
            engine.close()
        for channel in channels:
            channel.close()
        raise
    assert engine is not None
    return engine


def check_addresses(hellos: list[Hello]) -> None:
    """Raise BootstrapError on every rank if gloo could not connect ranks of several machines."""
    known = {h.machine for h in hellos if not h.machine.startswith(UNKNOWN)}
    local = [r for r, hello in enumerate(hellos) if hello.values[0] and hello.machine in known]
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
    options.refuse_check("c10d")
    store = undocumented(dist, "HashStore")()
    cost = options.calibration.constants("c10d", num_ranks, _LOOPBACK_COST)

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


def open_channels(meeting: Meeting, device: torch.device, run: bytes) -> Iterator[Channel]:
    """Yield channels for data (unless the next carries it), calls, and news of failures.

    Collective. ``run``: new, and the same on all ranks.

    Raises:
        UnsupportedError: the process group has no store.
    """
    rank, num_ranks = meeting.rank, meeting.num_ranks
    limit = min(meeting.timeout or _CONNECT_SECONDS, _CONNECT_SECONDS)
    if meeting.store is None:
        raise UnsupportedError("the process group has no store, by which new ones could meet")
    name = f"ultraep_comm/{run.hex()}"
    backend = movers(meeting.group)[device.type]
    if backend != "gloo":
        ranks = dist.get_process_group_ranks(meeting.group)
        yield BackendChannel(meeting.store, name, ranks, rank, backend, device, meeting.timeout)
    # Else one channel carries both, as every process group of gloo has a thread of its own.
    for what in ("calls", "alarms"):
        store = c10d.PrefixStore(f"{name}/{what}", meeting.store)
        yield GlooChannel(WatchedStore(store, meeting, limit), rank, num_ranks, limit)


def _make_one(
    rank: int,
    topology: Topology,
    options: Options,
    call_timeout: float,
    cost: Sequence[int],
    device: torch.device,
    channels: Sequence[Channel],
) -> C10dEngine:
    num_ranks = topology.num_ranks
    config = options.config(topology, rank, call_timeout, cost)
    data, (calls, alarms) = channels[0], channels[-2:]
    given = options.timeout

    def start(config: _core.EngineConfig) -> C10dEngine:
        return C10dEngine(
            topology,
            rank,
            device,
            ledger=_core.C10dLedger(config),
            slots=_find_slots(config, options, fabric.slots),
            channel=data,
            agreement=Agreement(calls, alarms, rank, num_ranks, topology.num_experts),
            call_limit=call_timeout if given is None else given,
            wait_limit=WAIT_TIMEOUT if given is None else given,
            order=HostOrder() if device.type == "cpu" else DeviceOrder(device),
        )

    fabric = PrivateFabric(rank, num_ranks, device)

    return start_engine(rank, topology, options, config, fabric, start)


def _find_slots(config: _core.EngineConfig, options: Options, memory: torch.Tensor) -> Slots:
    """Return views of the slots and their gradients in a rank's memory."""
    layout, per_bank = _core.EngineLayout(config), config.slots_per_rank

    def rows(offset: int, nbytes: int) -> torch.Tensor:
        return memory.narrow(0, offset, per_bank * nbytes).view(per_bank, nbytes)

    slots, grads = list(options.segments.values()), list(options.grads.values())
    offset, grad_offset = iter(layout.slot_offset), iter(layout.grad_offset)
    return Slots(
        names=tuple(options.segments),
        grad_names=tuple(options.grads),
        bytes=[[rows(next(offset), s.nbytes) for s in slots] for _ in range(options.banks)],
        grads=[
            [rows(next(grad_offset), s.nbytes).view(s.dtype) for s in grads]
            for _ in range(options.grad_banks)
        ],
    )
