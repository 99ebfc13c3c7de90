"""Command lines: light parsers, errors before anything runs, and the documented commands."""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from benched import bench, refusal, settings_of

from studies import cli as studies
from ultraep_comm.bench import cli
from ultraep_comm.bench.cli import main
from ultraep_comm.bench.options import ALL_MODES, choose_engine
from ultraep_comm.bench.sizes import parse_counts
from ultraep_comm.calls.reduce import REDUCE_MODES
from ultraep_comm.errors import InvalidArgumentError
from ultraep_comm.plan.schedule import MODES

ROOT = Path(__file__).resolve().parents[3]

# ---- errors -------------------------------------------------------------------------------------

BAD: dict[str, list[tuple[list[str], str]]] = {
    "replicate": [
        (["--slots", "0"], "--slots is 0; expected at least 1"),
        (["-b", "12Q"], "not a size"),
        (["--segments", "a=1K,a=2K"], "'a=2K'"),
        (["--segments", "a=1K", "-b", "4K"], "give one"),
        (["--segments", "9", "-b", "4"], "cannot be split"),
        (["--imbalance", "5"], "expected 1 to 4"),
        (["--trace", "none.npz"], "none.npz"),
        (["--trace", "none.npz", "--imbalance", "2"], "--imbalance is for generated load"),
        (["-b", "64K", "-e", "32K"], "--maxbytes is 32768, below the first size, 65536"),
        (["-b", "1K", "-e", "2K", "-f", "1"], "--stepfactor is 1; expected at least 2"),
        (["-e", "9" * 5000 + "G"], "--maxbytes: '999"),
        (["-e", "999999999999G"], "is too large; expected at most 262144G"),
        (["-b", "1K", "-e", "1024G"], "experts and slots of all ranks take"),
        (["--ranks", "100000"], "--ranks is 100000; expected at most 1024"),
        (["-b", "1K", "-f", "2"], "there is no --maxbytes"),
        (["-b", "1K", "-e", "2K", "--segments", "a=1K"], "--maxbytes asks for several"),
        (["--min-bandwidth", "0"], "--min-bandwidth is 0.0; expected a finite number above 0"),
        (["--times", "p50,mean"], "--times has 'mean'; expected any of p50, p90"),
        (["--engine", "c10d", "--fabric", "shm"], "does not run over --fabric shm"),
        (["--json", "."], "is a folder"),
        (["--csv", "none/o.csv"], "--csv none/o.csv cannot be written to: No such file"),
        (["--csv", "o", "--json", "./o"], "expected two files"),
        (
            ["--max-over-bound", "2", "--engine", "cuda", "--fabric", "torch"],
            "give --link-gbps",
        ),
    ],
    "replicate --op reduce": [
        (["--segments", "a=6"], "'a' has 6 bytes"),
        (["--segments", "a=7", "--grad-dtype", "bfloat16"], "multiple of 2"),
        (["--mode", "push"], "--op reduce has no --mode push; expected one of pull, direct, auto"),
    ],
    "plan": [
        (["--max-over-bound", "2", "--engine", "cuda"], "give one of the two"),
        (["--sizes", "64/256"], "ranks/experts/slots"),
        (["--sizes", "64/x/2"], "'64/x/2'"),
        (["--sizes", ""], "--sizes"),
        (["--sizes", "8/32/1,8/32/1"], "twice"),
        (["--sizes", "8/4/1"], "--topk 8"),
        (["--tokens", "100000000"], "2**31"),
        (["--seeds", "0"], "--seeds is 0"),
        (["--target", "0.9"], "--target"),
        (["--workload", "W1"], "--workload has 'W1'; expected any of zipf0.6"),
        (["--workload", "trace"], "belong together"),
        (["--trace", "nowhere.npz"], "nowhere.npz"),
        (["--warps", "4"], "for --engine cuda"),
        (["--engine", "cuda", "--warps", "1,17"], "at most 16"),
        (["--certify", "--engine", "cuda"], "--certify"),
        (["--sizes", "8/4/5", "--topk", "4"], "--sizes has 8/4/5, with more slots than experts"),
    ],
    "critical-path": [
        (["--tokens", "100000000"], "less than 2**31"),
        (["--imbalance", "9"], "imbalance is 9"),
        (["--trace", "/nowhere/x.npz"], "x.npz"),
    ],
    "links": [
        (["--ranks", "1"], "--ranks is 1; expected at least 2"),
        (["--slowest", "-1"], "--slowest is -1"),
        (["--sms", "0"], "--num-workers is 0"),
        (["--ranks", "2", "--pattern", "ring"], "no links between 2 ranks"),
        (["--pattern", "incast", "--one-at-a-time"], "omit one"),
    ],
    "calibrate": [
        (["--ranks", "2"], "--ranks is 2; expected at least 3"),
        (["-b", "4095"], "--expert-bytes is 4095; expected at least 4096"),
        (["--output", "none/c.json"], "No such file"),
        (["--output", "bad.json"], "calibration bad.json is damaged"),
    ],
}


