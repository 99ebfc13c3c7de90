"""Loaders, plans and command lines with input of any kind: what was found, and bounded searches.

``tests/fuzz`` has the targets and the corpus; docs/developing.md says how to search for longer.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from cpp_build import ROOT, CppBuild, run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fuzz.inputs import Bytes, calibration_document, result_documents
from fuzz.targets import TARGETS
from studies.cli import main as studies
from studies.draw.records import load_records
from studies.draw.run import read_figures
from ultraep_comm import errors
from ultraep_comm.bench.cli import main as bench
from ultraep_comm.bench.launch import find_launcher, meeting_point
from ultraep_comm.bench.loads import generate_load
from ultraep_comm.bench.traces import TraceError, open_trace
from ultraep_comm.calibration import read_calibration
from ultraep_comm.plan.plan import Plan
from ultraep_comm.plan.topology import MAX_COUNT, Topology
from ultraep_comm.system import MAX_JSON_BYTES, read_json
from ultraep_comm.viz.cli import main as viz

CORPUS = ROOT / "tests" / "fuzz" / "corpus"
CPP = ("plan", "schedule", "reroute")
SEARCH = settings(suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("target", TARGETS)
def test_corpus(target: str) -> None:
    inputs = sorted((CORPUS / target).iterdir())
    assert inputs
    for path in inputs:
        try:
            TARGETS[target](path.read_bytes())
        except BaseException as error:
            error.args = (f"{path}: {error}", *error.args[1:])
            raise


@pytest.mark.cases
@pytest.mark.parametrize("target", TARGETS)
def test_search(target: str) -> None:
    @settings(SEARCH, max_examples=max(1, settings.default.max_examples // 2))
    @given(st.binary(max_size=150))
    def search(data: bytes) -> None:
        TARGETS[target](data)

    search()


def test_corpora_are_small_and_complete() -> None:
    folders = {path.name for path in CORPUS.iterdir()}
    assert folders == {*TARGETS, *CPP}
    assert sum(path.stat().st_size for path in CORPUS.rglob("*") if path.is_file()) < 100_000


def test_targets_find_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of another type, a traceback and a bad message are findings."""

    def fails(*_: object, **__: object) -> None:
        raise KeyError("x")

    monkeypatch.setattr("fuzz.targets.open_trace", fails)
    with pytest.raises(KeyError):
        TARGETS["trace"](b"")
    monkeypatch.setattr("fuzz.targets.bench_cli.main", lambda _: 2)
    with pytest.raises(AssertionError):
        TARGETS["shown"](b"")


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.builds("fuzz", "fuzzers")
def test_libfuzzer_finds_nothing(cpp: CppBuild, tmp_path: Path) -> None:
    """A bounded run under both sanitizers, where there is clang with libFuzzer."""
    program = 'extern "C" int LLVMFuzzerTestOneInput(const char*, long) { return 0; }'
    (tmp_path / "probe.cc").write_text(program)
    clang = shutil.which("clang++")
    if (
        clang is None
        or subprocess.run(
            [clang, "-fsanitize=fuzzer", "probe.cc", "-o", "probe"],
            cwd=tmp_path,
            capture_output=True,
            check=False,
        ).returncode
    ):
        pytest.skip("no clang++ with libFuzzer: apt-get install clang libclang-rt-dev")
    built = cpp.build("fuzz", "fuzzers")
    for name in CPP:
        # Named one by one: the search depends on their order, and a folder's is the file system's.
        inputs = ",".join(str(path) for path in sorted((CORPUS / name).iterdir()))
        text = run(
            [
                *(built / "tests" / "fuzz" / f"fuzz_{name}", "-runs=3000", "-seed=1"),
                *("-max_len=1024", f"-artifact_prefix={tmp_path}/", f"-seed_inputs={inputs}"),
            ]
        )
        assert "Done 3000 runs" in text


# ---- what was found, in words -------------------------------------------------------------------


