"""The benchmarks of GPUs, with the host engine in place of a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from benched import ONE_PLAN_KEYS, SMALL, baselines_of, modes_of, run_on, settings_of
from fake_device import FakeDevice
from stand_in import StandIn

from ultraep_comm.bench import clock
from ultraep_comm.bench.baselines import StreamCopies
from ultraep_comm.bench.measure import describe_link, with_link
from ultraep_comm.bench.ranks import WeightRanks
from ultraep_comm.calibration import MeasuredCosts, make_calibration
from ultraep_comm.driver import Links

FEW = ["replicate", "--engine", "cuda", *SMALL]
RECORD_KEYS = ONE_PLAN_KEYS | {
    *("loads_bytes", "stores_bytes", "moved_bytes", "egress_bytes_max", "moved_gbps"),
    *("egress_gbps", "over_copy", "over_big_copy", "speedup_over_copies", "speedup_over_nccl"),
    *("host_bound_us", "host_unbound_us"),
}


def test_a_sweep_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "o.json"
    sizes = ["-b", "48K", "-e", "96K", "--num-workers", "2,1"]
    assert run_on(StandIn(), *FEW, *sizes, "--check", "--json", str(path)) == 0
    text, document = capsys.readouterr().out, json.loads(path.read_text())
    records, modes = modes_of(document), ["push", "pull", "direct", "auto"]
    wanted = [(size << 10, n, mode) for size in (48, 96) for n in (1, 2) for mode in modes]
    assert [(r["expert_bytes"], r["num_sms"], r["mode"]) for r in records] == wanted
    for record in records:
        assert set(record) == RECORD_KEYS
        assert record["wrong_bytes"] == 0
        total, p50 = record["replicas"] * record["expert_bytes"], record["time_us"]["p50"]
        assert total > 0
        # Every replica is stored once, in every mode.
        assert record["stores_bytes"] == total
        beside = (b for b in baselines_of(document) if b["expert_bytes"] == record["expert_bytes"])
        found = {baseline["mode"]: baseline for baseline in beside}
        assert set(found) == {"copy", "big copy", "copies"}
        big = found["big copy"]["moved_gbps"]
        assert big == pytest.approx(2 * (1 << 20) / found["big copy"]["time_us"]["p50"] / 1e3)
        bound = total / (big / 2) / 1e3  # a copy loads and stores
        assert record["over_bound"] == pytest.approx(p50 / bound)
        assert record["speedup_over_nccl"] is None
        assert min(record["host_bound_us"], record["host_unbound_us"]) > 0
    assert all(baseline["wrong_bytes"] == 0 for baseline in baselines_of(document))
    assert text.count("#wrong") == 1
    assert "driver_version 1.2" in text
    rows = [line.split()[0] for line in text.splitlines() if not line.startswith("#")]
    assert rows == [*modes * 2, "copy", "big", "copies"] * 2


def test_a_bound_over_links_says_of_which_rate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Linked(StandIn):
        def find_link(self) -> tuple[float, str]:
            return 370.8, "built in; not measured here"

    several = settings_of(*FEW, "--fabric", "torch")
    assert describe_link(several) == describe_link(with_link(several, StandIn())) == []
    found = with_link(several, Linked())
    assert found.link_gbps == 370.8
    (line,) = describe_link(found)
    assert line == "bound: over links of 370.8 GB/s, built in; not measured here"
    given = settings_of(*FEW, "--fabric", "torch", "--link-gbps", "450")
    assert with_link(given, Linked()) == given
    few, path = [*FEW, "--ranks", "2", "--mode", "push"], tmp_path / "o.json"
    assert run_on(Linked(), *few) == 0
    assert "bound: over" not in capsys.readouterr().out  # ranks that share a GPU have no links
    assert run_on(Linked(), *few, "--link-gbps", "450", "--json", str(path)) == 0
    text = capsys.readouterr().out
    assert "\n# bound: over links of 450 GB/s, given, not measured here\n" in text
    assert json.loads(path.read_text())["settings"]["link_source"] == "given, not measured here"


@pytest.mark.parametrize(
    ("links", "rate", "source"),
    [
        (None, 370.8, "H100, 18 NVLinks, assumed since NVML does not answer; not measured here"),
        ((True,) * 8, 164.8, "built-in constants for H100, 8 active NVLinks; not measured here"),
        ((False,) * 18, 50.0, "PCIe 5: no active NVLinks; not measured here"),
    ],
)
def test_the_rate_of_a_gpus_links(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    links: tuple[bool, ...] | None,
    rate: float,
    source: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "H100")
    meter = clock.Gpu.__new__(clock.Gpu)
    meter.torch_device = torch.device("cuda", 0)
    known = None if links is None else Links(pci="", links=links)
    meter._device = FakeDevice(known_links=known)  # type: ignore[assignment]
    found = meter.find_link()
    assert found[0] == pytest.approx(rate)
    assert found[1].endswith(source)
    path = tmp_path / "c.json"
    figures = dict.fromkeys(("flag_us", "hop_us", "call_us"), 1.0)
    costs = MeasuredCosts(
        device="H100", ranks=2, store_gbps=377.0, load_gbps=1.0, parallel=2.0, **figures
    )
    path.write_text(json.dumps(make_calibration({"cuda": costs})))
    monkeypatch.setenv("ULTRAEP_CALIBRATION", str(path))
    assert meter.find_link() == (377.0, "measured here, by bench calibrate")


def test_a_single_wrong_bit_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative controls: one bit of a slot, and one of a copy."""
    few, call = [*FEW, "--mode", "push"], WeightRanks.call

    def broken(self: WeightRanks, plan: Any, mode: str) -> None:
        call(self, plan, mode)
        for rank in (plan.slot_expert[:, 0] >= 0).nonzero()[:1]:
            slots = next(iter(self.groups[int(rank)].slots.values()))
            slots[0, 5] = 0xA4

    with monkeypatch.context() as patch:
        patch.setattr(WeightRanks, "call", broken)
        assert run_on(StandIn(), *few) == 1

    monkeypatch.setattr(StreamCopies, "run", lambda self: self._meter.spread(self._jobs[1:]))
    assert run_on(StandIn(), *few) == 1


def test_without_nvidia_smi_there_are_no_clocks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert clock.query_smi("") == {}
    script = tmp_path / "nvidia-smi"
    script.write_text(
        "#!/bin/sh\necho '580.1, 1980 MHz, 3201 MHz, 1980 MHz, 3201 MHz, 700 W, On'\n"
    )
    script.chmod(0o755)
    found = clock.query_smi("1234")
    assert found["driver_version"] == "580.1"
    assert found["clocks_mem"] == "3201 MHz"
