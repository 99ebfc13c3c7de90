"""The c10d engine when ranks fail: typed errors on all of them, and nothing left behind.

Deaths, stops and Ctrl-C of processes are scenes of `tests/faults`.
"""

from __future__ import annotations

import gc
import socket
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from holdings import holdings, more_than
from ranks import (
    RankPool,
    clear_slots,
    close_all,
    fill_weights,
    loopback,
    make_weights,
    prepare_all,
    raised,
    start_all,
    synchronize_all,
    wrong_bytes,
)

import ultraep_comm as uec
from ultraep_comm import Segment, _core, errors
from ultraep_comm.engines.c10d import channel as channels
from ultraep_comm.engines.c10d import engine as engine_module
from ultraep_comm.engines.c10d import make
from ultraep_comm.engines.c10d.channel import (
    BackendChannel,
    BrokenChannelError,
    GlooChannel,
    Message,
    Pending,
)
from ultraep_comm.engines.c10d.engine import C10dEngine
from ultraep_comm.engines.c10d.movement import Movement, Step, Transfer
from ultraep_comm.fabrics.rendezvous import Rendezvous
from ultraep_comm.fabrics.shm import UNKNOWN
from ultraep_comm.group.group import session_of

E, S, ODD, LATE = 8, 2, 1, 3
EXPERT = {"w": Segment((300, 200), torch.bfloat16), "s": Segment((5,), torch.uint8)}
# Home map on 4 ranks: 0 0 1 1 2 2 3 3. Both have chains, and no rank is without a part.
PLAN = uec.Plan.from_slots([[6, -1], [0, 6], [0, 6], [0, -1]], num_experts=E)
OTHER = uec.Plan.from_slots([[2, 4], [4, -1], [2, 7], [2, 1]], num_experts=E)
LIMIT = 20.0


def _group(process_group: Any, **options: Any) -> uec.Group:
    options = {"expert": EXPERT, "timeout": LIMIT, "engine": "c10d", **options}
    return uec.new_group(process_group, num_experts=E, slots_per_rank=S, **options)


def _describe(error: BaseException | None) -> tuple[str, int, int, str]:
    return type(error).__name__, getattr(error, "peer", -9), getattr(error, "root", -9), str(error)


# ---- ranks that live ------------------------------------------------------------------------


def _order(group: uec.Group, weights: Any, plans: tuple[uec.Plan, ...]) -> None:
    works = [uec.replicate_experts(weights, p, group=group, async_op=True) for p in plans]
    synchronize_all([work for work in works if work is not None])


def _call(kind: str, group: uec.Group, aborted: Path) -> None:
    """Make this rank's call, in which rank 1 is the odd one."""
    rank, odd = group.rank, group.rank == ODD
    weights = make_weights(group)
    ids = torch.zeros((3, 2), dtype=torch.int64)
    if kind == "rejects behind a call":
        work = uec.replicate_experts(weights, PLAN, group=group, async_op=True)
        assert work is not None
        if odd:
            uec.replicate_experts({}, PLAN, group=group)
        work.wait()
        uec.replicate_experts(weights, PLAN, group=group)
    elif kind == "rejects ids":
        uec.gather_load(torch.full((2, 2), E) if odd else ids, group=group)
    elif kind == "plan":
        uec.replicate_experts(weights, OTHER if odd else PLAN, group=group)
    elif kind == "operation":
        if odd:
            uec.gather_load(ids, group=group)
        else:
            uec.replicate_experts(weights, PLAN, group=group)
    elif kind == "order":
        _order(group, weights, (OTHER, PLAN) if odd else (PLAN, OTHER))
    elif kind == "aborts":
        while rank == LATE and not aborted.exists():
            time.sleep(0.01)
        work = uec.replicate_experts(weights, PLAN, group=group, async_op=True)
        assert work is not None
        if odd:
            group.abort()
            aborted.touch()
        work.wait()
    elif odd:
        group.close()
    else:
        uec.replicate_experts(weights, PLAN, group=group)


def _transfers(group: uec.Group) -> int:
    """Return the wrong bytes of a transfer."""
    weights = make_weights(group)
    fill_weights(group, weights, 7)
    clear_slots(group)
    uec.replicate_experts(weights, PLAN, group=group)
    return wrong_bytes(group, PLAN, 7)


