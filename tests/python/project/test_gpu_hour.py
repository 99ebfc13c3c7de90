"""tools/gpu_hour without a GPU: how stages are run, recorded and resumed, and what they name."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import pytest

from ultraep_comm.bench.cli import COMMANDS, make_parser
from ultraep_comm.bench.options import make_settings

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "tools" / "gpu_hour"
sys.path.insert(0, str(ROOT / "tools"))
gpu_hour: Any = module_from_spec(
    spec_from_loader("gpu_hour", SourceFileLoader("gpu_hour", str(SCRIPT)))  # type: ignore[arg-type]
)
gpu_hour.__spec__.loader.exec_module(gpu_hour)
from hour import load_kernels, machine, report, running, stages  # noqa: E402
from hour.call import ARCHIVE, Results  # noqa: E402
from hour.rehearsal import make_wheel  # noqa: E402
from hour.running import Command, Stage  # noqa: E402

DOC = ROOT / "docs" / "developing.md"
DEVICE = {"arch": 90, "name": "a GPU", "gpus": 1}


def python(code: str, **options: Any) -> Command:
    return Command([sys.executable, "-c", code], **options)


def stage(*commands: Command, **options: Any) -> Stage:
    return Stage("a stage", list(commands), **options)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that runs stages, by default all, on a GPU that nobody asks."""
    monkeypatch.setattr(machine, "find_device", lambda: DEVICE)
    monkeypatch.setattr(machine, "commit", lambda: "c0ffee")
    monkeypatch.setattr(machine, "unpack", lambda *_: [])
    monkeypatch.setattr(gpu_hour, "ROOT", tmp_path)

    def run(own: dict[str, Stage], *options: str) -> tuple[int, dict[str, Any]]:
        monkeypatch.setattr(stages.Plan, "stages", lambda plan: own)
        names = [] if set(options) & set(own) else list(own)
        status = gpu_hour.main(["--out", str(tmp_path / "out"), *options, *names])
        found = json.loads(unpacked(tmp_path / "out")["summary.json"])
        return status, {record["stage"]: record for record in found["stages"]}

    return run


def unpacked(out: Path) -> dict[str, str]:
    """The files of the archive."""
    with tarfile.open(out / ARCHIVE) as archive:
        files = [(member.name, archive.extractfile(member)) for member in archive]
        return {name: file.read().decode() for name, file in files if file}


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
    lines = done.stdout.splitlines()
    assert done.returncode == 0
    assert lines[0] == "a: build, doctor, primitives, replicate"
    names = [line.split()[0] for line in lines if line[1] != ":"]
    assert {name for call in stages.CALLS.values() for name in call} == set(names)
    assert all(call[0] == "build" for call in stages.CALLS.values())


def test_without_a_gpu_it_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    done = call("--out", tmp_path / "out", "a", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 3
    assert done.stderr.startswith("gpu_hour: no GPU: ")
    assert "python -m ultraep_comm.doctor" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["tea", "--out", "."], "tea; expected some of a, b, c, d, e, build, doctor"),
        (["--out", "."], "no stage is named"),
        (["a"], "--out is missing"),
    ],
)
def test_wrong_usage(options: list[str], message: str) -> None:
    done = call(*options)
    assert done.returncode == 2
    assert message in done.stderr


# ---- stages --------------------------------------------------------------------------------------


