"""Calibration: the file, its effect on the cost model, and the measurement."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from benched import bench, run_settings_on, settings_of
from ranks import RankPool, make_weights, raised, start_all, synchronize_all
from stand_in import StandIn

import ultraep_comm as uec
from ultraep_comm.bench.commands.calibrate.run import make_costs
from ultraep_comm.bench.ranks import WeightRanks
from ultraep_comm.calibration import (
    MAX_FIGURE,
    MeasuredCosts,
    choose_constants,
    device_name,
    make_calibration,
    read_calibration,
)
from ultraep_comm.engines import host
from ultraep_comm.errors import BootstrapError, InvalidArgumentError, UltraEPError, UnsupportedError

HERE = device_name("host") or ""
COSTS = MeasuredCosts(
    **{"device": HERE, "ranks": 4, "store_gbps": 20.48, "load_gbps": 40.96},
    **{"flag_us": 0.25, "hop_us": 5.0, "parallel": 2.5, "call_us": 6.0},
)
FAR = replace(COSTS, hop_us=1e5)  # a second hop costs more than any bytes
NEAR = replace(COSTS, hop_us=0.0, flag_us=0.0, parallel=4.0)


def write(path: Path, *, engine: str = "host", costs: MeasuredCosts = COSTS) -> Path:
    path.write_text(json.dumps(make_calibration({engine: costs})))
    return path


# ---- the file -----------------------------------------------------------------------------------


def test_constants_of_the_cost_model(tmp_path: Path) -> None:
    """1 KiB at 20.48 GB/s takes 50 ns, which are 50,000 ps."""
    found = read_calibration(write(tmp_path / "c.json"))
    assert found == {"host": COSTS}
    built_in = host.cost_constants(2)
    assert choose_constants(found, "host", 8, built_in) == (50_000, 25_000, 250_000, 5_000_000, 250)
    assert choose_constants(found, "cuda", 8, built_in) == built_in  # no figures for this engine
    # On a rack every rank has its own links, so the parallelism grows with the ranks.
    assert COSTS.constants(8, scales=True)[4] == 500
    assert replace(COSTS, parallel=1.0).constants(4, scales=True)[4] == 100
    assert choose_constants({}, "host", 4, built_in) == built_in


def damaged(entry: dict[str, Any] | None = None, **changes: Any) -> str:
    """Return a calibration with other values of the whole, and of the host's figures."""
    document: dict[str, Any] = make_calibration({"host": COSTS})
    document["engines"]["host"].update(entry or {})
    return json.dumps({**document, **changes})


BAD = [
    ("", "is damaged"),
    ("[1]", "is not a calibration"),
    (damaged(format=3), "has format 3; expected 2"),
    (damaged(engines={"tpu": {}}), "has an invalid 'engines'"),
    (damaged(engines={"host": {}}), "has other fields"),
    (damaged({"hop_us": "5"}), "has hop_us = '5'"),
    (damaged({"flag_us": -1}), "flag_us = -1"),
    (damaged({"load_gbps": 2e6}), "load_gbps = 2000000"),
    (damaged({"ranks": 3.5}), "3.5 ranks"),
    (damaged({"device": 1}), "device for 'host'"),
    (damaged({"device": "Cray-1"}), "was measured on 'Cray-1', but this is"),
]


@pytest.mark.parametrize(("text", "why"), BAD)
def test_bad_files_are_named(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "c.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(InvalidArgumentError, match=why) as error:
        read_calibration(path)
    assert str(path) in str(error.value)


def test_a_file_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidArgumentError, match="cannot be read"):
        read_calibration(tmp_path)
    monkeypatch.setenv("ULTRAEP_CALIBRATION", str(tmp_path / "none.json"))
    with pytest.raises(InvalidArgumentError, match=r"none\.json cannot be read"):
        uec.testing.new_loopback_groups(
            2, num_experts=2, slots_per_rank=1, expert={"w": ((8,), torch.uint8)}
        )


