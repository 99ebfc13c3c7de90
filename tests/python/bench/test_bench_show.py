"""``show`` prints a file of records as its run did."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benched import bench

from ultraep_comm.bench.cli import main

FEW = ["--ranks", "3", "-n", "2", "-w", "1", "--json", "o.json"]
RUNS = {
    "sizes, workers and a gate": [
        *(
            "replicate",
            "-b",
            "16K",
            "-e",
            "64K",
            "-f",
            "4",
            "--num-workers",
            "1,2",
            "--mode",
            "auto",
        ),
        *("--times", "p50,rank-max", "--min-bandwidth", "1e-6", "--max-over-bound", "1e6"),
    ],
    "nothing to move": ["reduce", "-b", "16K", "--imbalance", "1", "--experts", "3"],
    "links": ["links", "-b", "16K", "--slowest", "1", "--min-bandwidth", "1e6"],
}


@pytest.mark.parametrize("name", RUNS)
def test_as_it_was_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    done = bench(tmp_path, *RUNS[name], *FEW)
    assert done.returncode in (0, 3), done.stderr
    assert main(["show", str(tmp_path / "o.json")]) == 0
    assert capsys.readouterr().out == done.stdout
    document = json.loads((tmp_path / "o.json").read_text())
    record = document["records"][0]
    if name == "links":
        document["matrix_gbps"][0][1] = 12345.0
    else:
        record["critical_gbps"] = 12345.0
    (tmp_path / "o.json").write_text(json.dumps(document))
    assert main(["show", str(tmp_path / "o.json")]) == 0
    assert "12345" in capsys.readouterr().out  # figures come from the records


BAD = {
    "{": "is not a file of records",
    '{"records": 3}': "is not a file of records",
    '{"records": []}': "has no records and cannot be shown",
    '{"records": [{"op": "plan"}], "header": []}': "has plan and cannot be shown",
    '{"records": [{"op": "replicate"}], "header": []}': "has replicate and cannot be shown",
}


@pytest.mark.parametrize("content", BAD)
def test_other_files(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str) -> None:
    path = tmp_path / "o.json"
    path.write_text(content)
    assert main(["show", str(path)]) == 2
    error = capsys.readouterr().err
    assert BAD[content] in error
    assert str(path) in error


def test_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(tmp_path / "none.json")]) == 2
    assert "none.json" in capsys.readouterr().err
