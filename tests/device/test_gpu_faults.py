"""What goes wrong on a GPU: every error's kind and root, and that the device stays usable.

Each test of `engine` runs the kernels on the CPU too, and the host engine: no GPU is needed to know
that the test itself is right.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from loopback_ranks import Ranks, hold, put_plan
from ranks import loopback, make_weights, raised

import ultraep_comm as uec
from ultraep_comm import errors

SEGMENTS = {"w": 100_003, "s": 37}


def _ranks(engine: str, num_ranks: int = 3, **options: Any) -> Ranks:
    return Ranks(engine, num_ranks, SEGMENTS, num_experts=2 * num_ranks, **options)


def _ring(ranks: Ranks) -> uec.Plan:
    """Every rank holds its neighbour's first expert."""
    return ranks.plan([[(2 * r + 2) % ranks.num_experts, -1] for r in range(len(ranks.groups))])


def _start(ranks: Ranks, rank: int, plan: uec.Plan, **options: Any) -> uec.Work:
    group = ranks.groups[rank]
    work = uec.replicate_experts(make_weights(group), plan, group=group, async_op=True, **options)
    assert work is not None
    return work


def _outcomes(works: list[uec.Work]) -> list[BaseException | None]:
    return loopback(len(works), lambda r: raised(works[r].synchronize))


def _end(ranks: Ranks) -> None:
    """Every rank's next call is refused; groups close; a new group works on the same device."""
    plan = _ring(ranks)
    for rank, group in enumerate(ranks.groups):
        with pytest.raises(errors.GroupClosedError) as closed:
            _start(ranks, rank, plan)
        assert isinstance(closed.value.__cause__, errors.UltraEPError)
        assert raised(group.close) is None  # the failure was raised before
        with pytest.raises(errors.GroupClosedError, match="is closed"):
            _start(ranks, rank, plan)
    with _ranks(ranks.engine) as fresh:
        fresh.replicate(fresh.stacked(), _ring(fresh))


def _root(error: BaseException | None) -> int:
    assert isinstance(error, errors.TransferError)
    return error.root


# ---- a rank that does not take part --------------------------------------------------------------


def test_a_rank_that_never_calls_is_named(engine: str) -> None:
    ranks = _ranks(engine, timeout=1.0)
    works = [_start(ranks, rank, _ring(ranks)) for rank in (0, 2)]
    found = _outcomes(works)
    assert any(isinstance(error, errors.TransferTimeoutError) for error in found), found
    assert any(isinstance(error, TimeoutError) for error in found)
    for error in found:
        assert isinstance(error, errors.TransferTimeoutError | errors.TransferAbortedError)
    assert 1 in [_root(error) for error in found]
    (text, *_) = (str(e) for e in found if isinstance(e, errors.TransferTimeoutError))
    assert "Look at rank 1 first" in text
    if engine != "host":  # which reads what the peers have written
        assert re.search(r"rank 1: waited for by rank [02]", text)
    ranks.groups[1].abort()
    for group in ranks.groups:
        raised(group.close)


def test_a_rank_that_closes_is_named(engine: str) -> None:
    ranks = _ranks(engine)
    ranks.groups[1].close()
    works = [_start(ranks, rank, _ring(ranks)) for rank in (0, 2)]
    for error in _outcomes(works):
        assert isinstance(error, errors.PeerGoneError | errors.TransferAbortedError)
        assert _root(error) == 1
    for rank in (0, 2):
        with pytest.raises(errors.GroupClosedError):
            _start(ranks, rank, _ring(ranks))
        ranks.groups[rank].close()


@pytest.mark.parametrize("when", ["before", "while they wait"])
def test_abort_ends_what_the_peers_wait_for(engine: str, when: str) -> None:
    ranks = _ranks(engine)
    if when == "before":
        ranks.groups[1].abort()
    works = [_start(ranks, rank, _ring(ranks)) for rank in (0, 2)]
    aborter = threading.Timer(0.2, ranks.groups[1].abort)
    aborter.start()
    for error in _outcomes(works):
        assert isinstance(error, errors.TransferAbortedError)
        assert _root(error) == 1
    aborter.join()
    for rank in range(3):
        with pytest.raises(errors.GroupClosedError):
            _start(ranks, rank, _ring(ranks))
    for group in ranks.groups:
        group.close()


