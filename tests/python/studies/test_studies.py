"""The studies that plan and predict: other planners, public workloads, steps, and the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benched import bench, check_csv
from benched import table_cells as cells

from studies.against.run import EXPERT_BYTES, transfer_times_us
from studies.model.published import PUBLISHED_RUNS
from studies.model.run import OURS, WAYS, make_claim, target_us
from studies.options import (
    PEER_NAMES,
    WORKLOAD_EXPERTS,
    WORKLOAD_TOKENS,
    WORKLOAD_TOPK,
)
from studies.peers.relay import predict_relay
from studies.workloads import route_tokens, workload_load
from ultraep_comm import Plan
from ultraep_comm.group.bank import Bank
from ultraep_comm.model import predict


def run(folder: Path, *arguments: str, status: int = 0) -> tuple[list[dict[str, Any]], str]:
    """Return a run's records, which its CSV file has too, and what it prints."""
    done = bench(folder, *arguments, "--json", "o.json", "--csv", "o.csv")
    assert done.returncode == status, done.stderr
    records = done.document()["records"]
    check_csv(folder / "o.csv", records)
    return records, done.stdout


# ---- against ------------------------------------------------------------------------------------

AGAINST = ["against", "--sizes", "8/32/2", "--tokens", "512", "--topk", "4", "--seeds", "2"]
PLANNERS = ("ours", "ours exact", *PEER_NAMES)


def test_all_planners(tmp_path: Path) -> None:
    records, printed = run(tmp_path, *AGAINST, "--workload", "zipf1.0,W1", "--certify")
    assert printed.count("our reading of") == len(PEER_NAMES) - 1
    table = cells(printed.replace("ours exact", "ours-exact"))
    expected = [(family, planner) for family in ("zipf1.0", "W1") for planner in PLANNERS]
    assert [(r["family"], r["planner"]) for r in records] == expected
    for row, record in zip(table, records, strict=True):
        planner = record["planner"]
        assert row[4] == planner.replace(" ", "-")
        assert record["transfer_bound"] >= max(record["max_exports"], record["max_imports"]) - 1e-9
        assert record["max_copies"] >= record["max_exports"]
        assert record["time_us"]["mean"] >= record["bound_us"] * 0.9  # links carry more alone
        if planner in ("ours exact", "moonep"):
            assert record["exact"] == 2
            assert record["imbalance"]["worst"] <= 1.0001
        for i, text in enumerate(record["certified"]["plans"]):
            assert f"\n# 8/32/2 {record['family']} {i} {planner}: {text}\n" in printed
        if planner == "none":
            assert record["replicas"] == record["time_us"]["worst"] == 0
            assert record["imbalance"]["mean"] == pytest.approx(record["imbalance_before"])


def test_each_system_transfers_in_its_own_way() -> None:
    slots = torch.tensor([[-1], [0], [0], [0], [0], [-1], [-1], [-1]])
    home_quota = torch.tensor([20, 0, 0, 0, 0, 20, 20, 21])
    quota = torch.where(slots == 0, 20, 0)
    plan = Plan.from_slots(slots, num_experts=8, slot_quota=quota, home_quota=home_quota)
    direct, hubs = (transfer_times_us(plan, way)[0] for way in ("direct", "hubs"))
    relay, bound = transfer_times_us(plan, "relay")
    assert direct == predict(plan, EXPERT_BYTES, "nvl72", "direct").time_us
    assert hubs == predict(plan, EXPERT_BYTES, "nvl72", "auto").time_us
    assert relay == predict_relay(plan, EXPERT_BYTES, "nvl72").time_us
    assert bound == pytest.approx(EXPERT_BYTES / 710e3)  # one export
    assert hubs < relay < direct
    assert direct > 3.5 * bound
    assert transfer_times_us(plan, "none") == (0.0, 0.0)


# ---- public workloads ---------------------------------------------------------------------------

PUBLISHED = {
    "num_experts": WORKLOAD_EXPERTS,
    "topk": WORKLOAD_TOPK,
    "num_tokens": WORKLOAD_TOKENS,
}
# Expert max/mean and CV of the first step, as published for EP 4: the defaults, and top-4 of 512
# tokens. W3 is what its code gives: its page has 1.281, the figure of W4.
FIRST = {
    "W0": (1.000, 0.000, 1.000, 0.000),
    "W1": (3.312, 1.309, 1.781, 0.744),
    "W2": (3.219, 1.272, 1.770, 0.747),
    "W3": (1.906, 0.732, None, None),
    "W4": (1.281, 0.141, 1.086, 0.046),
    "W5": (2.156, 1.007, 2.000, 1.000),
    "W6": (3.312, 1.319, 1.770, 0.742),
    "W7": (1.219, 0.126, 1.066, 0.040),
}


@pytest.mark.parametrize("workload", FIRST)
def test_published_figures(workload: str) -> None:
    *small, big, big_cv = FIRST[workload]
    cases = [({}, small), ({"topk": 4, "num_tokens": 512}, [big, big_cv])]
    for shape, published in cases[: 1 if big is None else 2]:
        load = workload_load(workload, num_ranks=4, step=0, **(PUBLISHED | shape))
        found = load.max() / load.mean(), load.std() / load.mean()
        assert found == pytest.approx(published, abs=6e-4)