@pytest.mark.parametrize(
    ("command", "arguments", "text"),
    [(command, *row) for command, rows in BAD.items() for row in rows],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else None,
)
def test_bad_arguments_run_nothing(
    command: str,
    arguments: list[str],
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.json").write_text("{")  # no calibration
    assert text in refusal(main, [*command.split(), *arguments], monkeypatch, capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["bad.json"]
    assert Path("bad.json").read_text() == "{"


def test_ranks_must_be_those_of_the_launcher(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["replicate", "--ranks", "4"]) == 2
    assert "2 ranks were launched" in capsys.readouterr().err


# ---- engines ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "fabric", "launched", "chosen"),
    [
        ("host", "auto", None, ("host", "shm")),
        ("cuda", "auto", None, ("cuda", "loopback")),
        ("cuda", "auto", 4, ("cuda", "nvshmem")),
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
        ("cuda", "shm", None, "loopback, torch, nvshmem"),
        ("cuda", "loopback", 4, "4 ranks were launched"),
    ],
)
def test_engine_and_fabric_that_do_not_match(
    engine: str, fabric: str, launched: int | None, text: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        choose_engine(engine, fabric, launched)


def test_numbers_of_sms() -> None:
    assert parse_counts("16,4, 8", "--sms") == (4, 8, 16)
    for text in ("", "0", "4,,8", "4,4", "-1", "x"):
        with pytest.raises(InvalidArgumentError, match="--sms"):
            parse_counts(text, "--sms")
    assert settings_of("replicate", "--engine", "host", "--sms", "2,1").num_sms == (1, 2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize("command", ["replicate", "plan", "critical-path"])
def test_without_a_gpu_the_error_says_so(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, *(["--engine", "cuda"] if command != "critical-path" else [])]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert "use the host engine" in error
    assert "Traceback" not in error


# ---- parsers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("package", "named", "commands"),
    [
        ("ultraep_comm.bench", "ultraep_comm.bench", cli.COMMANDS),
        ("studies", "bench/studies", studies.COMMANDS),
    ],
    ids=["bench", "studies"],
)
def test_help_loads_nothing_heavy(package: str, named: str, commands: Any) -> None:
    """``--help`` loads neither torch nor numpy nor the extension module."""
    names = [command.name for command in commands]
    code = f"""
import sys
sys.path[0] = {str(ROOT / "bench")!r}
from {package}.cli import main
for command in {["", *names]}:
    try:
        main([*command.split(), "--help"])
    except SystemExit as end:
        assert end.code == 0
heavy = ("torch", "numpy", "ultraep_comm._core")
sys.exit(", ".join(name for name in heavy if name in sys.modules) or 0)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert all(f"{named} {command}" in done.stdout for command in names)


def test_names_in_parsers_are_those_of_the_library() -> None:
    """Parsers repeat names of the library, so that they load nothing heavy."""
    assert (*MODES, "auto") == ALL_MODES
    assert (*REDUCE_MODES, "auto") == settings_of("reduce", "--ranks", "2").modes


def test_check_as_in_nccl_tests() -> None:
    for arguments, wanted in (
        ([], False),
        (["-c"], True),
        (["--check"], True),
        (["-c", "1"], True),
        (["-c", "0"], False),
        (["--check", "-n", "2"], True),
    ):
        assert settings_of("replicate", *arguments).check is wanted
    with pytest.raises(SystemExit) as status:
        settings_of("replicate", "-c", "2")
    assert status.value.code == 2


def test_copies_on_one_gpu_are_larger_than_its_cache() -> None:
    for more, expected in (([], 16), (["--engine", "cuda"], 256), (["-b", "3M"], 3)):
        assert settings_of("calibrate", "--ranks", "3", *more).copy_bytes == expected << 20


def test_commands_in_the_documents_are_accepted() -> None:
    found = 0
    names = ["README.md", "bench/README.md", "bench/METRICS.md", "bench/results/README.md"]
    programs = {r"-m ultraep_comm\.bench": cli, "python bench/studies": studies}
    names += ["docs/benchmark.md", "docs/first-run.md", "docs/building.md", "docs/one-node.md"]
    for name in names:
        text = (ROOT / name).read_text().replace("\\\n", " ")
        for start, program in programs.items():
            for arguments in re.findall(rf"{start} ([^`\n]+)$", text, re.MULTILINE):
                program.make_parser().parse_args(shlex.split(arguments))
                found += 1
    assert found > 20


@pytest.mark.parametrize("program", ["bench plan", "viz load x --out x.png"])
def test_unknown_arguments_are_of_their_command(
    program: str, capsys: pytest.CaptureFixture[str]
) -> None:
    package, *arguments = program.split()
    main = importlib.import_module(f"ultraep_comm.{package}.cli").main
    with pytest.raises(SystemExit):
        main([*arguments, "--ranked", "3"])
    found = capsys.readouterr().err
    assert found.startswith(f"usage: python -m ultraep_comm.{package} {arguments[0]} [-h]")
    assert "unrecognized arguments: --ranked 3" in found


# ---- the command of docs/developing.md ----------------------------------------------------------


@pytest.fixture
def shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The command of the document's code block is one of the benchmark's."""
    text = (ROOT / "docs" / "developing.md").read_text()
    found = re.search(r"runs this block -->\n```python\n(.*?)```", text, re.DOTALL)
    assert found is not None
    (tmp_path / "shown_command.py").write_text(found[1])
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("shown_command")
    monkeypatch.setattr(cli, "COMMANDS", (*cli.COMMANDS, module.COMMAND))
    yield
    del sys.modules["shown_command"]


@pytest.mark.usefixtures("shown")
def test_the_command_of_the_document(tmp_path: Path) -> None:
    few = ["gather", "--ranks", "2", "-n", "3", "-w", "0", "-c", "--json", "o.json"]
    done = bench(tmp_path, *few, "--max-over-bound", "1e-9")
    assert done.returncode == 3, done.stderr
    (record,) = done.document()["records"]
    assert record["over_bound"] >= 1
    assert list(done.rows()) == ["gather_load"]
    assert "# topology: 2 ranks on 1 host" in done.stdout
    done = bench(tmp_path, "gather", "--iters", "0")
    assert (done.returncode, done.stderr) == (2, "error: --iters is 0; expected at least 1\n")
