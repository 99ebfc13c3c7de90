"""Calibration: the file, its effect on the cost model, and the measurement."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

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
    device=HERE,
    ranks=4,
    store_gbps=20.48,
    load_gbps=40.96,
    flag_us=0.25,
    hop_us=5.0,
    parallel=2.5,
    call_us=6.0,
)
FAR = replace(COSTS, hop_us=1e5)  # a second hop costs more than any bytes
NEAR = replace(COSTS, hop_us=0.0, flag_us=0.0, parallel=4.0)


def write(path: Path, *, engine: str = "host", costs: MeasuredCosts = COSTS, **more: Any) -> Path:
    path.write_text(json.dumps({**make_calibration({engine: costs}), **more}))
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


def damaged(change: Callable[[dict[str, Any]], object]) -> str:
    document = make_calibration({"host": COSTS})
    change(document)
    return json.dumps(document)


WHOLE = json.dumps(make_calibration({"host": COSTS}))
BAD = {
    "truncated": (WHOLE[:-20], "is damaged"),
    "empty": ("", "is damaged"),
    "bytes": ("\udcff", "is damaged"),
    "no object": ("[1]", "is not a calibration"),
    "records": (json.dumps({"format": 2, "records": []}), "is not a calibration"),
    "later": (damaged(lambda d: d.update(format=3)), "has format 3; expected 2"),
    "earlier": (damaged(lambda d: d.update(format=1)), "has format 1; expected 2"),
    "no engines": (damaged(lambda d: d.pop("engines")), "has an invalid 'engines'"),
    "engine": (damaged(lambda d: d["engines"].update(tpu={})), "has an invalid 'engines'"),
    "field": (damaged(lambda d: d["engines"]["host"].pop("hop_us")), "has other fields"),
    "more": (damaged(lambda d: d["engines"]["host"].update(x=1)), "has other fields"),
    "text": (damaged(lambda d: d["engines"]["host"].update(hop_us="5")), "has hop_us = '5'"),
    "nan": (damaged(lambda d: d["engines"]["host"].update(flag_us=float("nan"))), "flag_us = nan"),
    "flag": (damaged(lambda d: d["engines"]["host"].update(flag_us=-1)), "flag_us = -1"),
    "zero": (damaged(lambda d: d["engines"]["host"].update(store_gbps=0)), "store_gbps = 0"),
    "huge": (damaged(lambda d: d["engines"]["host"].update(load_gbps=2e6)), "load_gbps = 2000000"),
    "bool": (damaged(lambda d: d["engines"]["host"].update(parallel=True)), "parallel = True"),
    "ranks": (damaged(lambda d: d["engines"]["host"].update(ranks=3.5)), "3.5 ranks"),
    "device": (damaged(lambda d: d["engines"]["host"].update(device=1)), "device for 'host'"),
    "foreign": (
        damaged(lambda d: d["engines"]["host"].update(device="Cray-1")),
        "was measured on 'Cray-1', but this is",
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_files_are_named(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text, why = BAD[kind]
    path = tmp_path / "c.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(InvalidArgumentError, match=why) as error:
        read_calibration(path)
    assert str(path) in str(error.value)
    monkeypatch.setenv("ULTRAEP_CALIBRATION", str(path))
    with pytest.raises(InvalidArgumentError, match=why):
        uec.testing.new_loopback_groups(
            2, num_experts=2, slots_per_rank=1, expert={"w": ((8,), torch.uint8)}
        )


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"none\.json cannot be read"):
        read_calibration(tmp_path / "none.json")
    with pytest.raises(InvalidArgumentError, match="cannot be read"):
        read_calibration(tmp_path)


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


def chosen_modes(groups: list[uec.Group]) -> set[str]:
    """Return the mode that each rank chooses for one expert with replicas on all others."""
    plan = uec.Plan.from_slots([[-1], [0], [0], [0]], num_experts=len(groups))
    works = start_all(groups, [make_weights(group) for group in groups], plan)
    synchronize_all(works)
    return {work.mode for work in works}


@pytest.mark.parametrize("figures", ["host", "loopback"])
def test_stored_figures_change_the_choice(
    figures: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    new_groups: Callable[..., list[uec.Group]],
) -> None:
    """Ranks on one GPU have figures of their own."""
    if figures == "loopback":
        request.getfixturevalue("emulated")
    found = {}
    for name, costs in (("far", FAR), ("near", NEAR)):
        path = write(tmp_path / f"{name}.json", engine=figures, costs=costs)
        monkeypatch.setenv("ULTRAEP_CALIBRATION", str(path))
        options = {"expert": {"w": ((1 << 20,), torch.uint8)}, "num_experts": 4}
        engine = "host" if figures == "host" else "cuda"
        found[name] = chosen_modes(new_groups(4, slots_per_rank=1, engine=engine, **options))
    assert found == {"far": {"direct"}, "near": {"push"}}


def _choose_in_a_process(
    rank: int, process_group: dist.ProcessGroup, paths: list[str]
) -> tuple[str, str]:
    """Create a group with this rank's own file; return the mode, or the error's name and text."""
    os.environ["ULTRAEP_CALIBRATION"] = paths[rank]
    made: list[uec.Group] = []

    def make() -> None:
        expert = {"w": ((1 << 20,), torch.uint8)}
        made.append(
            uec.new_group(
                process_group, num_experts=4, slots_per_rank=1, expert=expert, engine="host"
            )
        )

    try:
        error = raised(make)
    finally:
        del os.environ["ULTRAEP_CALIBRATION"]
    if error is not None:
        return type(error).__name__, str(error)
    table = torch.tensor([[-1], [0], [0], [0]], dtype=torch.int32)
    plan = uec.Plan.from_slots(table, num_experts=4)
    with made[0] as group:
        work = uec.replicate_experts(make_weights(group), plan, group=group, async_op=True)
        assert work is not None
        work.wait()
        return work.mode, ""


def test_rank_0_decides_for_all(ranks: RankPool, tmp_path: Path) -> None:
    far = str(write(tmp_path / "far.json", costs=FAR))
    near = str(write(tmp_path / "near.json", costs=NEAR))
    none = str(tmp_path / "none.json")  # only rank 0 reads it
    assert ranks.run(4, _choose_in_a_process, [far, near, near, none]) == [("direct", "")] * 4
    assert ranks.run(4, _choose_in_a_process, [near, far, far, none]) == [("push", "")] * 4
    answers = ranks.run(4, _choose_in_a_process, [none, near, near, near])
    assert [name for name, _ in answers] == [InvalidArgumentError.__name__] + [
        BootstrapError.__name__
    ] * 3
    assert all("none.json" in text for _, text in answers)


# ---- measuring ----------------------------------------------------------------------------------

TIMES: dict[str, Any] = {
    "device": HERE,
    "ranks": 4,
    "copy_bytes": 10**6,
    "short_bytes": 0,
    "empty_us": 6.0,
    "short_us": 16.0,
    "alone_us": 116.0,
    "both_us": 196.0,
    "together_us": 232.0,
    "flag_us": 0.5,
}


def test_figures_out_of_times() -> None:
    """A copy stores in 80 us and reads in 20; two hops take 10."""
    found = make_costs(**TIMES)
    assert found.store_gbps == pytest.approx(12.5)
    assert found.load_gbps == pytest.approx(50)
    assert found.hop_us == pytest.approx(5)
    assert found.parallel == pytest.approx(2)
    assert found.flag_us == 0.5
    assert found.call_us == 6.0
    # The model composed again: copies without the fixed time of a call.
    store, load, *_ = found.constants(4, scales=False)
    kib = 10**6 / 1024
    assert kib * (store + load) / 1e6 == pytest.approx(116 - 16, rel=1e-3)
    assert kib * 2 * (store + load / 2) / 1e6 == pytest.approx(196 - 16, rel=1e-3)


def test_figures_stay_inside_what_a_file_may_hold(tmp_path: Path) -> None:
    found = make_costs(**{**TIMES, "both_us": 250.0, "together_us": 1e4, "flag_us": -0.1})
    assert (found.load_gbps, found.parallel, found.flag_us) == (MAX_FIGURE, 1.0, 0.0)
    assert make_costs(**{**TIMES, "together_us": 1.0}).parallel == 4
    assert read_calibration(write(tmp_path / "c.json", costs=found))["host"] == found


def test_a_hop_is_what_is_left_without_bytes() -> None:
    """The short expert is a quarter of the large one: 16 us and a quarter of 100."""
    found = make_costs(**{**TIMES, "short_bytes": 250_000, "short_us": 41.0})
    assert found == make_costs(**TIMES)
    assert found.hop_us == pytest.approx(5)
    # The large copy took too long, so that the rest is negative.
    assert make_costs(**{**TIMES, "short_bytes": 250_000, "short_us": 30.0}).hop_us == 0


def test_with_two_ranks_a_store_has_its_read_in_it() -> None:
    found = make_costs(**{**TIMES, "ranks": 2, "both_us": None})
    assert found.store_gbps == pytest.approx(10)  # 100 us beyond a tile
    assert found.load_gbps == MAX_FIGURE


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


def calibrate(*arguments: str) -> int:
    """Run ``calibrate`` on scripted times."""
    few = ["--engine", "cuda", "--ranks", "4", "-b", "1000000", "-n", "1"]
    settings = settings_of("calibrate", *few, *arguments)
    return run_settings_on(Scripted(), "calibrate", settings)


def test_a_file_from_measuring(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "c.json")  # of the host; it stays
    assert calibrate("--output", str(path)) == 0
    costs = read_calibration(path)
    assert costs["host"] == COSTS
    found = costs["loopback"]
    assert asdict(found) == asdict(
        make_costs(**{**TIMES, "device": "none", "flag_us": found.flag_us, "short_bytes": 64})
    )
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
    path = tmp_path / "c.json"
    assert calibrate("--output", str(path)) == 1
    assert not path.exists()


def test_a_folder_that_went_away_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    few = ["--engine", "cuda", "--ranks", "4", "-b", "1000000", "-n", "1"]
    path = str(tmp_path / "here" / "c.json")
    settings = settings_of("calibrate", *few, "--output", path)
    (tmp_path / "here").rmdir()
    with pytest.raises(UltraEPError, match=r"--output .*c\.json: cannot be written: No such file"):
        run_settings_on(Scripted(), "calibrate", settings)


def test_the_command(tmp_path: Path) -> None:
    few = ["calibrate", "--ranks", "3", "-b", "4M", "-n", "4", "--output", "c.json"]
    done = bench(tmp_path, *few)
    path = tmp_path / "c.json"
    if done.returncode != 0:  # on a busy machine it reports so and writes nothing
        assert done.returncode == 2
        assert "too busy" in done.stderr
        assert not path.exists()
        return
    found = read_calibration(path)["host"]
    assert found.ranks == 3
    assert found.device == HERE
    assert "hop_us" in done.stdout