def test_abort_of_a_rank_that_waits_itself(engine: str) -> None:
    ranks = _ranks(engine)
    work = _start(ranks, 0, _ring(ranks))
    aborter = threading.Timer(0.2, ranks.groups[0].abort)
    aborter.start()
    assert isinstance(raised(work.synchronize), errors.TransferAbortedError)
    aborter.join()
    with pytest.raises(errors.GroupClosedError):
        _start(ranks, 0, _ring(ranks))
    for group in ranks.groups:
        raised(group.close)


def test_bad_input_is_rejected_before_anything_is_written(engine: str) -> None:
    ranks = _ranks(engine)
    good = ranks.stacked()
    ranks.fill(good)
    plan = _ring(ranks)
    with pytest.raises(errors.InvalidWeightsError):
        uec.replicate_experts({}, plan, group=ranks.groups[1])
    works = [_start(ranks, rank, plan) for rank in (0, 2)]
    for error in _outcomes(works):
        assert isinstance(error, errors.PeerRejectedError | errors.TransferAbortedError)
        assert _root(error) == 1
    assert sum(ranks.wrong(ranks.plan([[-1, -1]] * 3))) == 0
    _end(ranks)


def test_weights_of_another_device_are_refused(engine: str) -> None:
    ranks = _ranks(engine)
    other = "cpu" if engine == "cuda" else "meta"
    weights = {name: t.to(other) for name, t in make_weights(ranks.groups[0]).items()}
    with pytest.raises(errors.InvalidWeightsError, match=f"is on {other}"):
        ranks.groups[0].bind(weights)
    ranks.replicate(ranks.stacked(), _ring(ranks))  # binding is local: nothing has ended
    for group in ranks.groups:
        group.close()


# ---- different calls -----------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["plan", "mode", "segments"])
def test_ranks_that_make_different_calls(engine: str, what: str) -> None:
    ranks = _ranks(engine, timeout=5.0)
    plan = _ring(ranks)
    rows = plan.slot_expert.tolist()
    rows[0][1] = 3
    other: dict[str, Callable[[], uec.Work]] = {
        "plan": lambda: _start(ranks, 1, ranks.plan(rows), mode="push"),
        "mode": lambda: _start(ranks, 1, plan, mode="direct"),
        "segments": lambda: _start(ranks, 1, plan, mode="push", segments=["s"]),
    }
    works = [
        _start(ranks, 0, plan, mode="push"),
        other[what](),
        _start(ranks, 2, plan, mode="push"),
    ]
    found = _outcomes(works)
    assert any(isinstance(error, errors.PlanMismatchError) for error in found), found
    for error in found:
        assert isinstance(error, errors.PlanMismatchError | errors.TransferAbortedError)
    assert [work.exception() is None for work in works] == [False] * 3
    _end(ranks)


def test_calls_behind_a_failed_one_do_not_run(engine: str) -> None:
    ranks = _ranks(engine, timeout=5.0)
    plan = _ring(ranks)
    ranks.replicate(ranks.stacked(), plan)
    first, second = [], []
    for rank in range(3):
        mode = "direct" if rank == 1 else "push"
        first.append(_start(ranks, rank, plan, mode=mode))
        try:
            second.append(_start(ranks, rank, plan))
        except errors.GroupClosedError:  # the first one has failed by now
            continue
    assert all(isinstance(error, errors.TransferError) for error in _outcomes(first))
    for work in second:
        assert isinstance(raised(work.synchronize), errors.UltraEPError)
    _end(ranks)


def test_a_failure_that_nobody_waited_for_surfaces_in_close(engine: str) -> None:
    ranks = _ranks(engine, timeout=5.0)
    plan = _ring(ranks)
    works = [_start(ranks, r, plan, mode="direct" if r == 1 else "push") for r in range(3)]
    assert len(works) == 3
    for group in ranks.groups:  # which does not consume the error
        while not group.health().last_error:
            time.sleep(0.01)
        assert group.health().state == "failed"
    found = loopback(3, lambda r: raised(ranks.groups[r].close))
    assert any(isinstance(error, errors.PlanMismatchError) for error in found), found
    assert all(isinstance(error, errors.TransferError) for error in found), found


