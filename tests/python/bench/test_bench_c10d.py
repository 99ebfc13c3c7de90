"""The c10d engine under the benchmark, beside the baselines of a process group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from benched import ONE_PLAN_KEYS, SMALL, Done, baselines_of, bench, modes_of, settings_of

from ultraep_comm.bench import baselines
from ultraep_comm.bench.cli import main
from ultraep_comm.bench.commands.replicate import reduction as reduce
from ultraep_comm.errors import InvalidArgumentError

KEYS = {  # of records, besides those of every command for one plan
    "replicate": {"broadcast_time_us", "speedup_over_broadcast", "p2p_time_us", "speedup_over_p2p"},
    "reduce": {"reduce_time_us", "speedup_over_reduce", "gloo_time_us", "speedup_over_gloo"},
}
ROWS = {
    "replicate": ["push", "direct", "auto", "p2p", "broadcast"],
    "reduce": ["pull", "direct", "auto", "gloo", "reduce"],
}


def test_a_limit_needs_the_rate_of_a_link() -> None:
    with pytest.raises(InvalidArgumentError, match="link is not known; give --link-gbps"):
        settings_of("replicate", "--engine", "c10d", "--max-over-bound", "9")


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
