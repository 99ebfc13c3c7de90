"""Exit statuses, sweeps, gates, records in both formats, and the header."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
from benched import bench, cells_of, check_csv, modes_of, settings_of

from ultraep_comm.bench import machine
from ultraep_comm.bench.commands.replicate import each_size
from ultraep_comm.bench.gate import Gate, exit_code
from ultraep_comm.bench.launch import run_ranks
from ultraep_comm.bench.options import TIMES
from ultraep_comm.bench.report import format_csv, write_output

FEW = ["replicate", "--ranks", "2", "--experts", "8", "-w", "0", "--mode", "push"]


def sizes_of(*arguments: str) -> list[int]:
    return [one.expert_bytes for one in each_size(settings_of("replicate", *arguments))]


def test_sizes_of_a_sweep() -> None:
    assert sizes_of() == [16 << 20]
    assert sizes_of("-b", "64K") == sizes_of("--expert-bytes", "64K") == [64 << 10]
    assert sizes_of("-b", "64K", "-e", "64K") == [64 << 10]
    assert sizes_of("-b", "1K", "-e", "9K") == [1 << 10, 2 << 10, 4 << 10, 8 << 10]
    assert sizes_of("-b", "1K", "-e", "81K", "-f", "3") == [1024 * 3**i for i in range(5)]
    assert sizes_of("-e", "32M") == [16 << 20, 32 << 20]
    for one in each_size(settings_of("replicate", "-b", "4K", "-e", "12K", "--segments", "3")):
        assert len(one.segments) == 3
        assert len(one.sizes) == 1


LIMITS = ["--min-bandwidth", "1e6", "--max-over-bound", "1e-6", "--link-gbps", "100"]


def test_a_sweep_end_to_end(tmp_path: Path) -> None:
    """The limits are above and below any machine."""
    few = [*FEW, "-n", "3", "-b", "16K", "-e", "32K", "--sms", "2,1", "-c", "1", *LIMITS]
    files = ["--json", "o.json", "--csv", "o.csv"]
    done = bench(tmp_path, *few, "--times", ",".join(TIMES), *files)
    assert done.returncode == 3
    assert "gate not met by 4 of 4, expected at least 1e+06 GB/s and at most" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    document = done.document()
    records = modes_of(document)
    wanted = [(size, sms) for size in (1 << 14, 1 << 15) for sms in (1, 2)]
    assert [(r["expert_bytes"], r["num_sms"]) for r in records] == wanted
    assert document["gate"]["met"] is False
    check_csv(tmp_path / "o.csv", document["records"])

    lines = [line.split() for line in done.stdout.splitlines() if not line.startswith("#")]
    assert [line[0] for line in lines] == ["push", "p2p", "memcpy"] * 4
    shown = [line for line in lines if line[0] == "push"]
    for line, record in zip(shown, records, strict=True):
        assert line[-1] == record["gate"] == "bandwidth+bound"
        assert (int(line[1]), int(line[2])) == (record["expert_bytes"], record["num_sms"])
        times = {**record["time_us"]}
        times.update({f"rank-{name}": value for name, value in record["rank_time_us"].items()})
        assert [float(x) for x in line[5:12]] == [round(times[name], 1) for name in TIMES]
    assert done.stdout.count("# mode") == 1  # one table
    assert {path.name for path in tmp_path.iterdir()} == {"o.json", "o.csv", "output"}


def record_of(gbps: float, over: float | None, **more: Any) -> dict[str, Any]:
    return {
        **{"mode": "push", "expert_bytes": 65536, "num_sms": None},
        **{"critical_gbps": gbps, "over_bound": over, **more},
    }


@pytest.mark.parametrize(
    ("gbps", "over", "wanted"),
    [
        (5.0, 1.5, "met"),
        (5.0, 1.501, "bound"),
        (1.0, 9.0, "bandwidth+bound"),
        (float("nan"), 1.0, "bandwidth"),
        (6.0, None, "bound"),  # an unknown value misses the limit
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
    assert exit_code(gate, records, 0, prints=True) == 3
    text = capsys.readouterr().err
    assert text == "gate not met by 1 of 2, expected at least 5 GB/s: direct 64 KiB 2 GB/s\n"
    assert exit_code(gate, records, 1, prints=False) == 1  # wrong bytes come first
    assert exit_code(gate, records[:1], 0, prints=True) == 0
    assert not any(capsys.readouterr())
    many = [{**slow, "gate": "bandwidth"}] * 20
    assert gate.explain(many).endswith(" and 12 more")


def test_a_gate_needs_something_to_move(tmp_path: Path) -> None:
    few = [*FEW, "-b", "16K", "-n", "1", "--imbalance", "1", "--min-bandwidth", "1"]
    done = bench(tmp_path, *few, "--json", "o.json")
    assert done.returncode == 2
    assert done.stderr.count("the plan has no replicas") == 1
    assert not (tmp_path / "o.json").exists()


def _end(signal_number: int) -> int:
    signal.signal(signal_number, signal.SIG_DFL)  # nohup ignores SIGHUP, here too
    os.kill(os.getpid(), signal_number)
    return 0


def test_a_signal_that_ends_a_rank_is_no_verdict() -> None:
    """SIGQUIT has number 3, SIGHUP 1."""
    for number in (signal.SIGQUIT, signal.SIGHUP):
        assert run_ranks(_end, number.value, 1) == 128 + number


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
    write_output("--json", Path(os.devnull), "to nowhere")  # written into, not replaced
    assert not Path(os.devnull).is_file()


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    """The other file is written, and figures are printed."""
    few = [*FEW, "-b", "16K", "-n", "1", "--json", "/dev/full", "--csv", "o.csv"]
    done = bench(tmp_path, *few, "--min-bandwidth", "1e-6")
    assert done.returncode == 2
    assert done.stderr == "error: --json /dev/full: No space left on device\n"
    assert done.rows()["push"][-1] == "met"
    assert cells_of((tmp_path / "o.csv").read_text())[0]["gate"] == "met"


def test_places_of_ranks(tmp_path: Path) -> None:
    assert machine.format_numbers([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"
    assert machine.parse_cpus("0-2,5\n") == {0, 1, 2, 5}
    for node, cpus in ((0, "0-3"), (1, "4-7"), (10, "8")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(cpus)
    assert machine.memory_nodes([5, 8], tmp_path) == [1, 10]
    places = [
        {
            **{"rank": r, "host": f"gb0{r // 2}", "domain": r // 2, "cpu": "Grace", "cpus": 72},
            **{"numa_nodes": [r % 2], "gpu": "GB200", "gpu_id": f"id{r // 2 or r}"},
        }
        for r in range(4)
    ]
    assert machine.format_places(places, engine="cuda", fabric="nvshmem") == [
        "topology: 4 ranks on 2 hosts, 2 domains; engine cuda, fabric nvshmem",
        "host gb00: ranks 0-1; Grace, 72 CPUs, NUMA 0-1; GPUs: 2 x GB200",
        "host gb01: ranks 2-3; Grace, 72 CPUs, NUMA 0-1; GPUs: 1 x GB200, shared by ranks",
        "domain 0: ranks 0-1",
        "domain 1: ranks 2-3",
    ]


def test_a_commit_is_dirty_by_its_code_not_by_its_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, result = tmp_path / "ultraep_comm" / "machine.py", tmp_path / "bench/results/o.json"
    for path in (code, result):
        path.parent.mkdir(parents=True)
        path.write_text("old")
    who = ["-c", "user.name=me", "-c", "user.email=me@localhost"]
    for arguments in (["init", "-q"], ["add", "."], [*who, "commit", "-q", "-m", "one"]):
        subprocess.run(["git", "-C", tmp_path, *arguments], check=True)
    monkeypatch.setattr(machine, "__file__", str(code))
    find_commit = machine.find_commit.__wrapped__
    result.write_text("new")
    clean = find_commit()
    assert re.fullmatch("[0-9a-f]{12}", clean)
    code.write_text("new")
    assert find_commit() == f"{clean}-dirty"