@pytest.mark.parametrize("num_experts", [0, -1, MAX_COUNT + 1, 2**40, 10**30])
def test_plans_of_any_number_of_experts(num_experts: int) -> None:
    with pytest.raises(errors.InvalidPlanError, match="num_experts"):
        Plan.from_slots([[-1]], num_experts=num_experts)


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        (np.full((2, 1), 2**64 - 1, np.uint64), "18446744073709551615"),  # was taken for -1
        (torch.full((2, 1), 2**32 - 1, dtype=torch.uint32), "4294967295"),  # likewise
        ([[-(2**40)], [0]], "-1099511627776"),
        ([[10**30], [0]], "not a tensor of integers"),
        (torch.zeros(2, 1, dtype=torch.int32, device="meta"), "meta"),
        (torch.zeros(2, 1, dtype=torch.int32).to_sparse(), "sparse"),
    ],
)
def test_slots_that_are_no_32_bit_integers(slots: object, message: str) -> None:
    with pytest.raises(errors.InvalidPlanError, match=message):
        Plan.from_slots(slots, num_experts=4)  # type: ignore[arg-type]


def test_maps_that_are_no_arrays() -> None:
    for home in (torch.zeros(4, device="meta"), torch.zeros(4).to_sparse(), object()):
        with pytest.raises(errors.InvalidArgumentError, match="home"):
            Topology.make(num_ranks=2, num_experts=4, slots_per_rank=1, home=home)  # type: ignore[arg-type]
    with pytest.raises(errors.InvalidArgumentError, match="num_ranks is 4294967296"):
        Topology.make(num_ranks=2**32, num_experts=4, slots_per_rank=1)


def save(path: Path, **arrays: np.ndarray) -> Path:
    np.savez(path, **arrays)
    return path


@pytest.mark.parametrize(
    "arrays",
    [
        {"topk": np.full((4, 1, 1), 2**64 - 1, np.uint64)},  # was taken for padding
        {"topk": np.full((4, 1, 1), 2**62, np.int64)},  # a table of as many experts
        {"topk": np.zeros((4, 1, 1), np.int32), "n_experts": np.array(2**62)},
        {"topk": np.zeros((4, 1, 0), np.int32)},
        {"counts_src": np.full((1, 1, 2, 2), 2**63, np.uint64)},  # was negative
        {"counts_src": np.full((1, 1, 2, 2), 2**62, np.int64)},  # overflowed
        {"counts_src": np.zeros((1, 1, 0, 2), np.int64)},
    ],
)
def test_traces_with_numbers_beyond_all_bounds(
    tmp_path: Path, arrays: dict[str, np.ndarray]
) -> None:
    path = save(tmp_path / "t.npz", **arrays)
    with pytest.raises(TraceError, match=str(path)):
        open_trace(path).load(num_ranks=2, step=0, layer=0, tokens_per_rank=2)