def test_a_gpu_that_is_not_used_may_be_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "GB200")
    path = write(tmp_path / "c.json", engine="cuda", costs=replace(COSTS, device="H200"))
    assert read_calibration(path, used=["host"])
    with pytest.raises(InvalidArgumentError, match="was measured on 'H200', but this is 'GB200'"):
        read_calibration(path)


# ---- its effect ---------------------------------------------------------------------------------


SHAPE: dict[str, Any] = {"num_experts": 4, "slots_per_rank": 1}
SHAPE["expert"] = {"w": ((1 << 20,), torch.uint8)}
SPREAD = uec.Plan.from_slots([[-1], [0], [0], [0]], num_experts=4)


@pytest.mark.usefixtures("emulated")
def test_ranks_on_one_gpu_have_figures_of_their_own(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    new_groups: Callable[..., list[uec.Group]],
) -> None:
    for costs, mode in ((FAR, "direct"), (NEAR, "push")):
        path = write(tmp_path / "c.json", engine="loopback", costs=costs)
        monkeypatch.setenv("ULTRAEP_CALIBRATION", str(path))
        groups = new_groups(4, **SHAPE, engine="cuda")
        works = start_all(groups, [make_weights(group) for group in groups], SPREAD)
        synchronize_all(works)
        assert {work.mode for work in works} == {mode}


def _choose_in_a_process(
    rank: int, process_group: dist.ProcessGroup, paths: list[str]
) -> tuple[str, str]:
    """Create a group with this rank's own file; return the mode, or the error's name and text."""
    made: list[uec.Group] = []
    with mock.patch.dict(os.environ, {"ULTRAEP_CALIBRATION": paths[rank]}):
        error = raised(lambda: made.append(uec.new_group(process_group, **SHAPE, engine="host")))
    if error is not None:
        return type(error).__name__, str(error)
    with made[0] as group:
        work = uec.replicate_experts(make_weights(group), SPREAD, group=group, async_op=True)
        work.wait()
        return work.mode, ""


def test_rank_0_decides_for_all(ranks: RankPool, tmp_path: Path) -> None:
    far = str(write(tmp_path / "far.json", costs=FAR))
    near = str(write(tmp_path / "near.json", costs=NEAR))
    none = str(tmp_path / "none.json")  # only rank 0 reads it
    assert ranks.run(4, _choose_in_a_process, [far, near, near, none]) == [("direct", "")] * 4
    assert ranks.run(4, _choose_in_a_process, [near, far, far, none]) == [("push", "")] * 4
    answers = ranks.run(4, _choose_in_a_process, [none, near, near, near])
    errors = [InvalidArgumentError, *[BootstrapError] * 3]
    assert [name for name, _ in answers] == [error.__name__ for error in errors]
    assert all("none.json" in text for _, text in answers)


# ---- measuring ----------------------------------------------------------------------------------

TIMES: dict[str, Any] = {
    **{"device": HERE, "ranks": 4, "copy_bytes": 10**6, "short_bytes": 0, "flag_us": 0.5},
    **{"empty_us": 6.0, "short_us": 16.0},
    **{"alone_us": 116.0, "both_us": 196.0, "together_us": 232.0},
}


def test_figures_out_of_times() -> None:
    """A copy stores in 80 us and reads in 20; two hops take 10."""
    found = make_costs(**TIMES)
    figures = {"store_gbps": 12.5, "load_gbps": 50, "hop_us": 5, "parallel": 2}
    for name, value in {**figures, "flag_us": 0.5, "call_us": 6.0}.items():
        assert getattr(found, name) == pytest.approx(value), name
    # The model composed again: copies without the fixed time of a call.
    store, load, *_ = found.constants(4, scales=False)
    kib = 10**6 / 1024
    assert kib * (store + load) / 1e6 == pytest.approx(116 - 16, rel=1e-3)
    assert kib * 2 * (store + load / 2) / 1e6 == pytest.approx(196 - 16, rel=1e-3)
    # The short expert is a quarter of the large one: 16 us and a quarter of 100.
    assert make_costs(**{**TIMES, "short_bytes": 250_000, "short_us": 41.0}) == found
    # The large copy took too long, so that the rest is negative.
    assert make_costs(**{**TIMES, "short_bytes": 250_000, "short_us": 30.0}).hop_us == 0
    # With two ranks a store has its read in it: 100 us beyond a tile.
    found = make_costs(**{**TIMES, "ranks": 2, "both_us": None})
    assert found.store_gbps == pytest.approx(10)
    assert found.load_gbps == MAX_FIGURE


