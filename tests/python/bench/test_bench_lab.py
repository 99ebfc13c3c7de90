"""Ranks on machines of a lab, and the engine whose experts cross their links."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from benched import ONE_PLAN_KEYS, SMALL, Done, baselines_of, bench, modes_of, settings_of

from ultraep_comm.bench import baselines
from ultraep_comm.bench.cli import main
from ultraep_comm.bench.commands.replicate import reduction as reduce
from ultraep_comm.bench.netlab import lab_problem
from ultraep_comm.errors import InvalidArgumentError

needs_lab = pytest.mark.skipif(lab_problem() is not None, reason=str(lab_problem()))
KEYS = {  # of records, besides those of every command for one plan
    "replicate": {"broadcast_time_us", "speedup_over_broadcast", "p2p_time_us", "speedup_over_p2p"},
    "reduce": {"reduce_time_us", "speedup_over_reduce", "gloo_time_us", "speedup_over_gloo"},
}
ROWS = {
    "replicate": ["push", "direct", "auto", "p2p", "broadcast"],
    "reduce": ["pull", "direct", "auto", "gloo", "reduce"],
}


def test_no_lab_is_an_error_before_any_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    assert main(["replicate", *SMALL, "--lab-gbit", "1", "--lab-machines", "1"]) == 2
    out, err = capsys.readouterr()
    needed = "a lab of network namespaces needs the program ip; install iproute2"
    assert (out, err) == ("", f"error: {needed}\n")


@pytest.mark.parametrize(
    ("arguments", "machines", "link_gbps"),
    [
        (["--max-over-bound", "9"], 4, 0.25),
        (["--lab-machines", "2"], 2, None),  # two ranks share a link
        (["--link-gbps", "3"], 4, 3.0),
        (["--lab-machines", "1", "--engine", "host"], 1, None),
    ],
)
def test_the_link_of_a_rank(arguments: list[str], machines: int, link_gbps: float | None) -> None:
    settings = settings_of("replicate", "--engine", "c10d", "--lab-gbit", "2", *arguments)
    assert (settings.lab.machines, settings.lab.gbit) == (machines, 2)
    assert settings.link_gbps == link_gbps


def test_a_lab_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidArgumentError, match="link is not known; give --link-gbps"):
        settings_of("replicate", "--engine", "c10d", "--max-over-bound", "9")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InvalidArgumentError, match="2 were launched; start it without"):
        settings_of("replicate", "--engine", "c10d", "--lab-gbit", "1")


def run(folder: Path, command: str, *arguments: str, fault: Any = None) -> Done:
    few = [*SMALL, "--engine", "c10d", "--ranks", "3", "--check", "--json", "o.json"]
    return bench(folder, command, *few, *arguments, fault=fault)


BFLOAT16 = ["--grad-dtype", "bfloat16", "--main-dtype", "bfloat16"]


@pytest.mark.parametrize(("command", "more"), [("replicate", []), ("reduce", BFLOAT16)])
def test_modes_and_baselines_without_shared_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, more: list[str]
) -> None:
    done = run(tmp_path, command, *more)
    assert done.returncode == 0, done.stderr
    table = done.rows()
    assert list(table) == ROWS[command]
    assert {cells[-1] for cells in table.values()} == {"0"}
    document = done.document()
    for record in modes_of(document):
        assert set(record) == ONE_PLAN_KEYS | {"bytes", "algbw_gbps", "over_model"} | KEYS[command]
        assert (record["engine"], record["fabric"]) == ("c10d", "none")
        assert record["replicas"] > 0
        assert (record["bound_us"], record["over_bound"]) == (None, None)
        assert min(record[key] for key in KEYS[command]) > 0
    assert main(["show", str(tmp_path / "o.json")]) == 0
    assert capsys.readouterr().out == done.stdout


def do_nothing_in_the_last_baseline() -> None:
    for kind in (baselines.Broadcast, reduce.GroupReduction):
        kind.run = lambda self: None  # type: ignore[method-assign]


@pytest.mark.parametrize("command", ROWS)
def test_a_baseline_that_moves_nothing_is_wrong(tmp_path: Path, command: str) -> None:
    done = run(tmp_path, command, fault=do_nothing_in_the_last_baseline)
    assert done.returncode == 1, done.stderr
    wrong = [baseline["wrong_bytes"] for baseline in baselines_of(done.document())]
    assert wrong[0] == 0
    assert wrong[1] > 0


@needs_lab
@pytest.mark.parametrize("command", ROWS)
def test_nothing_beats_the_links_of_a_lab(tmp_path: Path, command: str) -> None:
    """A link may be ahead by 80 KiB, and a byte passes two limits: here, a third of an expert."""
    few = ["-b", "512K", "-n", "1", "-w", "0", "--lab-gbit", "0.4", "--json", "o.json"]
    done = bench(tmp_path, command, "--engine", "c10d", "--ranks", "4", "--check", *few)
    assert done.returncode == 0, done.stderr
    assert "# lab: 4 machines, each with a link of 0.4 Gbit/s, one way" in done.stdout
    document = done.document()
    settings = document["settings"]
    assert (settings["lab_gbit"], settings["lab_machines"]) == (0.4, 4)
    assert settings["link_gbps"] == pytest.approx(0.05)
    assert {place["domain"] for place in document["topology"]} == {0}  # each has a machine
    for record in modes_of(document):
        experts = record["bound_us"] * 0.05e3 / record["expert_bytes"]
        assert experts >= 1
        assert record["over_bound"] > 1 - 1 / 3 / experts
    for baseline in baselines_of(document):
        assert baseline["time_us"]["p50"] > 2 / 3 * record["bound_us"]
