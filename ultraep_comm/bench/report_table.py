"""What a run of replicate or reduce on the CPU prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ultraep_comm.bench.figures import recorded_time, time_titles
from ultraep_comm.bench.placement import format_places
from ultraep_comm.bench.report import (
    baseline_key,
    describe_run,
    describe_settings,
    imbalance_before,
)
from ultraep_comm.bench.settings import ReplicateSettings
from ultraep_comm.bench.sizes import describe_segments, format_size
from ultraep_comm.bench.table import GrowingTable
from ultraep_comm.plan import Plan
from ultraep_comm.schedule import transfer_bound

_LEAST_WIDTH = 9  # where rows of several sizes are to come


def format_header(settings: ReplicateSettings, plan: Plan, places: Sequence[dict[str, Any]]) -> str:
    """Return what a reader must know before the figures."""
    lines = [
        *describe_run(settings.op),
        *format_places(places, engine=settings.engine, fabric=settings.fabric),
        f"ranks {settings.num_ranks}, experts {settings.num_experts}, slots {settings.slots},"
        f" expert {describe_sizes(settings)}",
        *([", ".join(f"{k} {v}" for k, v in settings.more.items())] if settings.more else []),
        f"load: {settings.load_source}; imbalance {imbalance_before(settings):.3f} before,"
        f" {plan.imbalance:.3f} after",
        _describe_plan(plan),
        f"{settings.iters} iterations after {settings.warmup}, interleaved; checked:"
        f" {'every one' if settings.check else 'the last one'}",
        *describe_limits(settings),
    ]
    return "\n".join(f"# {line}" for line in lines)


def describe_sizes(settings: ReplicateSettings) -> str:
    """Return the one size and its segments, or the range."""
    if not settings.sweep:
        return describe_segments(settings.segments)
    first, last = (sum(settings.sizes[i].values()) for i in (0, -1))
    parts = ", ".join(settings.segments)
    return f"{format_size(first)} to {format_size(last)}, {len(settings.sizes)} sizes ({parts})"


def describe_limits(settings: ReplicateSettings) -> list[str]:
    """Return the line that names the gate, and nothing where there is none."""
    gate, parts = settings.gate, []
    if gate.min_gbps is not None:
        parts.append(f"critbw at least {gate.min_gbps:g} GB/s")
    if gate.max_over_bound is not None:
        rate_of = "the measured copy rate" if settings.link_gbps is None else "the link's rate"
        parts.append(f"time at most {gate.max_over_bound:g} times its bound at {rate_of}")
    return [f"gate: {', '.join(parts)}"] if parts else []


def _describe_plan(plan: Plan) -> str:
    if plan.num_replicas == 0:
        return "plan: no replicas; nothing to transfer"
    slots = plan.slot_expert
    experts = len(set(slots[slots >= 0].tolist()))
    bound = transfer_bound(plan.slot_expert, home=plan.home)
    return (
        f"plan: {plan.num_replicas} replicas of {experts} experts, at most"
        f" {plan.max_exports} exported and {plan.max_imports} imported by a rank; T* = {bound:.4g}"
        " experts over one link"
    )


class ResultTable:
    """The table: a row for each size and mode, then what they are compared with.

    Rows are JSON records and nothing else, so that a file can be printed as its run was.
    """

    def __init__(
        self, settings: Mapping[str, Any], gate: Mapping[str, Any] | None, baselines: Sequence[str]
    ) -> None:
        """Choose the columns: those of sweeps, bounds and gates only where there are such.

        Args:
            settings: a document's.
            gate: a document's.
            baselines: what a user would do, and what the machine can do.
        """
        self._user, self._machine = baselines
        self._times = tuple(settings["times"])
        self._sizes, self._workers = len(settings["sizes"]) > 1, len(settings["num_sms"]) > 1
        self._gate = gate is not None
        self._bound = settings["link_gbps"] is not None or (
            gate is not None and gate["max_over_bound"] is not None
        )
        several = self._sizes or self._workers
        headers = list(zip(*self._columns(), strict=True))
        self._table = GrowingTable(headers, _LEAST_WIDTH if several else 0)

    def add(self, records: Sequence[Mapping[str, Any]]) -> str:
        """Return the rows of one size, the first time with the titles before them."""
        return self._table.add([self._row(record) for record in records])

    def _columns(self) -> list[tuple[str, str]]:
        return [
            ("mode", ""),
            *([("size", "(B)")] if self._sizes else []),
            *([("SMs", "")] if self._workers else []),
            *(("replicas", ""), ("bytes", "(B)")),
            *((title, "(us)") for title in time_titles(self._times)),
            *(("algbw", "(GB/s)"), ("critbw", "(GB/s)"), ("model", "/T*")),
            *([("time", "/bound")] if self._bound else []),
            *((self._machine, "/time"), (self._user, "/time"), ("#wrong", "(B)")),
            *([("gate", "")] if self._gate else []),
        ]

    def _row(self, record: Mapping[str, Any]) -> list[str]:
        mode, ours = record["mode"], "chosen" in record
        replicas, expert_bytes = _whole(record, "replicas"), _whole(record, "expert_bytes")
        relayed = f"{mode} ({record['chosen']})" if ours and record["chosen"] != mode else mode
        paired = (
            f"over_{baseline_key(self._machine)}",
            f"speedup_over_{baseline_key(self._user)}",
        )
        return [
            relayed,
            *([str(expert_bytes)] if self._sizes else []),
            *([str(record["num_sms"])] if self._workers else []),
            str(replicas),
            str(replicas * expert_bytes),
            *(f"{recorded_time(record, name):.1f}" for name in self._times),
            f"{record['algbw_gbps']:.2f}",
            f"{record['critical_gbps']:.2f}",
            _show(record.get("over_model"), ".3f"),
            *([_show(record.get("over_bound"), ".3f")] if self._bound else []),
            *(_show(record.get(name), ".2f") for name in paired),
            str(record["wrong_bytes"]),
            *([format_verdict(record if ours else None)] if self._gate else []),
        ]


def make_table(settings: ReplicateSettings, baselines: Sequence[str]) -> ResultTable:
    """Return the table of a run."""
    gate = settings.gate.describe() if settings.gate else None
    return ResultTable(describe_settings(settings), gate, baselines)


def format_document(document: Mapping[str, Any]) -> str:
    """Return what the run of a document of `report.make_document` printed."""
    records, baselines = document["records"], document["baselines"]
    names = [baseline["mode"] for baseline in baselines[:2]]
    table = ResultTable(document["settings"], document["gate"], names)
    parts = list(document["header"])
    for user, machine in zip(baselines[::2], baselines[1::2], strict=True):
        run = [r for r in records if _size_of(r) == _size_of(user)]
        parts.append(table.add([*run, user, machine]))
    return "\n".join(parts)


def _size_of(record: Mapping[str, Any]) -> tuple[Any, Any]:
    return record["expert_bytes"], record["num_sms"]


def format_verdict(record: Mapping[str, Any] | None) -> str:
    """Return the cell of the column `gate`."""
    if record is None:
        return "-"
    return "ok" if record["gate"] == "met" else f"FAIL:{record['gate']}"


def _whole(record: Mapping[str, Any], name: str) -> int:
    """Return an integer of a file: a text, for one, would be repeated by a product."""
    value = record[name]
    if not isinstance(value, int):
        raise TypeError(f"{name} is a {type(value).__name__}")
    return value


def _show(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