def test_a_stage_that_fails_or_hangs_does_not_stop_the_others(run: Any) -> None:
    # Its child has the pipe too, and would hold up whoever reads until the end.
    hangs = "import subprocess, sys; subprocess.run(['sleep', '100'])"
    begin = time.monotonic()
    status, found = run(
        {
            "fails": stage(python("print('why'); exit(7)"), python("print('and on')")),
            "hangs": stage(python(hangs, seconds=0.1), python("print('late')", seconds=1)),
            "passes": stage(python("print('fine')")),
            "lacks": stage(Command([], why="no tool")),
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


def test_what_is_run_instead_counts(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    fails = "print('why it fails'); exit(1)"
    status, found = run(
        {
            "mended": stage(python(fails, otherwise=(python("print('mended')"),))),
            "still": stage(python(fails, otherwise=(python(fails),))),
        }
    )
    assert status == 1
    assert [found[name]["status"] for name in found] == ["passed", "failed"]
    assert [c["status"] for c in found["mended"]["commands"]] == ["replaced", "passed"]
    said = capsys.readouterr().out.partition("====")[2]
    assert "instead of: " in said
    assert "why it fails" in said.partition("still")[0]


def test_resuming_leaves_out_what_has_passed(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not what a machine has forgotten since."""
    ran, mended = tmp_path / "ran", tmp_path / "mended"
    note = f"open({str(ran)!r}, 'a').write"
    own = {
        "here": stage(python(f"{note}('h')"), of_machine=True),
        "one": stage(python(f"{note}('1')")),
        "two": stage(python(f"import os; {note}('2'); exit(not os.path.exists({str(mended)!r}))")),
    }
    assert run(own)[0] == 1
    mended.touch()
    shutil.rmtree(tmp_path / "build")  # another machine, which has the archive
    status, found = run(own, "--resume")
    assert status == 0
    assert ran.read_text() == "h12" + "h2"
    assert list(found) == ["here", "one", "two"]
    assert "one.log" in unpacked(tmp_path / "out")
    assert run(own, "one")[1].keys() == {"here", "one", "two"}  # another call keeps the others
    assert ran.read_text() == "h12" + "h2" + "1"
    monkeypatch.setattr(machine, "commit", lambda: "another")
    assert run(own, "one", "--resume")[1].keys() == {"one"}
    assert ran.read_text() == "h12" + "h2" + "1" + "1"


def test_results_are_kept(run: Any, tmp_path: Path) -> None:
    line = '{"probe": "measure_shuffle", "wrong": 0, "each": 31.4}'
    words = [sys.executable, "-c", f"print('{line}')  # tools/gpu_probes/probes.py"]
    costs = stage(Command(words), then=stages.Plan(tmp_path, tmp_path)._write_clock)
    status, found = run({"costs": costs})
    assert status == 0
    assert found["costs"]["results"] == [json.loads(line)]
    files = unpacked(tmp_path / "out")
    assert files.keys() == {"clock_measured.env", "costs.log", "summary.json"}
    clock = files["clock_measured.env"].splitlines()
    assert "SHUFFLE=31" in clock
    assert "REMOTE=1584  # not measured" in clock
    assert [path.name for path in (tmp_path / "out").iterdir()] == [ARCHIVE]


def test_results_name_the_commit_that_was_built(tmp_path: Path) -> None:
    file = tmp_path / "bench_links.json"
    file.write_text(
        '{"header": ["# ultraep_comm 0.1.0, commit v0.1.0: links"], "commit": "v0.1.0"}'
    )
    Results(tmp_path, tmp_path, {"commit": "e4dfa74df4ef61+"}).name_commit()
    found = json.loads(file.read_text())
    assert found["commit"] == "e4dfa74df4ef-dirty"
    assert found["header"] == ["# ultraep_comm 0.1.0, commit e4dfa74df4ef-dirty: links"]


# ---- the report ----------------------------------------------------------------------------------


BROKEN = """
import time, pytest

def deep(n):
    if n == 0:
        raise ValueError("the cause")
    deep(n - 1)

@pytest.mark.parametrize("rank", [3])
def test_breaks(rank):
    try:
        deep(9)
    except ValueError as error:
        raise RuntimeError(f"rank {rank} is broken") from error

def test_passes():
    pass

def test_hangs():
    time.sleep(100)
"""


def test_a_fault_is_understood_from_the_report_alone(
    run: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(running, "GRACE", 60.0)  # pytest writes its results, on a busy machine too
    (tmp_path / "test_it.py").write_text(BROKEN)
    xml = tmp_path / "it.xml"
    words = [sys.executable, "-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider"]
    words += ["--junit-xml", str(xml), str(tmp_path / "test_it.py")]
    status, found = run(
        {
            # Plugins take most of a second to load, and many on a busy machine.
            "tests": stage(
                Command(words, seconds=1, xml=xml, env={"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"})
            ),
            "fine": stage(python("print(1)", seconds=3)),
        },
        *("--limit", "80"),  # a quarter of it to start pytest in, on a busy machine
    )
    assert status == 1
    assert [found[name]["status"] for name in found] == ["failed", "passed"]
    assert found["tests"]["commands"][0]["tests"] == {"passed": 1, "skipped": 0, "failed": 1}
    said = capsys.readouterr().out.partition("====")[2]
    assert "---- tests: test_it::test_breaks[3]\nRuntimeError: rank 3 is broken\n" in said
    assert "ValueError: the cause" in said
    hung = said.partition("timeout")[2]
    assert "test_it.py::test_hangs" in hung
    assert re.search(r"fine +passed +\d", said)


def failure(number: int) -> dict[str, Any]:
    return {"name": f"test_{number}", "error": f"Error {number}", "lines": ["x" * 200] * 10}


@pytest.mark.parametrize("count", [5, 60, 5000])
def test_the_report_fits(count: int) -> None:
    commands = [
        {"name": "c", "command": "c", "status": "failed", "last": "", "failures": [failure(i)]}
        for i in range(count)
    ]
    record = {"stage": "s", "status": "failed", "seconds": 1.0, "commands": commands}
    text = report.write("a title", [record], ["a note"])
    assert len(text) <= report.LIMIT == 12_000
    assert "a title" in text
    assert "a note" in text
    shown = re.findall(r"^---- s: test_(\d+)\nError (\d+)$", text, re.MULTILINE)
    assert [a == b for a, b in shown] == [True] * min(count, len(shown))
    assert len(shown) == count or f"and {count - len(shown)} failures more" in text
    assert len(shown) >= min(count, 50)
    if count <= 5:
        assert text.count("x" * 200) == 10 * count


# ---- what the machine lacks ----------------------------------------------------------------------


def test_wheels_of_what_lacks_are_unpacked(tmp_path: Path) -> None:
    make_wheel(tmp_path / "carried")
    (tmp_path / "carried" / "pytest-1.0-py3-none-any.whl").write_text("not unpacked: it is here")
    (tmp_path / "carried" / "other-1.0-cp27-none-any.whl").write_text("of another Python")
    said = machine.unpack(tmp_path / "carried", tmp_path / "wheels")
    assert [line.partition(":")[0].partition("-")[0] for line in said] == [
        *("nvshmem4py_cu13", "other")
    ]
    assert said[0].endswith("unpacked")
    assert "not a supported wheel" in said[1]
    assert (tmp_path / "wheels" / "nvshmem" / "__init__.py").exists()


# ---- what the stages name ------------------------------------------------------------------------


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What runs on GPUs, where all tools are installed."""
    monkeypatch.setattr(stages, "find", lambda program, *roots: program)
    (tmp_path / "wheels" / "nvshmem").mkdir(parents=True)
    plan = stages.Plan(tmp_path, tmp_path, num_gpus=8)
    return [command.words for stage in plan.stages().values() for command in stage.commands]


def test_every_test_of_a_gpu_is_in_a_stage(commands: list[list[str]]) -> None:
    named = {Path(word) for words in commands for word in words if "/tests/device/" in word}
    assert named == set((ROOT / "tests/device").glob("test_gpu_*.py"))


def test_benchmark_commands_are_valid(commands: list[list[str]]) -> None:
    lines = [words[3:] for words in commands if words[2:3] == ["ultraep_comm.bench"]]
    assert {line[0] for line in lines} == {
        *("replicate", "links", "calibrate", "plan", "critical-path")
    }
    for line in lines:
        options = make_parser().parse_args(line)
        (command,) = [one for one in COMMANDS if one.name == line[0]]
        assert make_settings(command.settings, options) is not None


def test_the_rehearsal_loads_a_cubin_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ULTRAEP_CUBINS", str(load_kernels.info_alone().parent))
    assert load_kernels.load_kernels(load_kernels.stand_in(), None).nvshmem == (3, 4)


def test_every_call_has_a_reserve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the limit of nine minutes that a borrowed machine has, and the start before it."""
    monkeypatch.setattr(stages, "find", lambda program, *roots: program)
    (tmp_path / "wheels" / "nvshmem").mkdir(parents=True)
    assert gpu_hour.LIMIT <= 525
    for count, call in ((1, "abcd"), (8, "e")):
        own = stages.Plan(tmp_path, tmp_path, num_gpus=count).stages()
        for name in call:
            named = [own[stage] for stage in stages.CALLS[name]]
            seconds = sum(c.seconds for stage in named for c in stage.commands)
            assert seconds < gpu_hour.LIMIT / 1.2, (name, seconds)


def test_documented_calls_are_valid() -> None:
    lines = re.findall(r"^tools/gpu_hour (.*?)(?: +#.*)?$", DOC.read_text(), re.MULTILINE)
    parsed = [gpu_hour.parse(line.split()) for line in lines]
    named = [options.names for options in parsed]
    assert all(stages.CALLS[call] in named for call in "abcde")
