"""The recorder: what it keeps of calls, and the files that it writes."""

from __future__ import annotations

import io
import os
import re
import resource
import subprocess
import sys
import threading
import tracemalloc
import warnings
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from emulated_device import EmulatedDevice
from ranks import RankPool, fill_weights, make_weights

import ultraep_comm as uec
import ultraep_comm.recorder
from ultraep_comm import Segment, errors, npz
from ultraep_comm.recording import (
    OPERATIONS,
    Known,
    Recording,
    load_recording,
    load_recordings,
    save_recording,
)

G, E, S = 2, 4, 1
EXPERT = {"w": Segment((8, 4), torch.float32), "s": Segment((3,), torch.uint8)}
W, GRADS = 8 * 4 * 4 + 3, 8 * 4 * 4


def make_groups(**options: Any) -> list[uec.Group]:
    options = {"grads": {"w": torch.float32}, "timeout": 20.0, **options}
    return uec.new_loopback_groups(G, num_experts=E, slots_per_rank=S, expert=EXPERT, **options)


@pytest.fixture
def groups() -> Iterator[list[uec.Group]]:
    made = make_groups()
    yield made
    for group in made:
        group.abort()
        group.close()


def plan_of(first: int) -> uec.Plan:
    """A plan with quotas and load; rank 0 has so many tokens of expert 0."""
    load = torch.tensor([[first, 1, 1, 1], [7, 2, 2, 2]], dtype=torch.int32)
    return uec.plan_replicas(load, slots_per_rank=S)


def transfer(groups: list[uec.Group], plans: Any, **options: Any) -> None:
    works = []
    for group in groups:
        plan = plans[group.rank] if isinstance(plans, list) else plans
        weights = make_weights(group)
        work = uec.replicate_experts(weights, plan, group=group, async_op=True, **options)
        assert work is not None
        works.append(work)
    for work in works:
        work.wait()


def reduce(groups: list[uec.Group], plans: list[uec.PlanHandle]) -> None:
    works = []
    for group, plan in zip(groups, plans, strict=True):
        grads = {"w": torch.zeros(group.num_mains, 8, 4)}
        works.append(uec.reduce_expert_grads(grads, plan, group=group, async_op=True))
    for work in works:
        assert work is not None
        work.wait()


def equal(one: Recording, two: Recording) -> bool:
    pairs = [(getattr(one, f.name), getattr(two, f.name)) for f in fields(one)]
    return all(np.array_equal(a, b) for a, b in pairs if not isinstance(a, str))


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


def test_the_end_of_a_call_is_known_before_anybody_waits(groups: list[uec.Group]) -> None:
    recorders = [group.start_recording() for group in groups]
    works = [
        uec.replicate_experts(make_weights(g), plan_of(50), group=g, async_op=True) for g in groups
    ]
    while not all(work.is_completed() for work in works if work is not None):
        pass
    ends = [recorder.recording().calls["end_ns"][0] for recorder in recorders]
    assert min(ends) > 0
    for work in works:
        assert work is not None
        work.wait()
    assert ends == [recorder.recording().calls["end_ns"][0] for recorder in recorders]


def test_loads_are_gathered_without_a_plan(ranks: RankPool) -> None:
    for rank, found in enumerate(ranks.run(2, _gather)):
        calls, num_bytes = found
        assert [OPERATIONS[i] for i in calls["operation"]] == ["gather_load"], rank
        assert calls["known"].tolist() == [0]
        assert calls["mode"].tolist() == [-1]
        assert calls["end_ns"][0] > calls["begin_ns"][0]
        assert num_bytes.tolist() == [0]


def _gather(rank: int, process_group: Any) -> Any:
    with uec.new_group(process_group, num_experts=E, slots_per_rank=S, expert=EXPERT) as group:
        recorder = group.start_recording()
        uec.gather_load(torch.tensor([[rank, 3]]), group=group)
        return recorder.recording().calls, recorder.recording().bytes_of_rank()