def _holdings(process_group: Any) -> Any:
    """Return what this process holds after a first use."""
    with _group(process_group) as group:
        _transfers(group)
    del group
    return holdings()


def _one_is_odd(rank: int, process_group: Any, kind: str, at_once: bool, aborted: Path) -> Any:
    """Return the error of a call, what later calls and another group say, and what is left."""
    held = _holdings(process_group)
    group, other = _group(process_group), _group(process_group)
    error = raised(partial(_call, kind, group, aborted))
    later = []
    if not (at_once and rank == ODD):
        weights = make_weights(group)
        later = [
            type(raised(call)).__name__
            for call in (
                partial(uec.replicate_experts, weights, PLAN, group=group),
                partial(uec.gather_load, torch.zeros(1, 1).long(), group=group),
            )
        ]
    found = _describe(error)
    wrong = _transfers(other)
    closing = raised(group.close), raised(other.close)
    with _group(process_group) as another:
        wrong += _transfers(another)
    del group, other, another, error
    return found, later, closing, wrong, more_than(held)


@pytest.mark.parametrize(
    ("kind", "at_once", "own", "others"),
    [
        ("rejects behind a call", True, "InvalidWeightsError", "PeerRejectedError"),
        ("rejects ids", False, "InvalidLoadError", "PeerRejectedError"),
        ("plan", False, "PlanMismatchError", "PlanMismatchError"),
        ("operation", True, "PlanMismatchError", "PlanMismatchError"),
        ("order", False, "PlanMismatchError", "PlanMismatchError"),
        ("aborts", False, "TransferAbortedError", "TransferAbortedError"),
        ("closes", True, "NoneType", "PeerGoneError"),
    ],
)
def test_all_ranks_get_its_error_and_other_groups_go_on(
    ranks: RankPool, tmp_path: Path, kind: str, at_once: bool, own: str, others: str
) -> None:
    results = ranks.run(4, _one_is_odd, kind, at_once, tmp_path / "aborted")
    for rank, ((name, _, root, text), later, closing, wrong, left) in enumerate(results):
        told = others == "PeerGoneError" and rank != ODD and name == "TransferAbortedError"
        assert name == (own if rank == ODD else others) or told, text
        if rank != ODD and own != "PlanMismatchError":
            assert root == ODD, text
        assert set(later) <= {"GroupClosedError"}
        assert closing == (None, None)
        assert wrong == 0
        assert left == []


# ---- several groups ---------------------------------------------------------------------------


def _interleaves(rank: int, process_group: Any) -> Any:
    groups = [_group(process_group), _group(process_group)]
    weights = [make_weights(group) for group in groups]
    wrong, sums = 0, []
    for epoch in range(1, 6):
        prepare_all([groups[0]], {rank: weights[0]}, epoch)  # type: ignore[arg-type]
        prepare_all([groups[1]], {rank: weights[1]}, 10 + epoch)  # type: ignore[arg-type]
        plans = [PLAN, OTHER] if epoch % 2 else [OTHER, PLAN]
        works = []
        for group, own, plan in zip(groups, weights, plans, strict=True):
            works.append(uec.replicate_experts(own, plan, group=group, async_op=True))
            total = torch.tensor([rank + epoch])
            dist.all_reduce(total, group=process_group)
            sums.append(int(total) - 4 * epoch)
        for work in reversed(works) if rank % 2 else works:
            assert work is not None
            work.wait()
        wrong += wrong_bytes(groups[0], plans[0], epoch)
        wrong += wrong_bytes(groups[1], plans[1], 10 + epoch)
    close_all(groups)
    return wrong, set(sums)


def test_two_groups_and_the_framework_run_at_once(ranks: RankPool) -> None:
    assert ranks.run(4, _interleaves) == [(0, {6})] * 4


# ---- set-up -----------------------------------------------------------------------------------


def _cannot_be_made(rank: int, process_group: Any, options: dict[str, Any]) -> Any:
    held = holdings()
    error = raised(partial(_group, process_group, **options))
    found = type(error).__name__, str(error)
    del error
    return found, more_than(held)


