"""The host engine: threads that copy in shared memory."""

from __future__ import annotations

import contextlib
import os

import numpy as np
import torch

from ultraep_comm import _core
from ultraep_comm.calibration import choose_constants
from ultraep_comm.engines.base import Engine, Objective, Setup
from ultraep_comm.engines.options import Options
from ultraep_comm.errors import BootstrapError, UnsupportedError, name_ranks
from ultraep_comm.fabrics.loopback import make_loopback_fabrics
from ultraep_comm.fabrics.rendezvous import DEFAULT_TIMEOUT, Rendezvous
from ultraep_comm.fabrics.shm import ShmFabric, machine_id, say_unknown
from ultraep_comm.plan.topology import Topology

# The core's methods as they are: one more call in between would take longer than some of them.
_OF_CORE = (
    *("add_region", "transfer", "residents", "version", "slots_to_fill", "synchronize"),
    *("finished_at", "failed_epoch", "report", "health", "reject", "abort", "close"),
)


class HostEngine(Engine):
    """One rank of the host engine: threads that copy in shared memory."""

    _native: _core.Engine

    def __init__(self, topology: Topology, rank: int, setup: Setup) -> None:
        super().__init__(topology, rank, setup)
        self._native = core = _start_threads(rank, self.config)
        for name in _OF_CORE:
            setattr(self, name, getattr(core, name))

    def invalidate(self, bank: int) -> int:
        """Let a bank hold nothing, of the next version, unless a call fills it: return that."""
        last = self._native.last_call(bank)
        if not self._native.is_completed(last):
            return last
        self._native.invalidate(bank)
        return 0

    def gather(
        self, counted: torch.Tensor, load: torch.Tensor, objective: Objective | None = None
    ) -> tuple[int, None]:
        """Exchange counts ``[E]`` into ``load [G, E]``; return the call's epoch."""
        return self._native.exchange(counted.data_ptr(), load.data_ptr()), None

    def is_completed(self, epoch: int, slot: int | None = None) -> bool:
        """Return whether a call has finished or failed, or has filled a slot."""
        if slot is None:
            return self._native.is_completed(epoch)
        return self._native.slot_ready(epoch, slot)

    def wait(self, epoch: int, slots: list[int] | None = None) -> bool:
        """Block until a call has finished, or has filled some slots; False if it has failed."""
        if slots is None:
            return self._native.wait(epoch)
        return self._native.wait_slots(epoch, slots)


def cost_constants(num_cores: int) -> tuple[int, int, int, int, int]:
    """Return the cost model's constants; see `CostModel` in src/core/schedule/cost.hpp.

    One core streams about 20 GB/s; a load costs half a store; two cores together move about 1.2
    times what one does, because they share the memory's bandwidth.
    """
    return (40_000, 20_000, 300_000, 10_000_000, max(100, 60 * num_cores))


def make_shm_engine(rendezvous: Rendezvous, options: Options, topology: Topology) -> HostEngine:
    """Create one rank's engine. Collective; arguments have been checked on every rank.

    Raises:
        BootstrapError: a rank left or cannot take part.
        OutOfSharedMemoryError: this rank's slots do not fit in memory.
        UnsupportedError: the ranks are on several machines.
    """
    num_cores = len(os.sched_getaffinity(0))
    rank, num_ranks = rendezvous.rank, rendezvous.num_ranks
    cost = choose_constants(options.calibration, "host", num_ranks, cost_constants(num_cores))
    records = rendezvous.exchange({"machine": machine_id(), "cost": cost})
    check_machines([record["machine"] for record in records])
    if not options.given_domains:
        topology = topology.with_domains(np.zeros(num_ranks, np.int32))
    fabric = ShmFabric(rendezvous)
    with contextlib.ExitStack() as undo:
        undo.callback(fabric.close)
        config = options.config(topology, rank, rendezvous.timeout, records[0]["cost"])
        config.set_peers(fabric.peer_pipes, fabric.peer_processes)
        config.num_workers = options.num_sms or max(1, min(8, num_cores // num_ranks))
        engine = HostEngine(topology, rank, (options, config, fabric))
        undo.callback(engine.close)
        undo.callback(engine.abort)
        rendezvous.raise_if_any_failed()
        undo.pop_all()
    return engine


def _start_threads(rank: int, config: _core.EngineConfig) -> _core.Engine:
    try:
        return _core.Engine(config)
    except RuntimeError as error:
        raise BootstrapError(
            f"rank {rank}: {config.num_workers} threads could not be started ({error}); raise the"
            " limit of processes with ulimit -u, or create the group with a smaller num_sms",
            failed_rank=rank,
        ) from error


def check_machines(machines: list[str]) -> None:
    """Raise UnsupportedError on every rank unless all share memory."""
    if unknown := say_unknown(machines):
        raise UnsupportedError(
            f"{unknown}, by which the host engine finds the ranks that share memory. Use"
            " engine='c10d'"
        )
    apart = [rank for rank, machine in enumerate(machines) if machine != machines[0]]
    if apart:
        raise UnsupportedError(
            f"the host engine reaches only the memory of one machine, but rank 0 and"
            f" {name_ranks(apart)} of {len(machines)} are on different ones. Use engine='c10d'"
        )


def make_loopback_engines(options: Options, topology: Topology) -> list[HostEngine]:
    """Create the engines of all ranks in this process."""
    built_in = cost_constants(len(os.sched_getaffinity(0)))
    cost = choose_constants(options.calibration, "host", topology.num_ranks, built_in)
    made = []
    for rank, fabric in enumerate(make_loopback_fabrics(topology.num_ranks)):
        config = options.config(topology, rank, DEFAULT_TIMEOUT, cost)
        config.num_workers = options.num_sms or 1
        made.append(HostEngine(topology, rank, (options, config, fabric)))
    return made
