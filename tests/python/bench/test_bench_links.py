"""The links benchmark, from the command line to records and exit status."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benched import bench, check_csv, run_on
from emulated_device import EmulatedDevice
from numpy.typing import NDArray
from stand_in import Emulated, StandIn

from ultraep_comm import Plan
from ultraep_comm.bench.clock import DeviceClock
from ultraep_comm.bench.commands.links import LinksSettings
from ultraep_comm.bench.commands.links import run as links
from ultraep_comm.bench.commands.links.report import (
    Link,
    describe_slow,
    slow_ranks,
    slowest_links,
)
from ultraep_comm.bench.commands.links.run import make_rounds, rates_of, times_of_links
from ultraep_comm.bench.payload import Payload
from ultraep_comm.bench.ranks import WeightRanks

BAD = (2, 0)
HERE = ["links", "--engine", "cuda", "-b", "64K", "-n", "2", "-w", "1"]  # in one process


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 5, 8, 9, 72])
def test_rounds_have_every_link_once_and_no_rank_twice(num_ranks: int) -> None:
    rounds = make_rounds([0] * num_ranks)
    together = [link for played in rounds for link in played]
    assert sorted(together) == list(itertools.permutations(range(num_ranks), 2))
    for played in rounds:
        ranks = [rank for link in played for rank in link]
        assert len(ranks) == len(set(ranks))
        assert len(played) == num_ranks // 2  # the maximum
    assert len(rounds) == 2 * (num_ranks - 1 + num_ranks % 2)


def test_rounds_stay_inside_domains() -> None:
    together = {link for played in make_rounds([0, 1, 0, 1, 2]) for link in played}
    assert together == {(0, 2), (2, 0), (1, 3), (3, 1)}
    assert make_rounds([0, 1]) == []
    assert make_rounds([0] * 3, "incast") == [[(1, 0), (2, 0)], [(0, 1), (2, 1)], [(0, 2), (1, 2)]]
    assert make_rounds([0, 1, 0], "incast") == [[(2, 0)], [(0, 2)]]
    for pattern in ("ring", "ring-beside-incast"):
        assert make_rounds([0] * 4, pattern) == [[(1, 2), (2, 3), (3, 1)]]
        assert make_rounds([0, 0, 1, 0], pattern) == [[(1, 3), (3, 1)]]
        assert make_rounds([0, 0, 1], pattern) == []


def fake_matrix(num_ranks: int, slow: dict[Link, float]) -> NDArray[np.float64]:
    """Return 10 GB/s for every link except the slow ones."""
    matrix = np.full((num_ranks, num_ranks), 10.0)
    for link, gbps in slow.items():
        matrix[link] = gbps
    np.fill_diagonal(matrix, np.nan)
    return matrix


def test_slow_links_and_ranks_are_found() -> None:
    matrix = fake_matrix(6, {BAD: 2.5})
    assert slowest_links(matrix, 1) == [(BAD, pytest.approx(0.25))]
    assert len(slowest_links(matrix, 100)) == 30
    assert slow_ranks(matrix) == []  # one link of five does not make a slow rank
    assert len(describe_slow(matrix, 9)) == 2  # the others are no slower than the median
    matrix = fake_matrix(6, {(3, other): 5.0 for other in range(6)})
    assert slow_ranks(matrix) == [(3, pytest.approx(0.5), pytest.approx(1.0))]
    assert "rank 3: its links out are 50% below the median" in "\n".join(describe_slow(matrix, 5))


def test_times_of_links_out_of_times_of_ranks() -> None:
    spans = np.zeros((3, 2, 1, 2))  # rank, start and end, round, iteration
    spans[0, :, 0] = [[5, 5], [20, 30]]
    spans[1, :, 0] = [[7, 1], [26, 28]]
    for one_clock, times in ((True, [21, 29]), (False, [19, 27])):
        found = times_of_links([[(0, 1)]], spans, one_clock=one_clock)
        assert found[0, 1].tolist() == times
        assert np.isnan(found).sum() == 2 * (9 - 1)
    for statistic, size, gbps in (("median", 19_000, 19 / 23), ("min", 27_000, 1)):
        settings = LinksSettings(link_bytes=size, statistic=statistic)
        assert rates_of(found, settings)[0, 1] == pytest.approx(gbps)


def check_document(path: Path, num_ranks: int) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text())
    records = document["records"]
    pairs = [(a, b) for a in range(num_ranks) for b in range(num_ranks) if a != b]
    assert [(r["source"], r["destination"]) for r in records] == pairs
    for record in records:
        times = record["time_us"]
        assert 0 < times["min"] <= times["p50"] <= times["p99"] <= times["max"]
        assert record["gbps"] == pytest.approx(record["link_bytes"] / times["p50"] / 1e3)
        at = document["matrix_gbps"][record["source"]][record["destination"]]
        assert at == record["gbps"]
        assert record["over_median"] == pytest.approx(at / document["median_gbps"])
    assert all(row[i] is None for i, row in enumerate(document["matrix_gbps"]))
    assert len(document["topology"]) == num_ranks
    return document


def test_links_of_processes(tmp_path: Path) -> None:
    few = ["--ranks", "3", "-b", "64K", "-n", "2", "-w", "1", "-c", "--sms", "1"]
    files = ["--json", "o.json", "--csv", "o.csv"]
    done = bench(tmp_path, "links", *few, *files, "--min-bandwidth", "1e-6")
    assert done.returncode == 0, done.stderr
    document = check_document(tmp_path / "o.json", 3)
    assert document["gate"]["met"] is True
    assert {record["wrong_bytes"] for record in document["records"]} == {0}
    check_csv(tmp_path / "o.csv", document["records"])
    shown = [line.split() for line in done.stdout.splitlines() if line.startswith("  ")]
    assert [line.index("-") for line in shown] == [1, 2, 3]
    assert "6 rounds, links of a round at the same time" in done.stdout


def test_a_pattern_of_processes(tmp_path: Path) -> None:
    few = ["links", "--ranks", "4", "-b", "64K", "-n", "2", "-w", "1", "-c", "--sms", "1"]
    done = bench(tmp_path, *few, "--pattern", "ring-beside-incast", "--json", "o.json")
    assert done.returncode == 0, done.stderr
    found = {(r["source"], r["destination"]): r for r in done.document()["records"]}
    assert found.keys() == {(1, 2), (2, 3), (3, 1)}
    assert all(r["wrong_bytes"] == 0 < r["gbps"] for r in found.values())


def test_what_runs_beside_a_ring_is_checked_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Negative control: a byte of what rank 0 received, in a group of its own."""
    finish = links.Crowd.finish

    def broken(crowd: links.Crowd) -> None:
        finish(crowd)
        crowd._ranks.groups[0].slots["w"][2, 5] ^= 1

    beside = [*HERE, "--pattern", "ring-beside-incast"]
    monkeypatch.setattr(links.Crowd, "finish", broken)
    assert run_on(StandIn(), *beside) == 1
    assert "beside that as much to rank 0" in capsys.readouterr().out


