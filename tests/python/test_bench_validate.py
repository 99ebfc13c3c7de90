"""Predictions beside measurements: the plans, the errors, exit statuses, and what is written."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from test_bench import run

from ultraep_comm.bench.cli import _parser, main
from ultraep_comm.bench.turns import COLD_BYTES, count_experts, make_turns
from ultraep_comm.bench.validate import costs_of
from ultraep_comm.bench.validate_report import (
    Predicted,
    format_validation,
    make_validation_document,
    median_error,
    worst_error,
)
from ultraep_comm.bench.validate_settings import (
    MODES,
    PlannedCase,
    ValidateSettings,
    make_cases,
    make_validate_settings,
)
from ultraep_comm.errors import UnsupportedError

FEW = ["validate", "--plans", "4", "-b", "64K", "-e", "256K", "-n", "3"]
RECORD_KEYS = {
    *("op", "mode", "chosen", "expert_bytes", "replicas", "imports", "filling", "calls"),
    *("time_us", "measured_us", "predicted_us", "error"),
}


def settings_of(*arguments: str) -> ValidateSettings:
    return make_validate_settings(_parser().parse_args(["validate", *arguments]))


# ---- the plans ----------------------------------------------------------------------------------


def test_plans_of_all_kinds() -> None:
    settings = settings_of()
    cases = make_cases(settings)
    assert len(cases) == 20
    assert settings.sizes == (1 << 18, 1 << 19, 1 << 20, 1 << 21, 1 << 22, 1 << 23, 1 << 24)
    assert {case.expert_bytes for case in cases} == set(settings.sizes)
    for mode in MODES:
        assert sum(case.mode == mode for case in cases) == 5
    one_way = sum(0 in case.imports for case in cases)
    assert 0 < one_way < 20
    assert len({tuple(case.imports) for case in cases}) > 8
    assert make_cases(settings) == cases
    assert make_cases(settings_of("--seed", "2")) != cases


@pytest.mark.parametrize("ranks", ["2", "3", "5"])
def test_turns_are_legal_plans_of_one_shape(ranks: str) -> None:
    settings = settings_of("--ranks", ranks, "--slots", "3", "--plans", "30")
    for case in make_cases(settings):
        plans = make_turns(case.filling, slots=3, experts=9, in_a_turn=3)
        assert len(plans) == 3
        experts = [set(plan.slot_expert[plan.slot_expert >= 0].tolist()) for plan in plans]
        assert not experts[0] & experts[1]
        for plan in plans:
            plan.validate()
            assert (plan.slot_expert >= 0).sum(1).tolist() == case.imports
            assert plan.num_replicas == case.replicas


def test_no_cache_holds_the_turns() -> None:
    for size in (1 << 18, 1 << 20, 5 << 20, 1 << 24):
        experts = count_experts(size, 4)
        assert experts % 4 == 0
        assert experts * size >= COLD_BYTES
    assert count_experts(64, 4) == 256  # but there is an end to it
    assert count_experts(1 << 30, 1) == 1


# ---- figures ------------------------------------------------------------------------------------

TIMES = {
    "empty": [6.0, 5.0, 60.0],
    "short": [22.25, 23.0, 20.0],
    "alone": [116.0, 100.0, 500.0],
    "together": [116.0, 118.0, 110.0],
    "few": [16.0, 16.0, 16.0],
    "many": [31.5, 31.5, 31.5],
}


def test_figures_are_of_primitive_calls_alone() -> None:
    settings = settings_of("-b", "1000000", "-e", "1000000")
    found = costs_of(settings, TIMES)
    assert found.store_gbps == pytest.approx(1e6 / 100 / 1e3)
    assert found.hop_us == pytest.approx(5)
    assert found.flag_us == pytest.approx(0.5)
    assert found.parallel == pytest.approx(2)
    assert found.call_us == 6
    least = costs_of(settings_of("-b", "1000000", "-e", "1000000", "--statistic", "min"), TIMES)
    assert least.call_us == 5
    assert least.store_gbps == pytest.approx((1e6 - 62500) / 80 / 1e3)
    with pytest.raises(UnsupportedError, match="too busy"):
        costs_of(settings, {**TIMES, "short": [6.0, 6.0, 6.0]})


def predicted(measured_us: float, predicted_us: float) -> Predicted:
    return Predicted(
        case=PlannedCase(mode="auto", expert_bytes=1 << 20, filling=[[], [(0, 0), (0, 1)]]),
        took="direct",
        calls=3,
        times_us=[measured_us] * 3,
        measured_us=measured_us,
        predicted_us=predicted_us,
    )


def test_errors() -> None:
    found = [predicted(100, 90), predicted(100, 130), predicted(200, 204)]
    assert [one.error for one in found] == pytest.approx([-0.1, 0.3, 0.02])
    assert median_error(found) == pytest.approx(0.1)
    assert worst_error(found) == pytest.approx(0.3)
    costs = costs_of(settings_of(), TIMES)
    for limit, met in (("0.05", False), ("0.11", True)):
        settings = settings_of("--max-error", limit)
        document = make_validation_document(settings, costs, TIMES, found, [], [0.1, 0.2])
        assert document["gate"] == {"max_error": float(limit), "met": met}
        text = format_validation(settings, costs, found)
        assert "# error: median 10.0%, worst 30.0%, of 3 plans" in text
        assert f"gate {'met' if met else 'not met'}" in text
    cells = [line.split() for line in text.splitlines() if not line.startswith("#")]
    assert cells[1] == ["auto", "(direct)", "1", "MiB", "0+2", "2.10", *cells[1][6:]]
    assert cells[1][6:] == ["100.0", "130.0", "+30.0", "20.97"]


# ---- the command --------------------------------------------------------------------------------


def rejects(done: Any, *paths: Path) -> bool:
    """Return whether the machine was too busy; it must say so, and write nothing."""
    if done.returncode != 2:
        return False
    assert "too busy" in done.stderr
    assert not any(path.exists() for path in paths)
    return True


def test_the_command(tmp_path: Path) -> None:
    path, flat = tmp_path / "v.json", tmp_path / "v.csv"
    outputs = ["--json", str(path), "--csv", str(flat)]
    done = run("-m", "ultraep_comm.bench", *FEW, *outputs, cwd=tmp_path)
    if rejects(done, path, flat):
        return
    assert done.returncode == 0, done.stderr
    document = json.loads(path.read_text())
    assert set(document) == {
        *("records", "median_error", "worst_error", "calibration", "calibration_times_us"),
        *("wrong_bytes", "load_average", "machine", "topology", "commit", "gate", "settings"),
        "format",
    }
    records = document["records"]
    assert len(records) == 4
    assert [record["mode"] for record in records] == list(MODES)
    for record in records:
        assert set(record) == RECORD_KEYS
        assert record["time_us"]["min"] <= record["measured_us"] <= record["time_us"]["max"]
        assert record["error"] == pytest.approx(record["predicted_us"] / record["measured_us"] - 1)
        assert record["predicted_us"] > document["calibration"]["call_us"]
    errors = sorted(abs(record["error"]) for record in records)
    assert document["median_error"] == pytest.approx((errors[1] + errors[2]) / 2)
    assert document["worst_error"] == errors[-1]
    assert document["calibration"]["ranks"] == 2
    assert document["settings"]["sizes"] == [1 << 16, 1 << 17, 1 << 18]
    assert document["gate"] is None
    assert f"median {100 * document['median_error']:.1f}%" in done.stdout
    with flat.open() as file:
        assert [float(row["error"]) for row in csv.DictReader(file)] == [
            record["error"] for record in records
        ]


def test_a_gate_that_no_model_meets(tmp_path: Path) -> None:
    path = tmp_path / "v.json"
    gated = [*FEW, "--ranks", "3", "--max-error", "1e-12", "--json", str(path)]
    done = run("-m", "ultraep_comm.bench", *gated, cwd=tmp_path)
    if rejects(done, path):
        return
    assert done.returncode == 3, done.stderr
    assert "gate not met" in done.stdout
    assert json.loads(path.read_text())["gate"] == {"max_error": 1e-12, "met": False}


def test_wrong_bytes_are_not_predicted(tmp_path: Path) -> None:
    """A rank that disturbs its slots after every transfer, in place of the library's call."""
    script = tmp_path / "broken.py"
    script.write_text(
        "import sys\n"
        "from ultraep_comm.bench import device_transfers, validate\n"
        "from ultraep_comm.bench.cli import main\n"
        "call = device_transfers.RanksHere.call\n"
        "def broken(self, plan, mode, given):\n"
        "    call(self, plan, mode, given)\n"
        "    self.groups[0].slots[next(iter(self.groups[0].slots))][0, 3] ^= 1\n"
        "def start(settings):\n"
        "    device_transfers.RanksHere.call = broken\n"
        "    return validate_run(settings)\n"
        "validate_run = validate.run\n"
        "validate.run = start\n"
        "if __name__ == '__main__':\n"
        "    sys.exit(main(sys.argv[1:]))\n"
    )
    path = tmp_path / "v.json"
    done = run(str(script), *FEW, "--json", str(path), cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "nothing was predicted" in done.stdout
    assert not path.exists()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--ranks", "1"], "--ranks is 1; expected at least 2"),
        (["--plans", "0"], "--plans is 0; expected at least 1"),
        (["--iters", "0"], "--iters is 0"),
        (["-b", "x"], "'x' is not a size"),
        (["-b", "1M", "-e", "64K"], "the smallest first"),
        (["-b", "64"], "at least 4096 bytes"),
        (["--max-error", "nan"], "--max-error is nan"),
        (["--max-error", "0"], "expected a number above 0"),
        (["--json", "none/v.json"], "no such folder"),
    ],
)
def test_bad_arguments(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    text: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["validate", "--json", "v.json", *arguments]) == 2
    assert text in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
