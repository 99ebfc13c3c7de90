"""Bad input, disagreement and failure: typed errors, on the right rank, at once."""

from __future__ import annotations

import dataclasses
import inspect
import os
import pickle
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import (
    RankPool,
    clear_slots,
    close_all,
    fill_weights,
    forkserver,
    make_weights,
    own_group,
    raised,
)
from torch._subclasses.fake_tensor import FakeTensorMode

import ultraep_comm as uec
from ultraep_comm import Segment, _core, errors
from ultraep_comm.engines.reports import error_from
from ultraep_comm.nn import Replication
from ultraep_comm.plan.topology import contiguous_home

EXPERT = {
    "w": Segment((30, 20), torch.bfloat16),
    "s": Segment((5,), torch.uint8),
}
E, S = 8, 2


def _group(process_group: Any, **options: Any) -> uec.Group:
    options = {"expert": EXPERT, "timeout": 200.0, **options}
    return uec.new_group(process_group, num_experts=E, slots_per_rank=S, **options)


def _plan(slots: list[list[int]]) -> uec.Plan:
    """Return a plan without the checks of from_slots."""
    slot_expert = torch.tensor(slots, dtype=torch.int32)
    home = torch.from_numpy(contiguous_home(E, len(slots)))
    return uec.Plan(slot_expert=slot_expert, home=home)


# Home map on 4 ranks: 0 0 1 1 2 2 3 3. Every rank sends and receives.
RING = [[2, -1], [4, -1], [6, -1], [0, -1]]
FAN = [[-1, -1], [0, -1], [0, -1], [0, -1]]
EMPTY = [[-1, -1]] * 4


def _describe(error: BaseException | None) -> tuple[str, str, int, int]:
    if isinstance(error, errors.GroupClosedError) and error.__cause__ is not None:
        error = error.__cause__
    peer, root = getattr(error, "peer", -9), getattr(error, "root", -9)
    return type(error).__name__, str(error), peer, root


# ---- a rank's own bad input -----------------------------------------------------------------

W, BYTES = torch.zeros(2, 30, 20, dtype=torch.bfloat16), torch.zeros(2, 5, dtype=torch.uint8)
SPARSE_ROWS = torch.zeros(2, 30, 21, dtype=torch.bfloat16)[:, :, :20]
TRANSPOSED = W[1].T.contiguous().T
with FakeTensorMode():
    FAKE = torch.empty(2, 30, 20, dtype=torch.bfloat16)
OTHER_HOME = dataclasses.replace(_plan(EMPTY), home=torch.arange(E, dtype=torch.int32) % 4)


def _second(row: Any) -> dict[str, Any]:
    return {"weights": {"w": [W[0], row], "s": BYTES}}


