"""The benchmark of GPUs, as far as that goes without one: the host engine stands in for theirs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stand_in import StandIn

from ultraep_comm.bench import device, gpu
from ultraep_comm.bench.arguments import choose_engine
from ultraep_comm.bench.cli import _parser, main
from ultraep_comm.bench.device_report import ModeRun, sms_needed
from ultraep_comm.bench.device_transfers import StreamCopies
from ultraep_comm.bench.figures import Times
from ultraep_comm.bench.replicate_settings import make_settings
from ultraep_comm.bench.settings import ReplicateSettings
from ultraep_comm.bench.sizes import parse_counts
from ultraep_comm.bench.traffic import Traffic
from ultraep_comm.errors import InvalidArgumentError

NO_GPU = not torch.cuda.is_available()
RECORD_KEYS = {
    *("op", "engine", "fabric", "mode", "chosen", "num_sms", "ranks", "experts", "slots"),
    *("expert_bytes", "replicas", "imbalance_before", "imbalance_after", "time_us"),
    *("loads_bytes", "stores_bytes", "moved_bytes", "egress_bytes_max", "moved_gbps"),
    *("egress_gbps", "over_copy", "over_big_copy", "speedup_over_copies", "speedup_over_nccl"),
    *("host_bound_us", "host_unbound_us", "wrong_bytes", "rank_time_us", "critical_gbps"),
    *("bound_us", "over_bound", "gate"),
}


def _settings(*arguments: str) -> ReplicateSettings:
    few = ["--engine", "cuda", "-b", "96K", "-n", "2", "-w", "1", "--experts", "16"]
    return make_settings(_parser().parse_args(["replicate", *few, *arguments]))


# ---- a whole run --------------------------------------------------------------------------------


def test_a_sweep_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "o.json"
    settings = _settings("--num-sms", "2,1", "--check", "--json", str(path))
    assert settings.fabric == "loopback"
    assert device.run_on(StandIn(), settings) == 0
    text = capsys.readouterr().out
    document = json.loads(path.read_text())
    records = document["records"]
    modes = ["push", "pull", "direct", "auto"]
    assert [(r["num_sms"], r["mode"]) for r in records] == [(n, m) for n in (1, 2) for m in modes]
    total = records[0]["replicas"] * records[0]["expert_bytes"]
    assert total > 0
    big = document["baselines"]["big copy"]
    assert big["moved_gbps"] == pytest.approx(2 * (1 << 20) / big["p50_us"] / 1e3)
    for record in records:
        assert set(record) == RECORD_KEYS
        assert record["wrong_bytes"] == 0
        p50 = record["time_us"]["p50"]
        assert record["moved_bytes"] == record["loads_bytes"] + record["stores_bytes"]
        # Every replica is stored once, whoever does it.
        assert record["stores_bytes"] == total
        assert record["moved_gbps"] == pytest.approx(record["moved_bytes"] / p50 / 1e3)
        assert record["egress_gbps"] == pytest.approx(record["egress_bytes_max"] / p50 / 1e3)
        bound = total / (big["moved_gbps"] / 2) / 1e3  # a copy loads and stores
        assert record["over_bound"] == pytest.approx(p50 / bound)
        over = record["moved_gbps"] / big["moved_gbps"]
        assert record["over_big_copy"] == pytest.approx(over)
        assert record["speedup_over_copies"] > 0
        assert record["speedup_over_nccl"] is None
        assert record["host_bound_us"] > 0
        assert record["host_unbound_us"] > 0
    assert set(document["baselines"]) == {"copy", "big copy", "copies"}
    assert document["baselines"]["copy"]["bytes"] == total
    assert document["baselines"]["copies"]["bytes"] == total
    assert all(b["wrong_bytes"] == 0 for b in document["baselines"].values())
    assert all(value > 0 for value in document["fixed_cost"].values())
    assert [needed["mode"] for needed in document["sms_needed"]] == modes
    assert [sms for sms, _ in document["sms_needed"][0]["curve"]] == [1, 2]
    assert document["machine"]["gpu"] == "none"
    assert document["machine"]["cores"] >= 1
    assert document["commit"]
    assert document["settings"]["num_sms"] == [1, 2]
    assert text.count("#wrong") == 1
    assert "driver_version 1.2" in text
    rows = [line.split() for line in text.splitlines() if not line.startswith("#")]
    assert [row[0] for row in rows] == [*modes * 2, "copy", "big", "copies"]


def test_two_ranks_have_no_hub(capsys: pytest.CaptureFixture[str]) -> None:
    assert device.run_on(StandIn(), _settings("--ranks", "2", "--mode", "push")) == 0
    assert "one tile through a hub - us" in capsys.readouterr().out


def test_nothing_to_transfer(capsys: pytest.CaptureFixture[str]) -> None:
    settings = _settings("--ranks", "2", "--imbalance", "1", "--mode", "push")
    assert device.run_on(StandIn(), settings) == 0
    assert " 0 replicas" in capsys.readouterr().out


def test_a_single_wrong_bit_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative controls: one bit of a slot, and one of a copy."""
    settings = _settings("--mode", "push")
    call = device.RanksHere.call

    def broken(self: device.RanksHere, plan: Any, mode: str, given: Any) -> None:
        call(self, plan, mode, given)
        for rank in (plan.slot_expert[:, 0] >= 0).nonzero()[:1]:
            slots = next(iter(self.groups[int(rank)].slots.values()))
            slots[0, 5] = 0xA4

    with monkeypatch.context() as patch:
        patch.setattr(device.RanksHere, "call", broken)
        assert device.run_on(StandIn(), settings) == 1

    def lost(self: StreamCopies) -> None:
        self._spread(self._jobs[1:])

    monkeypatch.setattr(StreamCopies, "run", lost)
    assert device.run_on(StandIn(), settings) == 1


