"""Making groups of the host engine."""

from __future__ import annotations

import os

import numpy as np

from ultraep_comm.errors import BootstrapError, UnsupportedError
from ultraep_comm.fabrics.bootstrap import DEFAULT_TIMEOUT, Hello, Meeting, check_same_arguments
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
    listener, token = ShmFabric.listen()
    num_cores = len(os.sched_getaffinity(0))
    built_in = cost_constants(num_cores)
    hellos = meeting.exchange(
        Hello(
            digest=options.digest(topology, given_domains),
            machine=machine_id(),
            token=token,
            pid=os.getpid(),
            cost=options.calibration.constants("host", topology.num_ranks, built_in),
        )
    )
    try:
        topology = place(topology, hellos, given_domains)
    except BaseException:
        listener.close()
        raise
    fabric, error = None, None
    try:
        fabric = ShmFabric(meeting, listener, hellos)
    except BootstrapError as no_connection:
        error = no_connection
    meeting.agree(error)
    assert fabric is not None

    ranks_here = sum(h.machine == hellos[meeting.rank].machine for h in hellos)
    config = options.config(topology, meeting.rank, meeting.timeout, hellos[0].cost)
    config.num_workers = options.num_sms or max(1, min(8, num_cores // ranks_here))
    try:
        return Group(
            rank=meeting.rank,
            topology=topology,
            segments=options.segments,
            grads=options.grads,
            config=config,
            fabric=fabric,
            # The fabric reaches one machine; the process group reaches all.
            loads=None if ranks_here == meeting.num_ranks else ProcessGroupLoads(meeting),
            check=options.check,
        )
    except BaseException:
        fabric.close()
        raise


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
                check=options.check,
            )
        )
    return groups
