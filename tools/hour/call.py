"""A call: some stages, within a limit, their results in one archive, and the report at the end."""

from __future__ import annotations

import json
import platform
import re
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hour.running import Budget, Stage, replacing, run_stage, write_whole
from hour.stages import Plan

ARCHIVE = "results.tgz"
VERSION = re.compile(r'(\bcommit"?:? "?)v\d+\.\d+\.\d+\b')
MAX_BYTES = 15 << 20  # of all files together, before they are compressed


@dataclass(frozen=True)
class Results:
    """What a call leaves.

    Attributes:
        out: where the archive goes.
        files: of the archive, as they are written.
        header: what is tested, and on what: results of others are not kept.
    """

    out: Path
    files: Path
    header: dict[str, Any]

    def earlier(self) -> dict[str, dict[str, Any]]:
        """Bring back the files of an earlier call; return its records, by stage."""
        self.files.mkdir(parents=True, exist_ok=True)
        try:
            with tarfile.open(self.out / ARCHIVE) as archive:
                members = [m for m in archive if m.isfile() and "/" not in m.name]
                contents = {m.name: archive.extractfile(m) for m in members}
                files = {name: file.read() for name, file in contents.items() if file}
            found = json.loads(files["summary.json"])
        except (OSError, ValueError, KeyError, tarfile.TarError, EOFError):
            return {}
        if any(found.get(key) != value for key, value in self.header.items()):
            return {}
        for name, data in files.items():
            (self.files / name).write_bytes(data)
        return {record["stage"]: record for record in found["stages"]}

    def to_run(
        self, stages: Mapping[str, Stage], names: Sequence[str], *, resume: bool
    ) -> list[str]:
        """Return the stages to run: with `resume` without what passed, but for what is of the
        machine.
        """
        earlier = self.earlier() if resume else {}
        passed = {name for name, record in earlier.items() if record["status"] == "passed"}
        return [name for name in names if name not in passed or stages[name].of_machine]

    def write(self, records: Sequence[dict[str, Any]]) -> None:
        """Write the summary and the archive, without the largest files if they are too many."""
        summary = {**self.header, "python": platform.python_version(), "stages": records}
        write_whole(self.files / "summary.json", json.dumps(summary, indent=1) + "\n")
        self.name_commit()
        self.out.mkdir(parents=True, exist_ok=True)
        sizes = sorted((p.stat().st_size, p.name) for p in self.files.iterdir() if p.is_file())
        room = MAX_BYTES
        with (
            replacing(self.out / ARCHIVE) as partial,
            tarfile.open(partial, "w:gz") as archive,
        ):
            for size, name in sizes:
                room -= size
                if room >= 0:
                    archive.add(self.files / name, name)

    def name_commit(self) -> None:
        """Name the commit where benchmarks of an installed copy know only its version."""
        commit = self.header["commit"]
        name = commit.removesuffix("+")[:12] + ("-dirty" if commit.endswith("+") else "")
        for path in self.files.glob("*.json"):
            text = path.read_text()
            if text != (named := VERSION.sub(rf"\g<1>{name}", text)):
                write_whole(path, named)


def run_stages(
    plan: Plan, names: Sequence[str], results: Results, budget: Budget, env: dict[str, str]
) -> list[dict[str, Any]]:
    """Run stages, and write the results after each; return their records."""
    stages = plan.stages()
    plan.empty.mkdir(parents=True, exist_ok=True)
    records = results.earlier()
    for name in names:
        print(f"{name}: {stages[name].title}", flush=True)
        records[name] = run_stage(name, stages[name], results.files, budget, plan.empty, env)
        print(f"{name}: {records[name]['status']}, {records[name]['seconds']} s", flush=True)
        results.write([records[name] for name in stages if name in records])
    return [records[name] for name in names]