def test_close_tells_of_another_last_call(engine: str) -> None:
    """Where nothing was to be moved, nobody has asked before."""
    ranks = _ranks(engine, num_ranks=2)
    nothing = ranks.plan([[-1, -1]] * 2)
    for work in [_start(ranks, r, nothing, segments=["s"] if r else None) for r in range(2)]:
        work.synchronize()
    found = loopback(2, lambda r: raised(ranks.groups[r].close))
    assert any("the last call of rank" in str(error) for error in found), found


def test_a_failure_leaves_other_groups_alone(engine: str) -> None:
    with _ranks(engine) as other:
        weights = other.stacked()
        ranks = _ranks(engine, timeout=5.0)
        plan = _ring(ranks)
        works = [_start(ranks, r, plan, mode="direct" if r == 1 else "push") for r in range(3)]
        started = None
        if engine != "host":  # under way while the other fails
            other.fill(weights)
            started = other.start(weights, _ring(other))
        assert all(_outcomes(works))
        for work in started or []:
            work.synchronize()
        if started is not None:
            assert other.wrong(_ring(other)) == [0] * 3
        _end(ranks)
        for _ in range(3):
            other.replicate(weights, _ring(other))


# ---- on the device alone -------------------------------------------------------------------------


def test_a_table_without_addresses_is_refused(streams: str) -> None:
    ranks = _ranks(streams)
    bound = [group.bind(own) for group, own in zip(ranks.groups, ranks.stacked(), strict=True)]
    ranks.finish()
    for own in bound:
        assert own.table is not None
        own.table.zero_()  # as a kernel that writes addresses might
    works = ranks.start(bound, put_plan(ranks.groups[0], _ring(ranks)))
    found = [raised(work.synchronize) for work in works]
    assert {type(error) for error in found} <= {
        errors.InvalidWeightsError,
        errors.PeerRejectedError,
        errors.TransferAbortedError,
    }
    with pytest.raises(errors.InvalidWeightsError, match=r"no address of segment '.*' of expert 0"):
        raise found[0]
    _end(ranks)


def test_abort_of_a_call_that_the_stream_has_not_reached(streams: str) -> None:
    ranks = _ranks(streams)
    plan = _ring(ranks)
    ranks.replicate(ranks.stacked(), plan)
    ranks.finish()
    hold(streams)
    works = [_start(ranks, rank, plan) for rank in range(3)]
    for work in works:
        work.wait()  # nothing is known yet
    ranks.groups[1].abort()
    for error in _outcomes(works):  # a kernel looks at the abort when it has to wait
        assert error is None or isinstance(error, errors.TransferAbortedError)
    with pytest.raises(errors.GroupClosedError):
        _start(ranks, 1, plan)
    for rank in (0, 2):
        error = raised(lambda r=rank: _start(ranks, r, plan).synchronize())
        assert isinstance(error, errors.TransferAbortedError | errors.GroupClosedError)
    for group in ranks.groups:
        raised(group.close)
    ranks.finish()


def test_a_failure_surfaces_without_being_waited_for(streams: str) -> None:
    ranks = _ranks(streams, timeout=5.0)
    plan = _ring(ranks)
    works = [_start(ranks, r, plan, mode="direct" if r == 1 else "push") for r in range(3)]
    ranks.finish()  # the kernel ends by itself, and leaves no CUDA error
    deadline = time.monotonic() + 5
    while not all(work.exception() for work in works) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert all(isinstance(work.exception(), errors.TransferError) for work in works)
    with pytest.raises(errors.GroupClosedError):
        _start(ranks, 0, plan)
    assert int(torch.ones(3, device=ranks.groups[0].device).sum()) == 3
    _end(ranks)


@pytest.mark.gpu
def test_too_many_blocks_for_the_device(gpu: torch.device) -> None:
    with pytest.raises(errors.InvalidArgumentError, match="multiprocessors"):
        _ranks("cuda", num_ranks=4, num_sms=200)
