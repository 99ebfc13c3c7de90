"""Making groups of the host engine."""

from __future__ import annotations

import os
from functools import partial

import numpy as np

from ultraep_comm import _core
from ultraep_comm.errors import BootstrapError, UnsupportedError
from ultraep_comm.fabrics.bootstrap import DEFAULT_TIMEOUT, Hello, Meeting, check_same_arguments
from ultraep_comm.fabrics.connections import Listener
from ultraep_comm.fabrics.loopback import LoopbackFabric, LoopbackMemory
from ultraep_comm.fabrics.shm import ShmFabric, machine_id
from ultraep_comm.group import Group
from ultraep_comm.loads import ProcessGroupLoads
from ultraep_comm.options import Options
from ultraep_comm.topology import Topology


def cost_constants(num_cores: int) -> tuple[int, int, int, int, int]:
    """Return the cost model's constants; see `CostModel` in src/core/cost.hpp.

    One core streams about 20 GB/s; reading costs half of storing; two cores together move about
    1.2 times what one does, because memory is shared.
    """
    return (40_000, 20_000, 300_000, 10_000_000, max(100, 60 * num_cores))


def make_shm_group(
    meeting: Meeting, options: Options, topology: Topology, given_domains: bool
) -> Group:
    """Make one rank's group. Collective; arguments have been checked on every rank.

    Raises:
        BootstrapError: ranks disagree, or one left or cannot take part.
        OutOfSharedMemoryError: this rank's slots do not fit into memory.
        UnsupportedError: the domains need another engine.
    """
    num_cores = len(os.sched_getaffinity(0))
    listener, error, hello = None, None, Hello()
    try:
        listener = Listener(meeting.rank)
        hello = Hello(
            digest=options.digest(topology, given_domains),
            machine=machine_id(),
            token=listener.token,
            address=listener.address,
            cost=options.calibration.constants(
                "host", topology.num_ranks, cost_constants(num_cores)
            ),
        )
    except OSError as refused:
        error = BootstrapError(
            f"rank {meeting.rank}: no connection can be made here ({refused.strerror}); if open"
            " files are too many, raise the limit with ulimit -n, or close some",
            failed_rank=meeting.rank,
        )
        error.__cause__ = refused
    try:
        hellos = meeting.exchange(hello, error)
        assert listener is not None
        topology = place(topology, hellos, given_domains)
        fabric = ShmFabric(meeting, listener, hellos)
    finally:
        if listener is not None:
            listener.close()

    ranks_here = sum(h.machine == hellos[meeting.rank].machine for h in hellos)
    group = None
    try:
        config = options.config(topology, meeting.rank, meeting.timeout, hellos[0].cost)
        config.num_workers = options.num_sms or max(1, min(8, num_cores // ranks_here))
        try:
            group = Group(
                rank=meeting.rank,
                topology=topology,
                segments=options.segments,
                grads=options.grads,
                config=config,
                fabric=fabric,
                make_engine=partial(_start_engine, rank=meeting.rank),
                # The fabric reaches one machine; the process group reaches all.
                loads=None if ranks_here == meeting.num_ranks else ProcessGroupLoads(meeting),
                check=options.check,
            )
        except NoThreadError as no_thread:  # everything else is known to all
            error = no_thread
        meeting.agree(error, last=True)
    except BaseException:
        if group is not None:
            group.abort()
            group.close()
        fabric.close()
        raise
    assert group is not None
    return group


class NoThreadError(BootstrapError):
    """The engine's threads could not be started."""


def _start_engine(config: _core.EngineConfig, *, rank: int) -> _core.Engine:
    try:
        return _core.Engine(config)
    except RuntimeError as error:
        raise NoThreadError(
            f"rank {rank}: {config.num_workers} threads could not be started ({error}); raise the"
            " limit of processes with ulimit -u, or make the group with a smaller num_sms",
            failed_rank=rank,
        ) from error


def place(topology: Topology, hellos: list[Hello], given_domains: bool) -> Topology:
    """Check that ranks agree, and find the domains. The same result or error on every rank."""
    check_same_arguments(hellos)
    machines = {machine: i for i, machine in enumerate(dict.fromkeys(h.machine for h in hellos))}
    machine = np.array([machines[h.machine] for h in hellos], np.int32)
    if topology.allow_cross_domain and len(machines) > 1:
        raise UnsupportedError(
            f"allow_cross_domain=True over {len(machines)} machines: the host engine reaches one"
            " machine's memory only"
        )
    if not given_domains:
        return topology.with_domains(machine)
    for domain in np.unique(topology.domain):
        if len(np.unique(machine[topology.domain == domain])) > 1:
            raise UnsupportedError(
                f"domain {domain} spans several machines; the host engine reaches one machine's"
                " memory only. Leave domains=None to have them found"
            )
    return topology


def make_loopback_groups(options: Options, topology: Topology) -> list[Group]:
    """Make the groups of all ranks in this process."""
    memory = LoopbackMemory(topology.num_ranks)
    built_in = cost_constants(len(os.sched_getaffinity(0)))
    cost = options.calibration.constants("host", topology.num_ranks, built_in)
    groups = []
    for rank in range(topology.num_ranks):
        config = options.config(topology, rank, DEFAULT_TIMEOUT, cost)
        config.num_workers = options.num_sms or 1
        groups.append(
            Group(
                rank=rank,
                topology=topology,
                segments=options.segments,
                grads=options.grads,
                config=config,
                fabric=LoopbackFabric(memory, rank),
                make_engine=partial(_start_engine, rank=rank),
                check=options.check,
            )
        )
    return groups
