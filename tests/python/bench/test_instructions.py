"""The count of instructions: what is compared, exit statuses, and the committed figures."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
COMMITTED = ROOT / "bench" / "results" / "instructions.json"
SMALL, GUARDED = "8/32/1", "8/32/1,64/256/2"
CALLS = {"plan", "shares", *(f"schedule {mode}" for mode in ("push", "pull", "direct", "auto"))}


def _load() -> ModuleType:
    """Import the script, which belongs to no package."""
    spec = importlib.util.spec_from_file_location(
        "instructions", ROOT / "bench/speed/instructions.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


instructions = _load()


@pytest.fixture(scope="module")
def tools() -> dict[str, str]:
    try:
        return instructions.describe_tools()
    except instructions.CountError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def counted(tools: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("instructions") / "now.json"
    assert instructions.main(["--sizes", GUARDED, "--json", str(path)]) == 0
    return path


def record(mean: int, p50: int = 100, most: int = 100, **other: Any) -> dict[str, Any]:
    figures = {"mean": mean, "p50": p50, "max": most}
    key = {"op": "plan", "size": "2/4/1", "loads": 3, "inputs": "a"}
    return {**key, "instructions": figures, **other}


def baseline(*records: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(one["op"], one["size"]): one for one in records}


# ---- what is counted --------------------------------------------------------------------------


def test_document(counted: Path, tools: dict[str, str]) -> None:
    document = json.loads(counted.read_text())
    assert document["tools"] == tools
    assert document["commit"]
    for size in GUARDED.split(","):
        of_size = {one["op"]: one for one in document["records"] if one["size"] == size}
        assert set(of_size) == CALLS | {f"{op} chained" for op in CALLS if "schedule" in op}
        plain, chained = of_size["schedule push"], of_size["schedule push chained"]
        assert plain["loads"] + chained["loads"] == of_size["plan"]["loads"] == 37
        for one in of_size.values():
            figures = one["instructions"]
            assert 0 < figures["p50"] <= figures["max"]
            assert 0 < figures["mean"] <= figures["max"]


def test_the_same_source_has_the_same_counts(
    counted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["--sizes", SMALL, "--compare", str(counted), "--max-increase", "0%"]
    assert instructions.main(command) == 0
    assert "changes: 0 of 10 rows" in capsys.readouterr().out


def test_counts_are_close_to_the_committed_ones(
    counted: Path, tools: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """After an intended change record them again: see bench/README.md."""
    was = json.loads(COMMITTED.read_text())["tools"]
    if different := [name for name in instructions.DECIDING if was[name] != tools[name]]:
        pytest.skip(f"counted with {[was[n] for n in different]}; here are {tools}")
    records = json.loads(counted.read_text())["records"]
    changes = instructions.compare(records, instructions.read_baseline(COMMITTED, tools))
    assert len(changes) == len(records)
    status = instructions.report_changes(changes, 0.05)
    assert status == 0, capsys.readouterr().out


# ---- what is compared -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("now", "limit", "status"),
    [
        (record(100), 0.0, 0),
        (record(90), 0.0, 0),
        (record(102), 0.02, 0),
        (record(103), 0.02, 3),
        (record(100, p50=103), 0.02, 3),
        (record(100, most=103), 0.02, 3),
        (record(50, most=101), 0.005, 3),
    ],
)
def test_the_worst_figure_decides(
    now: dict[str, Any], limit: float, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = instructions.compare([now], baseline(record(100)))
    assert instructions.report_changes(changes, limit) == status
    printed = capsys.readouterr().out
    assert ("more than" in printed) == (status == 3)


def test_invalid_baselines(tmp_path: Path) -> None:
    made_with = {"compiler": "gcc version 12", "target": "x86_64", "flags": "-O3"}
    path = tmp_path / "base.json"
    with pytest.raises(instructions.CountError, match="FileNotFoundError"):
        instructions.read_baseline(path, made_with)
    for text in ("{", "[]", '{"records": []}', '{"tools": {}, "records": [{"op": "plan"}]}'):
        path.write_text(text)
        with pytest.raises(instructions.CountError, match="that --json of this script wrote"):
            instructions.read_baseline(path, made_with)
    path.write_text(json.dumps({"tools": made_with, "records": [record(100)]}))
    wanted = {name: record(100)[name] for name in ("loads", "inputs", "instructions")}
    assert instructions.read_baseline(path, made_with) == {("plan", "2/4/1"): wanted}
    with pytest.raises(instructions.CountError, match=r"compiler was 'gcc version 12'.*clang"):
        instructions.read_baseline(path, {**made_with, "compiler": "clang version 14"})


# ---- exit statuses ----------------------------------------------------------------------------


def test_an_increase_is_status_3(
    counted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = json.loads(counted.read_text())
    for one in document["records"]:
        if one["op"] == "shares":
            one["instructions"] = {n: int(v / 1.1) for n, v in one["instructions"].items()}
    path = tmp_path / "fewer.json"
    path.write_text(json.dumps(document))
    assert instructions.main(["--sizes", SMALL, "--compare", str(path)]) == 3
    printed = capsys.readouterr().out
    assert "changes: 1 of 10 rows" in printed
    assert "(shares, 8/32/1" in printed


def test_no_valgrind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert instructions.main([]) == 2
    assert "no valgrind in PATH: apt-get install valgrind" in capsys.readouterr().err
