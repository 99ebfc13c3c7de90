"""Run cases of the table, each framework in a process of its own, and write what they find."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessException, start_processes

from frameworks.table import FRAMEWORKS, Program
from ultraep_comm.bench.launch import run_ranks
from ultraep_comm.bench.machine import find_commit

MISSING = 5  # the exit status if there is no such framework, or too old a one


@dataclass(frozen=True)
class Settings:
    """What the ranks of a program are given.

    Attributes:
        program: whose cases they run.
        cases: their names.
        source: the framework's unpacked source distribution.
        folder: which they share.
    """

    program: Program
    cases: list[str]
    source: Path | None
    folder: Path


def run_cases(settings: Settings) -> int:
    """Run cases on this rank; rank 0 leaves what they find. An error ends a case, and the run."""
    torch.set_num_threads(1)
    rank, ranks = 0, settings.program.num_ranks
    if dist.is_initialized():
        rank = dist.get_rank()
        places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        os.environ.update({name: str(value) for name, value in places.items()})
    module = importlib.import_module(f"frameworks.{settings.program.module}")
    for number, name in enumerate(settings.cases):
        folder = settings.folder / str(number)
        folder.mkdir(exist_ok=True)
        given = settings.program.cases[name]
        arguments = (given, settings.source, folder) if given.source else (given, folder)
        try:
            found = module.run(*arguments)
        except Exception:
            found = {"failed": [traceback.format_exc()]}
        if rank == 0 or ("failed" in found and len(found) == 1):
            (folder / f"found-{rank}.json").write_text(json.dumps(found))
            print(describe(name, found).splitlines()[0], file=sys.stderr, flush=True)
        if len(found) == 1 and found["failed"]:
            return 1  # ranks may be apart now
    return 0


def _run_apart(settings: Settings) -> None:
    """Run cases in a process that may start others. Frameworks change each other's modules."""
    with contextlib.suppress(ProcessException):  # what it has left says how far it came
        start_processes(_be_apart, (settings,), nprocs=1, start_method="spawn")


def _be_apart(_: int, settings: Settings) -> None:
    sys.exit(run_cases(settings))


def run_framework(name: str, chosen: list[str], source: Path | None) -> dict[str, Any]:
    """Return the findings of each case; those that cannot run say why under ``skipped``."""
    findings: dict[str, Any] = {}
    for program in FRAMEWORKS[name][1]:
        cases = [case for case in program.cases if not chosen or case in chosen]
        for case in cases:
            if program.cases[case].source and source is None:
                findings[case] = {"skipped": "needs --source FOLDER"}
        cases = [case for case in cases if case not in findings]
        if not cases:
            continue
        with tempfile.TemporaryDirectory() as folder:
            settings = Settings(program, cases, source, Path(folder))
            if program.num_ranks == 1:
                _run_apart(settings)
            else:
                module = f"frameworks.{program.module}"  # imported once
                run_ranks(run_cases, settings, program.num_ranks, preload=module)
            for number, case in enumerate(cases):
                found = sorted((Path(folder) / str(number)).glob("found-*.json"))
                findings[case] = (
                    json.loads(found[0].read_text()) if found else {"failed": ["did not end"]}
                )
    return findings


def why_missing(name: str) -> str | None:
    """Return why a framework's cases cannot run; None if they can."""
    least, _ = FRAMEWORKS[name]
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return f"{name} is not installed"
    if tuple(map(int, re.findall(r"\d+", version)[: len(least)])) < least:
        return f"{name} is {version}; expected {'.'.join(map(str, least))} or newer"
    return None


def describe(name: str, found: Mapping[str, Any]) -> str:
    """Return what is printed of a case."""
    if "skipped" in found:
        return f"  {name}: skipped, {found['skipped']}"
    failed = "".join(f"\n    {line}" for line in "\n".join(found["failed"]).splitlines())
    shown = summarise({k: v for k, v in found.items() if k != "failed"})
    verdict = f"  {name}: {'FAILED' if failed else 'passed'}{failed}"
    return verdict if shown == "{}" else f"{verdict}\n    {shown}"


def format_result(result: Mapping[str, Any]) -> str:
    """Return a result as JSON, with one line for each case."""
    head = json.dumps({key: value for key, value in result.items() if key != "cases"})
    cases = (f"{json.dumps(name)}: {json.dumps(found)}" for name, found in result["cases"].items())
    return f'{head[:-1]}, "cases": {{\n' + ",\n".join(cases) + "\n}}\n"


def summarise(figures: Mapping[str, Any]) -> str:
    """Return one line of a case's figures; the file of ``--json`` has all."""
    if "gradients" not in figures:
        return textwrap.shorten(json.dumps(figures), 200, placeholder=" ...")
    losses = [", ".join(f"{loss:.6f}" for loss in run) for run in figures["losses"]]
    _, before, after, replicas = zip(
        *(figures["imbalance"] or [("", math.nan, math.nan, 0)]), strict=True
    )
    return (
        f"losses {losses[0]}; with replicas {losses[1]}; gradients {max(figures['gradients']):.1e}"
        f" apart; imbalance {max(before):.2f} to {max(after):.2f}, up to {max(replicas)} replicas;"
        f" our calls {figures['share']:.0%} of a step"
    )


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python tools/frameworks")
    parser.add_argument("framework", nargs="?", choices=list(FRAMEWORKS), help="default: all")
    parser.add_argument("cases", nargs="*", metavar="CASE", help="default: all")
    parser.add_argument("--quick", action="store_true", help="the cases of the first tier of tests")
    parser.add_argument("--source", type=Path, help="its unpacked source distribution, for tests")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what is found")
    options = parser.parse_args()
    if options.framework is None:
        flags = ["--quick"] if options.quick else []
        command = [sys.executable, str(Path(__file__).parent)]
        done = [subprocess.run([*command, name, *flags], check=False) for name in FRAMEWORKS]
        return max({one.returncode for one in done} - {MISSING}, default=MISSING)
    name = options.framework
    if reason := why_missing(name):
        print(f"{name}: {reason}")
        return MISSING
    known = {c: case for program in FRAMEWORKS[name][1] for c, case in program.cases.items()}
    if unknown := set(options.cases) - set(known):
        parser.error(f"no cases {sorted(unknown)}; there are {list(known)}")
    chosen = options.cases or [c for c, case in known.items() if case.is_quick or not options.quick]
    names = (name, "torch", "ultraep_comm")
    result: dict[str, Any] = {
        "versions": {each: importlib.metadata.version(each) for each in names},
        "commit": find_commit(),
        "cases": run_framework(name, chosen, options.source and options.source.resolve()),
    }
    print(", ".join(f"{each} {version}" for each, version in result["versions"].items()))
    for case, found in result["cases"].items():
        print(describe(case, found))
    if options.json is not None:
        options.json.write_text(format_result(result))
    return int(any(found.get("failed") for found in result["cases"].values()))
