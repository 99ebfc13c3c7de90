"""``show`` prints a file of records as its run did."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benched import bench

from ultraep_comm.bench.cli import main

FEW = ["--ranks", "3", "-n", "2", "-w", "1"]
RUNS = {
    "sizes, workers and a gate": [
        *("replicate", *FEW, "-b", "16K", "-e", "64K", "-f", "4", "--num-workers", "1,2"),
        *("--mode", "auto", "--times", "p50,rank-max"),
        *("--min-bandwidth", "1e-6", "--max-over-bound", "1e6"),
    ],
    "links": ["links", *FEW, "-b", "16K", "--slowest", "1", "--min-bandwidth", "1e6"],
    "plan": ["plan", "--sizes", "4/8/1", "--workload", "zipf1.0", "--seeds", "2", "--certify"],
    "a study": ["against", "--sizes", "4/8/1", "--workload", "W1", "--peers", "none"],
}


@pytest.mark.parametrize("name", RUNS)
def test_as_it_was_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """But for the widths of columns, which a run that prints row by row does not know."""
    done = bench(tmp_path, *RUNS[name], "--json", "o.json")
    assert done.returncode in (0, 3), done.stderr
    assert main(["show", str(tmp_path / "o.json")]) == 0
    shown = capsys.readouterr().out
    assert [line.split() for line in shown.splitlines()] == [
        line.split() for line in done.stdout.splitlines()
    ]
    document = json.loads((tmp_path / "o.json").read_text())
    if name == "links":
        document["matrix_gbps"][0][1] = 12345.0
    else:
        value = next(c[2] for c in document["columns"] if c[3] and "." not in c[2])
        document["records"][0][value] = 12345.0
    (tmp_path / "o.json").write_text(json.dumps(document))
    assert main(["show", str(tmp_path / "o.json")]) == 0
    assert "12345" in capsys.readouterr().out  # figures come from the records


def test_a_table_in_markdown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = {
        "columns": [["load", "", "load", ""], ["time", "(us)", "time_us.p50", ".1f"]],
        "records": [{"load": "even", "time_us": {"p50": 3.25}}, {"load": "none", "time_us": None}],
    }
    (tmp_path / "o.json").write_text(json.dumps(document))
    assert main(["show", str(tmp_path / "o.json"), "--markdown"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "| load | time (us) |",
        "| --- | --- |",
        "| even | 3.2 |",
        "| none | - |",
    ]


BAD = {
    "{": "is not a file of records",
    '{"records": 3}': "is not a file of records",
    '{"records": [{"op": "plan"}], "columns": []}': "no records or no columns",
    '{"records": [{"a": 1}], "columns": [["a", "", "a", "9999999999"]]}': "format '9999999999'",
    '{"records": [{"a": "x"}], "columns": [["a", "", "a", ".1f"]]}': "cannot be shown",
}


@pytest.mark.parametrize("content", BAD)
def test_other_files(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str) -> None:
    path = tmp_path / "o.json"
    path.write_text(content)
    assert main(["show", str(path)]) == 2
    error = capsys.readouterr().err
    assert BAD[content] in error
    assert str(path) in error