OF_WEIGHTS, OF_PLAN = errors.InvalidWeightsError, errors.InvalidPlanError
OF_ARGUMENT = errors.InvalidArgumentError
# What rank 2 passes instead, and its error.
FAULTS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "one expert too few": ({"weights": {"w": W[1:], "s": BYTES}}, OF_WEIGHTS, "shape"),
    "list too long": ({"weights": {"w": [*W, W[0]], "s": BYTES}}, OF_WEIGHTS, "3 entries"),
    "dtype": ({"weights": {"w": W.float(), "s": BYTES}}, OF_WEIGHTS, "torch.float32"),
    "device": ({"weights": {"w": W.to("meta"), "s": BYTES}}, OF_WEIGHTS, "meta"),
    "not dense": ({"weights": {"w": SPARSE_ROWS, "s": BYTES}}, OF_WEIGHTS, "strides"),
    "dtype of one": (_second(W[1].float()), OF_WEIGHTS, "weights[w][1] has dtype torch.float32;"),
    "device of one": (_second(W[1].to("meta")), OF_WEIGHTS, "weights[w][1] is on meta; expected"),
    "sparse": (_second(W[1].to_sparse()), OF_WEIGHTS, "weights[w][1] is a Tensor without dense"),
    "shape of one": (_second(W[1, 1:]), OF_WEIGHTS, "an expert of weights[w][1] has shape"),
    "strides of one": (_second(TRANSPOSED), OF_WEIGHTS, "an expert of weights[w][1] has strides"),
    "no tensor": (_second(W[1].tolist()), OF_WEIGHTS, "weights['w'][1] is a list; expected a"),
    "no tensors": ({"weights": {"w": None, "s": None}}, OF_WEIGHTS, "NoneType"),
    "no mapping": ({"weights": [W]}, OF_WEIGHTS, "list"),
    "no weights": ({"weights": None}, OF_WEIGHTS, "NoneType"),
    "fake": ({"weights": {"w": FAKE, "s": BYTES}}, OF_WEIGHTS, "FakeTensor"),
    "missing": ({"weights": {"w": W}}, OF_WEIGHTS, "'s'"),
    "extra": ({"weights": {"w": W, "s": BYTES, "bias": BYTES}}, OF_WEIGHTS, "'bias'"),
    "own home": ({"plan": _plan([[0, -1], *RING[1:]])}, OF_PLAN, "at home"),
    "duplicate": ({"plan": _plan([[2, 2], *RING[1:]])}, OF_PLAN, "already holds"),
    "out of range": (
        {"plan": _plan([[E, -1], *RING[1:]])},
        OF_PLAN,
        "expected an expert in [0, 8)",
    ),
    "negative": ({"plan": _plan([[-2, -1], *RING[1:]])}, OF_PLAN, "-2"),
    "other home": ({"plan": OTHER_HOME}, OF_PLAN, "home map is not the group's"),
    "too few ranks": ({"plan": _plan(RING[:3])}, OF_PLAN, "3 ranks"),
    "mode": ({"mode": "relay"}, OF_ARGUMENT, "'relay'"),
    "pull": ({"mode": "pull"}, OF_WEIGHTS, "empty_weights"),
    "segments": ({"segments": ["v"]}, OF_ARGUMENT, "'v'"),
    "no segments": ({"segments": []}, OF_ARGUMENT, "()"),
    "a name": ({"segments": "w"}, OF_ARGUMENT, "segments"),
    "a number": ({"segments": 7}, OF_ARGUMENT, "segments"),
    "no names": ({"segments": [["w"]]}, OF_ARGUMENT, "segments"),
}


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("fault", list(FAULTS))
def test_bad_input_is_named(fault: str) -> None:
    groups = uec.testing.new_loopback_groups(4, num_experts=E, slots_per_rank=S, expert=EXPERT)
    instead, kind, part = FAULTS[fault]
    given = {"weights": make_weights(groups[2]), "plan": _plan(RING), **instead}
    error, refused = (
        raised(lambda: uec.replicate_experts(group=groups[2], **given)) for _ in range(2)
    )
    assert type(error) is kind
    assert part in str(error)
    assert "rank 2" in str(error)
    assert isinstance(refused, errors.GroupClosedError)
    assert refused.__cause__ is error
    close_all(groups)


def _one_rank_is_wrong(rank: int, process_group: Any, fault: str) -> Any:
    group = _group(process_group)
    weights = make_weights(group)
    fill_weights(group, weights, 1)
    clear_slots(group)
    right = {"weights": weights, "plan": _plan(RING)}
    given = right | FAULTS[fault][0] if rank == 2 else right
    error = raised(lambda: uec.replicate_experts(group=group, **given))
    if error is None and rank == 0:  # rank 0 has nothing to do with rank 2 in RING
        error = raised(lambda: uec.replicate_experts(group=group, **right))
    again = raised(lambda: uec.replicate_experts(group=group, **right))
    untouched = int((group.slots["w"].view(torch.uint8) != 0xA5).sum()) if rank == 1 else 0
    group.close()
    return _describe(error), type(again).__name__, untouched


@pytest.mark.parametrize("fault", ["missing", "own home", "mode"])
def test_a_rank_with_bad_input_says_so_and_its_peers_do_not_wait(
    ranks: RankPool, fault: str
) -> None:
    results = ranks.run(4, _one_rank_is_wrong, fault)
    assert results[2][0][0] == FAULTS[fault][1].__name__
    for rank in (0, 1, 3):
        (name, text, peer, root), again, untouched = results[rank]
        assert name in ("PeerRejectedError", "TransferAbortedError"), text
        assert peer in (0, 1, 2, 3)
        assert again == "GroupClosedError"
        assert untouched == 0  # its sender, rank 2, wrote nothing
        assert root == 2, text


