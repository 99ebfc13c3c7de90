"""The c10d engine's own promises; what it shares with the host engine runs on both elsewhere."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_grads import RankGrads
from ranks import (
    MIXED,
    RankPool,
    clear_slots,
    close_all,
    fill_weights,
    make_weights,
    prepare_all,
    random_plan,
    start_all,
    synchronize_all,
    wrong_bytes,
)
from tiers import cases

import ultraep_comm as uec
from ultraep_comm import Segment, _core, errors
from ultraep_comm.engines.c10d import make
from ultraep_comm.engines.c10d.agreement import Agreement
from ultraep_comm.engines.c10d.movement import Step, Transfer
from ultraep_comm.engines.c10d.order import DeviceOrder
from ultraep_comm.group import create

E, S = 7, 2
SMALL = {"w": Segment((8, 4), torch.bfloat16), "s": Segment((3,), torch.uint8)}


def _groups(num_ranks: int, **options: Any) -> list[uec.Group]:
    options = {"num_experts": E, "slots_per_rank": S, "expert": SMALL, "timeout": 20.0, **options}
    return uec.testing.new_loopback_groups(num_ranks, engine="c10d", **options)


# ---- bytes and bits -------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks, domains", [(2, None), (5, None), (5, [1, 0, 1, 0, 0])])
def test_random_calls_move_every_byte_and_sum_every_bit(
    num_ranks: int, domains: list[int] | None
) -> None:
    """Transfers and reductions in random order, against their oracles and the host engine."""
    draw = random.Random(num_ranks)
    grads = {"w13": torch.float32, "w2": torch.bfloat16, "big": torch.bfloat16}
    expert = {**MIXED, "w2": Segment((48, 33), torch.bfloat16)}
    home = [draw.randrange(num_ranks) for _ in range(E)]  # uneven: some rank may have none
    options: dict[str, Any] = {"home": home, "expert": expert, "grads": grads}
    options |= {"domains": domains, "allow_cross_domain": domains is not None}
    groups = _groups(num_ranks, **options, tile_bytes=draw.choice([1024, 4096, 65536]))
    on_host = uec.testing.new_loopback_groups(num_ranks, num_experts=E, slots_per_rank=S, **options)
    weights = [make_weights(group) for group in groups]
    dtypes = {"w13": torch.bfloat16, "w2": torch.bfloat16, "big": torch.float32}
    both = [RankGrads(own, dtypes) for own in (groups, on_host)]
    for seed in range(cases(12, 1000)):
        plan = random_plan(seed, num_ranks, E, S, home=home, fill=draw.choice([0.2, 0.7, 1.0]))
        names = draw.choice([None, ("w13",), ("big", "bias", "w_t")])
        prepare_all(groups, weights, seed)
        mode = draw.choice(["auto", "push", "direct"])
        synchronize_all(start_all(groups, weights, plan, mode=mode, segments=names))
        for group in groups:
            assert wrong_bytes(group, plan, seed, names=names) == 0, (seed, mode, names)
        mode, zero = draw.choice(["auto", "pull", "direct"]), draw.choice([True, False])
        for own in both:
            own.fill(seed)
            synchronize_all(
                [
                    uec.reduce_expert_grads(
                        main, plan, group=group, async_op=True, mode=mode, zero=zero
                    )
                    for main, group in zip(own.main_grads, own.groups, strict=True)
                ]
            )
            own.check(plan, zero=zero)
        for ours, theirs in zip(both[0].main_grads, both[1].main_grads, strict=True):
            assert all(torch.equal(ours[n], theirs[n]) for n in grads), (seed, mode)
    close_all(groups)
    close_all(on_host)


def test_pull_is_push() -> None:
    groups = _groups(3)
    weights = [group.empty_weights() for group in groups]
    plan = uec.Plan.from_slots([[-1, -1], [0, -1], [0, -1]], num_experts=E)
    prepare_all(groups, weights, 1)
    works = start_all(groups[:1], weights, plan, mode="push")
    works += start_all(groups[1:], weights, plan, mode="pull")
    assert {work.mode for work in works} == {"push"}
    synchronize_all(works)
    assert [wrong_bytes(group, plan, 1) for group in groups] == [0, 0, 0]
    close_all(groups)


def test_an_empty_call_asks_nobody_and_counts_all_the_same() -> None:
    groups = _groups(2)
    weights = [make_weights(group) for group in groups]
    nothing = uec.Plan.from_slots(torch.full((2, S), -1), num_experts=E)
    uec.replicate_experts(weights[0], nothing, group=groups[0])  # its peer has not called
    plan = uec.Plan.from_slots([[5, -1], [0, -1]], num_experts=E)
    works = start_all(groups, weights, plan)  # one rank's second call, the other's first
    for work in works:
        with pytest.raises(errors.PlanMismatchError, match="Make the same calls"):
            work.wait()
    close_all(groups)


def test_slots_are_ready_one_by_one() -> None:
    """A slot that waits for a rank that has not called is not ready; what is there is."""
    groups = _groups(3, banks=1)
    weights = [make_weights(group) for group in groups]
    plan = uec.Plan.from_slots([[-1, -1], [0, 6], [0, -1]], num_experts=E)
    prepare_all(groups, weights, 1)
    first = [
        uec.replicate_experts(weights[r], plan, group=groups[r], async_op=True) for r in (0, 1)
    ]
    assert not first[1].slot_ready(1)  # of rank 2
    last = uec.replicate_experts(weights[2], plan, group=groups[2], async_op=True)
    first[1].wait(slots=[0, 1])
    assert first[1].slot_ready(0)
    assert first[1].slot_ready(1)
    synchronize_all([*first, last])
    assert first[1].is_completed()
    close_all(groups)


def test_a_slot_is_ready_with_the_last_of_its_messages() -> None:
    def receive(tag: int, place: int) -> Step:
        return Step(0, _core.C10dStep.RECEIVE, 1, tag, 0, tag, 1, place, 2, tag, -1, -1, -1)

    steps, nothing = [receive(0, 0), receive(1, 1), receive(2, 1)], torch.zeros(0)
    ready: list[dict[int, int]] = []
    channel: Any = None
    transfer = Transfer(
        steps, channel, 0, [], lambda *_: nothing, lambda: ready.append(dict(transfer.missing))
    )
    for i in (1, 0, 2):
        transfer.arrived(steps[i], nothing)
    assert ready == [{1: 1}, {}]


def test_the_limit_is_of_all_waits_for_a_call_together() -> None:
    """A late rank and a dead one behind it must not add up."""
    limits: list[float] = []

    class Late:
        def wait(self, limit: float) -> None:
            limits.append(limit)
            time.sleep(0.01)

    channel: Any = SimpleNamespace(post=lambda messages: [Late() for _ in messages])
    agreement = Agreement(channel, channel, 0, 8, E)
    agreement.begin(_core.RecordKind.CALL, 1, 1)
    agreement.finish(5.0)
    assert len(limits) == 6  # three steps, each way
    assert all(later < sooner for sooner, later in pairwise(limits))


# ---- process groups -------------------------------------------------------------------------


def _our_backend(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def _move(rank: int, process_group: dist.ProcessGroup) -> int:
    """Return wrong bytes of calls, with messages of `batch_isend_irecv`."""
    dist.Backend.register_backend("ours", _our_backend, devices=["cpu"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(make, "movers", lambda _: {"cpu": "ours"})
        group = uec.new_group(
            process_group, num_experts=E, slots_per_rank=S, expert=MIXED, engine="c10d"
        )
    weights, wrong = make_weights(group), 0
    for seed in range(1, 6):
        plan = random_plan(seed, group.num_ranks, E, S)
        fill_weights(group, weights, seed)
        clear_slots(group)
        uec.replicate_experts(weights, plan, group=group, mode=("push", "direct")[seed % 2])
        wrong += wrong_bytes(group, plan, seed)
    load = uec.gather_load(torch.full((2, 1), rank), group=group)
    wrong += int((load.diag() != 2).sum())
    group.close()
    return wrong


def test_another_backend_moves_every_byte(ranks: RankPool) -> None:
    assert ranks.run(4, _move) == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ("cpu:gloo,cuda:nccl", {"cpu": "gloo", "cuda": "nccl"}),
        ("cpu:gloo,cuda:gloo,mps:gloo", {"cpu": "gloo"}),
        ("cpu:mpi,cuda:mpi", {"cpu": "mpi"}),
        ("cpu:gloo,xpu:xccl", {"cpu": "gloo", "xpu": "xccl"}),
    ],
)
def test_backends_that_move_tensors(
    monkeypatch: pytest.MonkeyPatch, config: str, found: dict[str, str]
) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda _: config)
    assert make.movers(None) == found  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("config", "device", "match"),
    [
        ("cpu:gloo,cuda:gloo", "cuda", r"cpu:gloo,cuda:gloo, of which none moves .* on cuda"),
        ("cuda:nccl", None, "none moves tensors on a device of this machine"),
        ("cuda:nccl", "cpu", "none moves tensors on cpu"),
        ("cpu:gloo,cuda:nccl", "cuda", "torch finds no such device here"),
    ],
)
def test_a_device_that_no_backend_moves(
    monkeypatch: pytest.MonkeyPatch, config: str, device: str | None, match: str
) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda _: config)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    wanted = None if device is None else torch.device(device)
    with pytest.raises(errors.UnsupportedError, match=match):
        make.find_device(None, wanted)  # type: ignore[arg-type]


def test_the_accelerator_comes_first_and_device_settles_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda _: "cpu:gloo,xpu:xccl")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("xpu"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    find = make.find_device
    group: Any = None
    assert find(group, None) == torch.device("xpu", 3)
    assert find(group, torch.device("xpu", 1)) == torch.device("xpu", 1)
    assert find(group, torch.device("cpu")) == torch.device("cpu")


# ---- engine="auto" ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("machines", "devices", "expected"),
    [
        (["a", "a"], ["cpu", "cpu"], ("host", "")),
        (["a", "b"], ["cpu", "cpu"], ("c10d", "the ranks are on 2 machines")),
        (["a", "a"], ["cuda", "cuda"], ("c10d", "")),
        (["a", "a"], ["cuda", "cpu"], ("host", "")),
    ],
)
def test_auto_takes_the_host_engine_on_one_machine_without_devices(
    monkeypatch: pytest.MonkeyPatch,
    machines: list[str],
    devices: list[str],
    expected: tuple[str, str],
) -> None:
    answers = iter([list(zip(devices, machines, strict=True)), ["rank 0's memory"], [True, True]])
    rendezvous: Any = SimpleNamespace(
        group=None, rank=0, exchange=lambda _: next(answers), failure_scope=nullcontext
    )
    monkeypatch.setattr(dist, "get_backend_config", lambda _: "cpu:gloo")
    engine, reason = make.choose_engine(rendezvous, None)
    assert engine == expected[0]
    assert reason.startswith(expected[1])


def test_auto_says_once_what_it_took_and_why(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="ultraep_comm")
    create._say_engine.cache_clear()
    for engine, reason in [("c10d", "fabric nvshmem: none here"), ("host", "")] * 2:
        create._say_engine(engine, reason)
    said = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert [level for level, _ in said] == ["WARNING", "INFO"]
    assert "uses the c10d engine (fabric nvshmem: none here)" in said[0][1]
    assert "uses the host engine. Pass engine=" in said[1][1]


# ---- a device's streams -------------------------------------------------------------------------


def test_calls_on_a_device_run_behind_the_caller_and_before_what_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[str] = []
    current = ["caller"]

    @contextmanager
    def stream(name: str) -> Iterator[None]:
        current.append(name)
        yield
        current.pop()

    runtime = SimpleNamespace(
        Event=lambda: SimpleNamespace(
            record=lambda name: log.append(f"record on {name}"),
            wait=lambda: log.append(f"{current[-1]} waits"),
        ),
        Stream=lambda _: "engine",
        current_stream=lambda _: current[-1],
        device=lambda _: nullcontext(),
        stream=stream,
    )
    monkeypatch.setattr(torch, "get_device_module", lambda _: runtime)
    order = DeviceOrder(torch.device("cuda", 0))
    begin, end = order.enter()
    with order.running(begin, end):
        log.append(f"messages on {current[-1]}")
    end.wait()
    assert log == [
        "record on caller",
        "engine waits",
        "messages on engine",
        "record on engine",
        "caller waits",
    ]
