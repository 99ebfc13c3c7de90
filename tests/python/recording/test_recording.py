"""Files of recordings: whole or not there, and checked before anything of them is believed."""

from __future__ import annotations

import io
import os
import resource
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import close_all
from recorded_groups import (
    E,
    G,
    S,
    equal,
    make_groups,
    plan_of,
    transfer,
)

from ultraep_comm import errors
from ultraep_comm.recording import file as npz
from ultraep_comm.recording.file import (
    OPERATIONS,
    Recording,
    load_recording,
    load_recordings,
    save_recording,
)


@pytest.fixture(scope="module")
def recorded() -> list[Recording]:
    groups = make_groups()
    recorders = [group.start_recording(4) for group in groups]
    for first in (50, 3, 9):
        transfer(groups, plan_of(first))
    close_all(groups)
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


def test_places_that_no_file_can_have(recorded: list[Recording], tmp_path: Path) -> None:
    with pytest.raises(OSError, match="missing"):
        save_recording(recorded[0], tmp_path / "missing" / "r.npz")
    with pytest.raises(OSError, match="folder"):
        save_recording(recorded[0], tmp_path)


def test_a_full_disk_leaves_the_file_of_before(recorded: list[Recording], tmp_path: Path) -> None:
    path = tmp_path / "r.npz"
    path.write_bytes(b"before")
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, hard))  # as if 300 bytes were left
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
    "run": ("<U1", ()),  # of which no character is made
    "domain": ("<i4", (-1,)),
    "rank": ("|V1000000000000", ()),
}


@pytest.mark.parametrize("name", HUGE)
def test_sizes_that_are_not_true_are_errors(
    recorded: list[Recording], tmp_path: Path, name: str
) -> None:
    path = tmp_path / "r.npz"
    save_recording(recorded[0], path)
    descr, shape = HUGE[name]
    header = {"descr": descr, "fortran_order": False, "shape": shape}
    rewritten(path, name, header, b"\xff\xff\xff\x7f" * 16)
    with pytest.raises(errors.RecordingError) as raised:
        load_recording(path)
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
    "magic string": _with(magic="something else"),
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
    "moves has dtype": _with(moves=np.zeros((3, G, S + 1), bool)),
    "moves has an empty slot": lambda a: {**a, "moves": a["slot_expert"] < 0},
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
    for content, says in (
        ({"counts_src": np.zeros(3)}, r"it has the arrays \['counts_src'\]"),
        ({"magic": np.array([{}], dtype=object)}, "not a recording"),
    ):
        np.savez(path, **content)
        with pytest.raises(errors.RecordingError, match=says):
            load_recording(path)
    path.write_text("a text")
    with pytest.raises(errors.RecordingError, match=r"not an \.npz file"):
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
    refused("two groups or two runs", first, replace(second, run="another"))
    refused("with ranks, experts and slots", first, replace(second, home=second.home[::-1].copy()))
    other = second.slot_expert.copy()
    other[1] = np.where(other[1] >= 0, (other[1] + 1) % E, -1)
    refused("call 2 differs between", first, replace(second, slot_expert=other))
    calls = second.calls.copy()
    calls["operation"][0] = OPERATIONS.index("reduce_expert_grads")
    refused("call 1 differs between", first, replace(second, calls=calls))
    with pytest.raises(errors.RecordingError, match="no files were given"):
        load_recordings([])
    (tmp_path / "empty").mkdir()
    with pytest.raises(errors.RecordingError, match=r"no \*.npz files"):
        load_recordings([tmp_path / "empty"])