def _asks(kind: str, wrong: bool, group: uec.Group) -> object:
    ids = torch.zeros(2, 1).long()
    if kind == "target":
        return uec.gather_and_plan(ids, group=group, target=1.1 - wrong)
    return Replication(group).begin(make_weights(group), ids, microbatch=-int(wrong)).work.wait()


def _one_rank_asks_wrongly(rank: int, process_group: Any, kind: str, engine: str) -> Any:
    group = _group(process_group, engine=engine, instances=True)
    error = raised(lambda: _asks(kind, rank == 1, group))
    if error is None:  # where allocations exchange nothing
        error = raised(lambda: uec.replicate_experts(make_weights(group), _plan(RING), group=group))
    group.close()
    return _describe(error)[:2]


@pytest.mark.parametrize("engine", ["host", "c10d"])
@pytest.mark.parametrize("kind, says", [("target", "0.1"), ("microbatch", "microbatch=-1")])
def test_a_bad_argument_of_any_collective_is_at_the_peers_at_once(
    ranks: RankPool, kind: str, says: str, engine: str
) -> None:
    found = ranks.run(4, _one_rank_asks_wrongly, kind, engine)
    for rank, (name, text) in enumerate(found):
        if rank == 1:
            assert name == "InvalidArgumentError"
            assert says in text
        else:
            assert name in ("PeerRejectedError", "TransferAbortedError", "BootstrapError"), text
            assert "rank 1" in text


def _allocates_alone(rank: int, process_group: Any, path: str) -> str:
    """Rank 1 does not call a collective allocation."""
    del process_group
    group = _group(own_group(rank, 2, path), timeout=2.0)
    return "" if rank == 1 else str(raised(group.empty_weights))


def test_a_rank_that_does_not_allocate_is_named_in_time(ranks: RankPool, tmp_path: Path) -> None:
    text, _ = ranks.run(2, _allocates_alone, str(tmp_path / "store"))
    assert "because rank 1 failed: ranks [1] did not join this collective within 2 s" in text


@pytest.mark.parametrize(
    "ids, part",
    [
        (torch.tensor([[0, E]]), f"id {E} at position 1"),
        (torch.tensor([[0, -2]]), "id -2"),
        (torch.tensor([[0.5]]), "torch.float32"),
    ],
)
def test_bad_ids_are_rejected(ids: torch.Tensor, part: str) -> None:
    (group,) = uec.testing.new_loopback_groups(1, num_experts=E, slots_per_rank=S, expert=EXPERT)
    with group, pytest.raises(errors.InvalidLoadError) as caught:
        uec.gather_load(ids, group=group)
    assert part in str(caught.value)


def test_a_slot_outside_the_domain_is_rejected() -> None:
    groups = uec.testing.new_loopback_groups(
        4, num_experts=E, slots_per_rank=S, expert=EXPERT, domains=[0, 0, 1, 1]
    )
    weights = make_weights(groups[0])
    with pytest.raises(errors.InvalidPlanError, match="another domain"):
        uec.replicate_experts(weights, _plan(RING), group=groups[0])
    close_all(groups)


# ---- ranks that disagree --------------------------------------------------------------------