@pytest.mark.parametrize(
    ("options", "kind", "says"),
    [
        ({"device": "cuda"}, "UnsupportedError", "cpu:gloo"),
        ({"domains": [0, 0]}, "InvalidArgumentError", "domains"),
        ({"check": True}, "UnsupportedError", "check"),
    ],
)
def test_what_cannot_be_made_is_an_error_on_every_rank(
    ranks: RankPool, options: dict[str, Any], kind: str, says: str
) -> None:
    for (name, text), left in ranks.run(3, _cannot_be_made, options):
        assert name == kind
        assert says in text
        assert left == []


# ---- left behind -------------------------------------------------------------------------------


def _forgets(rank: int, process_group: Any, in_a_call: bool) -> Any:
    held = _holdings(process_group)
    group = _group(process_group)
    work = None
    if in_a_call and rank != ODD:
        work = uec.replicate_experts(make_weights(group), PLAN, group=group, async_op=True)
    del group, work
    gc.collect()
    return more_than(held)


@pytest.mark.parametrize("in_a_call", [False, True])
def test_a_forgotten_group_leaves_nothing(ranks: RankPool, in_a_call: bool) -> None:
    assert ranks.run(4, _forgets, in_a_call) == [[]] * 4


def _pair(**options: Any) -> list[uec.Group]:
    options = {"expert": EXPERT, "timeout": LIMIT, **options}
    return uec.testing.new_loopback_groups(
        2, num_experts=4, slots_per_rank=1, engine="c10d", **options
    )


PAIR_PLAN = uec.Plan.from_slots([[2], [0]], num_experts=4)


def test_a_group_that_is_collected_in_its_own_thread_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    groups: list[uec.Group] = _pair()
    weights = [make_weights(group) for group in groups]
    synchronize_all(start_all(groups, weights, PAIR_PLAN))
    close_all(groups)
    held = holdings()  # with what the first use leaves
    groups = _pair()
    finish, finalizers = Movement.finish, [session_of(groups[0])._finalizer]

    def collects(self: Movement, limit: float) -> None:
        if threading.current_thread().name == "ultraep-c10d-0":
            finalizers.pop()()  # as the collector does, in any thread
        finish(self, limit)

    monkeypatch.setattr(Movement, "finish", collects)
    works = start_all(groups, weights, PAIR_PLAN)
    raised(works[1].wait)  # all that it needs may have come
    ids = torch.zeros(1, 1).long()
    assert isinstance(raised(partial(uec.gather_load, ids, group=groups[1])), errors.UltraEPError)
    groups[1].close()
    session_of(groups[0]).state = "closed"
    monkeypatch.undo()
    groups, works = [], []
    assert more_than(held) == []


# ---- what the engine's parts do ------------------------------------------------------------------


