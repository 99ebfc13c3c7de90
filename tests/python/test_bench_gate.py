"""What an operator relies on: exit statuses, sweeps, gates, records in two formats, the header."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shlex
import signal
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stand_in import StandIn
from test_bench import SMALL, bench, rows

from ultraep_comm import Plan
from ultraep_comm.bench import device, placement
from ultraep_comm.bench.cli import _parser, main
from ultraep_comm.bench.figures import TIMES, Times, link_bound_us, parse_times
from ultraep_comm.bench.gate import Gate, exit_code
from ultraep_comm.bench.launch import run_ranks
from ultraep_comm.bench.outputs import flatten, format_csv, write_output
from ultraep_comm.bench.replicate_settings import make_settings
from ultraep_comm.bench.settings import ReplicateSettings, each_size
from ultraep_comm.bench.table import GrowingTable
from ultraep_comm.errors import InvalidArgumentError

ROOT = Path(__file__).resolve().parents[2]


def settings_of(*arguments: str) -> ReplicateSettings:
    return make_settings(_parser().parse_args(["replicate", *arguments]))


def sizes_of(*arguments: str) -> list[int]:
    return [one.expert_bytes for one in each_size(settings_of(*arguments))]


def cells_of(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def check_csv(path: Path, records: list[dict[str, Any]]) -> None:
    """Hold every cell against the records."""
    cells = cells_of(path.read_text())
    assert len(cells) == len(records)
    for row, record in zip(cells, records, strict=True):
        flat = flatten(record)
        assert set(row) >= set(flat)
        for name, value in flat.items():
            assert row[name] == ("" if value is None else str(value)), name


# ---- sweeps -------------------------------------------------------------------------------------


def test_sizes_of_a_sweep() -> None:
    assert sizes_of() == [16 << 20]
    assert sizes_of("-b", "64K") == sizes_of("--minbytes", "64K") == [64 << 10]
    assert sizes_of("-b", "64K", "-e", "64K") == [64 << 10]
    assert sizes_of("-b", "1K", "-e", "9K") == [1 << 10, 2 << 10, 4 << 10, 8 << 10]
    assert sizes_of("-b", "1K", "-e", "81K", "-f", "3") == [1024 * 3**i for i in range(5)]
    assert sizes_of("-b", "4K", "-e", "12K", "-i", "4K") == [4096, 8192, 12288]
    assert sizes_of("-e", "32M") == [16 << 20, 32 << 20]
    for one in each_size(settings_of("-b", "4K", "-e", "12K", "--segments", "3")):
        assert len(one.segments) == 3
        assert not one.sweep


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["-b", "64K", "-e", "32K"], "--maxbytes is 32768, below the first size, 65536"),
        (["-e", "64K"], "below the first size"),
        (["-b", "1K", "-e", "2K", "-f", "1"], "--stepfactor is 1; expected at least 2"),
        (["-b", "1K", "-e", "2K", "-f", "0"], "--stepfactor is 0"),
        (["-b", "1K", "-e", "2K", "-f", "-2"], "--stepfactor is -2"),
        (["-b", "1K", "-e", "2K", "-i", "0"], "'0' is not a size"),
        (["-b", "1K", "-e", "2K", "-f", "2", "-i", "1K"], "expected one of them"),
        (["-b", "-5"], "--expert-bytes: '-5' is not a size"),
        (["-e", "9" * 5000 + "G"], "--maxbytes: '999"),
        (["-e", "999999999999G"], "is no memory's size; expected at most 262144G"),
        (["-b", "1K", "-e", "1024G"], "experts and slots of all ranks take"),
        (["--ranks", "100000"], "--ranks is 100000; expected at most 1024"),
        (["-b", "1K", "-f", "2"], "there is no --maxbytes"),
        (["-b", "1K", "-i", "2K"], "there is no --maxbytes"),
        (["-b", "1K", "-e", "1G", "-i", "1"], "more than 1000 sizes"),
        (["-b", "1K", "-e", "2K", "--segments", "a=1K"], "--maxbytes asks for several"),
        (["--min-bandwidth", "0"], "--min-bandwidth is 0.0; expected a finite number above 0"),
        (["--min-bandwidth", "-5"], "--min-bandwidth is -5.0"),
        (["--min-bandwidth", "nan"], "--min-bandwidth is nan"),
        (["--min-bandwidth", "inf"], "--min-bandwidth is inf"),
        (["--max-over-bound", "0"], "--max-over-bound is 0.0"),
        (["--link-gbps", "-1"], "--link-gbps is -1.0"),
        (["--times", "p50,mean"], "--times is 'p50,mean'"),
        (["--times", "p50,p50"], "each once"),
        (["--json", "."], "is a folder"),
        (["--json", "/proc/none.json"], "cannot be written to"),
        (["--csv", "none/o.csv"], "--csv none/o.csv: there is no such folder"),
        (["--csv", "o", "--json", "./o"], "expected two files"),
        (
            ["--max-over-bound", "2", "--engine", "cuda", "--fabric", "torch"],
            "give --link-gbps",
        ),
    ],
)
def test_bad_arguments_run_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    text: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ultraep_comm.bench.cli.run_ranks", lambda *_: pytest.fail("it ran"))
    assert main(["replicate", *arguments]) == 2
    assert text in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_sweep_end_to_end(tmp_path: Path) -> None:
    few = ["--ranks", "2", "--experts", "8", "-n", "3", "-w", "0", "-b", "16K", "-e", "64K"]
    files = ["--json", "o.json", "--csv", "o.csv"]
    done = bench(
        *few, "--mode", "push", "--sms", "2,1", "-c", "1", "--times", ",".join(TIMES), *files,
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "o.json").read_text())
    records = document["records"]
    wanted = [(size, sms) for size in (1 << 14, 1 << 15, 1 << 16) for sms in (1, 2)]
    assert [(r["expert_bytes"], r["num_sms"]) for r in records] == wanted
    assert document["format"] == 1
    assert document["gate"] is None
    assert document["settings"]["sizes"] == [1 << 14, 1 << 15, 1 << 16]
    assert {record["gate"] for record in records} == {None}
    check_csv(tmp_path / "o.csv", records)

    lines = [line.split() for line in done.stdout.splitlines() if not line.startswith("#")]
    assert [line[0] for line in lines] == ["push", "p2p", "memcpy"] * 6
    shown = [line for line in lines if line[0] == "push"]
    for line, record in zip(shown, records, strict=True):
        assert (int(line[1]), int(line[2])) == (record["expert_bytes"], record["num_sms"])
        times = {**record["time_us"]}
        times.update({f"rank-{name}": value for name, value in record["rank_time_us"].items()})
        assert [float(x) for x in line[5:12]] == [round(times[name], 1) for name in TIMES]
    assert done.stdout.count("# mode") == 1  # one table
    assert [place["rank"] for place in document["topology"]] == [0, 1]
    assert "# topology: 2 ranks on 1 host, 1 domain; engine host, fabric shm" in done.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"o.json", "o.csv"}


def test_a_sweep_on_a_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["--json", str(tmp_path / "o.json"), "--csv", str(tmp_path / "o.csv")]
    few = ["--engine", "cuda", "--ranks", "2", "--experts", "8", "-n", "2", "-w", "0"]
    settings = settings_of(*few, "-b", "32K", "-e", "64K", "--mode", "push", *files)
    assert device.run_on(StandIn(), settings) == 0
    document = json.loads((tmp_path / "o.json").read_text())
    assert [r["expert_bytes"] for r in document["records"]] == [32 << 10, 64 << 10]
    assert [one["expert_bytes"] for one in document["sizes"]] == [32 << 10, 64 << 10]
    assert document["baselines"] == document["sizes"][-1]["baselines"]
    check_csv(tmp_path / "o.csv", document["records"])
    text = capsys.readouterr().out
    assert text.count("#wrong") == 1
    assert [line.split()[1] for line in text.splitlines() if line.startswith("  push")] == [
        "32768",
        "65536",
    ]


# ---- the gate -----------------------------------------------------------------------------------


def record_of(gbps: float, over: float | None, **more: Any) -> dict[str, Any]:
    return {
        **{"mode": "push", "expert_bytes": 65536, "num_sms": None},
        **{"critical_gbps": gbps, "over_bound": over, **more},
    }


@pytest.mark.parametrize(
    ("gbps", "over", "wanted"),
    [
        (5.0, 1.5, "met"),
        (4.999, 1.5, "bandwidth"),
        (5.0, 1.501, "bound"),
        (1.0, 9.0, "bandwidth+bound"),
        (float("nan"), 1.0, "bandwidth"),
        (6.0, None, "bound"),  # what is not known is not met
    ],
)
def test_verdicts(gbps: float, over: float | None, wanted: str) -> None:
    record = record_of(gbps, over)
    assert Gate(min_gbps=5.0, max_over_bound=1.5).judge(record) == wanted
    assert Gate().judge(record) is None


def test_statuses_and_the_line_that_names_what_fails(capsys: pytest.CaptureFixture[str]) -> None:
    gate = Gate(min_gbps=5.0)
    good, slow = record_of(7.0, 1.0), record_of(2.0, 1.0, mode="direct")
    records = [{**r, "gate": gate.judge(r)} for r in (good, slow)]
    assert exit_code(gate, records, 0, speaks=True) == 3
    text = capsys.readouterr().err
    assert text == "gate not met by 1 of 2, expected at least 5 GB/s: direct 64 KiB 2 GB/s\n"
    assert exit_code(gate, records, 1, speaks=False) == 1  # wrong bytes come first
    assert exit_code(gate, records[:1], 0, speaks=True) == 0
    assert not any(capsys.readouterr())
    many = [{**slow, "gate": "bandwidth"}] * 20
    assert gate.explain(many).endswith(" and 12 more")


def test_gate_met_and_missed_end_to_end(tmp_path: Path) -> None:
    """No machine is that slow, and none that fast."""
    few = [*SMALL, "--ranks", "2", "--mode", "push"]
    done = bench(*few, "--min-bandwidth", "1e-6", "--json", "o.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert rows(done.stdout)["push"][-1] == "ok"
    document = json.loads((tmp_path / "o.json").read_text())
    assert document["gate"]["met"] is True
    assert document["records"][0]["gate"] == "met"

    limits = ["--min-bandwidth", "1e6", "--max-over-bound", "1e-6", "--link-gbps", "100"]
    done = bench(*few, *limits, "--json", "o.json", "--csv", "o.csv", cwd=tmp_path)
    assert done.returncode == 3
    assert rows(done.stdout)["push"][-1] == "FAIL:bandwidth+bound"
    assert len(done.stderr.splitlines()) == 1
    assert "gate not met by 1 of 1, expected at least 1e+06 GB/s and at most" in done.stderr
    document = json.loads((tmp_path / "o.json").read_text())
    assert document["gate"] == {
        "min_bandwidth_gbps": 1e6,
        "max_over_bound": 1e-6,
        "met": False,
    }
    (record,) = document["records"]
    assert record["over_bound"] == pytest.approx(record["time_us"]["p50"] / record["bound_us"])
    assert cells_of((tmp_path / "o.csv").read_text())[0]["gate"] == "bandwidth+bound"


def test_a_gate_on_a_device(capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--engine", "cuda", "-b", "96K", "-n", "2", "-w", "0", "--experts", "16"]
    few += ["--mode", "push", "--max-over-bound"]
    assert device.run_on(StandIn(), settings_of(*few, "1e9")) == 0
    assert device.run_on(StandIn(), settings_of(*few, "1e-9")) == 3
    assert "times the bound" in capsys.readouterr().err


def test_a_gate_needs_something_to_move(tmp_path: Path) -> None:
    few = [*SMALL, "--ranks", "2", "--imbalance", "1", "--min-bandwidth", "1"]
    done = bench(*few, "--json", "o.json", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("the plan has no replicas") == 1
    assert not list(tmp_path.iterdir())


def test_the_bound_over_links() -> None:
    """Expert 0 of rank 0 goes to three ranks, 10^6 bytes over 1 GB/s: one export, 1000 us."""
    plan = Plan.from_slots(np.array([[-1], [0], [0], [0]]), num_experts=8)
    assert link_bound_us(plan, 10**6, 1.0) == pytest.approx(1000)
    plan = Plan.from_slots(np.array([[-1, -1], [0, 1], [0, -1], [0, -1]]), num_experts=8)
    assert link_bound_us(plan, 10**6, 4.0) == pytest.approx(500)


def _end(signal_number: int) -> int:
    signal.signal(signal_number, signal.SIG_DFL)  # under nohup SIGHUP is ignored, here too
    os.kill(os.getpid(), signal_number)
    return 0


def test_a_rank_that_a_signal_ends_is_no_verdict() -> None:
    """SIGQUIT has number 3, SIGHUP 1."""
    assert run_ranks(_end, signal.SIGQUIT.value, 1) == 128 + 3
    assert run_ranks(_end, signal.SIGHUP.value, 1) == 128 + 1


# ---- parts --------------------------------------------------------------------------------------


def test_check_as_in_nccl_tests() -> None:
    for arguments, wanted in (
        ([], False),
        (["-c"], True),
        (["--check"], True),
        (["-c", "1"], True),
        (["-c", "0"], False),
        (["--check", "-n", "2"], True),
    ):
        assert settings_of(*arguments).check is wanted
    with pytest.raises(SystemExit) as status:
        settings_of("-c", "2")
    assert status.value.code == 2


def test_times_of_ranks() -> None:
    times = Times(iterations=np.arange(1.0, 101.0), ranks=np.array([3.0, 1.0, 5.0]))
    assert times.record()["rank_time_us"] == {"min": 1.0, "avg": 3.0, "max": 5.0}
    assert times.get("p90") == pytest.approx(90.1)
    assert times.record()["time_us"]["max"] == 100
    assert parse_times("rank-max, p99") == ("rank-max", "p99")


def test_csv_is_flat_and_keeps_every_column() -> None:
    text = format_csv([{"a": {"b": 1.5, "c": None}}, {"a": {"b": 0.1}, "d": [1, 2], "e": "x,y"}])
    assert cells_of(text) == [
        {"a.b": "1.5", "a.c": "", "d": "", "e": ""},
        {"a.b": "0.1", "a.c": "", "d": "[1, 2]", "e": "x,y"},
    ]


def test_files_appear_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "o.json"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        write_output("--json", path, "new \ud800")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["o.json"]
    (tmp_path / "link").symlink_to(path)
    write_output("--json", tmp_path / "link", "new")
    assert path.read_text() == "new"
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask
    write_output("--json", Path(os.devnull), "to nowhere")  # written to, and not replaced
    assert not Path(os.devnull).is_file()


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    """The other file is written, and figures have been printed."""
    few = ["--ranks", "2", "--experts", "8", "-b", "16K", "-n", "1", "-w", "0", "--mode", "push"]
    done = bench(*few, "--json", "/dev/full", "--csv", "o.csv", cwd=tmp_path)
    assert done.returncode == 2
    line = "error: --json /dev/full: No space left on device\n"
    assert done.stderr == line
    assert "push" in rows(done.stdout)
    assert cells_of((tmp_path / "o.csv").read_text())[0]["mode"] == "push"


def test_records_on_standard_output(tmp_path: Path) -> None:
    few = ["--ranks", "2", "--experts", "8", "-b", "16K", "-n", "1", "-w", "0", "--mode", "push"]
    done = bench(*few, "--csv", "/dev/stdout", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    header, row = done.stdout.splitlines()[-2:]
    assert cells_of(f"{header}\n{row}\n")[0]["mode"] == "push"
    assert done.stdout.startswith("# ultraep_comm")
    assert not list(tmp_path.iterdir())


def test_commands_in_the_documents_are_accepted() -> None:
    found = 0
    names = ["README.md", "bench/README.md", "bench/METRICS.md", "bench/results/README.md"]
    for name in [*names, "docs/benchmark.md", "docs/first-run.md", "docs/building.md"]:
        text = (ROOT / name).read_text().replace("\\\n", " ")
        for arguments in re.findall(r"-m ultraep_comm\.bench ([^`\n]+)$", text, re.MULTILINE):
            _parser().parse_args(shlex.split(arguments))
            found += 1
    assert found > 20


def test_a_table_that_grows_keeps_its_columns() -> None:
    table = GrowingTable([["mode", "x"]], least=5)
    assert table.add([["a", "1"]]).splitlines() == ["# mode       x", "  a          1"]
    assert table.add([["b", "22"]]) == "  b         22"


def test_where_ranks_are(tmp_path: Path) -> None:
    assert placement.format_numbers([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"
    assert placement.parse_cpus("0-2,5\n") == {0, 1, 2, 5}
    for node, cpus in ((0, "0-3"), (1, "4-7"), (10, "8")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(cpus)
    assert placement.memory_nodes([5, 8], tmp_path) == [1, 10]
    places = [
        {
            **{"rank": r, "host": f"gb0{r // 2}", "domain": r // 2, "cpu": "Grace", "cpus": 72},
            **{"numa_nodes": [r % 2], "gpu": "GB200", "gpu_id": f"id{r // 2 or r}"},
        }
        for r in range(4)
    ]
    assert placement.format_places(places, engine="cuda", fabric="nvshmem") == [
        "topology: 4 ranks on 2 hosts, 2 domains; engine cuda, fabric nvshmem",
        "host gb00: ranks 0-1; Grace, 72 CPUs, NUMA 0-1; GPUs: 2 x GB200",
        "host gb01: ranks 2-3; Grace, 72 CPUs, NUMA 0-1; GPUs: 1 x GB200, shared by ranks",
        "domain 0: ranks 0-1",
        "domain 1: ranks 2-3",
    ]


def test_outputs_of_other_commands(tmp_path: Path) -> None:
    few = ["plan", "--sizes", "8/32/1", "--families", "zipf1.0", "--seeds", "1"]
    files = ["--json", str(tmp_path / "p.json"), "--csv", str(tmp_path / "p.csv")]
    assert main([*few, *files]) == 0
    records = json.loads((tmp_path / "p.json").read_text())["records"]
    check_csv(tmp_path / "p.csv", records)
    assert main([*few, "--csv", str(tmp_path / "none" / "p.csv")]) == 2


def test_settings_keep_unknown_rates_out() -> None:
    with pytest.raises(InvalidArgumentError, match="--link-gbps is nan"):
        settings_of("--link-gbps", "nan")