def _disagree(rank: int, process_group: Any, kind: str) -> Any:
    group = _group(process_group)
    weights = group.empty_weights()
    fill_weights(group, weights, 1)
    clear_slots(group)
    odd = rank == 1
    ids = torch.zeros((4, 2), dtype=torch.int64)

    def call() -> None:
        if kind == "plan":
            uec.replicate_experts(weights, _plan(FAN if odd else RING), group=group)
        elif kind == "mode":
            mode = "pull" if odd else "push"
            uec.replicate_experts(weights, _plan(RING), group=group, mode=mode)
        elif kind == "segments":
            names = ["w"] if odd else None
            uec.replicate_experts(weights, _plan(RING), group=group, segments=names)
        elif kind == "quota":
            quota = torch.full((4, S), int(odd), dtype=torch.int32)
            plan = dataclasses.replace(_plan(RING), slot_quota=quota)
            uec.replicate_experts(weights, plan, group=group)
        elif kind == "operation":
            if odd:
                uec.gather_load(ids, group=group)
            else:
                uec.replicate_experts(weights, _plan(RING), group=group)
        elif kind == "order":
            calls: list[Callable[[], Any]] = [
                lambda: uec.replicate_experts(weights, _plan(FAN), group=group, async_op=True),
                lambda: uec.replicate_experts(weights, _plan(RING), group=group, async_op=True),
            ]
            works = [call() for call in (calls[::-1] if odd else calls)]
            for work in works:
                work.wait()

    error = raised(call)
    # Ranks that did not exchange data with the odd rank learn of it in their next call.
    if error is None:
        error = raised(lambda: uec.replicate_experts(weights, _plan(RING), group=group))
    moved = int((group.slots["w"].view(torch.uint8) != 0xA5).sum())
    group.close()
    return _describe(error), moved


@pytest.mark.parametrize("kind", ["plan", "mode", "segments", "quota", "operation", "order"])
def test_ranks_that_disagree_all_fail(ranks: RankPool, kind: str) -> None:
    results = ranks.run(4, _disagree, kind)
    names = [result[0][0] for result in results]
    assert "PlanMismatchError" in names
    for rank, ((name, text, peer, _), _) in enumerate(results):
        assert name in ("PlanMismatchError", "TransferAbortedError"), text
        if name == "PlanMismatchError":
            assert rank == 1 or peer == 1, text
    assert results[1][1] == 0  # nothing moved to or from the rank that disagrees
    if kind != "order":
        assert results[0][1] == 0  # RING: rank 0 is written by rank 1


def _empty_against_full(rank: int, process_group: Any) -> Any:
    group = _group(process_group)
    weights = make_weights(group)
    plan = _plan([[2, -1], [0, -1], [-1, -1], [-1, -1]]) if rank < 2 else _plan(EMPTY)
    first = raised(lambda: uec.replicate_experts(weights, plan, group=group))
    dist.barrier(process_group)
    return _describe(first)[0], _describe(raised(group.close))[0]


def test_a_rank_whose_own_plan_is_empty_learns_at_close(ranks: RankPool) -> None:
    results = ranks.run(4, _empty_against_full)
    assert [r[0] for r in results] == ["NoneType"] * 4
    assert [r[1] for r in results] == ["PlanMismatchError"] * 4


# ---- waits are bounded -----------------------------------------------------------------------


def _aborts(rank: int, process_group: Any) -> Any:
    group = _group(process_group)
    weights = make_weights(group)
    work = None
    plan = _plan([[6, -1], [6, -1], [6, -1], [0, -1]])  # all need rank 3
    if rank != 3:
        work = uec.replicate_experts(weights, plan, group=group, async_op=True)
    if rank == 0:
        time.sleep(0.2)
        group.abort()
    if work is None:
        while (
            error := raised(lambda: uec.gather_load(torch.zeros(1, 1).long(), group=group))
        ) is None:
            pass
    else:
        error = raised(work.wait)
        assert type(work.exception()) is type(error)
    group.abort()  # harmless
    group.close()
    group.close()  # harmless
    return _describe(error)


def test_abort_ends_the_call_everywhere(ranks: RankPool) -> None:
    for name, text, *_ in ranks.run(4, _aborts):
        assert name in ("TransferAbortedError", "PlanMismatchError"), text


# ---- after the end ---------------------------------------------------------------------------


def _peer_closes(rank: int, process_group: Any) -> Any:
    group = _group(process_group)
    weights = make_weights(group)
    error = None
    if rank != 1:
        error = raised(lambda: uec.replicate_experts(weights, _plan(RING), group=group))
    group.close()
    return _describe(error)


def test_a_peer_that_closed_is_named(ranks: RankPool) -> None:
    results = ranks.run(4, _peer_closes)
    told = [results[0], results[2]]  # in RING, rank 3 has nothing to do with rank 1
    assert {name for name, *_ in told} <= {"PeerGoneError", "TransferAbortedError"}
    assert {root for *_, root in told} == {1}
    first_hand = [text for name, text, *_ in told if name == "PeerGoneError"]
    assert first_hand
    assert "closed its group" in first_hand[0]


