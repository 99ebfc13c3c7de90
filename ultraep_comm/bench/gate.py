"""Limits for the records of a run. Records that miss one are named and change the exit status."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ultraep_comm.bench.launch import GATE_MISSED, WRONG
from ultraep_comm.bench.sizes import format_size

_NAMED = 8  # records to name that miss a gate; further ones are only counted


@dataclass(frozen=True, kw_only=True)
class Gate:
    """Limits that every record must meet; None: no limit.

    Attributes:
        min_gbps: minimum of `critical_gbps`, or of a link's `gbps`, in 10^9 bytes per second.
        max_over_bound: maximum of `over_bound`: time, or a plan's imbalance, over its bound.
    """

    min_gbps: float | None = None
    max_over_bound: float | None = None

    def __bool__(self) -> bool:
        """Return whether there is a limit."""
        return self.min_gbps is not None or self.max_over_bound is not None

    def judge(self, record: dict[str, Any]) -> str | None:
        """Return `gate` of a record: "met" or the limits missed; None without a limit."""
        if not self:
            return None
        missed = []
        if self.min_gbps is not None and not _rate(record) >= self.min_gbps:
            missed.append("bandwidth")
        if self.max_over_bound is not None:
            over = record["over_bound"]
            if over is None or not over <= self.max_over_bound:
                missed.append("bound")
        return "+".join(missed) or "met"

    def describe(self, records: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
        """Return the limits and whether all records meet them, for JSON; None without a limit."""
        limits = {"min_bandwidth_gbps": self.min_gbps, "max_over_bound": self.max_over_bound}
        return {**limits, "met": not self.explain(records)} if self else None

    def explain(self, records: Sequence[dict[str, Any]]) -> str:
        """Return one line that names the records that miss a limit; empty if none does."""
        missed = [r for r in records if r["gate"] not in (None, "met")]
        if not missed:
            return ""
        missed.sort(key=_slowness, reverse=True)
        judged = sum(r["gate"] is not None for r in records)
        more = f" and {len(missed) - _NAMED} more" if len(missed) > _NAMED else ""
        named = "; ".join(_describe(record) for record in missed[:_NAMED])
        limits = []
        if self.min_gbps is not None:
            limits.append(f"at least {self.min_gbps:g} GB/s")
        if self.max_over_bound is not None:
            limits.append(f"at most {self.max_over_bound:g} times the bound")
        expected = " and ".join(limits)
        return f"gate not met by {len(missed)} of {judged}, expected {expected}: {named}{more}"


def exit_code(gate: Gate, records: Sequence[dict[str, Any]], wrong: int, *, prints: bool) -> int:
    """Return the exit status of a run; print on stderr which records miss the gate."""
    text = gate.explain(records)
    if text and prints:
        print(text, file=sys.stderr, flush=True)
    if wrong:
        return WRONG
    return GATE_MISSED if text else 0


def _rate(record: dict[str, Any]) -> float:
    return float(record["gbps"] if "gbps" in record else record["critical_gbps"])


def _slowness(record: dict[str, Any]) -> float:
    """Return the sort key of a record: by bandwidth if it has one, else by time over bound."""
    if "gbps" in record or "critical_gbps" in record:
        return -_rate(record)
    return math.inf if record["over_bound"] is None else float(record["over_bound"])


def _describe(record: dict[str, Any]) -> str:
    parts = []
    if "bandwidth" in record["gate"]:
        parts.append(f"{_rate(record):.4g} GB/s")
    if "bound" in record["gate"]:
        over = record["over_bound"]
        parts.append("no bound" if over is None else f"{over:.4g} times the bound")
    return f"{_subject(record)} {', '.join(parts)}"


def _subject(record: dict[str, Any]) -> str:
    if "source" in record:
        return f"{record['source']} to {record['destination']}"
    if record.get("op") == "plan":
        return f"{record['ranks']}/{record['experts']}/{record['slots']} {record['family']}"
    for name in ("routing", "row"):
        if name in record:
            return str(record[name])
    workers = record.get("num_sms")
    parts = [record["mode"], format_size(record["expert_bytes"])]
    return " ".join(parts + ([f"{workers} SMs"] if workers else []))
