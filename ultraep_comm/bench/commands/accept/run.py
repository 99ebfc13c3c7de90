"""The acceptance test: the doctor and the stages, one after the other on the same ranks."""

from __future__ import annotations

import importlib
import math
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch.distributed as dist

from ultraep_comm.bench.commands.accept import AcceptSettings, Stage
from ultraep_comm.bench.commands.links.report import describe_slow
from ultraep_comm.bench.launch import GATE_MISSED, WRONG
from ultraep_comm.bench.machine import gather_json
from ultraep_comm.bench.report import Record, Report
from ultraep_comm.doctor.diagnose import ERROR, diagnose
from ultraep_comm.doctor.facts import collect
from ultraep_comm.errors import UltraEPError
from ultraep_comm.system import FAILED

_SLOW_LINKS = 5  # to name
_DOCTOR_SECONDS = 300.0  # of each probe; all machines may import torch from one network disk
_NAMES = {0: "ok", WRONG: "WRONG BYTES", GATE_MISSED: "TOO SLOW"}
_WORST = (0, GATE_MISSED, FAILED, WRONG)  # of exit statuses, the worst last


@dataclass(frozen=True)
class Outcome:
    """What became of a stage.

    Attributes:
        stage: its name.
        status: an exit status.
        seconds: that it took.
        found: lines about what was found.
        document: of the measurement; empty if it failed.
    """

    stage: str
    status: int
    seconds: float
    found: list[str]
    document: Mapping[str, Any] = field(default_factory=dict)


class StageReport(Report):
    """The report of a stage: the acceptance test keeps the document, instead of a file."""

    def __init__(self, stage: Stage, *, prints: bool) -> None:
        """Create the report; ``prints``: this rank prints, and keeps the document."""
        super().__init__(stage.settings, prints=prints)
        self.written: Mapping[str, Any] = {}

    def write(self, document: Mapping[str, Any]) -> None:
        """Keep the document."""
        self.written = document


def run(settings: AcceptSettings, report: Report) -> int:
    """Run all stages, whichever fail; return the worst exit status. Collective."""
    names = ", ".join(["doctor", *(stage.name for stage in settings.stages)])
    report.show(f"# accept: {names}; {settings.num_ranks} ranks, every byte checked")
    outcomes = [ask_doctors(settings)]
    for stage in settings.stages:
        report.show("")
        outcomes.append(run_stage(stage, prints=report.prints))
    report.show("\n" + "\n".join(format_page(outcomes)))
    status = max((outcome.status for outcome in outcomes), key=_WORST.index)
    if report.prints:
        for outcome in outcomes:
            report.add(outcome.document.get("records", ()), gated=False, shown=False)
        stages = [asdict(outcome) for outcome in outcomes]
        report.write(report.document({"passed": status == 0, "stages": stages}))
    return status


def ask_doctors(settings: AcceptSettings) -> Outcome:
    """Run the doctor on every machine, by its first rank. Collective, but in loopback."""
    started, host = time.monotonic(), socket.gethostname()
    rank, hosts = (0, [host]) if settings.alone else (dist.get_rank(), gather_json(host))
    required = ["cuda"] if settings.engine == "cuda" else []
    is_first = hosts.index(host) == rank
    errors = [
        f"{host}: {finding.text}{f'; run: {finding.mend}' if finding.mend else ''}"
        for finding in (diagnose(collect(_DOCTOR_SECONDS), required) if is_first else ())
        if finding.severity == ERROR
    ]
    everyone = [errors] if settings.alone else gather_json(errors)
    found = [text for texts in everyone for text in texts]
    return Outcome("doctor", FAILED if found else 0, time.monotonic() - started, found)


def run_stage(stage: Stage, *, prints: bool) -> Outcome:
    """Run a stage. Collective, but in loopback."""
    report, started = StageReport(stage, prints=prints), time.monotonic()
    try:
        status: int = importlib.import_module(stage.module).run(stage.settings, report)
        found = list(describe(stage, report.written))
    except UltraEPError as error:
        status, found = FAILED, [f"{type(error).__name__}: {error}"]
    return Outcome(stage.name, status, time.monotonic() - started, found, report.written)


def describe(stage: Stage, document: Mapping[str, Any]) -> Iterator[str]:
    """Yield lines about what was measured, and what is bad about it."""
    if not document:  # of another rank
        return
    records: list[Record] = document["records"]
    if stage.name == "links":
        cells = [[math.nan if x is None else x for x in row] for row in document["matrix_gbps"]]
        yield from describe_slow(np.array(cells), _SLOW_LINKS)
        for r in records:
            if r["wrong_bytes"]:
                yield f"{r['source']} to {r['destination']}: {r['wrong_bytes']} wrong bytes"
    for record in records:
        if record["op"] in ("links", "baseline"):
            continue
        over = record["over_bound"]
        yield (
            f"mode {record['mode']}: {record['critical_gbps']:.4g} GB/s"
            + (f", {over:.3f} of the bound" if over is not None else "")
            + (f", {record['wrong_bytes']} wrong bytes" if record["wrong_bytes"] else "")
        )
    if text := stage.settings.gate.explain(records):
        yield text


def format_page(outcomes: list[Outcome]) -> Iterator[str]:
    """Yield the lines of the page: the verdict, and a row for each stage with its lines."""
    failed = [outcome.stage for outcome in outcomes if outcome.status]
    verdict = f"FAIL: {', '.join(failed)}" if failed else "PASS"
    yield f"# {verdict}; {sum(outcome.seconds for outcome in outcomes):.0f} s"
    for outcome in outcomes:
        name = _NAMES.get(outcome.status, "FAILED")
        yield f"  {outcome.stage:<10}  {name:<11}  {outcome.seconds:6.1f} s"
        yield from (f"      {line}" for line in outcome.found)
