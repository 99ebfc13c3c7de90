"""The recorder: what it keeps of calls, and when it writes a file."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from emulated_device import EmulatedDevice
from ranks import (
    RankPool,
    close_all,
    loopback,
    make_weights,
    run_python,
    start_all,
    synchronize_all,
)
from recorded_groups import EXPERT, GRADS, E, G, S, W, make_groups, plan_of, transfer

import ultraep_comm as uec
import ultraep_comm.recording.recorder
from ultraep_comm import errors
from ultraep_comm.group.group import session_of
from ultraep_comm.recording.file import (
    OPERATIONS,
    Known,
    Recording,
    load_recording,
    load_recordings,
)


def reduce(groups: list[uec.Group], plans: list[uec.PlanHandle]) -> None:
    grads = [{"w": torch.zeros(group.num_local_experts, 8, 4)} for group in groups]
    synchronize_all(start_all(groups, grads, plans, call=uec.reduce_expert_grads))


def contents(plan: uec.Plan, recording: Recording, i: int) -> bool:
    """Whether a call was recorded with all of this plan."""
    names = ("slot_expert", "slot_quota", "home_quota", "load")
    return all(np.array_equal(getattr(recording, n)[i], getattr(plan, n).numpy()) for n in names)


# ---- what is kept ---------------------------------------------------------------------------


def test_calls_are_recorded_with_plans_and_times(groups: list[uec.Group]) -> None:
    recorders = [group.start_recording() for group in groups]
    plans = [plan_of(50), plan_of(3)]
    transfer(groups, plans[0], mode="push")
    handles = [group.save(plans[1], layer=7, microbatch=2) for group in groups]
    transfer(groups, handles, segments=("s",))
    reduce(groups, handles)
    for rank, recorder in enumerate(recorders):
        found = recorder.recording()
        assert found.rank == rank
        assert found.num_calls == len(found.calls) == 3
        operations = [OPERATIONS[i] for i in found.calls["operation"]]
        assert operations == ["replicate_experts", "replicate_experts", "reduce_expert_grads"]
        assert found.calls["epoch"].tolist() == [1, 2, 3]
        assert found.calls["layer"].tolist() == [-1, 7, 7]
        assert found.calls["microbatch"].tolist() == [-1, 2, 2]
        assert found.calls["expert_bytes"].tolist() == [W, 3, GRADS]
        assert found.calls["mode"][0] == 0
        assert (found.calls["known"] == Known.PLACEMENT | Known.QUOTAS | Known.LOAD).all()
        assert contents(plans[0], found, 0)
        assert contents(plans[1], found, 1)
        assert contents(plans[1], found, 2)
        assert (found.calls["end_ns"] >= found.calls["begin_ns"]).all()
        assert (np.diff(found.calls["begin_ns"]) > 0).all()
        filled = [int((plan.slot_expert[rank] >= 0).sum()) for plan in (plans[0], plans[1])]
        expected = [filled[0] * W, filled[1] * 3, filled[1] * GRADS]
        assert found.bytes_of_rank().tolist() == expected
    assert sum(r.recording().bytes_of_rank()[0] for r in recorders) == plans[0].num_replicas * W


def test_only_what_a_call_moves_is_counted() -> None:
    """Not what a bank has kept, in the same version and segments, nor slots without a gradient."""
    groups = make_groups(banks=2)
    recorders = [group.start_recording() for group in groups]
    one = uec.Plan.from_slots([[2], [0]], num_experts=E, bank=1, reuse=True)
    other = uec.Plan.from_slots([[3], [0]], num_experts=E, bank=1, reuse=True)
    for plan, options in (
        (one, {}),
        (other, {}),  # Plan.slots_to_fill says that all is moved
        (other, {"segments": ("s",)}),
        (other, {"version": 5}),
        (other, {"version": 5}),
        (uec.Plan.from_slots([[3], [-1]], num_experts=E), {}),
    ):
        transfer(groups, plan, **options)
    kept = uec.Plan.from_slots(
        [[3], [0]],
        num_experts=E,
        slot_quota=torch.tensor([[0], [4]]),
        home_quota=torch.tensor([1, 0, 0, 2]),
        bank=1,
        reuse=True,
    )
    reduce(groups, [group.save(kept) for group in groups])
    moves = [[1, 1], [1, 0], [1, 1], [1, 1], [0, 0], [1, 0], [0, 1]]
    sizes = np.array([W, W, 3, W, W, W, GRADS])
    for rank, recorder in enumerate(recorders):
        found = recorder.recording()
        assert found.moves[:, :, 0].astype(int).tolist() == moves
        assert found.bytes_of_rank().tolist() == (np.array(moves)[:, rank] * sizes).tolist()
    close_all(groups)


def test_the_end_of_a_call_is_known_before_anybody_waits(groups: list[uec.Group]) -> None:
    recorders = [group.start_recording() for group in groups]
    works = start_all(groups, [make_weights(group) for group in groups], plan_of(50))
    while not all(work.is_completed() for work in works):
        pass
    ends = [recorder.recording().calls["end_ns"][0] for recorder in recorders]
    assert min(ends) > 0
    synchronize_all(works)
    assert ends == [recorder.recording().calls["end_ns"][0] for recorder in recorders]


def test_loads_are_gathered_without_a_plan(ranks: RankPool) -> None:
    runs = set()
    for rank, (calls, num_bytes, run) in enumerate(ranks.run(2, _gather)):
        runs.add(run)
        assert [OPERATIONS[i] for i in calls["operation"]] == ["gather_load"], rank
        assert calls["known"].tolist() == [0]
        assert calls["mode"].tolist() == [-1]
        assert calls["end_ns"][0] > calls["begin_ns"][0]
        assert num_bytes.tolist() == [0]
    assert len(runs) == 1  # all ranks have the group's name
    assert runs != {""}


def _gather(rank: int, process_group: Any) -> Any:
    with uec.new_group(process_group, num_experts=E, slots_per_rank=S, expert=EXPERT) as group:
        recorder = group.start_recording()
        uec.gather_load(torch.tensor([[rank, 3]]), group=group)
        found = recorder.recording()
        return found.calls, found.bytes_of_rank(), found.run


@pytest.mark.parametrize("capacity", [3, 100])
def test_the_ring_keeps_the_last_calls(groups: list[uec.Group], capacity: int) -> None:
    recorders = [group.start_recording(capacity) for group in groups]
    bare = uec.Plan.from_slots([[2], [-1]], num_experts=E)  # no quotas, no load
    plans = [plan_of(10 * i) if i % 3 else bare for i in range(10)]
    for plan in plans:
        transfer(groups, plan)
    for recorder in recorders:
        found = recorder.recording()
        kept = min(capacity, 10)
        assert recorder.num_calls == found.num_calls == 10
        assert found.calls["epoch"].tolist() == list(range(11 - kept, 11))
        assert (found.calls["end_ns"] > 0).all()
        for i, plan in enumerate(plans[-kept:]):
            if plan is bare:
                assert found.calls["known"][i] == Known.PLACEMENT
                assert np.array_equal(found.slot_expert[i], bare.slot_expert.numpy())
                arrays = (found.slot_quota[i], found.home_quota[i], found.load[i])
                assert not any(array.any() for array in arrays)
            else:
                assert contents(plan, found, i)


def test_nothing_of_an_old_call_stays_where_a_plan_is_not_known(groups: list[uec.Group]) -> None:
    recorder = groups[0].start_recording(1)
    for plan in (plan_of(50), None):
        recorder.enter()
        recorder.add(recorder.num_calls + 1, "replicate_experts", "auto", plan, 0, W)
    found = recorder.recording()
    assert found.calls["known"].tolist() == [0]
    assert (found.slot_expert == -1).all()
    assert not any(array.any() for array in (found.slot_quota, found.home_quota, found.load))
    assert found.bytes_of_rank().tolist() == [-1]


def test_the_ring_is_allocated_once(groups: list[uec.Group]) -> None:
    recorder = groups[0].start_recording(3)
    arrays = [v for v in vars(recorder).values() if isinstance(v, np.ndarray) and v.base is None]
    addresses = [a.ctypes.data for a in arrays]
    assert recorder.nbytes == sum(a.nbytes for a in arrays)
    for i in range(7):
        recorder.enter()
        recorder.add(i + 1, "replicate_experts", "push", plan_of(i), 0, W)
    after = [v for v in vars(recorder).values() if isinstance(v, np.ndarray) and v.base is None]
    assert [a.ctypes.data for a in after] == addresses


def test_without_loads(groups: list[uec.Group], tmp_path: Path) -> None:
    recorders = [group.start_recording(4, loads=False) for group in groups]
    assert load_recording(recorders[0].dump(tmp_path / "empty.npz")).calls.shape == (0,)
    transfer(groups, plan_of(50))
    found = load_recording(recorders[0].dump(tmp_path / "r.npz"))
    assert found.load.shape == (0, G, E)
    assert found.calls["known"].tolist() == [Known.PLACEMENT | Known.QUOTAS]


def test_plans_on_a_device_are_recorded_without_contents(emulated: EmulatedDevice) -> None:
    made = make_groups(engine="cuda", grads=None, num_sms=2, timeout=60.0)
    recorders = [group.start_recording() for group in made]
    plan = uec.plan_replicas(emulated.put(torch.full((G, E), 5, dtype=torch.int32)), group=made[0])
    weights = [make_weights(group) for group in made]
    for given, mode in ((plan, "push"), (plan_of(50), "push")):
        synchronize_all(start_all(made, weights, given, mode=mode))
    for recorder in recorders:
        found = recorder.recording()
        everything = Known.PLACEMENT | Known.QUOTAS | Known.LOAD
        assert found.calls["known"].tolist() == [0, everything]
        assert found.calls["end_ns"].tolist() == [-1, -1]
        assert found.bytes_of_rank()[0] == -1
        assert contents(plan_of(50), found, 1)
    close_all(made)


# ---- starting and stopping ------------------------------------------------------------------


def test_off_by_default_and_off_again(groups: list[uec.Group]) -> None:
    assert all(session_of(group).recorder is None for group in groups)
    with groups[0].start_recording() as recorder, groups[1].start_recording():
        transfer(groups, plan_of(50))
    transfer(groups, plan_of(40))
    assert recorder.num_calls == 1
    assert repr(recorder) == "Recorder(rank=0, 1 calls, stopped)"
    recorder.stop()  # harmless
    with groups[0].start_recording() as second:
        recorder.stop()
        assert session_of(groups[0]).recorder is second


def test_a_recorder_outlives_its_group(tmp_path: Path) -> None:
    made = make_groups()
    recorders = [group.start_recording() for group in made]
    transfer(made, plan_of(50))
    close_all(made)
    del made
    found = load_recording(recorders[1].dump(tmp_path / "r{rank}.npz"))
    assert found.source == str(tmp_path / "r1.npz")
    assert found.calls["end_ns"][0] > 0


def test_bad_starts(groups: list[uec.Group]) -> None:
    for bad in (0, -1, 1 << 25, 1.5, "many"):
        with pytest.raises(errors.InvalidArgumentError, match="capacity is"):
            groups[0].start_recording(bad)  # type: ignore[arg-type]
    groups[0].start_recording()
    with pytest.raises(errors.InvalidArgumentError, match="recorded already"):
        groups[0].start_recording()
    groups[1].abort()
    groups[1].close()
    with pytest.raises(errors.GroupClosedError):
        groups[1].start_recording()


def test_recording_by_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "runs"
    monkeypatch.setenv("ULTRAEP_RECORD", str(folder))
    monkeypatch.setenv("ULTRAEP_RECORD_CALLS", "2")
    runs = set()
    for _ in range(2):
        made = make_groups()
        for first in (10, 20, 30):
            transfer(made, plan_of(first))
        close_all(made)
        runs.add(run := session_of(made[0]).run)
        assert re.fullmatch(r"\d{8}-\d{6}-[0-9a-f]{8}", run)
    assert len(runs) == 2
    for run in runs:
        found = load_recordings([folder / f"{run}-rank{rank}.npz" for rank in range(2)])
        assert [(r.run, r.rank) for r in found] == [(run, 0), (run, 1)]
        assert [r.calls["epoch"].tolist() for r in found] == [[2, 3], [2, 3]]
    assert len(list(folder.iterdir())) == 4
    with pytest.raises(errors.RecordingError, match="two groups or two runs"):
        load_recordings([folder])


@pytest.mark.parametrize("action", ["error", "default"])
def test_a_recording_that_cannot_be_written_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, action: Any
) -> None:
    folder = tmp_path / "folder"
    monkeypatch.setenv("ULTRAEP_RECORD", str(folder))
    made = make_groups()
    folder.rmdir()
    folder.write_text("")
    seen = pytest.raises if action == "error" else pytest.warns
    for group in made:
        with warnings.catch_warnings():
            warnings.simplefilter(action)
            with seen(UserWarning, match="the recording of a group is lost"):
                group.close()
        # The peers got their goodbye, and threads have ended.
        assert not session_of(group)._finalizer.alive


def test_a_bad_folder_is_an_error_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ULTRAEP_RECORD", str(tmp_path / "file"))
    with pytest.raises(errors.InvalidArgumentError, match=r"ULTRAEP_RECORD is .*file"):
        make_groups()


def test_a_ring_that_memory_cannot_hold_is_an_error(
    groups: list[uec.Group], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(ultraep_comm.recording.recorder, "physical_bytes", lambda: 100_000)
        with pytest.raises(errors.InvalidArgumentError, match=r"takes \d+ bytes.*or loads=False"):
            groups[0].start_recording(1000)
        with pytest.raises(errors.InvalidArgumentError, match=r"takes \d+ bytes.*fewer calls$"):
            groups[0].start_recording(1000, loads=False)
        assert session_of(groups[0]).recorder is None
        assert groups[0].start_recording(10).nbytes <= 50_000
        patched.setenv("ULTRAEP_RECORD", str(tmp_path))
        patched.setenv("ULTRAEP_RECORD_CALLS", "1000")
        with pytest.raises(errors.InvalidArgumentError, match="ULTRAEP_RECORD_CALLS is 1000"):
            make_groups()


FORGOTTEN = """
import os, sys, torch
import ultraep_comm as uec
from ultraep_comm.group.group import session_of
groups = uec.testing.new_loopback_groups(
    2, num_experts=4, slots_per_rank=1, expert={"w": ((4,), torch.float32)})