@pytest.mark.parametrize("capacity", [1, 3, 7, 100])
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
        works = [
            uec.replicate_experts(w, given, group=g, async_op=True, mode=mode)
            for w, g in zip(weights, made, strict=True)
        ]
        for work in works:
            assert work is not None
            work.synchronize()
    for recorder in recorders:
        found = recorder.recording()
        everything = Known.PLACEMENT | Known.QUOTAS | Known.LOAD
        assert found.calls["known"].tolist() == [0, everything]
        assert found.calls["end_ns"].tolist() == [-1, -1]
        assert found.bytes_of_rank()[0] == -1
        assert contents(plan_of(50), found, 1)
    for group in made:
        group.close()


# ---- starting and stopping ------------------------------------------------------------------


def test_off_by_default_and_off_again(groups: list[uec.Group]) -> None:
    assert all(group._recorder is None for group in groups)
    with groups[0].start_recording() as recorder, groups[1].start_recording():
        transfer(groups, plan_of(50))
    transfer(groups, plan_of(40))
    assert recorder.num_calls == 1
    assert repr(recorder) == "Recorder(rank=0, 1 calls, stopped)"
    recorder.stop()  # harmless
    with groups[0].start_recording() as second:
        recorder.stop()
        assert groups[0]._recorder is second


def test_a_recorder_outlives_its_group(tmp_path: Path) -> None:
    made = make_groups()
    recorders = [group.start_recording() for group in made]
    transfer(made, plan_of(50))
    for group in made:
        group.close()
    del group, made
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
    monkeypatch.setenv("ULTRAEP_RECORD", str(tmp_path / "runs"))
    monkeypatch.setenv("ULTRAEP_RECORD_CALLS", "2")
    made = make_groups()
    for first in (10, 20, 30):
        transfer(made, plan_of(first))
    for group in made:
        group.close()
    found = load_recordings([tmp_path / "runs"])
    assert [r.rank for r in found] == [0, 1]
    assert [r.calls["epoch"].tolist() for r in found] == [[2, 3], [2, 3]]
    names = {path.name for path in (tmp_path / "runs").iterdir()}
    assert names == {f"{found[0].run}-rank{rank}.npz" for rank in range(2)}
    assert re.fullmatch(r"\d{8}-\d{6}-[0-9a-f]{8}", found[0].run)


def test_groups_and_runs_have_files_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: RankPool
) -> None:
    monkeypatch.setenv("ULTRAEP_RECORD", str(tmp_path))
    runs = set()
    for _ in range(2):
        made = make_groups()
        for group in made:
            group.close()
        runs.add(made[0]._run)
    assert len(runs) == 2
    assert len(list(tmp_path.iterdir())) == 4
    with pytest.raises(errors.RecordingError, match="two groups, or of two runs"):
        load_recordings([tmp_path])
    for run in runs:
        assert len(load_recordings(sorted(tmp_path.glob(f"{run}-*")))) == 2
    # Groups beside each other, as with several expert-parallel groups: all have a rank 0.
    folder = tmp_path / "beside"
    ranks.run(2, _record_alone, str(folder))
    assert len(list(folder.iterdir())) == 2
    with pytest.raises(errors.RecordingError, match="two groups"):
        load_recordings([folder])


def _record_alone(rank: int, process_group: Any, folder: str) -> None:
    os.environ["ULTRAEP_RECORD"] = folder
    try:
        alone = [dist.new_group([r]) for r in range(2)][rank]
        uec.new_group(alone, num_experts=E, slots_per_rank=S, expert=EXPERT).close()
    finally:
        del os.environ["ULTRAEP_RECORD"]


def test_ranks_of_a_group_share_its_name(ranks: RankPool) -> None:
    one, two = ranks.run(2, _run_name)
    assert one == two != ""