def test_array_files(tmp_path: Path) -> None:
    for odd in ("/dev/zero", "/dev/null"):
        with pytest.raises(TraceError, match=r"it is not an \.npz file"):
            open_trace(Path(odd))
    with pytest.raises(IsADirectoryError):
        open_trace(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a": "\xff"}', "not utf-8"),
        (b"9" * 5000, "digits"),
        (b"", "Expecting value"),
        (b" " * (MAX_JSON_BYTES + 1), "more than"),
    ],
)
def test_json_files(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "f.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as raised:
        read_json(path)
    assert len(str(raised.value)) < 200
    with pytest.raises(errors.InvalidArgumentError, match="not JSON"):
        read_calibration(path)
    with pytest.raises(errors.InvalidArgumentError, match="not a JSON"):
        load_records(path)
    assert bench(["show", str(path)]) == 2


def test_a_device_is_not_read_for_ever() -> None:
    with pytest.raises(ValueError, match="more than"):
        read_json(Path("/dev/zero"))


@pytest.mark.parametrize("value", [10**400, float("nan"), -1, [], "1"])
def test_figures_of_calibrations(tmp_path: Path, value: object) -> None:
    document = calibration_document()
    document["engines"]["host"]["store_gbps"] = value
    path = tmp_path / "c.json"
    path.write_text(json.dumps(document))
    with pytest.raises(errors.InvalidArgumentError, match="store_gbps") as raised:
        read_calibration(path)
    assert len(str(raised.value)) < 500


@pytest.mark.parametrize(
    ("name", "value"),
    [("size", 10**400), ("size", 0), ("fan_out", 10**400), ("over_bound", 10**400)],
)
def test_results_beyond_floats(name: str, value: int) -> None:
    record = {"size": 1, "mode": "push", "fan_out": 2, "over_bound": 1.1, name: value}
    with pytest.raises(errors.InvalidArgumentError, match=name):
        read_figures([record], "a file")


def test_names_in_results_that_no_font_has(tmp_path: Path) -> None:
    record = {"size": "a\ud800", "mode": "\x00" + "x" * 500, "fan_out": 2, "over_bound": 1.1}
    path = tmp_path / "r.json"
    path.write_text(json.dumps([record]))
    _, (result,) = read_figures(load_records(path), str(path))
    assert result.size == "a?"
    assert result.mode.startswith("?")
    assert len(result.mode) <= 60
    assert studies(["draw", str(path), "--out", str(tmp_path / "o.png")]) == 0


def test_records_without_what_a_table_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "o.json"
    for document in result_documents()[:3]:
        for name in ("op", "time_us", "critical_gbps", "wrong_bytes"):
            changed = json.loads(json.dumps(document))
            if changed["records"][0].pop(name, None) is None:
                continue
            path.write_text(json.dumps(changed))
            assert bench(["show", str(path)]) in (0, 2)
            out, err = capsys.readouterr()
            assert bool(out) != bool(err)
            assert len(err.splitlines()) <= 1
    changed = json.loads(json.dumps(result_documents()[0]))
    changed["header"][0] = "\ud800"
    path.write_text(json.dumps(changed))
    assert bench(["show", str(path)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {path} has records that cannot be shown")


LONG = "9" * 5000


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["replicate", "--num-workers", LONG], "--num-workers"),
        (["replicate", "--num-workers", "1,,2"], "--num-workers"),
        (["replicate", "--segments", LONG], "segments"),
        (["replicate", "--segments", "100000000", "-b", "1G"], "segments"),
        (["replicate", "-b", LONG], "is too large"),
        (["replicate", "--experts", "1000000000"], "1000000000 experts"),
        (["plan", "--sizes", f"{LONG}/8/1"], "--sizes"),
        (["plan", "--sizes", "8/99999999999/1"], "--sizes"),
        (["plan", "--engine", "cuda", "--warps", LONG], "--warps"),
        (["replicate", "--trace", "/dev/zero"], "not an .npz file"),
        (["show", "/dev/zero"], "more than"),
        (["replicate", "--json", "loop"], "link"),
    ],
)
def test_commands_of_the_benchmark(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    assert bench(command) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert message in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize(
    "command",
    [
        ["timeline", "none", "--calls", f"1:{LONG}", "--out", "o.png"],
        ["timeline", "--imbalance", "3", "--seed", "-1", "--out", "o.png"],
        ["timeline", "--imbalance", "3", "--experts", "1048576", "--out", "o.png"],
        ["load", "--trace", "/dev/zero", "--out", "o.png"],
    ],
)
def test_commands_of_pictures(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert viz(command) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_generated_loads_are_bounded() -> None:
    with pytest.raises(errors.InvalidArgumentError, match="seed is -1"):
        generate_load(num_ranks=2, num_experts=4, imbalance=1.5, num_tokens=8, seed=-1)
    with pytest.raises(errors.InvalidArgumentError, match="1024 ranks and 65536 experts"):
        generate_load(num_ranks=1024, num_experts=1 << 16, imbalance=2, num_tokens=8, seed=1)


def test_variables_of_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("SLURM_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", LONG)
    with pytest.raises(errors.InvalidArgumentError, match="launcher"):
        find_launcher()
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    monkeypatch.setenv("MASTER_ADDR", "a")
    monkeypatch.setenv("MASTER_PORT", "65536")
    with pytest.raises(errors.InvalidArgumentError, match="MASTER_PORT"):
        meeting_point()


def test_choices_are_what_bytes_say() -> None:
    """Inputs of the corpus mean the same tomorrow."""
    b = Bytes(bytes([3, 0, 200, 1]))
    assert (b.draw(0, 9), b.draw(0, 0xFFFF), b.pick("abc"), b.flag(), b.rest()) == (
        *(3, 200, "b", False),
        b"",
    )