def test_a_link_that_is_slowed_down_fails_the_gate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Real transfers with scripted times: 10 GB/s, and 2.5 on one link."""
    call, link = WeightRanks.call, (-1, -1)

    def called(self: WeightRanks, plan: Plan, mode: str) -> None:
        nonlocal link
        call(self, plan, mode)
        link = (int(plan.slot_expert.max()), int(plan.slot_expert[:, 0].argmax()))

    def timed(self: DeviceClock, run: Any) -> tuple[float, float]:
        run()
        return 0.0, 65536 / (2.5e3 if link == BAD else 10e3)

    monkeypatch.setattr(WeightRanks, "call", called)
    monkeypatch.setattr(DeviceClock, "span", timed)
    path = tmp_path / "o.json"
    few = [*HERE, "--one-at-a-time", "--json", str(path)]
    assert run_on(StandIn(), *few, "--min-bandwidth", "8") == 3
    document = check_document(path, 4)
    failed = [r for r in document["records"] if r["gate"] != "met"]
    assert [(r["source"], r["destination"]) for r in failed] == [BAD]
    worst = document["slowest"][0]
    assert (worst["source"], worst["destination"]) == BAD
    assert worst["over_median"] == pytest.approx(0.25)
    text = capsys.readouterr()
    assert text.err == "gate not met by 1 of 12, expected at least 8 GB/s: 2 to 0 2.5 GB/s\n"
    assert "slow: 2 to 0, 2.50 GB/s, 75% below the median" in text.out
    assert "12 rounds, one at a time" in text.out
    assert run_on(StandIn(), *few, "--min-bandwidth", "2") == 0


def test_a_wrong_byte_is_found(
    emulated: EmulatedDevice,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Negative control: one link of the CUDA engine, on a CPU, flips a bit."""
    count = links.count_wrong

    def broken(ranks: WeightRanks, plan: Plan, payload: Payload, epoch: int) -> NDArray[np.int64]:
        emulated.synchronize()
        if int(plan.slot_expert[1, 0]) == 3:
            ranks.groups[1].slots["w"][0, 77] ^= 1
        return count(ranks, plan, payload, epoch)

    monkeypatch.setattr(links, "count_wrong", broken)
    path = tmp_path / "o.json"
    assert run_on(Emulated(), *HERE, "--json", str(path), "--check") == 1
    document = check_document(path, 4)
    wrong = [r for r in document["records"] if r["wrong_bytes"]]
    assert [(r["source"], r["destination"]) for r in wrong] == [(3, 1)]
    assert wrong[0]["wrong_bytes"] == 3  # a warm-up and two iterations
    assert {record["engine"] for record in document["records"]} == {"cuda"}
    text = capsys.readouterr().out
    assert "wrong bytes: 3 of 12 links" in text
    assert "no link is measured" in text
