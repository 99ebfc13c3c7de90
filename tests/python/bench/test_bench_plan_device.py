"""The planner's benchmark on a device: arguments, records, and a run on the emulated device."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from benched import run_on, settings_of
from emulated_device import EmulatedDevice
from ranks import plan_alone
from stand_in import Emulated

from ultraep_comm import Plan
from ultraep_comm.bench.commands.plan import PlanSize
from ultraep_comm.bench.commands.plan import device as plan_device
from ultraep_comm.bench.commands.plan.device import AllRanks, ids_of
from ultraep_comm.bench.ranks import WeightRanks
from ultraep_comm.engines.cuda.stages import CudaStages
from ultraep_comm.errors import DeviceError

TINY = ["plan", "--engine", "cuda", "--tokens", "12", "--topk", "2", "--seeds", "2"]
TINY += ["--workload", "zipf1.0,adversarial", "--warps", "1,3"]
ONE = ["--workload", "zipf1.0", "--seeds", "1"]


@pytest.fixture(autouse=True)
def _few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_device, "PLAN_CALLS", 2)


def test_end_to_end(
    emulated: EmulatedDevice, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "o.json"
    assert run_on(Emulated(), *TINY, "--sizes", "3/8/1,4/8/2", "--json", str(path)) == 0
    text, document = capsys.readouterr().out, json.loads(path.read_text())
    sizes = [(r["ranks"], r["slots"], r["family"]) for r in document["records"]]
    assert sizes == [(g, s, f) for g, s in ((3, 1), (4, 2)) for f in ("zipf1.0", "adversarial")]
    parts = ("host", "counts", "at_once", "launch", "shares", "reroute")
    parts += ("tiny_device_plan", "tiny_host_plan")
    for record in document["records"]:
        assert record["vectors"] == (2 if record["family"] == "zipf1.0" else 5)
        assert list(record["warps"]) == ["1", "3"]
        times = [record[f"{name}_us"] for name in parts]
        for run in record["warps"].values():
            times.append(run["time_us"])
        assert all(one["p99"] >= one["p50"] > 0 for one in times)
        assert record["schedule_us"]["p99"] >= record["schedule_us"]["p50"]  # a difference
        assert record["ids"] == pytest.approx(24, abs=12)
        assert record["wrong_values"] == 0
    rows = [line for line in text.splitlines() if not line.startswith("#")]
    assert len(rows) == 4
    assert "3 warps" in text


def test_rows_before_a_failure_are_kept(
    emulated: EmulatedDevice,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path, measure = tmp_path / "o.json", plan_device.measure_row

    def fail_at_the_second(meter: Any, settings: Any, size: PlanSize, *rest: Any) -> Any:
        if size.num_ranks == 3:
            raise DeviceError("broken")
        return measure(meter, settings, size, *rest)

    monkeypatch.setattr(plan_device, "measure_row", fail_at_the_second)
    with pytest.raises(DeviceError, match="broken"):
        run_on(Emulated(), *TINY, "--sizes", "2/4/1,3/8/1", *ONE, "--json", str(path))
    assert [record["ranks"] for record in json.loads(path.read_text())["records"]] == [2]
    assert capsys.readouterr().out.splitlines()[-1].split()[0] == "2/4/1"


@pytest.mark.parametrize("broken", ["slot", "empty slot", "load", "plan"])
def test_what_is_wrong_with_all_ranks_is_found(
    emulated: EmulatedDevice, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """Negative controls, in the results of calls."""
    settings = settings_of(*TINY, "--sizes", "3/8/1")
    (size,) = settings.sizes
    load = torch.tensor([[9, 1, 0, 0, 2, 0, 1, 1]] * 3, dtype=torch.int32)
    plan = plan_alone(load, slots_per_rank=1, num_ranks=3, home=size.home, target=1.01)
    filled = (plan.slot_expert >= 0).flatten().tolist()
    assert sorted(set(filled)) == [False, True]
    every = AllRanks.of(Emulated(), size)
    assert every.measure(load, plan, ids_of(load), 1.01)[1] == 0
    if "slot" in broken:
        at = filled.index(broken == "slot")
        count = WeightRanks.count_wrong

        def count_in_broken(self: WeightRanks, *arguments: Any) -> int:
            self.groups[at].slots["w"][0, 5] ^= 1
            return count(self, *arguments)

        monkeypatch.setattr(WeightRanks, "count_wrong", count_in_broken)
    ids = ids_of(load)
    if broken == "load":
        ids[1][0] = 1
    if broken == "plan":
        plan = dataclasses.replace(plan, home_quota=plan.home_quota.roll(1))
    assert every.measure(load, plan, ids, 1.01)[1] > 0
    every.ranks.close()


@pytest.mark.parametrize("broken", ["plan", "reroute"])
def test_a_wrong_integer_is_found(
    emulated: EmulatedDevice,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    broken: str,
) -> None:
    """Negative controls."""
    call = getattr(CudaStages, broken)

    def wrong(self: CudaStages, *arguments: Any) -> Any:
        found = call(self, *arguments)
        emulated.synchronize()
        tensor: torch.Tensor = found.home_quota if isinstance(found, Plan) else found
        tensor.view(-1)[0] += 1
        return found

    monkeypatch.setattr(CudaStages, broken, wrong)
    assert run_on(Emulated(), *TINY, "--sizes", "3/8/1", *ONE) == 1
    assert capsys.readouterr().out.split()[-1] != "0"
