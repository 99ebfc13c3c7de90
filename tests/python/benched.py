"""Runs the benchmark in this process, with ranks forked from one server."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from studies import cli as studies
from ultraep_comm.bench import cli, launch
from ultraep_comm.bench.clock import Meter
from ultraep_comm.bench.commands.calibrate import run as calibrate
from ultraep_comm.bench.commands.critical_path import run as critical_path
from ultraep_comm.bench.commands.links import run as links
from ultraep_comm.bench.commands.plan import device as plan_device
from ultraep_comm.bench.commands.replicate import run as replicate
from ultraep_comm.bench.options import make_settings
from ultraep_comm.bench.report import Report, flatten

FILES = ("--json", "-J", "--csv", "--output", "--trace")  # followed by a file name
SMALL = ["-b", "96K", "-n", "2", "-w", "1", "--experts", "16"]
TIMES = {"time_us", "rank_time_us"}
# Keys that records of replicate and reduce share, on the CPU and on a device.
ONE_PLAN_KEYS = {
    *("op", "name", "engine", "fabric", "mode", "chosen", "num_sms", "ranks", "experts", "slots"),
    *("expert_bytes", "replicas", "imbalance_before", "imbalance_after", "critical_gbps"),
    *("bound_us", "over_bound", "wrong_bytes", "gate", *TIMES),
}


def program_of(command: str) -> Any:
    """The command line that has a command: the benchmark's, or that of the studies."""
    return studies if any(one.name == command for one in studies.COMMANDS) else cli


def words_of(command: str) -> list[str]:
    """The words of a command, or of an operation of replicate."""
    return ["replicate", "--op", command] if command == "reduce" else [command]


def settings_of(command: str, *arguments: str) -> Any:
    """Checked settings of a command line."""
    program = program_of(command)
    command, *more = words_of(command)
    options = program.make_parser().parse_args([command, *more, *arguments])
    (found,) = (one for one in program.COMMANDS if one.name == command)
    return make_settings(found.settings, options)


def run_on(meter: Meter, command: str, *arguments: str) -> int:
    """Run a command with a meter in place of a GPU; return the exit status."""
    return run_settings_on(meter, command, settings_of(command, *arguments))


def run_settings_on(meter: Meter, command: str, settings: Any) -> int:
    """Run a command with these settings."""
    report = Report.of(settings)
    if command == "plan":
        return plan_device.run_device(meter, settings, report)
    runs: dict[str, Callable[..., int]] = {
        "critical-path": critical_path.run,
        "links": links.run,
        "calibrate": calibrate.run,
        "replicate": replicate.run,
        "reduce": replicate.run,
    }
    return runs[command](settings, report, meter)


@dataclass(frozen=True)
class Done:
    """The output of a run, like `subprocess.CompletedProcess`, and the folder of its files."""

    returncode: int
    stdout: str
    stderr: str
    folder: Path

    def document(self, name: str = "o.json") -> dict[str, Any]:
        """Return a JSON file that the run wrote."""
        found: dict[str, Any] = json.loads((self.folder / name).read_text())
        return found

    def rows(self) -> dict[str, list[str]]:
        """Return the table's rows by mode, without the mode that `auto` chose."""
        lines = [line.split() for line in self.stdout.splitlines() if not line.startswith("#")]
        return {
            line[0]: [cell for cell in line[1:] if not cell.startswith("(")]
            for line in lines
            if line
        }


def modes_of(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the records of the library's modes."""
    return [record for record in document["records"] if record["op"] != "baseline"]


def baselines_of(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the records of baselines."""
    return [record for record in document["records"] if record["op"] == "baseline"]


@dataclass(frozen=True)
class Rank:
    """Run as one of the ranks, with the output redirected to files."""

    run: Callable[[Any], int]
    folder: Path
    fault: Callable[[], None] | None

    def __call__(self, settings: Any) -> int:
        for name in ("out", "err"):
            setattr(sys, f"std{name}", (self.folder / f"{name}{dist.get_rank()}").open("w"))
        if self.fault is not None:
            self.fault()
        return self.run(settings)


def bench(folder: Path, *arguments: str, fault: Callable[[], None] | None = None) -> Done:
    """Run a command in the folder; ranks begin with a fault."""
    named = [*words_of(arguments[0]), *arguments[1:]]
    for i, flag in enumerate(named[:-1]):
        if flag in FILES:
            named[i + 1] = str(folder / named[i + 1])
    output = folder / "output"
    output.mkdir(exist_ok=True)
    for old in output.iterdir():
        old.unlink()

    def start(run: Any, settings: Any, num_ranks: int, **more: Any) -> int:
        return launch.run_ranks(Rank(run, output, fault), settings, num_ranks, **more)

    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(cli, "run_ranks", start),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        code = program_of(named[0]).main(named)
    texts = {p.name: p.read_text() for p in sorted(output.iterdir())}
    ranks = [
        "".join(text for name, text in texts.items() if name[:3] == kind) for kind in ("out", "err")
    ]
    return Done(code, out.getvalue() + ranks[0], err.getvalue() + ranks[1], folder)


def refusal(
    main: Callable[[list[str]], int],
    arguments: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> str:
    """Return the error of a command line that is refused before anything runs."""
    for name in ("run_ranks", "run_alone"):
        monkeypatch.setattr(cli, name, lambda *_, **__: pytest.fail("it ran"))
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    return printed.err


def plain_environment() -> dict[str, str]:
    """Return the environment of a process that no launcher has started."""
    return {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}


def cells_of(text: str) -> list[dict[str, str]]:
    """Return the rows of a CSV file."""
    return list(csv.DictReader(io.StringIO(text)))


def check_csv(path: Path, records: list[dict[str, Any]]) -> None:
    """Compare every cell with the records."""
    cells = cells_of(path.read_text())
    assert len(cells) == len(records)
    for row, record in zip(cells, records, strict=True):
        flat = flatten(record)
        assert set(row) >= set(flat)
        for name, value in flat.items():
            assert row[name] == ("" if value is None else str(value)), name


def check_times(record: dict[str, Any]) -> None:
    """Check that times grow with their percentiles and no rank's mean exceeds the maximum."""
    times, ranks = record["time_us"], record["rank_time_us"]
    assert 0 < times["p50"] <= times["p90"] <= times["p99"] <= times["max"]
    assert 0 < ranks["min"] <= ranks["avg"] <= ranks["max"] <= times["max"]


def table_cells(output: str) -> list[list[str]]:
    """Return the cells of a table's rows."""
    return [line.split() for line in output.splitlines() if not line.startswith("#")]