if os.fork() == 0:
    for group in groups:
        session_of(group).on_close()  # what the end of a process does
    os._exit(0)
os.wait()
assert not os.listdir(os.environ["ULTRAEP_RECORD"])
plan = uec.Plan.from_slots([[2], [0]], num_experts=4)
works = [uec.replicate_experts({"w": torch.zeros(2, 4)}, plan, group=g, async_op=True)
         for g in groups]
for work in works:
    work.wait()
if sys.argv[1] == "collected":
    del groups, works, work
    assert len(os.listdir(os.environ["ULTRAEP_RECORD"])) == 2
"""


@pytest.mark.parametrize("how", ["at the end", "collected"])
def test_groups_that_nobody_closes_write_recordings_too(tmp_path: Path, how: str) -> None:
    done = run_python("-c", FORGOTTEN, how, ULTRAEP_RECORD=str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    for recording in load_recordings([tmp_path]):
        assert recording.calls["epoch"].tolist() == [1]
        assert recording.calls["end_ns"][0] > 0


def test_failed_calls_are_known(groups: list[uec.Group]) -> None:
    recorders = [group.start_recording() for group in groups]
    transfer(groups, plan_of(50))
    work = uec.replicate_experts(
        make_weights(groups[0]), plan_of(50), group=groups[0], async_op=True
    )
    groups[1].abort()
    assert work is not None
    with pytest.raises(errors.TransferAbortedError):
        work.wait()
    found = recorders[0].recording()
    assert found.failed_epoch == 2
    assert found.calls["end_ns"][0] > 0
    assert found.calls["end_ns"][1] == -1
    close_all(groups)
    assert recorders[0].recording().failed_epoch == 2  # also when the group is gone


def test_more_calls_than_an_engine_holds_are_recorded_whole(groups: list[uec.Group]) -> None:
    recorders = [group.start_recording() for group in groups]
    weights = [make_weights(group) for group in groups]
    for _ in range(20):
        loopback(G, lambda r: uec.replicate_experts(weights[r], plan_of(50), group=groups[r]))
    for recorder in recorders:
        calls = recorder.recording().calls
        assert (calls["end_ns"] >= calls["begin_ns"]).all()
        assert (calls["end_ns"][:-1] <= calls["begin_ns"][1:]).all()


@pytest.mark.parametrize("value", ["0", "99999999999", "lots"])
def test_bad_environment(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("ULTRAEP_RECORD_CALLS", value)
    with pytest.raises(errors.InvalidArgumentError, match="ULTRAEP_RECORD_CALLS"):
        make_groups()