def test_a_thread_that_breaks_ends_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it does after a failure may fail too, for instance when no memory is left."""
    groups = _pair()
    weights = [make_weights(group) for group in groups]

    def fails(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    monkeypatch.setattr(Movement, "finish", fails)
    monkeypatch.setattr(C10dEngine, "_explain", fails)
    works = start_all(groups, weights, PAIR_PLAN)
    for work in works:
        assert isinstance(raised(work.wait), errors.TransferAbortedError)
    close_all(groups)


def test_a_backend_that_does_not_return_holds_up_neither_abort_nor_close(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entered, released, wait = threading.Event(), threading.Event(), Pending.wait

    def stuck(self: Pending, limit: float) -> None:
        if threading.current_thread().name == "ultraep-c10d-0":
            entered.set()
            released.wait()
        wait(self, limit)

    monkeypatch.setattr(engine_module, "_CLOSE_SECONDS", 0.2)
    groups = _pair()
    weights = [make_weights(group) for group in groups]
    monkeypatch.setattr(Pending, "wait", stuck)
    works = start_all(groups, weights, PAIR_PLAN)
    try:
        assert entered.wait(LIMIT)
        groups[0].abort()
        assert isinstance(raised(works[0].wait), errors.TransferAbortedError)
        groups[0].close()
    finally:
        released.set()
    groups[1].abort()
    groups[1].close()


@pytest.mark.parametrize("posting", [False, True])
def test_an_error_of_the_backend_names_rank_expert_and_chunk(
    monkeypatch: pytest.MonkeyPatch, posting: bool
) -> None:
    groups = _pair()
    weights = [make_weights(group) for group in groups]
    mover = session_of(groups[0]).engine._channel  # type: ignore[attr-defined]
    post, wait = GlooChannel.post, Pending.wait

    def refuses(message: Message) -> None:
        if message.receives and message.tensor.dtype is torch.uint8 and message.tensor.numel() > 9:
            raise BrokenChannelError(
                "no route", message.peer, receives=True, seconds=0.0, timed_out=not posting
            )

    def posts(self: GlooChannel, messages: Any) -> list[Pending]:
        for message in messages if self is mover else ():
            refuses(message)
        return post(self, messages)

    def waits(self: Pending, limit: float) -> None:
        if threading.current_thread().name == "ultraep-c10d-0":
            refuses(self.message)
        wait(self, limit)

    if posting:
        monkeypatch.setattr(GlooChannel, "post", posts)
    else:
        monkeypatch.setattr(Pending, "wait", waits)
    works = start_all(groups, weights, PAIR_PLAN)
    error = raised(works[0].wait)
    assert type(error) is (errors.PeerGoneError if posting else errors.TransferTimeoutError)
    assert (error.peer, error.root) == (1, 1)
    assert "`done` from rank 1 for expert 2, piece 0" in str(error)
    assert ("no route" if posting else "; every rank of the plan had called") in str(error)
    if posting:  # else rank 1 has sent what it has to
        error = raised(works[1].wait)
        assert isinstance(error, errors.PeerGoneError | errors.TransferAbortedError)
    for group in groups:
        group.abort()
        group.close()


def _gloo_channels(num_ranks: int) -> list[GlooChannel]:
    store = dist.HashStore()
    return loopback(num_ranks, lambda rank: GlooChannel(store, rank, num_ranks, 20.0))


def test_a_cut_ends_waits_though_the_next_rank_is_gone() -> None:
    first, second, third = _gloo_channels(3)
    second.abort()
    second.close()
    (pending,) = third.post([Message(0, 7, torch.zeros(1), receives=True)])
    first.abort()
    with pytest.raises(BrokenChannelError) as broken:
        pending.wait(LIMIT)
    assert not broken.value.timed_out
    assert broken.value.peer == 0
    with pytest.raises(BrokenChannelError) as refused:
        first.post([Message(2, 7, torch.zeros(1), receives=True)])
    assert refused.value.peer == 2
    for channel in (first, third):
        channel.close()


def _cuts(rank: int, process_group: Any) -> Any:
    store = dist.PrefixStore("cuts", Rendezvous(process_group).store)
    cpu = torch.device("cpu")
    channel = BackendChannel(store, "cuts", [0, 1], rank, "gloo", cpu, LIMIT)
    if rank == 0:
        time.sleep(0.2)
        channel.abort()
        error = None
    else:
        (pending,) = channel.post([Message(0, 7, torch.zeros(1), receives=True)])
        error = raised(partial(pending.wait, LIMIT))
    channel.close()
    return None if error is None else (type(error).__name__, getattr(error, "timed_out", None))


def test_a_cut_works_on_registered_process_groups_too(ranks: RankPool) -> None:
    assert ranks.run(2, _cuts) == [None, ("BrokenChannelError", False)]


class _Recorder:
    """A channel that notes its messages."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def post(self, messages: Any) -> list[Pending]:
        self.messages += messages
        return [Pending(message, None) for message in messages]


def test_messages_of_different_calls_have_different_tags() -> None:
    """gloo ends the process when a longer message comes than is received under its tag."""
    steps = [
        Step(0, _core.C10dStep.RECEIVE, 1, tag, 0, tag, 1, 0, 2, tag, -1, -1, -1)
        for tag in range(3)
    ]
    seen: list[set[int]] = []
    for digest in (0x1234_5678_9ABC_DEF0, 0x1234_5678_8ABC_DEF0):
        channel: Any = _Recorder()
        slot = torch.zeros((1, 8), dtype=torch.uint8)
        Transfer(steps, channel, digest, [slot], lambda *_: torch.zeros(8), lambda _: None).begin()
        seen.append({message.tag for message in channel.messages})
        assert max(seen[-1]) < 1 << 30  # those of records
    assert len(seen[0]) == len(seen[1]) == 3
    assert not seen[0] & seen[1]


