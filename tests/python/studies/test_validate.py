"""The validate benchmark: plans, errors, exit statuses and records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from benched import bench, check_csv, settings_of

from studies.validate.run import MODES, costs_of, describe_errors, make_cases, sum_up
from ultraep_comm.bench.ranks import WeightRanks, make_turns
from ultraep_comm.errors import UnsupportedError

FEW = ["validate", "--plans", "4", "-b", "64K", "-e", "256K", "-n", "3"]


@pytest.mark.parametrize("ranks", ["2", "5"])
def test_turns_are_legal_plans_of_one_shape(ranks: str) -> None:
    settings = settings_of("validate", "--ranks", ranks, "--slots", "3", "--plans", "30")
    for case in make_cases(settings):
        plans = make_turns(case.filling, slots=3, experts=9, in_a_turn=3)
        assert len(plans) == 3
        experts = [set(plan.slot_expert[plan.slot_expert >= 0].tolist()) for plan in plans]
        assert not experts[0] & experts[1]
        for plan in plans:
            plan.validate()
            assert (plan.slot_expert >= 0).sum(1).tolist() == case.imports
            assert plan.num_replicas == case.replicas


TIMES = {
    "empty": [6.0, 5.0, 60.0],
    "short": [22.25, 23.0, 20.0],
    "alone": [116.0, 100.0, 500.0],
    "together": [116.0, 118.0, 110.0],
    "few": [16.0, 16.0, 16.0],
    "many": [31.5, 31.5, 31.5],
}


def test_figures_are_of_primitive_calls_alone() -> None:
    size = ["validate", "-b", "1000000", "-e", "1000000"]
    found = costs_of(settings_of(*size), TIMES)
    assert found.store_gbps == pytest.approx(1e6 / 100 / 1e3)
    assert found.hop_us == pytest.approx(5)
    assert found.flag_us == pytest.approx(0.5)
    assert found.parallel == pytest.approx(2)
    assert found.call_us == 6
    least = costs_of(settings_of(*size, "--statistic", "min"), TIMES)
    assert least.call_us == 5
    assert least.store_gbps == pytest.approx((1e6 - 62500) / 80 / 1e3)
    with pytest.raises(UnsupportedError, match="too busy"):
        costs_of(settings_of(*size), {**TIMES, "short": [6.0, 6.0, 6.0]})


def test_errors() -> None:
    found: list[dict[str, Any]] = [{"error": error} for error in (-0.1, 0.3, 0.02)]
    costs = costs_of(settings_of("validate"), TIMES)
    for limit, met in (("0.05", False), ("0.11", True)):
        summed = sum_up(settings_of("validate", "--max-error", limit), costs, TIMES, found)
        assert summed["median_error"] == pytest.approx(0.1)
        assert summed["worst_error"] == pytest.approx(0.3)
        assert summed["gate"] == {"max_error": float(limit), "met": met}
        first, second = describe_errors(summed, len(found))
        assert first == "error: median 10.0%, worst 30.0%, of 3 plans"
        assert second.startswith(f"gate {'met' if met else 'not met'}: ")


def test_the_command(tmp_path: Path) -> None:
    done = bench(tmp_path, *FEW, "--json", "v.json", "--csv", "v.csv")
    if done.returncode == 2:  # the machine was too busy: it says so, and writes nothing
        assert "too busy" in done.stderr
        assert [path.name for path in tmp_path.iterdir()] == ["output"]
        return
    assert done.returncode == 0, done.stderr
    document = done.document("v.json")
    records = document["records"]
    assert [record["mode"] for record in records] == list(MODES)
    for record in records:
        assert record["time_us"]["min"] <= record["measured_us"] <= record["time_us"]["max"]
        assert record["error"] == pytest.approx(record["predicted_us"] / record["measured_us"] - 1)
        assert record["predicted_us"] > document["calibration"]["call_us"]
    errors = sorted(abs(record["error"]) for record in records)
    assert document["median_error"] == pytest.approx((errors[1] + errors[2]) / 2)
    assert document["worst_error"] == errors[-1]
    assert document["calibration"]["ranks"] == 2
    assert set(document["calibration_times_us"]) == set(TIMES)
    assert document["settings"]["sizes"] == [1 << 16, 1 << 17, 1 << 18]
    assert (document["wrong_bytes"], document["gate"]) == (0, None)
    assert f"median {100 * document['median_error']:.1f}%" in done.stdout
    check_csv(tmp_path / "v.csv", records)


def disturb_slots() -> None:
    """Flip a bit in this rank's slots after every call."""
    call = WeightRanks.call

    def broken(self: WeightRanks, plan: Any, mode: str) -> None:
        call(self, plan, mode)
        self.groups[0].slots[next(iter(self.groups[0].slots))][0, 3] ^= 1

    WeightRanks.call = broken  # type: ignore[method-assign]


def test_wrong_bytes_are_not_predicted(tmp_path: Path) -> None:
    """Negative control."""
    done = bench(tmp_path, *FEW, "--json", "v.json", fault=disturb_slots)
    assert done.returncode == 1, done.stderr
    assert "nothing was predicted" in done.stdout
    assert not (tmp_path / "v.json").exists()