def test_figures_stay_inside_what_a_file_may_hold(tmp_path: Path) -> None:
    found = make_costs(**{**TIMES, "both_us": 250.0, "together_us": 1e4, "flag_us": -0.1})
    assert (found.load_gbps, found.parallel, found.flag_us) == (MAX_FIGURE, 1.0, 0.0)
    assert make_costs(**{**TIMES, "together_us": 1.0}).parallel == 4
    assert read_calibration(write(tmp_path / "c.json", costs=found))["host"] == found


@pytest.mark.parametrize(
    "change", [{"both_us": 116.0}, {"short_us": 6.0}, {"both_us": None, "alone_us": 16.0}]
)
def test_a_busy_machine_is_not_calibrated(change: dict[str, float]) -> None:
    with pytest.raises(UnsupportedError, match="too busy"):
        make_costs(**{**TIMES, **change})


class Scripted(StandIn):
    """Real transfers with scripted times, those of a machine that is too busy first."""

    def __init__(self) -> None:
        self.times = [9.0] * 7 + [6.0, 16.0, 116.0, 196.0, 232.0, 20.0, 40.0]

    def time_us(self, run: Callable[[], None], *_: Any, **__: Any) -> float:
        run()
        return self.times.pop(0)


def calibrate(path: Path) -> int:
    """Run ``calibrate`` on scripted times."""
    few = ["--engine", "cuda", "--ranks", "4", "-b", "1000000", "-n", "1", "--output", str(path)]
    settings = settings_of("calibrate", *few)
    if path.parent.name == "gone":
        path.parent.rmdir()
    return run_settings_on(Scripted(), "calibrate", settings)


def test_a_file_from_measuring(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "c.json")  # of the host; it stays
    assert calibrate(path) == 0
    costs = read_calibration(path)
    assert costs["host"] == COSTS
    found = costs["loopback"]
    times = {**TIMES, "device": "none", "flag_us": found.flag_us, "short_bytes": 64}
    assert found == make_costs(**times)
    # 32 groups instead of 1; the two hubs forward all but the home rank's share.
    assert 20 / 32 <= found.flag_us <= 20 / 10
    text = capsys.readouterr().out
    assert "cost model: store_per_kib 81920, load_per_kib 20487" in text
    assert "topology: 4 ranks on 1 host, 1 domain; engine cuda, fabric loopback" in text


def test_wrong_bytes_are_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call = WeightRanks.call

    def broken(self: WeightRanks, plan: uec.Plan, mode: str) -> None:
        call(self, plan, mode)
        self.groups[1].slots[next(iter(self.groups[1].slots))][0, 3] ^= 1

    monkeypatch.setattr(WeightRanks, "call", broken)
    assert calibrate(tmp_path / "c.json") == 1
    assert not (tmp_path / "c.json").exists()


def test_a_folder_that_went_away_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    with pytest.raises(UltraEPError, match=r"--output .*c\.json: cannot be written: No such file"):
        calibrate(tmp_path / "gone" / "c.json")


def test_the_command(tmp_path: Path) -> None:
    few = ["calibrate", "--ranks", "3", "-b", "4M", "-n", "4", "--output", "c.json"]
    done, path = bench(tmp_path, *few), tmp_path / "c.json"
    if done.returncode == 2:  # on a busy machine it reports so and writes nothing
        assert "too busy" in done.stderr
        assert not path.exists()
        return
    assert done.returncode == 0, done.stderr
    found = read_calibration(path)["host"]
    assert (found.ranks, found.device) == (3, HERE)
    assert "hop_us" in done.stdout