# ---- making a group --------------------------------------------------------------------------


def _new_group_error(rank: int, process_group: Any, fault: str) -> Any:
    options: dict[str, Any] = {"num_experts": E, "slots_per_rank": S, "expert": EXPERT}
    odd = rank == 1
    if fault == "bad argument" and odd:
        options["slots_per_rank"] = -1
    elif fault == "other experts" and odd:
        options["num_experts"] = E + 1
    elif fault in ("check", "instances"):
        options[fault] = odd
    elif fault == "too much memory":
        options["expert"] = {"w": ((1 << 20,), torch.bfloat16)}
        options["banks"] = 1 << 16
    elif fault == "no memory on one rank" and odd:
        from ultraep_comm.fabrics import memory

        kept = memory.available_memory
        memory.available_memory = lambda: memory.Available(1000, "of a test")
        try:
            return _describe(raised(lambda: uec.new_group(process_group, **options)))
        finally:
            memory.available_memory = kept
    elif fault == "engine":
        options["engine"] = "cuda"
    return _describe(raised(lambda: uec.new_group(process_group, **options)))


@pytest.mark.parametrize(
    "fault, own, others, text",
    [
        ("bad argument", "InvalidArgumentError", "BootstrapError", "slots_per_rank is -1"),
        ("other experts", "BootstrapError", "BootstrapError", "num_experts="),
        ("check", "BootstrapError", "BootstrapError", "check="),
        ("instances", "BootstrapError", "BootstrapError", "instances="),
        ("too much memory", *["OutOfSharedMemoryError"] * 2, "65536 banks of 2 slots"),
        ("no memory on one rank", "OutOfSharedMemoryError", "BootstrapError", "memory"),
        ("engine", "UnsupportedError", "UnsupportedError", "CUDA"),
    ],
)
def test_new_group_fails_on_every_rank(
    ranks: RankPool, fault: str, own: str, others: str, text: str
) -> None:
    results = ranks.run(3, _new_group_error, fault)
    assert [r[0] for r in results] == [others, own, others]
    assert all(text in r[1] for r in results)
    if own != others:
        assert "rank 1" in results[0][1]


def _not_a_member(rank: int, process_group: Any) -> Any:
    pair = dist.new_group([0, 1])
    if rank < 2:
        with uec.new_group(pair, num_experts=E, slots_per_rank=S, expert=EXPERT) as group:
            return group.rank
    options: dict[str, Any] = {"num_experts": E, "slots_per_rank": S, "expert": EXPERT}
    return _describe(raised(lambda: uec.new_group(pair, **options)))


def test_a_rank_outside_the_process_group(ranks: RankPool) -> None:
    results = ranks.run(8, _not_a_member)
    assert results[:2] == [0, 1]
    assert {r[0] for r in results[2:]} == {"BootstrapError"}
    assert "not a member" in results[2][1]


# ---- processes that end ------------------------------------------------------------------------


def _mortal(rank: int, num_ranks: int, store: str, when: str, connected: Any, pipe: Any) -> None:
    limit = timedelta(seconds=5 if when == "before new_group" else 100)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks, timeout=limit
    )
    connected.wait()  # a rank that ends while others still connect breaks their gloo, not our call
    if when == "before new_group" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    gone: list[int] = []
    error = raised(lambda: _live(rank, when, gone))
    states = getattr(error, "states", ())
    pipe.send((_describe(error), states, gone))
    os._exit(0)


def _live(rank: int, when: str, gone: list[int]) -> None:
    group = _group(None)
    weights = make_weights(group)
    dist.barrier()
    if when == "before the call" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        for _ in range(50):
            uec.replicate_experts(weights, _plan(RING), group=group)
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
    finally:
        gone += group.health().peers_gone


