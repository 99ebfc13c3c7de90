"""The model benchmark: tables, records and claims."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from benched import table_cells as cells

from studies.cli import main
from studies.model import DEFAULT_SIZES
from studies.model.published import PUBLISHED_RUNS
from studies.model.run import OURS, WAYS, make_claim, target_us

TINY = ["model", "--tokens", "64", "--topk", "2", "--seeds", "2", "--expert-bytes", "1M"]


def test_a_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json"
    chosen = ["--sizes", "4/16/2,6/12/1", "--imbalances", "1.5,5", "--families", "zipf1.0"]
    assert main([*TINY, *chosen, "--machine", "hgx8", "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "modelled, not measured: hgx8, 370.8 GB/s" in printed
    document = json.loads(path.read_text())
    assert document["commit"]
    assert document["machine"]["cores"] >= 1
    assert document["modelled_machine"]["egress_gbps"] == 370.8
    assert document["settings"]["sizes"] == ["4/16/2", "6/12/1"]
    assert document["settings"]["expert_bytes"] == 1 << 20
    records = document["records"]
    expected = [("4/16/2", "imbalance1.5"), ("4/16/2", "zipf1.0")]  # 4 ranks cannot have 5
    expected += [("6/12/1", kind) for kind in ("imbalance1.5", "imbalance5", "zipf1.0")]
    table = cells(printed)
    rows, claims, published = table[:5], table[5:9], table[9:]
    assert [(row[0], row[1]) for row in rows] == expected
    for row, record in zip(rows, records, strict=True):
        assert set(record["over_bound"]) == set(record["time_us"]) == set(WAYS)
        assert set(record["over_target"]) == set(OURS)
        assert 1 <= record["loads"] <= 2
        for way in WAYS:
            assert 1 <= record["over_bound"][way]["mean"] <= record["over_bound"][way]["worst"]
        assert row[5] == f"{record['over_bound']['push']['mean']:.3f}"
    assert [(row[0], row[1]) for row in claims] == [
        (size, mode) for size in ("4/16/2", "6/12/1") for mode in OURS
    ]
    assert [claim["holds"] for claim in document["claims"]] == [r[-1] == "yes" for r in claims]
    assert [int(row[1]) for row in published] == [run.num_replicas for run in PUBLISHED_RUNS]
    assert len(document["published"]) == len(PUBLISHED_RUNS)


def test_domains_are_the_machine_s(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Replicas stay inside domains, so times are those of fast links."""
    path = tmp_path / "out.json"
    chosen = ["--sizes", "16/32/1", "--imbalances", "", "--families", "zipf1.0"]
    assert main([*TINY, *chosen, "--machine", "hgx8", "--json", str(path)]) == 0
    assert "16/32/1 by 8" in capsys.readouterr().out
    document = json.loads(path.read_text())
    assert document["settings"]["sizes"] == ["16/32/1 by 8"]
    (record,) = document["records"]
    assert record["over_bound"]["push"]["worst"] * record["bound_us"] < 3 * (1 << 20) / 370.8e3 + 30


def test_a_run_that_fails_leaves_no_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.json"
    path.write_text("before")
    wrong = ["--sizes", "4/16/2", "--expert-bytes", "128G", "--json", str(path)]
    assert main([*TINY, *wrong]) == 2
    assert "error: expert_bytes is 137438953472" in capsys.readouterr().err
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_size_without_loads_has_no_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "--sizes", "1/8/1", "--imbalances", "2", "--families", "zipf1.0"]) == 0
    assert "1/8/1" not in capsys.readouterr().out


def test_what_a_claim_says() -> None:
    assert target_us(np.array([10.0, 80.0, 100.0])).tolist() == pytest.approx([18, 88, 110])

    def holds(*over_target: float) -> bool:
        return bool(make_claim("4/16/2", "push", over_target)["holds"])

    assert holds(1.0)
    assert holds(0.9, 1.08)
    assert not holds(0.9, 1.12)  # the worst
    assert not holds(1.02, 1.02)  # the mean


@pytest.mark.parametrize("size", DEFAULT_SIZES.split(","))
def test_the_claim_holds(size: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of schedules, on links alone, with one load of each kind; bench/results has more."""
    path = tmp_path / "out.json"
    chosen = ["--machine", "nvl72-links", "--sizes", size, "--imbalances", "1.5,3,8"]
    assert (
        main(["model", *chosen, "--families", "adversarial", "--seeds", "1", "--json", str(path)])
        == 0
    )
    capsys.readouterr()
    claims = json.loads(path.read_text())["claims"]
    assert [claim["mode"] for claim in claims] == list(OURS)
    for claim in claims:
        assert claim["holds"], claim
