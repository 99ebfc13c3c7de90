"""The output of a run: header and tables, records as JSON and CSV, and progress."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from ultraep_comm import system
from ultraep_comm.bench.gate import exit_code
from ultraep_comm.bench.machine import describe_machine, find_commit, format_places, gather_places
from ultraep_comm.bench.options import Settings, is_stream
from ultraep_comm.bench.sizes import format_size
from ultraep_comm.bench.table import Column, RecordTable, format_records
from ultraep_comm.errors import UltraEPError

if TYPE_CHECKING:
    from ultraep_comm.group.group import Group

FORMAT = 2  # of the documents; a change that only adds fields keeps the number
_BAR, _LINE = 24, 79  # widths of the progress display
Record = dict[str, Any]


class Report:
    """The output of one run. Every rank has a report; one rank prints and writes."""

    def __init__(self, settings: Settings, *, prints: bool) -> None:
        """Create the report; ``prints``: this rank prints and writes."""
        self.settings, self.prints = settings, prints
        self.places: list[Record] = []  # of the ranks
        self._device: Mapping[str, Any] = {}
        self._header: list[str] = []
        self._table: RecordTable | None = None
        self._columns: Sequence[Column] = ()
        self._records: list[Record] = []
        self._notes: list[str] = []

    @classmethod
    def of(cls, settings: Settings) -> Report:
        """Return the report of this process."""
        if settings.alone:
            return cls(settings, prints=True)
        import torch.distributed as dist

        return cls(settings, prints=dist.get_rank() == 0)

    # ---- before the figures ---------------------------------------------------------------------

    def place(self, group: Group, device: Mapping[str, Any] | None = None) -> None:
        """Gather the places of all ranks. Collective, but in loopback.

        ``device`` is a GPU's `Meter.describe`.
        """
        self._device = device or {}
        self.places = gather_places(group, device=device, loopback=self.settings.loopback)

    def header(
        self, what: str, lines: Iterable[str] = (), *, device: Mapping[str, Any] | None = None
    ) -> None:
        """Print version, machine and device, the places of ranks, and some lines.

        Args:
            what: the command and its variant.
            lines: about the measurement.
            device: a GPU's `Meter.describe`, of a command that does not call `place`.
        """
        self._device = device or self._device
        settings = self.settings
        where = {"engine": settings.engine, "fabric": settings.fabric}
        head = describe_run(what)
        head += [describe_device(self._device)] if self._device else []
        head += format_places(self.places, **where) if self.places else []
        self._header = [f"# {line}" for line in (*head, *lines)]
        self.show("\n".join(self._header))

    # ---- figures --------------------------------------------------------------------------------

    def columns(self, columns: Sequence[Column], least: int = 0) -> None:
        """Begin the table of records, unless it has begun.

        ``least`` is the minimum width of a column.
        """
        if self._table is None:
            self._columns, self._table = columns, RecordTable(columns, least)

    def add(self, records: Sequence[Record], *, gated: bool = True, shown: bool = True) -> None:
        """Keep records, with the gate's verdict if they are ``gated``, and print their rows.

        Else a record has the verdict that it came with, or None.
        """
        gate = self.settings.gate
        found = [{**r, "gate": gate.judge(r) if gated else r.get("gate")} for r in records]
        self._records += found
        if shown and self._table is not None:
            self.show(self._table.add(found))

    def note(self, *lines: str) -> None:
        """Print and keep lines about the records."""
        self._notes += [f"# {line}" for line in lines]
        self.show("\n".join(self._notes[len(self._notes) - len(lines) :]))

    def show(self, text: str) -> None:
        """Print lines."""
        if self.prints:
            print(text, flush=True)

    def progress(self, done: int, total: int, text: str = "") -> None:
        """Show the progress of the run on the terminal."""
        if self.prints:
            show_progress(done, total, text)

    # ---- at the end -----------------------------------------------------------------------------

    def document(self, more: Mapping[str, Any] | None = None) -> Record:
        """Return the JSON document of a run; ``more``: further fields."""
        gate = self.settings.gate.describe(self._records)
        return {
            "header": self._header,
            "columns": [astuple(column) for column in self._columns],
            "records": self._records,
            "notes": self._notes,
            "machine": {**describe_machine(), **self._device},
            **({"topology": self.places} if self.places else {}),
            "commit": find_commit(),
            "gate": gate,
            **(more or {}),
            "settings": self.settings.describe(),
        }

    def write(self, document: Mapping[str, Any]) -> None:
        """Write the files of ``--json`` and ``--csv``."""
        write_outputs(document, json_path=self.settings.json, csv_path=self.settings.csv)

    def finish(self, *, wrong: int = 0, more: Mapping[str, Any] | None = None) -> int:
        """Write the document and print which records miss the gate; return the exit status.

        Args:
            wrong: bytes or values.
            more: further fields of the document.
        """
        if self.prints:
            self.write(self.document(more))
        return exit_code(self.settings.gate, self._records, wrong, prints=self.prints)


def describe_run(command: str) -> list[str]:
    """Return the first lines of a header: the version, the command and the machine."""
    machine = describe_machine()
    memory = format_size(int(machine["memory_bytes"]))
    return [
        f"ultraep_comm {machine['ultraep_comm']}, commit {find_commit()}: {command}",
        f"machine: {machine['cpu']}, {machine['cores']} cores, {memory}, {machine['kernel']};"
        f" Python {machine['python']}, torch {machine['torch']}",
    ]


def describe_device(device: Mapping[str, Any]) -> str:
    """Return the header line of a GPU, from its `Meter.describe`."""
    memory = format_size(int(device.get("gpu_memory_bytes", 0)))
    smi = [f"{k} {device[k]}" for k in ("driver_version", "clocks_sm", "clocks_mem") if k in device]
    return (
        f"device: {device.get('gpu', 'unknown')}, {memory}, {device.get('gpu_sms', '?')} SMs;"
        f" {', '.join(smi) or 'no nvidia-smi'}"
    )


def describe_rounds(settings: Settings) -> str:
    """Return the header line of iterations and checks."""
    checked = "every one" if settings.check else "the last one"
    return f"{settings.iters} iterations after {settings.warmup}, interleaved; checked: {checked}"


def show_progress(done: int, total: int, text: str) -> None:
    """Draw a bar and ``text``; at the end clear the line. Silent if stderr is no terminal."""
    if not sys.stderr.isatty():
        return
    filled = _BAR * done // max(total, 1)
    line = f"[{'#' * filled}{'.' * (_BAR - filled)}] {done} of {total} {text}"
    shown = "" if done >= total else line[:_LINE]
    print(f"\r{shown:<{_LINE}}\r", end="", file=sys.stderr, flush=True)


# ---- files --------------------------------------------------------------------------------------


def print_records(
    columns: Sequence[Column], records: Sequence[Record], path: Path | None, **more: Any
) -> None:
    """Print a table of records; write it, machine, commit and further fields as JSON.

    For scripts without a `Report`.
    """
    print(format_records(columns, records), flush=True)
    document = {
        "header": [f"# commit {find_commit()}"],
        "columns": [astuple(column) for column in columns],
        "records": records,
        "notes": [],
        "machine": describe_machine(),
        "commit": find_commit(),
        **more,
    }
    write_outputs(document, json_path=path, csv_path=None)


def write_outputs(
    document: Mapping[str, Any], *, json_path: Path | None, csv_path: Path | None
) -> None:
    """Write a document as JSON and its records as CSV, each file completely or not at all.

    Raises:
        UltraEPError: a file could not be written; the other one is still written.
    """
    texts: dict[str, tuple[Path | None, Callable[[], str]]] = {
        "--json": (json_path, lambda: format_json({"format": FORMAT, **document})),
        "--csv": (csv_path, lambda: format_csv(document["records"])),
    }
    failed = []
    for flag, (path, make_text) in texts.items():
        try:
            if path is not None:
                write_output(flag, path, make_text())
        except UltraEPError as error:
            failed.append(str(error))
    if failed:
        raise UltraEPError("; ".join(failed))


def format_json(document: Mapping[str, Any]) -> str:
    """Return a document as JSON, with one line for each field and for each item of a list."""

    def format_field(value: object) -> str:
        if not isinstance(value, list | tuple) or not value:
            return json.dumps(value)
        return "[\n    " + ",\n    ".join(map(json.dumps, value)) + "\n  ]"

    fields = (f"  {json.dumps(name)}: {format_field(value)}" for name, value in document.items())
    return "{\n" + ",\n".join(fields) + "\n}\n"


def write_output(flag: str, path: Path, text: str) -> None:
    """Replace a file atomically, also behind a symbolic link, or append to a stream.

    Raises:
        UltraEPError: it could not be written; the message names ``flag``.
    """

    def write(file: BinaryIO) -> None:
        file.write(text.encode())

    try:
        if is_stream(path):
            with path.open("a") as stream:
                stream.write(text)
        else:
            system.write_whole(path.resolve(), write)
    except OSError as error:
        raise UltraEPError(f"{flag} {path}: {error.strerror}") from None


def format_csv(records: Sequence[Mapping[str, Any]]) -> str:
    """Return records as CSV, with one column for each field; None is an empty cell."""
    flat = [flatten(record) for record in records]
    columns = list(dict.fromkeys(name for record in flat for name in record))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue()


def flatten(record: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return ``{"time_us": {"p50": 3.5}}`` as ``{"time_us.p50": 3.5}``, with lists as JSON."""
    flat: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{name}."))
        else:
            text = json.dumps(value) if isinstance(value, list | tuple) else value
            flat[f"{prefix}{name}"] = text
    return flat
