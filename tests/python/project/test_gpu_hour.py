"""tools/gpu_hour without a GPU: how stages are run, recorded and resumed, and what they name."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import pytest

from ultraep_comm.bench.cli import COMMANDS, make_parser

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "tools" / "gpu_hour"
hour: Any = module_from_spec(
    spec_from_loader("gpu_hour", SourceFileLoader("gpu_hour", str(SCRIPT)))  # type: ignore[arg-type]
)
sys.modules["gpu_hour"] = hour  # dataclasses look there
hour.__spec__.loader.exec_module(hour)


def python(code: str, **options: float) -> Any:
    return hour.Command([sys.executable, "-c", code], **options)


def stage(*commands: Any, **options: Any) -> Any:
    return hour.Stage("a stage", list(commands), **options)


# What a program of its own begins with. Its first argument is this folder.
SETUP = """
import resource, sys
sys.path.insert(0, sys.argv[1])
from test_gpu_hour import hour, python, stage
hour.commit, hour.find_device = (lambda: "c0ffee"), (lambda: {"arch": 90})
"""


def has_ended(pid: int) -> bool:
    """Whether a process has ended, or does soon."""
    state = Path("/proc", str(pid), "stat")
    for _ in range(400):
        if not state.exists() or state.read_text().split()[2] == "Z":
            return True
        time.sleep(0.05)
    return False


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that runs stages on a GPU that nobody asks."""
    monkeypatch.setattr(hour, "find_device", lambda: {"arch": 90, "name": "a GPU"})
    monkeypatch.setattr(hour, "commit", lambda: "c0ffee")

    def run(stages: dict[str, Any], *options: str) -> tuple[int, dict[str, Any]]:
        monkeypatch.setattr(hour.Plan, "stages", lambda plan: stages)
        status = hour.main(["--out", str(tmp_path / "out"), *options])
        summary = json.loads((tmp_path / "out" / "summary.json").read_text())
        return status, {record["stage"]: record for record in summary["stages"]}

    return run


def call(*options: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, SCRIPT, *options],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


# ---- the command line ----------------------------------------------------------------------------


def test_stages_are_listed() -> None:
    done = call("--list")
    names = [line.split()[0] for line in done.stdout.splitlines()]
    assert done.returncode == 0
    assert names[:4] == ["build", "doctor", "primitives", "replicate"]
    assert {"costs", "bandwidth", "sanitizer", "nvshmem"} < set(names)


def test_without_a_gpu_it_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    done = call("--out", tmp_path / "out", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 3
    assert done.stderr.startswith("gpu_hour: no GPU: ")
    assert "python -m ultraep_comm.doctor" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "options", [["--stages", "build,tea", "--out", "."], ["--stages", "build"]]
)
def test_wrong_usage(options: list[str]) -> None:
    done = call(*options)
    assert done.returncode == 2
    assert ("tea; expected some of build, doctor" if "--out" in options else "--out") in done.stderr


# ---- stages --------------------------------------------------------------------------------------


def test_a_stage_that_fails_or_hangs_does_not_stop_the_others(run: Any) -> None:
    # Its child has the pipe too, and would hold up whoever reads until the end.
    hangs = "import subprocess, sys; subprocess.run(['sleep', '100'])"
    begin = time.monotonic()
    status, found = run(
        {
            "fails": stage(python("print('why'); exit(7)"), python("print('and on')")),
            "hangs": stage(python(hangs, limit=1), python("print('late')")),
            "passes": stage(python("print('fine')")),
            "lacks": stage(hour.Command([], why="no tool")),
        }
    )
    assert status == 1
    assert time.monotonic() - begin < 20
    statuses = {n: [c["status"] for c in of["commands"]] for n, of in found.items()}
    assert statuses == {
        "fails": ["failed", "passed"],
        "hangs": ["timeout", "passed"],
        "passes": ["passed"],
        "lacks": ["failed"],
    }
    assert [found[name]["status"] for name in found] == ["failed", "failed", "passed", "failed"]
    assert found["fails"]["commands"][0]["exit_status"] == 7
    assert found["fails"]["commands"][0]["last"] == "why"


def test_a_stage_ends_at_its_limit(run: Any) -> None:
    sleeps = python("import time; time.sleep(60)")
    status, found = run({"long": stage(sleeps, sleeps)}, "--limit", "1")
    assert status == 1
    assert [c["status"] for c in found["long"]["commands"]] == ["timeout", "not run"]
    assert found["long"]["seconds"] < 10


def test_a_child_that_outlives_its_parent_is_ended(run: Any, tmp_path: Path) -> None:
    code = f"""
import subprocess
child = subprocess.Popen(['sleep', '100'])
open({str(tmp_path / "pid")!r}, 'w').write(str(child.pid))"""
    status, found = run({"leaves": stage(python(code))})
    assert status == 0
    assert found["leaves"]["seconds"] < 10
    assert has_ended(int((tmp_path / "pid").read_text()))


def test_what_runs_ends_with_it(tmp_path: Path) -> None:
    code = (
        SETUP
        + """
sleeps = f"import os, time; open({sys.argv[3]!r}, 'w').write(str(os.getpid())); time.sleep(100)"
hour.Plan.stages = lambda plan: {"sleeps": stage(python(sleeps))}
sys.exit(hour.main(["--out", sys.argv[2]]))
"""
    )
    pid = tmp_path / "pid"
    words = [sys.executable, "-B", "-c", code, str(Path(__file__).parent), str(tmp_path / "out")]
    with subprocess.Popen([*words, str(pid)], stdout=subprocess.DEVNULL) as process:
        while not (pid.exists() and pid.read_text()):
            assert process.poll() is None
            time.sleep(0.05)
        process.terminate()
        assert process.wait(30) == 143
    assert has_ended(int(pid.read_text()))


