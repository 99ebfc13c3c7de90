"""The public workloads W0 to W7, their command, and what our plans leave of them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from benched import check_csv
from benched import table_cells as cells

from studies.cli import main
from studies.options import (
    WORKLOAD_EXPERTS,
    WORKLOAD_TOKENS,
    WORKLOAD_TOPK,
    WORKLOADS,
)
from studies.workloads import route_tokens, workload_load

PUBLISHED = {
    "num_experts": WORKLOAD_EXPERTS,
    "topk": WORKLOAD_TOPK,
    "num_tokens": WORKLOAD_TOKENS,
}
LARGER = {"num_experts": WORKLOAD_EXPERTS, "topk": 4, "num_tokens": 512}
# Expert max/mean and CV of the first step, as published for EP 4. W3 is what its code gives: its
# page has 1.281, the figure of W4.
FIRST = {
    "W0": (1.000, 0.000),
    "W1": (3.312, 1.309),
    "W2": (3.219, 1.272),
    "W3": (1.906, 0.732),
    "W4": (1.281, 0.141),
    "W5": (2.156, 1.007),
    "W6": (3.312, 1.319),
    "W7": (1.219, 0.126),
}
LARGER_FIRST = {
    "W0": (1.000, 0.000),
    "W1": (1.781, 0.744),
    "W2": (1.770, 0.747),
    "W4": (1.086, 0.046),
    "W5": (2.000, 1.000),
    "W6": (1.770, 0.742),
    "W7": (1.066, 0.040),
}


@pytest.mark.parametrize(
    ("shape", "figures"), [(PUBLISHED, FIRST), (LARGER, LARGER_FIRST)], ids=["k2", "k4"]
)
def test_published_figures(shape: dict[str, int], figures: dict[str, tuple[float, float]]) -> None:
    for workload, (most, cv) in figures.items():
        load = workload_load(workload, num_ranks=4, step=0, **shape)
        assert load.max() / load.mean() == pytest.approx(most, abs=6e-4), workload
        assert load.std() / load.mean() == pytest.approx(cv, abs=6e-4), workload


def routed(workload: str, step: int = 0, **shape: int) -> np.ndarray:
    return route_tokens(workload, step=step, **(PUBLISHED | shape))


def test_pools() -> None:
    """Where each token may go: h = max(k, E // 4) hot experts, and one token in four is cold."""
    shape = {"num_experts": 32, "topk": 2, "num_tokens": 4000}
    hot = np.arange(4000) % 4 != 0
    for workload, pool in {
        "W1": np.arange(8),
        "W2": np.arange(8),
        "W3": np.arange(0, 32, 2),
    }.items():
        ids = routed(workload, **shape)
        assert (ids[:, 0] != ids[:, 1]).all()
        assert set(np.unique(ids[hot])) == set(pool.tolist())
        assert len(np.unique(ids[~hot])) == 32
    assert len(np.unique(routed("W4", **shape))) == 32
    assert np.unique(routed("W5", **shape)).tolist() == list(range(16, 32))
    for step, first in {0: 0, 2: 0, 3: 8, 11: 24, 12: 0}.items():
        ids = routed("W6", step, **shape)
        assert np.unique(ids[hot]).tolist() == list(range(first, first + 8))
    for step in range(8):
        even = routed("W7", step, **shape)[::2]
        assert len(np.unique(even)) == (8 if step % 4 == 3 else 32)
    assert routed("W0", **shape)[:3].tolist() == [[0, 1], [2, 3], [4, 5]]


def test_seeds_are_of_name_seed_and_step() -> None:
    one = routed("W4")
    assert not np.array_equal(one, routed("W4", 1))
    assert not np.array_equal(one, route_tokens("W4", step=0, seed=1, **PUBLISHED))
    assert not np.array_equal(routed("W1"), routed("W2"))  # one distribution, two names


# ---- the command --------------------------------------------------------------------------------


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "o.json"
    assert main(["imbalance", "--json", str(path), "--csv", str(tmp_path / "o.csv")]) == 0
    table = cells(capsys.readouterr().out)
    document = json.loads(path.read_text())
    records = document["records"]
    check_csv(tmp_path / "o.csv", records)
    assert document["settings"]["seed"] == 1234
    assert [row[0] for row in table] == list(WORKLOADS.values())
    for row, record in zip(table, records, strict=True):
        most, cv = FIRST[record["workload"]]
        assert float(row[3]) == pytest.approx(most, abs=6e-4)
        assert float(row[4]) == pytest.approx(cv, abs=6e-4)
        assert row[5] == "1.000"  # all sources have equally many tokens
        assert float(row[6]) == pytest.approx(record["owner_imbalance"], abs=6e-4)
        assert sum(record["expert_counts"]) == record["assignments"] == 4 * 128 * 2
        default, exact = record["planned"]["default"], record["planned"]["exact"]
        assert default["owner_imbalance"] <= 1.01
        assert exact["owner_imbalance"] == 1.0
        assert float(row[7]) == pytest.approx(default["owner_imbalance"], abs=6e-5)
        assert float(row[9]) == 1.0
    owners = [record["owner_imbalance"] for record in records]
    assert min(owners) == 1.0
    assert max(owners) == pytest.approx(3.28, abs=0.005)


def test_a_row_for_each_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["imbalance", "--workloads", "W6,W7", "--steps", "4"]) == 0
    table = cells(capsys.readouterr().out)
    assert [row[:2] for row in table] == [
        [WORKLOADS[name], str(step)] for name in ("W6", "W7") for step in range(4)
    ]