def routed(workload: str, step: int = 0, **shape: int) -> np.ndarray:
    return route_tokens(workload, step=step, **(PUBLISHED | shape))


def test_pools() -> None:
    """Where each token may go: h = max(k, E // 4) hot experts, and one token in four is cold."""
    shape = {"num_experts": 32, "topk": 2, "num_tokens": 4000}
    hot = np.arange(4000) % 4 != 0
    for workload, pool in {"W1": range(8), "W2": range(8), "W3": range(0, 32, 2)}.items():
        ids = routed(workload, **shape)
        assert (ids[:, 0] != ids[:, 1]).all()
        assert np.unique(ids[hot]).tolist() == list(pool)
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


# ---- steady -------------------------------------------------------------------------------------

STEADY = ["steady", "--ranks", "4", "--experts", "16", "--layers", "2", "--steps", "4"]
STEADY += ["--expert-bytes", "1001", "--slots"]


def test_residents_move_less_and_balance_as_well(tmp_path: Path) -> None:
    records, printed = run(tmp_path, *STEADY, "1,2")
    ways = ["empty", "residents", "prefetch"]
    assert [(r["slots"], r["way"]) for r in records] == [(s, way) for s in (1, 2) for way in ways]
    for slots, rows in ((1, records[:3]), (2, records[3:])):
        empty, kept, fetched = rows
        assert kept["moves"] < empty["moves"]
        assert empty["prefetched"] == kept["prefetched"] == 0 < fetched["prefetched"]
        assert kept["slot_bytes"] == 2 * empty["slot_bytes"] == 2 * slots * 1001
        for record in rows:
            moves = np.array(record["moves_by_step"])
            assert moves.shape == (3, 2)
            assert record["imbalance"]["worst"] <= max(1.01, empty["imbalance"]["worst"])
            assert record["wrong"] == 0
        assert 0 < fetched["forecast_missed"] < 0.5
    assert "residents" in printed


def test_stale_slots_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bank that layers share without an invalidation has other layers' experts."""
    monkeypatch.setattr(Bank, "invalidate", lambda bank: None)
    records, _ = run(tmp_path, *STEADY, "2", status=1)
    assert [record["wrong"] > 0 for record in records] == [False, False, True]


# ---- model --------------------------------------------------------------------------------------

TINY = ["model", "--tokens", "64", "--topk", "2", "--seeds", "2", "--expert-bytes", "1M"]
HGX8 = [*TINY, "--machine", "hgx8", "--workload", "zipf1.0", "--sizes"]


def test_a_small_run(tmp_path: Path) -> None:
    sizes = "4/16/2,6/12/1,1/8/1"  # a rank alone has no replicas, and no rows
    done = bench(tmp_path, *HGX8, sizes, "--imbalance", "1.5,5", "--json", "o.json")
    printed, document = done.stdout, done.document()
    assert "modelled, not measured: hgx8, 370.8 GB/s" in printed
    expected = [("4/16/2", "imbalance1.5"), ("4/16/2", "zipf1.0")]  # 4 ranks cannot have 5
    expected += [("6/12/1", kind) for kind in ("imbalance1.5", "imbalance5", "zipf1.0")]
    rows = cells(printed)
    notes = [line[1:].split() for line in document["notes"] if line.startswith("#  ")]
    claims, published = notes[:4], notes[4:]
    assert [(row[0], row[1]) for row in rows] == expected
    for row, record in zip(rows, document["records"], strict=True):
        assert set(record["over_bound"]) == set(record["time_us"]) == set(WAYS)
        assert set(record["over_target"]) == set(OURS)
        for way in WAYS:
            assert 1 <= record["over_bound"][way]["mean"] <= record["over_bound"][way]["worst"]
        assert row[5] == f"{record['over_bound']['push']['mean']:.3f}"
    assert [(row[0], row[1]) for row in claims] == [
        (size, mode) for size in ("4/16/2", "6/12/1") for mode in OURS
    ]
    assert [claim["holds"] for claim in document["claims"]] == [r[-1] == "True" for r in claims]
    assert [int(row[1]) for row in published] == [run.num_replicas for run in PUBLISHED_RUNS]


def test_what_a_claim_says() -> None:
    assert target_us(np.array([10.0, 80.0, 100.0])).tolist() == pytest.approx([18, 88, 110])
    assert make_claim("", "push", [1.0])["holds"]
    assert make_claim("", "push", [0.9, 1.08])["holds"]
    assert not make_claim("", "push", [0.9, 1.12])["holds"]  # the worst
    assert not make_claim("", "push", [1.02, 1.02])["holds"]  # the mean


@pytest.mark.parametrize("size", ["64/128/1", "40/160/4"])
def test_the_claim_holds(size: str, tmp_path: Path) -> None:
    """Of schedules, on links alone, with one load of each kind; bench/results has more."""
    links = ["model", "--machine", "nvl72-links", "--workload", "adversarial", "--seeds", "1"]
    one = ["--sizes", size, "--imbalance", "1.5,3,8", "--json", "o.json"]
    claims = bench(tmp_path, *links, *one).document()["claims"]
    assert [(claim["mode"], claim["holds"]) for claim in claims] == [(mode, True) for mode in OURS]
