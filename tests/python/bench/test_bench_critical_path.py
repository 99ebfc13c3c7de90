"""The critical-path benchmark: arguments, ids, records, and a run on the emulated device."""

from __future__ import annotations

import functools
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from benched import TIMES, run_on, run_settings_on, settings_of
from emulated_device import EmulatedDevice
from fake_memory import FakeMemory
from stand_in import Emulated

from ultraep_comm.bench.commands.critical_path import PathSettings
from ultraep_comm.bench.commands.critical_path.calls import (
    Found,
    PathCalls,
    Variant,
    count_ids,
    draw_ids,
    expert_shares,
)
from ultraep_comm.bench.launch import run_ranks
from ultraep_comm.bench.loads import rank_imbalance
from ultraep_comm.bench.ranks import WeightRanks
from ultraep_comm.engines.cuda import device as device_module
from ultraep_comm.engines.cuda import make

FEW = ["-b", "24K", "-n", "2", "-w", "1", "--ranks", "2", "--experts", "6", "--slots", "1"]
FEW += ["--tokens", "40", "--topk", "2", "--imbalance", "1.8"]
STAGES = {
    **{"gather_load": 1, "plan_replicas": 1, "gather_and_plan": 1},
    **{"replicate_experts": 1, "reroute": 2},
}
PATHS = {
    **{"path": 3, "path at once": 2, "path + reroute": 5, "path at once + reroute": 4},
    **{"graph": 3, "graph at once": 2, "graph + reroute": 5, "graph at once + reroute": 4},
}
RECORD_KEYS = {
    *("op", "row", "engine", "fabric", "ranks", "experts", "slots", "expert_bytes", "tokens"),
    *("topk", "host_us", "kernels", "copies", "over_bound", "bound_over_time"),
    *("speedup_over_host_plan", "wrong_bytes", "wrong_values", "gate", *TIMES),
}


def check_kernels(records: dict[str, dict[str, Any]]) -> None:
    """Every call is one kernel, the reroute two, and nothing is copied to the device."""
    for name, kernels in {**STAGES, **PATHS}.items():
        assert (records[name]["kernels"], records[name]["copies"]) == (kernels, 0), name


