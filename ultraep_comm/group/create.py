"""Creation of groups: check the arguments, agree on an engine, and let its module create it."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Sequence
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from ultraep_comm.calibration import from_environment
from ultraep_comm.engines import host
from ultraep_comm.engines.base import Engine
from ultraep_comm.engines.options import ExpertSpec, GroupConfig, Options, allowed_backends
from ultraep_comm.errors import UnsupportedError, name_ranks
from ultraep_comm.fabrics.rendezvous import Rendezvous, check_same_arguments
from ultraep_comm.group.group import Group
from ultraep_comm.group.session import Session
from ultraep_comm.plan.topology import IntsLike, Topology
from ultraep_comm.recording.recorder import dump_at_end, new_run, prepare_folder
from ultraep_comm.weights.binding import GradSpec

_LOGGER = logging.getLogger("ultraep_comm")


def new_group(
    process_group: dist.ProcessGroup | None = None,
    *,
    num_experts: int,
    slots_per_rank: int,
    expert: ExpertSpec,
    home: IntsLike | None = None,
    domains: IntsLike | None = None,
    allow_cross_domain: bool = False,
    grads: GradSpec = None,
    banks: int = 1,
    grad_banks: int = 1,
    instances: bool = False,
    engine: str = "auto",
    fabric: str = "auto",
    timeout: timedelta | float | None = None,
    num_sms: int | None = None,
    tile_bytes: int | None = None,
    check: bool | None = None,
    device: torch.device | str | None = None,
) -> Group:
    """Create a group over a process group. Collective; several groups may exist at once.

    Args:
        process_group: None: WORLD. Any with a store, over which ranks exchange their arguments.
        num_experts: E.
        slots_per_rank: S, the replicas that a rank can hold at a time.
        expert: ``{name: (shape, dtype) or Segment}``: the tensors of one expert.
        home: integers ``[E]``; None: contiguous, and the first E % G ranks have one more.
        domains: integers ``[G]``; None: ranks with load/store access to each other.
        allow_cross_domain: replicas may lie outside their home's domain. An expert then crosses
            once to each domain that needs it, and its replicas there hand it on to each other.
        grads: dtype of the slots' gradients, torch.float32 or torch.bfloat16; ``{name: dtype}`` if
            not all segments have gradients. None: no gradients.
        banks: sets of slots, for instance one for each layer, which keeps what it holds from one
            step to the next; see :class:`Bank`. Each takes S experts' bytes (`group_memory`).
        grad_banks: sets of slot gradients; bank i has set i modulo their number.
        instances: leave room for main weights and gradients directly before the slots of each bank,
            for :meth:`Bank.empty_instances`; it takes as many bytes (`group_memory`).
        engine: "host" (threads, on one machine), "cuda" (one GPU per rank: torch's current device,
            so call torch.cuda.set_device first), "c10d" (messages over process groups of its own,
            with the backends of this one: gloo, NCCL or others, on any number of machines); or
            "auto": "cuda" where every rank can; else "host" where all ranks are on one machine and
            none has a device that "c10d" could use; else "c10d". The logger "ultraep_comm" says
            which, and why.
        fabric: "shm" with the host engine; with the CUDA engine "nvshmem", or "torch" (torch's
            symmetric memory, for ranks that all reach each other by load and store); "none" with
            "c10d"; or "auto": "nvshmem" where every rank has it over these ranks, else "torch".
        timeout: limit of every wait, a timedelta or seconds; 0: no limit. None: the process
            group's timeout until every rank of a plan has called, then 30 s.
        num_sms: workers per rank: threads (None: the machine's cores divided by its ranks) or
            blocks on the GPU (None: 64, or 24 in a call with ``async_op=True``; or all
            multiprocessors if there are fewer). Ranks may differ.
        tile_bytes: unit of the transfer, a power of two; on the CUDA engine 16384 or 32768.
        check: compare every slot with its main instance after each transfer, on the host engine;
            None: ULTRAEP_CHECK, else False. The same on every rank.
        device: where weights and slots are. None: where the engine works; of "c10d", the
            accelerator if there is one and a backend for it, else the CPU.

    Raises:
        InvalidArgumentError: an argument is wrong on this rank, or rank 0's calibration file is
            unreadable, damaged, or of another machine.
        BootstrapError: ranks disagree, or a rank left or cannot take part.
        OutOfSharedMemoryError: this rank's slots do not fit into memory.
        UnsupportedError: the engine or fabric cannot be used here, or the process group has no
            store; the text says what is missing.
    """
    rendezvous = Rendezvous(process_group)
    # The group's tensors outlive this call: they must not be inference tensors.
    with torch.inference_mode(False), rendezvous.failure_scope():
        config = GroupConfig(
            num_experts=num_experts,
            slots_per_rank=slots_per_rank,
            expert=expert,
            home=home,
            domains=domains,
            allow_cross_domain=allow_cross_domain,
            grads=grads,
            banks=banks,
            grad_banks=grad_banks,
            instances=instances,
            engine=engine,
            fabric=fabric,
            timeout=timeout,
            num_sms=num_sms,
            tile_bytes=tile_bytes,
            check=check,
            device=device,
        )
        options = Options(config, from_environment(engine) if rendezvous.rank == 0 else None)
        if fabric == "loopback":
            raise UnsupportedError("fabric='loopback' is for one process: new_loopback_groups")
        topology = config.topology(rendezvous.num_ranks)
        _prepare_recording(options, topology)
        # Compare arguments first: ranks that disagree on the engine would exchange different data.
        arguments = options.arguments(topology)
        records = rendezvous.exchange({"arguments": arguments, "run": new_run()})
        check_same_arguments([record["arguments"] for record in records])
        made = _make_engine(rendezvous, options, topology)
        if rendezvous.rank == 0:
            _say_domains(tuple(made.topology.domain.tolist()))
        rendezvous.limit = options.timeout  # of later allocations
        return _groups([made], options, records[0]["run"])[0]


def _make_engine(rendezvous: Rendezvous, options: Options, topology: Topology) -> Engine:
    """Create one rank's engine, the one asked for or the best one. Collective."""
    backends = allowed_backends(options.engine, options.fabric, options.device)
    made: Engine | None = None
    reason = ""
    if backends[0][0] == "cuda":
        from ultraep_comm.engines.cuda import make

        made, reason = make.make_group_engine(rendezvous, options, topology)
    engine = "cuda"
    if made is None:
        from ultraep_comm.engines.c10d import make as c10d

        left = {name for name, _ in backends if name != "cuda"}
        if len(left) == 1:
            engine = left.pop()
        else:
            engine, why = c10d.choose_engine(rendezvous, options.device)
            reason = "; ".join(filter(None, (reason, why)))
        make_one = host.make_shm_engine if engine == "host" else c10d.make_group_engine
        made = make_one(rendezvous, options, topology)
    if options.engine == "auto" and rendezvous.rank == 0:
        _say_engine(engine, reason)
    return made


@cache
def _say_engine(engine: str, reason: str) -> None:
    """Log which engine engine="auto" has taken; each once in a process."""
    why = f" ({reason})" if reason else ""
    _LOGGER.log(
        logging.WARNING if engine == "c10d" else logging.INFO,
        "engine='auto' uses the %s engine%s. Pass engine= to choose, or see `python -m"
        " ultraep_comm.doctor`",
        engine,
        why,
    )


@cache
def _say_domains(domain: tuple[int, ...]) -> None:
    """Log which domains groups have; each once in a process."""
    members = [
        f"domain {d}: {name_ranks([r for r, other in enumerate(domain) if other == d])}"
        for d in sorted(set(domain))
    ]
    count = f"{len(members)} domain{'s' if len(members) > 1 else ''}"
    _LOGGER.info("%d ranks in %s; %s", len(domain), count, "; ".join(members))


def new_loopback_groups(num_ranks: int, *, engine: str = "host", **arguments: Any) -> list[Group]:
    """Create a group whose ranks all live in this process; the engines are the same.

    With ``engine="host"`` (the default) ranks are threads, as with ``engine="c10d"``, whose threads
    send messages over gloo. With ``engine="cuda"`` they share torch's current device, and the last
    rank to call launches one kernel for all of them.
    A collective waits for its peers: call it from one thread per rank, or with ``async_op=True``
    on every rank before the first wait. Other arguments are those of :func:`new_group`, except
    ``fabric`` and ``device``; ``num_sms`` is per rank, and the blocks of all ranks have to fit on
    the device together.

    Raises:
        InvalidArgumentError: an argument is wrong.
        UnsupportedError: the engine cannot be used here; the text says what is missing.
    """
    config = GroupConfig(engine=engine, fabric="loopback", device=None, **arguments)
    options = Options(config, from_environment(engine))
    topology = config.topology(num_ranks)
    _prepare_recording(options, topology)
    run = new_run()
    with torch.inference_mode(False):  # as in new_group
        return _groups(_make_loopback_engines(options, topology), options, run)


def _make_loopback_engines(options: Options, topology: Topology) -> Sequence[Engine]:
    if options.engine == "host":
        return host.make_loopback_engines(options, topology)
    if options.engine == "c10d":
        from ultraep_comm.engines.c10d import make as c10d

        return c10d.make_loopback_engines(options, topology)
    from ultraep_comm.engines.cuda import make
    from ultraep_comm.engines.cuda.device import find_device
    from ultraep_comm.engines.cuda.kernels import load_kernels

    try:
        device = find_device()
        kernels = load_kernels(device, None)
    except UnsupportedError:
        if options.engine == "cuda":
            raise
        return host.make_loopback_engines(options, topology)
    options.refuse_check("CUDA")
    return make.make_loopback_engines(options, topology, device, kernels)


def _prepare_recording(options: Options, topology: Topology) -> None:
    if options.record_folder is not None:
        prepare_folder(options.record_folder, options.record_calls, topology)


def _groups(engines: Sequence[Engine], options: Options, run: str) -> list[Group]:
    """Return a Group on each engine, recorded if an environment variable asks for it.

    A recording is written when its group is closed, garbage-collected, or when the process ends.
    """
    groups = []
    for engine in engines:
        session = Session(engine, options)
        session.run = run
        if options.record_folder is not None:
            path = options.record_folder.absolute() / f"{session.run}-rank{session.rank}.npz"
            recorder = session.start_recording(options.record_calls, loads=True)
            session.on_close = weakref.finalize(session, dump_at_end, recorder, path, os.getpid())
        groups.append(Group(session))
    return groups