def _run_name(rank: int, process_group: Any) -> str:
    with uec.new_group(process_group, num_experts=E, slots_per_rank=S, expert=EXPERT) as group:
        return group.start_recording().recording().run


@pytest.mark.parametrize("action", ["error", "default"])
def test_a_recording_that_cannot_be_written_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, action: Any
) -> None:
    folder = tmp_path / "folder"
    monkeypatch.setenv("ULTRAEP_RECORD", str(folder))
    made = make_groups()
    folder.rmdir()
    folder.write_text("")
    for group in made:
        with warnings.catch_warnings():
            warnings.simplefilter(action)
            if action == "error":
                with pytest.raises(UserWarning, match="the recording of a group is lost"):
                    group.close()
            else:
                with pytest.warns(UserWarning, match="the recording of a group is lost"):
                    group.close()
        assert not group._finalizer.alive  # the peers got their goodbye, and threads have ended


def test_a_bad_folder_is_an_error_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ULTRAEP_RECORD", str(tmp_path / "file"))
    with pytest.raises(errors.InvalidArgumentError, match=r"ULTRAEP_RECORD is .*file"):
        make_groups()


def test_a_ring_that_memory_cannot_hold_is_an_error(
    groups: list[uec.Group], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(ultraep_comm.recorder, "physical_bytes", lambda: 100_000)
        with pytest.raises(errors.InvalidArgumentError, match=r"takes \d+ bytes.*or loads=False"):
            groups[0].start_recording(1000)
        with pytest.raises(errors.InvalidArgumentError, match=r"takes \d+ bytes.*fewer calls$"):
            groups[0].start_recording(1000, loads=False)
        assert groups[0]._recorder is None
        assert groups[0].start_recording(10).nbytes <= 50_000
        patched.setenv("ULTRAEP_RECORD", str(tmp_path))
        patched.setenv("ULTRAEP_RECORD_CALLS", "1000")
        with pytest.raises(errors.InvalidArgumentError, match="ULTRAEP_RECORD_CALLS is 1000"):
            make_groups()


FORGOTTEN = """
import os, sys, torch
import ultraep_comm as uec
groups = uec.new_loopback_groups(
    2, num_experts=4, slots_per_rank=1, expert={"w": ((4,), torch.float32)})
if os.fork() == 0:
    for group in groups:
        group._on_close()  # what the end of a process does
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
    environment = {**os.environ, "ULTRAEP_RECORD": str(tmp_path)}
    command = [sys.executable, "-c", FORGOTTEN, how]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
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
    for group in groups:
        group.close()
    assert recorders[0].recording().failed_epoch == 2  # also when the group is gone


def test_more_calls_than_an_engine_holds_are_recorded_whole(groups: list[uec.Group]) -> None:
    recorders = [group.start_recording() for group in groups]
    works = []
    for _ in range(20):  # nobody waits, and the engine takes four at a time
        plan = plan_of(50)
        works += [
            threading.Thread(
                target=uec.replicate_experts,
                args=(make_weights(group), plan),
                kwargs={"group": group},
            )
            for group in groups
        ]
        for thread in works[-2:]:
            thread.start()
        for thread in works[-2:]:
            thread.join()
    for recorder in recorders:
        calls = recorder.recording().calls
        assert (calls["end_ns"] >= calls["begin_ns"]).all()
        assert (calls["end_ns"][:-1] <= calls["begin_ns"][1:]).all()


@pytest.mark.parametrize("value", ["0", "-4", "99999999999", "lots"])
def test_bad_environment(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("ULTRAEP_RECORD_CALLS", value)
    with pytest.raises(errors.InvalidArgumentError, match="ULTRAEP_RECORD_CALLS"):
        make_groups()


# ---- files ----------------------------------------------------------------------------------


@pytest.fixture
def recorded(groups: list[uec.Group]) -> list[Recording]:
    recorders = [group.start_recording(4) for group in groups]
    for first in (50, 3, 9):
        transfer(groups, plan_of(first))
    return [recorder.recording() for recorder in recorders]


def test_files_hold_what_was_recorded(recorded: list[Recording], tmp_path: Path) -> None:
    for recording in recorded:
        save_recording(recording, tmp_path / f"r{recording.rank}.npz")
    assert all(map(equal, load_recordings([tmp_path]), recorded))
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["r0.npz", "r1.npz"]
    assert all(map(equal, load_recordings(reversed(files)), recorded))
    before = files[0].read_bytes()
    save_recording(recorded[0], files[0])
    assert files[0].read_bytes() == before


def test_a_recording_without_calls(groups: list[uec.Group], tmp_path: Path) -> None:
    recorder = groups[0].start_recording(4)
    found = load_recording(recorder.dump(tmp_path / "r.npz"))
    assert found.calls.shape == (0,)
    assert found.load.shape == (0, G, E)


def test_no_file_is_left_half_written(
    recorded: list[Recording], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "r.npz"
    path.write_bytes(b"before")

    def full(file: Any, **arrays: Any) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez_compressed", full)
    with pytest.raises(OSError, match="No space") as raised:
        save_recording(recorded[0], path)
    assert raised.value.filename == str(path)
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(OSError, match="missing"):
        save_recording(recorded[0], tmp_path / "missing" / "r.npz")
    with pytest.raises(OSError, match="folder"):
        save_recording(recorded[0], tmp_path)


def test_a_full_disk_leaves_the_file_of_before(recorded: list[Recording], tmp_path: Path) -> None:
    path = tmp_path / "r.npz"
    path.write_bytes(b"before")
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, hard))  # as if so many bytes were left
    try:
        with pytest.raises(OSError, match="cannot be written") as raised:
            save_recording(recorded[0], path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert raised.value.filename == str(path)
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]


def test_files_have_the_rights_of_new_files(
    recorded: list[Recording], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = os.umask(0o027)
    try:
        with monkeypatch.context() as patched:
            # To ask for it is to change it, for all threads.
            patched.setattr(os, "umask", lambda mask: pytest.fail("the mask was changed"))
            save_recording(recorded[0], tmp_path / "r.npz")
    finally:
        os.umask(before)
    assert (tmp_path / "r.npz").stat().st_mode & 0o777 == 0o640


def rewritten(path: Path, name: str, header: dict[str, Any], data: bytes = b"") -> None:
    """A file with one array replaced by such a header and data."""
    with zipfile.ZipFile(path) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    text = io.BytesIO()
    np.lib.format.write_array_header_1_0(text, header)
    members[f"{name}.npy"] = text.getvalue() + data
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, content in members.items():
            archive.writestr(member, content)


HUGE = {
    "calls": ("<i8", (1 << 40,)),
    "home": ("<i4", (1 << 33,)),
    "slot_expert": ("<i4", (3, G, 1 << 38)),
    "load": ("<i4", (3, G, 1 << 40)),
    "magic": ("<U2000000000", ()),
    "domain": ("<i4", (-1,)),
    "rank": ("|V1000000000000", ()),
}


@pytest.mark.parametrize("name", HUGE)
def test_sizes_are_checked_before_memory_is_taken(
    recorded: list[Recording], tmp_path: Path, name: str
) -> None:
    path = tmp_path / "r.npz"
    save_recording(recorded[0], path)
    descr, shape = HUGE[name]
    rewritten(path, name, {"descr": descr, "fortran_order": False, "shape": shape}, bytes(64))
    tracemalloc.start()
    try:
        with pytest.raises(errors.RecordingError) as raised:
            load_recording(path)
        assert tracemalloc.get_traced_memory()[1] < 10 << 20
    finally:
        tracemalloc.stop()
    assert str(path) in str(raised.value)


def test_files_that_unpack_to_more_than_memory_are_refused(
    recorded: list[Recording], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "r.npz"
    save_recording(recorded[0], path)
    header = {"descr": "<i4", "fortran_order": False, "shape": (1 << 20,)}
    rewritten(path, "home", header, bytes(4 << 20))
    assert path.stat().st_size < 50_000
    monkeypatch.setattr(npz, "physical_bytes", lambda: 8 << 20)
    with pytest.raises(errors.RecordingError, match="its arrays take 4"):
        load_recording(path)


def test_loads_are_left_out_where_nobody_wants_them(
    recorded: list[Recording], tmp_path: Path
) -> None:
    path = tmp_path / "r.npz"
    save_recording(recorded[0], path)
    found = load_recording(path, loads=False)
    assert found.load.shape == (0, G, E)
    assert equal(replace(found, load=recorded[0].load), recorded[0])
    header = {"descr": "<i4", "fortran_order": False, "shape": (3, G, E + 1)}
    rewritten(path, "load", header, bytes(3 * G * (E + 1) * 4))
    with pytest.raises(errors.RecordingError, match="load has dtype"):
        load_recordings([path], loads=False)


def test_damaged_files_are_typed_errors_or_the_same(
    recorded: list[Recording], tmp_path: Path
) -> None:
    path = tmp_path / "r.npz"
    save_recording(recorded[0], path)
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    texts = []
    cut = [whole[:n] for n in {*range(0, len(whole), 97), len(whole) - 1}]
    flipped = []
    for at in rng.integers(0, len(whole), 300):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << int(rng.integers(8))
        flipped.append(bytes(damaged))
    for damaged in [*cut, *flipped]:
        path.write_bytes(damaged)
        try:
            assert equal(load_recording(path), recorded[0])
        except errors.RecordingError as error:
            texts.append(str(error))
    assert all(str(path) in text for text in texts)
    refused = len(texts)
    assert refused > len(cut) + len(flipped) // 2


def _with(**changes: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda arrays: {**arrays, **changes}


def _edit(name: str, field: str | None, value: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def edit(arrays: dict[str, Any]) -> dict[str, Any]:
        array = arrays[name].copy()
        if field is None:
            array.flat[-1] = value
        else:
            array[field][-1] = value
        return {**arrays, name: array}

    return edit


BAD_ARRAYS = {
    "magic word": _with(magic="something else"),
    "version 9": _with(version=np.int64(9)),
    "no array 'home'": lambda arrays: {k: v for k, v in arrays.items() if k != "home"},
    "rank has values from 2": _with(rank=np.int64(2)),
    "rank has dtype": _with(rank=np.float64(0)),
    "slot_quota has dtype": _with(slot_quota=np.zeros((3, G, S + 1), np.int32)),
    "calls has dtype": _with(calls=np.zeros(3)),
    "load has 2 rows": _with(load=np.zeros((2, G, E), np.int32)),
    "slot_expert has values": _edit("slot_expert", None, E),
    "home has values": _edit("home", None, G),
    "load has values": _edit("load", None, -1),
    "'operation'": _edit("calls", "operation", 4),
    "'mode'": _edit("calls", "mode", 3),
    "'known'": _edit("calls", "known", 8),
    "num_calls is 2": _with(num_calls=np.int64(2)),
    "does not grow": _edit("calls", "epoch", 1),
    "ends before": _edit("calls", "end_ns", 1),
    "'epoch'\\] has values": _edit("calls", "epoch", 1 << 62),
    "'begin_ns'": _edit("calls", "begin_ns", -1),
    "'end_ns'\\] has values": _edit("calls", "end_ns", 2**63 - 1),
    "'expert_bytes'": _edit("calls", "expert_bytes", 1 << 60),
    "epoch_ns has values": _with(epoch_ns=np.int64(-(2**63))),
    "failed_epoch has values": _with(failed_epoch=np.int64(-1)),
    "domain has values": _edit("domain", None, -1),
    "for an empty slot": _with(
        slot_expert=np.full((3, G, S), -1, np.int32), slot_quota=np.ones((3, G, S), np.int32)
    ),
    "whose plan is not known": _edit("calls", "known", 0),
    "run has dtype": _with(run=np.int64(1)),
    "machine has dtype": _with(machine="x" * 129),
    "at most 128": _with(run=np.array(["a", "b"])),
    "no array 'failed_epoch'": lambda a: {k: v for k, v in a.items() if k != "failed_epoch"},
}


@pytest.mark.parametrize("text", BAD_ARRAYS)
def test_every_array_is_checked(recorded: list[Recording], tmp_path: Path, text: str) -> None:
    path = tmp_path / "r.npz"
    save_recording(recorded[0], path)
    with np.load(path) as archive:
        arrays = {name: archive[name] for name in archive.files}
    np.savez(path, **BAD_ARRAYS[text](arrays))
    with pytest.raises(errors.RecordingError, match=text) as raised:
        load_recording(path)
    assert str(path) in str(raised.value)


def test_foreign_files(tmp_path: Path) -> None:
    path = tmp_path / "f.npz"
    np.savez(path, counts_src=np.zeros(3))
    with pytest.raises(errors.RecordingError, match=r"\['counts_src'\], and no magic word"):
        load_recording(path)
    with path.open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(errors.RecordingError, match="single array"):
        load_recording(path)
    path.write_text("a text")
    with pytest.raises(errors.RecordingError, match="no recording"):
        load_recording(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("hello.txt", "hello")
    with pytest.raises(errors.RecordingError, match="no magic word"):
        load_recording(path)
    with path.open("wb") as file:
        np.savez(file, magic=np.array([{}], dtype=object))
    with pytest.raises(errors.RecordingError, match="no recording"):
        load_recording(path)
    with pytest.raises(FileNotFoundError):
        load_recording(tmp_path / "missing.npz")


def test_files_have_to_belong_together(recorded: list[Recording], tmp_path: Path) -> None:
    def refused(text: str, *recordings: Recording) -> None:
        paths = [tmp_path / f"{i}.npz" for i in range(len(recordings))]
        for path, recording in zip(paths, recordings, strict=True):
            save_recording(recording, path)
        with pytest.raises(errors.RecordingError, match=text) as raised:
            load_recordings(paths)
        assert all(str(path) in str(raised.value) for path in paths)

    first, second = recorded
    refused("both of rank 0", first, first)
    refused("two groups, or of two runs", first, replace(second, run="another"))
    refused("with ranks, experts and slots", first, replace(second, home=second.home[::-1].copy()))
    other = second.slot_expert.copy()
    other[1] = np.where(other[1] >= 0, (other[1] + 1) % E, -1)
    refused("call 2 is not the same", first, replace(second, slot_expert=other))
    calls = second.calls.copy()
    calls["operation"][0] = OPERATIONS.index("reduce_expert_grads")
    refused("call 1 is not the same", first, replace(second, calls=calls))
    with pytest.raises(errors.RecordingError, match="no file was named"):
        load_recordings([])
    (tmp_path / "empty").mkdir()
    with pytest.raises(errors.RecordingError, match=r"no \*.npz files"):
        load_recordings([tmp_path / "empty"])


def test_a_transfer_is_the_same_while_it_is_recorded(groups: list[uec.Group]) -> None:
    for group in groups:
        group.start_recording(2)
    plan = uec.Plan.from_slots([[2], [0]], num_experts=E)
    weights = [make_weights(group) for group in groups]
    for group, own in zip(groups, weights, strict=True):
        fill_weights(group, own, 1)
    works = [
        uec.replicate_experts(w, plan, group=g, async_op=True)
        for g, w in zip(groups, weights, strict=True)
    ]
    for work in works:
        assert work is not None
        work.wait()
    assert torch.equal(groups[0].slots["w"][0], weights[1]["w"][0])
    assert torch.equal(groups[1].slots["w"][0], weights[0]["w"][0])