def test_end_to_end(
    emulated: EmulatedDevice, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "o.json"
    more = ["--check", "--max-over-bound", "1e-9", "--json", str(path)]
    settings = settings_of("critical-path", *FEW, *more)
    assert run_settings_on(Emulated(), "critical-path", settings) == 3
    (text, error), document = capsys.readouterr(), json.loads(path.read_text())
    records = {record["row"]: record for record in document["records"]}
    assert set(records) == {*STAGES, *PATHS, "host plan", "big copy"}
    for name, record in records.items():
        assert set(record) == RECORD_KEYS
        assert (record["wrong_bytes"], record["wrong_values"]) == (0, 0)
        assert record["time_us"]["p50"] > 0
        assert (record["host_us"] is None) == (name == "host plan")
        assert (record["over_bound"] is None) == (name in STAGES or name == "big copy")
        assert record["gate"] == ("bound" if name in PATHS else None)
    check_kernels(records)
    assert (records["host plan"]["kernels"], records["host plan"]["copies"]) == (2, 1)
    plans = document["plans"]
    assert plans["replicas"] > 0
    assert plans["imbalance_after"] <= plans["imbalance_before"]
    copied = records["big copy"]["time_us"]["p50"] / Emulated.big_bytes
    assert plans["bound_us"] == pytest.approx(plans["replicas"] * settings.expert_bytes * copied)
    ratio = records["host plan"]["time_us"]["p50"] / records["graph"]["time_us"]["p50"]
    assert records["graph"]["speedup_over_host_plan"] == pytest.approx(ratio)
    rows = [line for line in text.splitlines() if not line.startswith("#")]
    assert len(rows) == len(records)
    assert "# topology: 2 ranks on 1 host, 1 domain; engine cuda, fabric loopback" in text
    assert document["gate"]["met"] is False
    assert "gate not met by 8 of 8, expected at most 1e-09 times" in error


@pytest.mark.parametrize("broken", ["byte", "empty slot", "no transfer", "load", "id"])
def test_what_is_wrong_is_found(
    emulated: EmulatedDevice,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    broken: str,
) -> None:
    """Negative controls, each in the results of one run."""

    def run(calls: PathCalls) -> Found:
        found = calls.path(rerouted=True)
        emulated.synchronize()
        slots = [group.slots["w13"][0] for group in calls.groups]
        filled = found.plans[0].slot_expert[:, 0] >= 0
        assert filled.any()
        assert not filled.all()  # so that there is an empty slot
        if broken == "byte":
            slots[filled.tolist().index(True)][7] ^= 1
        elif broken == "empty slot":
            slots[filled.tolist().index(False)][7] ^= 1
        elif broken == "load":
            found.loads[0][1, 0] += 1
        elif broken == "id":
            found.physical[1][3, 0] += 1
        return found

    if broken == "no transfer":  # an earlier run has filled the slots with other bytes
        work = SimpleNamespace(wait=lambda: None)
        monkeypatch.setattr(PathCalls, "transfer", lambda self, plans: [work])
    monkeypatch.setattr(
        PathCalls, "variants", lambda self: [Variant(name="path", run=lambda: run(self))]
    )
    assert run_on(Emulated(), "critical-path", *FEW, "-n", "1", "-w", "0") == 1
    row = capsys.readouterr().out.splitlines()[-1].split()
    assert [cell != "0" for cell in row[-2:]] == [
        broken in ("byte", "empty slot", "no transfer"),
        broken in ("load", "id"),
    ]


def _emulate(library: Path, folder: Path) -> None:
    emulated, memory = EmulatedDevice(library), FakeMemory(folder, offset=640)
    patch = pytest.MonkeyPatch()  # of this process, which ends here
    patch.setattr(make, "find_torch_device", lambda: (emulated, memory, emulated.kernels))
    patch.setattr(device_module, "find_device", lambda: emulated)


def _run_rank(settings: PathSettings, library: Path, folder: Path) -> int:
    _emulate(library, folder)
    return run_settings_on(Emulated(), "critical-path", settings)


def test_a_process_for_each_rank(emulated_library: Path, tmp_path: Path) -> None:
    path = tmp_path / "o.json"
    given = [*FEW, "-w", "0", "--check", "--fabric", "torch", "--link-gbps", "100"]
    settings = settings_of("critical-path", *given, "--json", str(path))
    run = functools.partial(_run_rank, library=emulated_library, folder=tmp_path)
    assert run_ranks(run, settings, 2) == 0
    document = json.loads(path.read_text())
    records = {record["row"]: record for record in document["records"]}
    assert set(records) == {*STAGES, *PATHS, "host plan"}
    check_kernels(records)
    plans = document["plans"]
    bound = plans["transfer_bound"] * settings.expert_bytes / 100e3
    assert plans["bound_us"] == pytest.approx(bound)


def _line_up(settings: PathSettings, library: Path, folder: Path) -> int:
    """Return 0 if this rank left the barrier after the last rank entered it; else 1."""
    _emulate(library, folder)
    shape = {"num_ranks": 2, "num_experts": settings.num_experts, "fabric": "torch"}
    more = {"segments": settings.segments, "tile_bytes": 32768, "num_sms": 1}
    ranks = WeightRanks(Emulated(), **shape, **more, slots=1)
    for late in (0.0, 0.3):  # a first round for one-time work
        dist.barrier()
        time.sleep(late if dist.get_rank() == 1 else 0)
        began = time.monotonic_ns()
        ranks.line_up()
        ranks.meter.synchronize()
        ended = time.monotonic_ns()
    last = torch.tensor([began])
    dist.all_reduce(last, op=dist.ReduceOp.MAX)
    ranks.close()
    return int(ended < int(last))


def test_no_rank_leaves_the_line_up_before_the_last_enters(
    emulated_library: Path, tmp_path: Path
) -> None:
    """A call with an empty plan is no barrier: a rank with nothing to move does not wait."""
    settings = settings_of("critical-path", *FEW, "--fabric", "torch")
    run = functools.partial(_line_up, library=emulated_library, folder=tmp_path)
    assert run_ranks(run, settings, 2) == 0


def test_ids_have_the_imbalance_asked_for_and_are_fresh() -> None:
    settings = settings_of("critical-path", "--ranks", "8", "--experts", "64", "--imbalance", "2.5")
    seen = set()
    for iteration in range(2):
        ids = draw_ids(settings, iteration)
        assert all(map(np.array_equal, ids, draw_ids(settings, iteration)))
        load = count_ids(ids, 64)
        assert load.dtype == np.int32
        assert (load.sum(axis=1) == settings.tokens * settings.topk).all()
        found = rank_imbalance(load.sum(axis=0, dtype=np.int64), 8)
        assert found == pytest.approx(2.5, rel=0.03)
        seen |= {own.tobytes() for own in ids}
    assert len(seen) == 2 * 8


def test_a_trace_gives_each_source_its_own_shares(tmp_path: Path) -> None:
    path = tmp_path / "t.npz"
    counts = np.zeros((2, 1, 2, 4), np.int64)
    counts[0, 0] = [[1, 3, 0, 0], [0, 0, 0, 0]]
    counts[1, 0] = [[0, 0, 0, 2], [0, 0, 5, 5]]
    np.savez(path, counts_src=counts)
    settings = settings_of(
        "critical-path", "--ranks", "2", "--trace", str(path), "--tokens", "50", "--topk", "2"
    )
    assert settings.num_experts == 4
    assert expert_shares(settings, 0).tolist() == [[0.25, 0.75, 0, 0], [0.25] * 4]
    assert expert_shares(settings, 1).tolist() == [[0, 0, 0, 1], [0, 0, 0.5, 0.5]]
    assert np.array_equal(expert_shares(settings, 2), expert_shares(settings, 0))
    assert count_ids(draw_ids(settings, 1), 4)[0].tolist() == [0, 0, 0, 100]
    assert "t.npz" in settings.source