# ---- parts --------------------------------------------------------------------------------------


def _mode_run(num_sms: int, time_us: float) -> ModeRun:
    bytes_of = np.array([1_000_000, 0])
    return ModeRun(
        mode="push",
        chosen="push",
        num_sms=num_sms,
        times=Times(iterations=np.array([time_us]), ranks=np.array([time_us])),
        wrong_bytes=0,
        traffic=Traffic(loads=bytes_of, stores=bytes_of, egress=bytes_of),
        host_bound_us=1.0,
        host_unbound_us=2.0,
    )


def test_sms_needed_for_each_rate() -> None:
    (needed,) = sms_needed([_mode_run(4, 1e3 / 400), _mode_run(8, 1e3 / 500)])
    assert needed["curve"][0] == [4, pytest.approx(400)]
    assert needed["sms"] == {"450": pytest.approx(6), "900": None}


def test_the_plan_through_a_hub_has_one() -> None:
    load = np.ones((4, 8), np.int32)
    plan = device.hub_plan(load, 1)
    assert plan is not None
    schedule = device.make_schedule(
        plan.slot_expert, home=plan.home, segment_bytes=[32768], tile_bytes=32768, mode="push"
    )
    home, *replicas = [end - begin for _, begin, end in schedule.hubs(0)]
    assert home == 0
    assert sorted(replicas) == [0, 1]
    assert device.hub_plan(load[:2], 1) is None
    assert device.hub_plan(load, 0) is None


def test_without_nvidia_smi_there_are_no_clocks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu.query_smi("") == {}
    script = tmp_path / "nvidia-smi"
    script.write_text(
        "#!/bin/sh\necho '580.1, 1980 MHz, 3201 MHz, 1980 MHz, 3201 MHz, 700 W, On'\n"
    )
    script.chmod(0o755)
    found = gpu.query_smi("1234")
    assert found["driver_version"] == "580.1"
    assert found["clocks_mem"] == "3201 MHz"


# ---- arguments ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "fabric", "launched", "chosen"),
    [
        ("host", "auto", None, ("host", "shm")),
        ("host", "shm", 4, ("host", "shm")),
        ("cuda", "auto", None, ("cuda", "loopback")),
        ("cuda", "auto", 4, ("cuda", "nvshmem")),
        ("cuda", "nvshmem", None, ("cuda", "nvshmem")),
        ("cuda", "torch", 4, ("cuda", "torch")),
        ("auto", "torch", None, ("cuda", "torch")),
        ("auto", "loopback", None, ("cuda", "loopback")),
        ("auto", "shm", None, ("host", "shm")),
    ],
)
def test_engine_and_fabric(
    engine: str, fabric: str, launched: int | None, chosen: tuple[str, str]
) -> None:
    assert choose_engine(engine, fabric, launched) == chosen


@pytest.mark.parametrize(
    ("engine", "fabric", "launched", "text"),
    [
        ("host", "nvshmem", None, "expected shm"),
        ("host", "loopback", None, "expected shm"),
        ("cuda", "shm", None, "loopback, torch, nvshmem"),
        ("host", "torch", None, "expected shm"),
        ("cuda", "loopback", 4, "4 ranks were launched"),
    ],
)
def test_engine_and_fabric_that_do_not_go_together(
    engine: str, fabric: str, launched: int | None, text: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        choose_engine(engine, fabric, launched)


@pytest.mark.skipif(not NO_GPU, reason="there is a GPU here")
def test_auto_is_the_host_engine_without_a_gpu() -> None:
    assert choose_engine("auto", "auto", None) == ("host", "shm")


def test_numbers_of_sms() -> None:
    assert parse_counts("16,4, 8", "--num-sms") == (4, 8, 16)
    for text in ("", "0", "4,,8", "4,4", "-1", "x"):
        with pytest.raises(InvalidArgumentError, match="--num-sms"):
            parse_counts(text, "--num-sms")
    few = ["replicate", "--engine", "host", "--sms", "2,1"]
    assert make_settings(_parser().parse_args(few)).num_sms == (1, 2)


@pytest.mark.skipif(not NO_GPU, reason="there is a GPU here")
def test_without_a_gpu_the_error_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replicate", "--engine", "cuda"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert "engine='host'" in error
    assert "Traceback" not in error


@pytest.mark.skipif(not NO_GPU, reason="there is a GPU here")
@pytest.mark.parametrize("launcher", [True, False])
def test_without_a_gpu_processes_say_so_too(tmp_path: Path, launcher: bool) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    arguments = ["replicate", "--engine", "cuda", "--fabric", "nvshmem"]
    done = subprocess.run(
        [
            sys.executable,
            *(torchrun if launcher else []),
            *("-m", "ultraep_comm.bench", *arguments),
            *([] if launcher else ["--ranks", "2"]),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=tmp_path,
        env={k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")},
    )
    assert done.returncode != 0
    assert "engine='host'" in done.stderr
    assert "device.py" not in done.stderr
