"""Bad input, disagreement and failure: typed errors, on the right rank, at once."""

from __future__ import annotations

import dataclasses
import inspect
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import (
    RankPool,
    assert_mismatch,
    close_all,
    loopback,
    make_weights,
    own_group,
    raised,
    start_all,
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
    options = {"slots_per_rank": S, "expert": EXPERT, "timeout": 200.0, **options}
    return uec.new_group(process_group, num_experts=E, **options)


def _plan(slots: list[list[int]]) -> uec.Plan:
    """Return a plan without the checks of from_slots."""
    slot_expert = torch.tensor(slots, dtype=torch.int32)
    home = torch.from_numpy(contiguous_home(E, len(slots)))
    return uec.Plan(slot_expert=slot_expert, home=home)


# Home map on 4 ranks: 0 0 1 1 2 2 3 3. Every rank sends and receives.
RING = [[2, -1], [4, -1], [6, -1], [0, -1]]


def _describe(error: BaseException | None) -> tuple[str, str]:
    return type(error).__name__, str(error)


# ---- a rank's own bad input -----------------------------------------------------------------

W, BYTES = torch.zeros(2, 30, 20, dtype=torch.bfloat16), torch.zeros(2, 5, dtype=torch.uint8)
TRANSPOSED = W[1].T.contiguous().T
with FakeTensorMode():
    FAKE = torch.empty(2, 30, 20, dtype=torch.bfloat16)
OTHER_HOME = dataclasses.replace(_plan(RING), home=torch.arange(E, dtype=torch.int32) % 4)


def _second(row: Any) -> dict[str, Any]:
    return {"weights": {"w": [W[0], row], "s": BYTES}}


OF_WEIGHTS, OF_PLAN = errors.InvalidWeightsError, errors.InvalidPlanError
OF_ARGUMENT = errors.InvalidArgumentError
# What rank 2 passes instead, and its error.
FAULTS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "one expert too few": ({"weights": {"w": W[1:], "s": BYTES}}, OF_WEIGHTS, "shape"),
    "list too long": ({"weights": {"w": [*W, W[0]], "s": BYTES}}, OF_WEIGHTS, "3 entries"),
    "dtype of one": (_second(W[1].float()), OF_WEIGHTS, "weights[w][1] has dtype torch.float32;"),
    "device of one": (_second(W[1].to("meta")), OF_WEIGHTS, "weights[w][1] is on meta; expected"),
    "sparse": (_second(W[1].to_sparse()), OF_WEIGHTS, "weights[w][1] is a Tensor without dense"),
    "shape of one": (_second(W[1, 1:]), OF_WEIGHTS, "an expert of weights[w][1] has shape"),
    "strides of one": (_second(TRANSPOSED), OF_WEIGHTS, "an expert of weights[w][1] has strides"),
    "no tensor": (_second(W[1].tolist()), OF_WEIGHTS, "weights['w'][1] is a list; expected a"),
    "no tensors": ({"weights": {"w": None, "s": None}}, OF_WEIGHTS, "NoneType"),
    "no mapping": ({"weights": [W]}, OF_WEIGHTS, "list"),
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
    "other home": ({"plan": OTHER_HOME}, OF_PLAN, "home map is not the group's"),
    "too few ranks": ({"plan": _plan(RING[:3])}, OF_PLAN, "3 ranks"),
    "mode": ({"mode": "relay"}, OF_ARGUMENT, "'relay'"),
    "pull": ({"mode": "pull"}, OF_WEIGHTS, "empty_weights"),
    "segments": ({"segments": ["v"]}, OF_ARGUMENT, "'v'"),
    "no segments": ({"segments": []}, OF_ARGUMENT, "()"),
    "a name": ({"segments": "w"}, OF_ARGUMENT, "segments"),
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
    return _describe(error)


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


def test_other_quotas_are_another_plan() -> None:
    groups = uec.testing.new_loopback_groups(4, num_experts=E, slots_per_rank=S, expert=EXPERT)
    quotas = [torch.full((4, S), int(rank == 1), dtype=torch.int32) for rank in range(4)]
    plans = [dataclasses.replace(_plan(RING), slot_quota=quota) for quota in quotas]
    pair = [groups[1], groups[0]]  # rank 0 takes an expert of rank 1
    assert_mismatch(start_all(pair, [make_weights(group) for group in groups], plans))
    for group in groups:
        raised(group.close)


# ---- making a group --------------------------------------------------------------------------


def _cannot_be_made(rank: int, process_group: Any) -> list[tuple[str, str]]:
    odd = {"slots_per_rank": -1} if rank == 1 else {}
    large = {"expert": {"w": ((1 << 20,), torch.bfloat16)}, "banks": 1 << 16}
    return [
        _describe(raised(lambda options=options: _group(process_group, **options)))
        for options in (odd, large)
    ]


def test_new_group_fails_on_every_rank(ranks: RankPool) -> None:
    for rank, (odd, large) in enumerate(ranks.run(3, _cannot_be_made)):
        assert odd[0] == ("InvalidArgumentError" if rank == 1 else "BootstrapError")
        assert "slots_per_rank is -1" in odd[1]
        assert "rank 1" in odd[1] or rank == 1
        assert large[0] == "OutOfSharedMemoryError"
        assert "65536 banks of 2 slots" in large[1]


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


# ---- texts -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("report", "expected"),
    [
        ({"aborter": 1, "root": 1}, "because rank 1 failed first; "),
        ({"aborter": 1, "root": 3}, "because rank 3 failed first, as rank 1 reported; "),
        ({"root": 3}, "because rank 3 failed first; "),
        ({"aborter": 1, "root": 0}, "because this rank came too late, or was stuck: rank 1, or"),
        ({"aborter": 0, "root": 0}, "was aborted on this rank"),
        ({"peer": 0, "root": 0}, "was aborted on this rank"),
        ({}, "was aborted on this rank"),
        ({"peer": 1, "fault": _core.Fault.CLOSED}, "but that rank has closed its group"),
        ({"peer": 1, "fault": _core.Fault.GONE}, "but that rank's process has ended"),
    ],
)
def test_who_failed_first_is_said_as_far_as_it_is_known(
    report: dict[str, Any], expected: str
) -> None:
    known = {"fault": _core.Fault.ABORTED, "aborter": -1, "peer": -1, "root": -1, "epoch": 1}
    error = error_from(_core.Report(**(known | report)), 0, "replicate_experts")
    assert expected in str(error)


