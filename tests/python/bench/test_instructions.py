"""The count of instructions: what is compared, exit statuses, and the committed figures."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
COMMITTED = ROOT / "bench" / "results" / "instructions.json"
SMALL = "8/32/1"
GUARDED = f"{SMALL},64/256/2"
sys.path.insert(0, str(ROOT / "bench" / "speed"))
instructions = importlib.import_module("instructions")


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


def test_an_increase_is_status_3(
    counted: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Against a file in which one call had fewer instructions; the counts are those from above."""
    document, now = (json.loads(counted.read_text()) for _ in range(2))
    for one in document["records"]:
        if one["op"] == "shares":
            one["instructions"] = {n: int(v / 1.1) for n, v in one["instructions"].items()}
    path = tmp_path / "fewer.json"
    path.write_text(json.dumps(document))
    small = [one for one in now["records"] if one["size"] == SMALL]
    monkeypatch.setattr(instructions, "build", lambda folder: folder)
    monkeypatch.setattr(instructions, "count", lambda program, size: small)
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