# ---- addresses ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("interface", "addresses", "local"),
    [
        ("lo", ["10.0.0.1"], True),
        ("eth0", ["127.0.0.1"], False),
        (None, ["127.0.0.1"], True),
        (None, ["::1"], True),
        (None, [], True),  # the name does not resolve
        (None, ["192.0.2.1"], True),  # to an address of no interface
        (None, ["192.0.2.1", "0.0.0.0"], False),  # to one that can be bound to
    ],
)
def test_gloos_address_is_known_before(
    monkeypatch: pytest.MonkeyPatch, interface: str | None, addresses: list[str], local: bool
) -> None:
    def resolve(*_: object, **__: object) -> list[Any]:
        if not addresses:
            raise socket.gaierror(socket.EAI_NONAME, "planted")
        found = [(socket.AF_INET6 if ":" in a else socket.AF_INET, a) for a in addresses]
        return [(family, socket.SOCK_STREAM, 6, "", (a, 0)) for family, a in found]

    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    if interface is not None:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    monkeypatch.setattr(channels.socket, "getaddrinfo", resolve)
    assert channels.gloo_is_local() == local


def _addresses(rank: int, process_group: Any, machines: list[str], local: list[bool]) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(make, "machine_id", lambda: machines[rank])
        patch.setattr(make, "gloo_is_local", lambda: local[rank])
        options: dict[str, Any] = {"num_experts": 4, "slots_per_rank": 1, "engine": "c10d"}
        expert = {"w": Segment((8,), torch.uint8)}
        found = raised(lambda: uec.new_group(process_group, expert=expert, **options).close())
    return "" if found is None else f"{type(found).__name__}: {found}"


@pytest.mark.parametrize(
    ("machines", "local", "expected"),
    [
        (["a", "b"], [True, True], "BootstrapError: ranks 0-1: gloo would listen at a loopback"),
        (["a", "b"], [False, True], "BootstrapError: rank 1: gloo would listen at a loopback"),
        (["a", "b"], [False, False], ""),
        (["a", "a"], [True, True], ""),
        ([UNKNOWN + "a", UNKNOWN + "b"], [True, True], ""),  # may be one machine
    ],
)
def test_addresses_that_other_machines_cannot_reach(
    ranks: RankPool, machines: list[str], local: list[bool], expected: str
) -> None:
    for error in ranks.run(2, _addresses, machines, local):
        assert error.startswith(expected)
        assert not expected or ("GLOO_SOCKET_IFNAME" in error and "NCCL_SOCKET_IFNAME" in error)


def _measured(rank: int, process_group: Any) -> int:
    """Make a group of which no calibration knows; return how often its messages were timed."""
    timed = []

    def measure(*_: object) -> tuple[int, ...]:
        timed.append(rank)
        return (700_000, 0, 1, 1, 100)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(make, "_measure", measure)
        _group(process_group).close()
    return len(timed)


def test_what_messages_cost_is_measured_once(ranks: RankPool) -> None:
    assert ranks.run(2, _measured) == [1, 1]


def _cannot_connect(rank: int, process_group: Any) -> tuple[str, str]:
    """On rank 1 gloo is refused, and rank 0 would wait for it."""
    channel = make.GlooChannel

    def refuse(*arguments: Any) -> Any:
        if rank == 1:
            raise RuntimeError("[pair.cc:152] Connection refused, remote=[127.0.0.1]\nmore")
        return channel(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(make, "GlooChannel", refuse)
        found = raised(lambda: _group(process_group))
    return type(found).__name__, str(found)


def test_a_refused_connection_is_told_with_its_remedy(ranks: RankPool) -> None:
    told, own = ranks.run(2, _cannot_connect)
    for kind, text in (told, own):
        assert kind == "BootstrapError"
        assert "([pair.cc:152] Connection refused, remote=[127.0.0.1])" in text
        assert "GLOO_SOCKET_IFNAME" in text
    assert "because rank 1 failed" in told[1]