@pytest.mark.parametrize(
    "kind",
    [e for e in vars(errors).values() if inspect.isclass(e) and issubclass(e, errors.UltraEPError)],
)
def test_errors_pass_from_process_to_process(kind: type[errors.UltraEPError]) -> None:
    names = [name for base in kind.__mro__ for name in inspect.get_annotations(base)]
    error = kind("what, and why", **{name: [name] for name in names})
    loaded = pickle.loads(pickle.dumps(error))
    assert (type(loaded), str(loaded), vars(loaded)) == (kind, "what, and why", vars(error))


@pytest.mark.parametrize("engine", ["host", "c10d"])
@pytest.mark.parametrize("is_load", [True, False])
def test_a_rank_that_comes_late_is_named_and_reads_that_its_peers_waited_for_it(
    engine: str, is_load: bool
) -> None:
    groups = uec.testing.new_loopback_groups(
        3, num_experts=6, slots_per_rank=1, expert=EXPERT, engine=engine, timeout=1.0
    )
    plan = uec.Plan.from_slots([[4], [4], [0]], num_experts=6)  # all need rank 2

    def call(rank: int) -> Any:
        group = groups[rank]
        if is_load:
            return raised(lambda: uec.gather_load(torch.zeros(8, 2).long(), group=group))
        return raised(lambda: uec.replicate_experts(make_weights(group), plan, group=group))

    found = loopback(2, call)
    timeouts = [error for error in found if isinstance(error, errors.TransferTimeoutError)]
    assert timeouts
    for error in timeouts:
        assert error.root == 2
        assert is_load or "not every rank of the plan had called" in str(error)
    late = call(2)
    assert isinstance(late, errors.TransferAbortedError)
    assert late.root == 2
    assert "ended because this rank came too late" in str(late)
    assert "raise timeout= in new_group" in str(late)
    close_all(groups)