def test_resuming_leaves_out_what_has_passed(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran, mended = tmp_path / "ran", tmp_path / "mended"
    note = f"open({str(ran)!r}, 'a').write"
    stages = {
        "a": stage(python(f"{note}('a')")),
        "b": stage(python(f"import os; {note}('b'); exit(not os.path.exists({str(mended)!r}))")),
    }
    assert run(stages)[0] == 1
    mended.touch()
    status, found = run(stages, "--resume")
    assert status == 0
    assert ran.read_text() == "abb"
    assert list(found) == ["a", "b"]
    assert run(stages, "--stages", "a")[1].keys() == {"a", "b"}  # another call keeps the others
    assert ran.read_text() == "abba"
    monkeypatch.setattr(hour, "commit", lambda: "another")
    assert run(stages, "--stages", "a", "--resume")[1].keys() == {"a"}
    assert ran.read_text() == "abbaa"


def test_a_long_log_keeps_its_begin_and_its_end(run: Any, tmp_path: Path) -> None:
    code = "print('first'); [print('x' * 999) for _ in range(5000)]; print('last')"
    assert run({"long": stage(python(code), python("print('more')"))})[0] == 0
    log = (tmp_path / "out" / "long.log").read_text()
    assert len(log) < 2 * hour.HALF_LOG + 100
    assert "\nfirst\n" in log[:1000]
    assert "bytes left out" in log
    assert "\nlast\n" in log[-1000:]
    assert "\nmore\n" in log[-1000:]


def test_results_are_kept_and_packed(run: Any, tmp_path: Path) -> None:
    line = '{"probe": "measure_shuffle", "wrong": 0, "each": 31.4}'
    words = [sys.executable, "-c", f"print('{line}')  # tools/gpu_probes/probes.py"]
    plan = hour.Plan(tmp_path, arch=90, dry=False)
    costs = stage(hour.Command(words), then=plan._write_clock)
    target = tmp_path / "all.tgz"
    status, found = run({"costs": costs}, "--pack", str(target))
    assert status == 0
    assert found["costs"]["results"] == [json.loads(line)]
    clock = (tmp_path / "out" / "clock_measured.env").read_text().splitlines()
    assert "SHUFFLE=31" in clock
    assert "REMOTE=1400  # not measured" in clock
    listed = subprocess.run(["tar", "tzf", target], capture_output=True, text=True, check=True)
    assert listed.stdout.split() == ["clock_measured.env", "costs.log", "summary.json"]


# Runs a stage that prints little, where no file can get larger than some bytes.
NO_ROOM = (
    SETUP
    + """
hour.Plan.stages = lambda plan: {"speaks": stage(python("print('x' * 200)"))}
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]),) * 2)
sys.exit(hour.main(["--out", sys.argv[2]]))
"""
)


@pytest.mark.parametrize(("room", "left"), [(100, []), (400, ["speaks.log"])])
def test_a_full_disk_leaves_nothing_half_written(
    tmp_path: Path, room: int, left: list[str]
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "summary.json").write_text("as it was")
    words = ["-B", "-c", NO_ROOM, str(Path(__file__).parent), str(out), str(room)]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 4, done.stderr
    assert "gpu_hour: cannot write: " in done.stderr
    assert sorted(path.name for path in out.iterdir()) == [*left, "summary.json"]
    assert (out / "summary.json").read_text() == "as it was"


# ---- what the stages name ------------------------------------------------------------------------


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What runs on a GPU, where all tools are installed."""
    monkeypatch.setattr(hour, "find", lambda program, *roots: program)
    stages = hour.Plan(tmp_path, arch=90, dry=False).stages()
    return [command.words for stage in stages.values() for command in stage.commands]


def test_every_test_of_a_gpu_is_in_a_stage(commands: list[list[str]]) -> None:
    named = {word for words in commands for word in words if word.startswith("tests/")}
    there = {f"tests/device/{path.name}" for path in (ROOT / "tests/device").glob("test_gpu_*.py")}
    assert named == there


def test_benchmark_commands_are_valid(commands: list[list[str]]) -> None:
    lines = [words[3:] for words in commands if words[2:3] == ["ultraep_comm.bench"]]
    assert {line[0] for line in lines} == {
        *("replicate", "reduce", "links", "calibrate", "plan", "critical-path")
    }
    for line in lines:
        options = make_parser().parse_args(line)
        (command,) = [one for one in COMMANDS if one.name == line[0]]
        assert command.make_settings(options) is not None


def test_every_stage_has_time_for_its_commands() -> None:
    """Below what a borrowed GPU may be given for: eight minutes."""
    assert hour.STAGE_LIMIT < 480


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
def test_a_dry_run_passes(tmp_path: Path) -> None:
    done = call("--out", tmp_path, "--dry-run")
    assert done.returncode == 0, done.stdout
    clock = (tmp_path / "clock_measured.env").read_text()
    if shutil.which("nvcc") is None:
        return
    assert re.findall("(.*)=.*not measured", clock) == ["REMOTE", "LINK_BYTES"]
