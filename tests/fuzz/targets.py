"""What the Python side is fuzzed with. Each target takes bytes, and lets no other error out than
those that its function documents: anything else is a finding."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from fuzz import inputs
from fuzz.inputs import Bytes
from studies import cli as studies
from studies.draw.records import load_records
from studies.draw.run import read_figures
from ultraep_comm.bench import cli as bench_cli
from ultraep_comm.bench.traces import TraceError, open_trace
from ultraep_comm.calibration import ENGINES, choose_constants, read_calibration
from ultraep_comm.errors import InvalidArgumentError, RecordingError
from ultraep_comm.plan.plan import Plan
from ultraep_comm.plan.topology import Topology
from ultraep_comm.recording.file import load_recordings
from ultraep_comm.viz import cli as viz_cli
from ultraep_comm.viz import run as viz_run

MAX_RANKS = 64  # of loads that are made of traces: any number works, and takes its time


@cache
def folder() -> Path:
    """A folder for the files of this process, which it removes in the end."""
    made = tempfile.TemporaryDirectory(prefix="ultraep-fuzz-")
    _KEPT.append(made)
    return Path(made.name)


_KEPT: list[tempfile.TemporaryDirectory[str]] = []


@contextlib.contextmanager
def _file(content: bytes, name: str = "file") -> Iterator[Path]:
    path = folder() / name
    path.write_bytes(content)
    yield path


# ---- plans --------------------------------------------------------------------------------------

_DTYPES = (
    *(torch.int32, torch.int64, torch.int8, torch.uint8, torch.int16, torch.uint16, torch.uint64),
    *(torch.float32, torch.bool, torch.complex64),
)
_ODD: list[Any] = [
    *(None, 3, "x", "12", [[]], [[1, 2], [3]], [["a"]], [[10**30]], [[None]], object(), {}, b"ab"),
    *([[0.5]], np.array([[object()]]), np.array([["a"]]), np.zeros((2, 2), np.uint64), [[2**31]]),
    *(
        np.array([[2**63]], np.uint64),
        np.array(3),
        np.zeros((1, 1), "M8[s]"),
        [[-(2**40)]],
        range(4),
    ),
    torch.zeros(2, 2, dtype=torch.int32).to_sparse(),
    torch.zeros(2, 2, dtype=torch.int32, device="meta"),
    torch.zeros(2, 2, dtype=torch.int64).T,
]


def _ints(b: Bytes, *shape: int) -> Any:
    """Return values, mostly of this shape, of any type that a caller may pass."""
    kind = b.draw(0, 15)
    if kind == 15:
        return b.pick(_ODD)
    dims = [max(0, length + b.pick([0, 1, -1])) if kind == 14 else length for length in shape]
    wide = kind == 13
    count = int(np.prod(dims))
    low, high = (-(2**63), 2**63 - 1) if wide else (-2, 9)
    values = np.array([b.draw(low, high) for _ in range(count)], np.int64).reshape(dims)
    match b.draw(0, 4):
        case 0:
            return values.tolist()
        case 1:
            return values
        case 2:
            return values.astype(np.int32)
        case _:
            return torch.from_numpy(values).to(b.pick(_DTYPES))


def plan_from_slots(data: bytes) -> None:
    """``Plan.from_slots`` of anything, and every figure of what it takes."""
    b = Bytes(data)
    num_ranks, num_slots, num_experts = b.draw(0, 4), b.draw(0, 3), b.draw(1, 8)
    slots = _ints(b, num_ranks, num_slots)
    if b.flag() and isinstance(slots, np.ndarray) and slots.dtype.kind == "i":
        slots = np.clip(slots, -1, num_experts - 1)
    shapes = {
        "home": (num_experts,),
        "slot_quota": (num_ranks, num_slots),
        "home_quota": (num_experts,),
        "load": (num_ranks, num_experts),
        "domains": (num_ranks,),
    }
    given = {name: _ints(b, *shape) for name, shape in shapes.items() if b.draw(0, 3) == 3}
    said = b.pick([num_experts] * 6 + [0, -1, 2**31, 2**40, 2**63, 10**30, 1.5, "3", None, True])
    try:
        plan = Plan.from_slots(slots, num_experts=said, allow_cross_domain=b.flag(), **given)
    except InvalidArgumentError:
        return
    assert not isinstance(said, float | str)
    _check_plan(plan, had_all=_is_whole(given))


def _is_whole(given: dict[str, Any]) -> bool:
    return all(given.get(name) is not None for name in ("slot_quota", "home_quota", "load"))


def _check_plan(plan: Plan, *, had_all: bool) -> None:
    """Assert what a legal plan is, one slot at a time."""
    home = plan.home.tolist()
    held: dict[int, int] = dict.fromkeys(range(plan.num_experts), 0)
    for rank, row in enumerate(plan.slot_expert.tolist()):
        filled = [expert for expert in row if expert != -1]
        assert len(set(filled)) == len(filled)
        for slot, expert in enumerate(row):
            assert -1 <= expert < plan.num_experts
            assert expert == -1 or 0 <= home[expert] != rank
            if plan.slot_quota is not None:
                quota = int(plan.slot_quota[rank, slot])
                assert quota >= 0
                assert expert != -1 or quota == 0
                held[expert] = held.get(expert, 0) + quota
    if had_all:
        assert plan.load is not None
        assert plan.home_quota is not None
        for expert in range(plan.num_experts):
            total = held[expert] + int(plan.home_quota[expert])
            assert total == int(plan.load[:, expert].sum(dtype=torch.int64))
    for name in ("num_replicas", "imbalance", "imbalance_bound", "max_exports", "max_imports"):
        getattr(plan, name)
    assert plan.local_share != plan.local_share or 0 <= plan.local_share <= 1
    plan.validate(allow_cross_domain=True)


def topology(data: bytes) -> None:
    """``Topology.make``, which every group and planner begins with."""
    b = Bytes(data)
    counts = [b.pick([0, 1, 2, 3, 4, -1, 2**31, 2**63, 1.5, None, "2", True]) for _ in range(3)]
    if any(isinstance(n, int) and n > 2**20 for n in counts[:2]):
        counts[:2] = [2, 4]  # the maps of any number take their memory
    sizes = [int(n) if isinstance(n, int) and n > 0 else 2 for n in counts]
    with contextlib.suppress(InvalidArgumentError):
        Topology.make(
            num_ranks=counts[0],  # type: ignore[arg-type]
            num_experts=counts[1],  # type: ignore[arg-type]
            slots_per_rank=counts[2],  # type: ignore[arg-type]
            home=_ints(b, sizes[1]) if b.flag() else None,
            domains=_ints(b, sizes[0]) if b.flag() else None,
        )


# ---- files --------------------------------------------------------------------------------------


def recording(data: bytes) -> None:
    """A recording, or two of one run."""
    b = Bytes(data)
    raw = b.draw(0, 7) == 7
    content = b.rest() if raw else inputs.npz_file(inputs.recording_arrays(), b)
    with _file(content, "r0.npz") as path:
        paths = [path]
        if not raw and b.flag():
            second = inputs.recording_arrays() | {"rank": np.array(1)}
            (folder() / "r1.npz").write_bytes(inputs.npz_file(second, b))
            paths.append(folder() / "r1.npz")
        try:
            found = load_recordings(paths, loads=b.flag())
        except RecordingError as error:
            _check_text(error)
            return
        for one in found:
            one.bytes_of_rank()
            assert one.slot_expert.max(initial=-1) < one.num_experts


def trace(data: bytes) -> None:
    """Recorded routing, and the load of one of its steps."""
    b = Bytes(data)
    content = b.rest() if b.draw(0, 7) == 7 else inputs.npz_file(inputs.trace_arrays(b), b)
    with _file(content, "trace.npz") as path:
        try:
            opened = open_trace(path)
            for step, layer in ((0, 0), (b.draw(-1, 3), b.draw(-1, 3))):
                num_ranks = b.draw(1, MAX_RANKS) if b.flag() else 2
                tokens = b.draw(1, 4)
                load = opened.load(
                    num_ranks=num_ranks, step=step, layer=layer, tokens_per_rank=tokens
                )
                assert load.shape == (num_ranks, opened.num_experts)
                assert load.min() >= 0
                assert load.sum(axis=0, dtype=np.int64).max() < 2**31
        except TraceError as error:
            _check_text(error)


def calibration(data: bytes) -> None:
    """A file of measured costs, and the constants that come of it."""
    b = Bytes(data)
    content = b.rest()
    if b.draw(0, 1) == 0 and content[:1] != b"\x01":
        b = Bytes(content)
        content = inputs.json_file(inputs.calibration_document(), b)
    else:
        content = content[1:]
    with _file(content, "calibration.json") as path:
        try:
            found = read_calibration(path)
        except InvalidArgumentError as error:
            _check_text(error)
            return
        for engine in ENGINES:
            for value in choose_constants(found, engine, 64, (1, 2, 3, 4, 5)):
                assert isinstance(value, int)
                assert 0 <= value < 2**63


def results(data: bytes) -> None:
    """Records of a study, and a picture of them now and then."""
    b = Bytes(data)
    draws = b.draw(0, 63) == 63
    content = b.rest() if b.draw(0, 7) == 7 else inputs.json_file(_document(b), b)
    with _file(content, "results.json") as path:
        try:
            read_figures(load_records(path), str(path))
        except InvalidArgumentError as error:
            _check_text(error)
        if draws:
            run(studies.main, ["draw", str(path), "--out", str(folder() / "drawn.png")])


def shown(data: bytes) -> None:
    """A file of records, printed as its run was."""
    b = Bytes(data)
    content = b.rest() if b.draw(0, 7) == 7 else inputs.json_file(_document(b), b)
    with _file(content, "shown.json") as path:
        run(bench_cli.main, ["show", str(path)])


def _document(b: Bytes) -> dict[str, Any]:
    return b.pick(inputs.result_documents())


def _check_text(error: Exception) -> None:
    text = str(error)
    assert text
    text.encode(errors="backslashreplace")
    assert len(text) < 6000, "a message that nobody reads"


# ---- command lines ------------------------------------------------------------------------------


def run(main: Callable[[Sequence[str]], int], arguments: Sequence[str]) -> int:
    """Run a command: it succeeds, or says in one line what is wrong, with the exit status 2."""
    out = io.TextIOWrapper(io.BytesIO(), "utf-8")
    err = io.TextIOWrapper(io.BytesIO(), "utf-8", errors="backslashreplace")
    code: Any = None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main(arguments)
        except SystemExit as ended:  # argparse
            code = ended.code
    if code is not None:
        assert code in (0, 2), code
        return int(code)
    err.seek(0)
    said = err.read()
    assert status in (0, 2), status
    assert (status == 2) == ("error: " in said), said
    if status == 2:
        assert said.startswith("error: "), said
        assert len(said.splitlines()) <= 2, said
        assert len(said) < 20_000, "a message that nobody reads"
    return status


@cache
def _options(make: Callable[[], argparse.ArgumentParser]) -> dict[str, dict[str, Sequence[str]]]:
    """Return the options of every command, with values that are worth a try."""
    (commands,) = (
        action for action in make()._actions if isinstance(action, argparse._SubParsersAction)
    )
    by_type: dict[Any, Sequence[str]] = {int: inputs.NUMBERS, float: inputs.NUMBERS}
    found: dict[str, dict[str, Sequence[str]]] = {}
    for name, command in commands.choices.items():
        found[name] = {}
        for action in command._actions:
            for option in action.option_strings:
                values = by_type.get(action.type)
                if action.nargs == 0:
                    values = []
                elif action.type is Path:
                    values = paths()
                elif action.choices is not None:
                    values = [*map(str, action.choices)] * 3 + ["x", ""]
                elif values is None:
                    text = f"{action.metavar} {option}"
                    values = inputs.SIZES if "SIZE" in text else inputs.WORDS
                    values = inputs.PLAN_SIZES if "G/E/S" in text else values
                    values = [*values, *inputs.NUMBERS] if "ranks" in text else values
                found[name][option] = values
    return found


@cache
def paths() -> list[str]:
    """Files of every kind, and what is none."""
    base = folder() / "paths"
    base.mkdir()
    none = Bytes(b"")
    contents = {
        "trace.npz": inputs.npz_file(inputs.trace_arrays(Bytes(b"\x01")), none),
        "ids.npz": inputs.npz_file(inputs.trace_arrays(Bytes(b"\x00\x01")), none),
        "recording.npz": inputs.npz_file(inputs.recording_arrays(), none),
        "model.json": inputs.json_file(inputs.result_documents()[3], none),
        "fan_out.json": inputs.json_file(inputs.result_documents()[4], none),
        "links.json": inputs.json_file(inputs.result_documents()[2], none),
        "calibration.json": inputs.json_file(inputs.calibration_document(), none),
        "empty": b"",
        "bytes": bytes(range(256)),
    }
    for name, content in contents.items():
        (base / name).write_bytes(content)
    (base / "folder").mkdir()
    (base / "link").symlink_to("nowhere")
    (base / "loop").symlink_to("loop")
    (base / "new").mkdir()
    names = [*contents, "folder", "link", "loop", "none", "none/file", "new/o.png", "new/o.json"]
    names += ["new/o.html", "new/o.csv", "empty/file", "new/" + "x" * 300, "new/\udcff.png"]
    return [str(base / name) for name in names] + ["", "/dev/null", "/dev/zero", "/proc/self/mem"]


def _forget_files() -> None:
    for file in (folder() / "paths" / "new").iterdir():
        file.unlink()


def bench(data: bytes) -> None:
    """``python -m ultraep_comm.bench``, up to where ranks would be started."""
    b = Bytes(data)
    arguments = inputs.command_line(b, _options(bench_cli.make_parser), paths())
    with (
        mock.patch.object(bench_cli, "run_ranks", return_value=0),
        mock.patch.object(bench_cli, "run_alone", return_value=0),
        mock.patch.dict(os.environ),
    ):
        for name in ("RANK", "WORLD_SIZE", "SLURM_STEP_ID"):
            os.environ.pop(name, None)
        run(bench_cli.main, arguments)
    _forget_files()


def viz(data: bytes) -> None:
    """``python -m ultraep_comm.viz``, up to where a picture would be drawn or a file written."""
    b = Bytes(data)
    arguments = inputs.command_line(b, _options(viz_cli.make_parser), paths())
    if b.flag():
        arguments += ["--out", str(folder() / "paths" / "new" / b.pick(["o.png", "o.json"]))]
    with mock.patch.object(viz_run, "_write"):
        run(viz_cli.main, arguments)
    _forget_files()


TARGETS: dict[str, Callable[[bytes], None]] = {
    target.__name__: target
    for target in (
        *(plan_from_slots, topology, recording, trace, calibration, results, shown, bench, viz),
    )
}