@pytest.mark.parametrize("when", ["before new_group", "before the call", "between calls"])
def test_a_killed_rank_is_noticed(tmp_path: Path, when: str) -> None:
    context = forkserver()
    connected = context.Barrier(4)
    pipes, processes = [], []
    for rank in range(4):
        here, there = context.Pipe(duplex=False)
        arguments = (rank, 4, str(tmp_path / "store"), when, connected, there)
        processes.append(context.Process(target=_mortal, args=arguments, daemon=True))
        processes[-1].start()
        pipes.append(here)
    try:
        for rank in (0, 2, 3):
            assert pipes[rank].poll(180), f"rank {rank} hangs"
            (name, text, peer, root), states, gone = pipes[rank].recv()
            if when == "before new_group":  # where its peers do not know its process
                assert name == "BootstrapError"
                assert "ranks [1] did not join this collective within 5 s" in text
                continue
            assert name in ("PeerGoneError", "TransferAbortedError"), text
            if name == "PeerGoneError":
                seen = "last seen in call 1" if when == "between calls" else "before its first call"
                assert (peer, root) == (1, 1)
                assert [state.gone for state in states] == [False, True, False, False]
                assert gone == [1]
                assert states[1].state == f"process ended ({seen})"
                assert f"\n  rank 1: process ended ({seen})" in text
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert not [p for p in Path("/dev/shm").iterdir() if "ultraep" in p.name]


@pytest.mark.parametrize(
    ("aborter", "peer", "root", "expected"),
    [
        (1, -1, 1, "because rank 1 failed first; "),
        (1, -1, 3, "because rank 3 failed first, as rank 1 reported; "),
        (-1, -1, 3, "because rank 3 failed first; "),
        (1, -1, 0, "because this rank came too late, or was stuck: rank 1, or the rank that told"),
        (0, -1, 0, "was aborted on this rank"),
        (-1, 0, 0, "was aborted on this rank"),
        (-1, -1, -1, "was aborted on this rank"),
    ],
)
def test_who_failed_first_is_said_as_far_as_it_is_known(
    aborter: int, peer: int, root: int, expected: str
) -> None:
    report = _core.Report(fault=_core.Fault.ABORTED, aborter=aborter, peer=peer, root=root, epoch=1)
    text = str(error_from(report, 0, "replicate_experts", ()))
    assert expected in text


@pytest.mark.parametrize(
    "kind",
    [e for e in vars(errors).values() if inspect.isclass(e) and issubclass(e, errors.UltraEPError)],
)
def test_errors_pass_from_process_to_process(kind: type[errors.UltraEPError]) -> None:
    names = [name for base in kind.__mro__ for name in inspect.get_annotations(base)]
    error = kind("what, and why", **{name: [name] for name in names})
    loaded = pickle.loads(pickle.dumps(error))
    assert (type(loaded), str(loaded), vars(loaded)) == (kind, "what, and why", vars(error))


def _comes_late(rank: int, process_group: Any, engine: str, is_load: bool) -> Any:
    """Let rank 2 call once its peers have given up waiting for it."""
    group = uec.new_group(
        process_group,
        num_experts=6,
        slots_per_rank=1,
        expert={"w": Segment((64,), torch.float32)},
        engine=engine,
        timeout=3.0,
    )
    if rank == 2:
        dist.barrier(process_group)

    def call() -> None:
        if is_load:
            uec.gather_load(torch.zeros((8, 2), dtype=torch.int64), group=group)
        else:
            plan = uec.Plan.from_slots([[4], [4], [0]], num_experts=6)  # all need rank 2
            uec.replicate_experts({"w": torch.zeros(2, 64)}, plan, group=group)

    error: Any = raised(call)
    if rank != 2:
        dist.barrier(process_group)
    dist.barrier(process_group)
    group.close()
    return type(error).__name__, str(error), error.root


@pytest.mark.parametrize("engine", ["host", "c10d"])
@pytest.mark.parametrize("is_load", [True, False])
def test_a_rank_that_comes_late_is_named_and_reads_that_its_peers_waited_for_it(
    ranks: RankPool, engine: str, is_load: bool
) -> None:
    *peers, (name, text, root) = ranks.run(3, _comes_late, engine, is_load)
    timeouts = [peer for peer in peers if peer[0] == "TransferTimeoutError"]
    assert timeouts
    for _, said, culprit in timeouts:
        assert culprit == 2, said
        assert is_load or "not every rank of the plan had called" in said
    assert (name, root) == ("TransferAbortedError", 2)
    assert "ended because this rank came too late" in text
    assert "raise timeout= in new_group" in text
