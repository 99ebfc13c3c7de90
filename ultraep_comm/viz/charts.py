"""Charts, rows of bars: of a timeline, recorded calls, a predicted transfer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ultraep_comm import _core
from ultraep_comm.model import predict
from ultraep_comm.model.timeline import Span
from ultraep_comm.plan.plan import Plan
from ultraep_comm.recording.file import OPERATIONS, Recording
from ultraep_comm.viz.style import count

CALL_LANE = -1
NEVER = 2**63 - 1
FAILED = "failed"  # kind of a call that failed, or came after a failed one


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A time span of a rank."""

    rank: int  # its row
    lane: int  # in the row, so that no two bars overlap; CALL_LANE: behind them
    kind: str  # key of the legend
    begin_us: float
    end_us: float  # equal to begin_us if the end is not known
    label: str  # a few characters to write into the bar
    details: dict[str, int | str] = field(default_factory=dict)  # values by name


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Rows of bars."""

    title: str  # what the picture shows
    subtitle: str  # where the data is from
    num_ranks: int  # rows
    bars: Sequence[Bar]  # sorted by rank, lane and begin
    marks: Mapping[str, float] = field(default_factory=dict)  # lines: microseconds by label
    rows: Sequence[str] = ()  # their names; none: they are ranks

    def lanes_of(self, rank: int) -> int:
        """Return the number of lanes of a row, at least 1."""
        return 1 + max((bar.lane for bar in self.bars if bar.rank == rank), default=0)

    @property
    def end_us(self) -> float:
        """Return the end of the last bar."""
        return max((bar.end_us for bar in self.bars), default=0.0)


# ---- recorded calls -----------------------------------------------------------------------------


def chart_calls(
    recordings: Sequence[Recording], *, source: str, epochs: range | None = None
) -> Chart:
    """Return the chart of recorded calls, one after the other on every rank.

    Times are relative to the first call shown. Ranks on one machine share a clock; several machines
    are aligned by their wall clocks, as accurately as those are synchronised.
    """
    clocks: dict[str, int] = {}  # offset of each machine's clock to wall time, by its first rank
    for r in recordings:
        clocks.setdefault(r.machine, r.epoch_ns)
    shift = {r.rank: clocks[r.machine] - min(clocks.values()) for r in recordings}
    shown = {
        r.rank: [i for i, e in enumerate(r.calls["epoch"].tolist()) if not epochs or e in epochs]
        for r in recordings
    }
    begins = [
        int(r.calls["begin_ns"][i]) + shift[r.rank] for r in recordings for i in shown[r.rank]
    ]
    bars, endless = [], 0
    for r in recordings:
        calls, moved = r.calls[shown[r.rank]], r.bytes_of_rank()[shown[r.rank]]
        since = shift[r.rank] - min(begins, default=0)
        begin, end = (calls["begin_ns"] + since) / 1e3, (calls["end_ns"] + since) / 1e3
        unknown = calls["end_ns"] < 0
        lost = unknown & (calls["epoch"] >= (r.failed_epoch or NEVER))
        endless += int((unknown & ~lost).sum())
        extents = list(zip(begin.tolist(), np.where(unknown, begin, end).tolist(), strict=True))
        for i, lane in enumerate(_pack(extents)):
            call = calls[i]
            operation, label = OPERATIONS[call["operation"]], f"#{call['epoch']}"
            details: dict[str, int | str] = {"operation": operation, "epoch": int(call["epoch"])}
            if call["layer"] >= 0:
                label = f"L{call['layer']} m{call['microbatch']}"
                details |= {name: int(call[name]) for name in ("layer", "microbatch")}
            if call["mode"] >= 0:
                details["mode"] = _core.Mode(call["mode"]).name.lower()
            if moved[i] >= 0:
                details["bytes"] = int(moved[i])
            bars.append(
                Bar(
                    rank=r.rank,
                    lane=lane,
                    kind=FAILED if lost[i] else operation,
                    begin_us=extents[i][0],
                    end_us=extents[i][1],
                    label=label,
                    details=details,
                )
            )
    failed = min((r.failed_epoch for r in recordings if r.failed_epoch), default=0)
    subtitle = f"{source}: {count(len(recordings), 'rank')} of {recordings[0].num_ranks}"
    subtitle += f", {count(len(begins), 'call')}"
    subtitle += f"; {count(endless, 'call')} without a known end" if endless else ""
    subtitle += f"; call {failed} failed" if failed else ""
    return Chart(
        title="Calls of every rank, as recorded",
        subtitle=subtitle,
        num_ranks=recordings[0].num_ranks,
        bars=_sorted(bars),
    )


def _sorted(bars: list[Bar]) -> list[Bar]:
    return sorted(bars, key=lambda bar: (bar.rank, bar.lane, bar.begin_us, bar.end_us))


def _pack(extents: Sequence[tuple[float, float]]) -> list[int]:
    """Return a lane for each (begin, end): the lowest that is free at its begin."""
    ends: list[float] = []  # of what is in each lane
    result = [0] * len(extents)
    for i in sorted(range(len(extents)), key=extents.__getitem__):
        begin, end = extents[i]
        result[i] = next((lane for lane, last in enumerate(ends) if last <= begin), len(ends))
        ends[result[i] : result[i] + 1] = [end]
    return result


# ---- predictions --------------------------------------------------------------------------------

_PIECE = ["kind", "expert", "piece"]  # identifies the spans of one piece
_WIDTHS = 400  # pauses shorter than the transfer over this are too short for a picture
_LANES = 6  # of a rank, in a picture


def predict_charts(
    plan: Plan,
    expert_bytes: int,
    *,
    machine: str,
    mode: str,
    source: str,
    residents: NDArray[np.int32] | None = None,
) -> tuple[Chart, Chart]:
    """Return two charts of one predicted transfer: simplified for a picture, and in full.

    ``residents`` are the experts that slots ``[G, S]`` hold already, -1: none.

    Raises:
        UltraEPError: the model rejects the machine, the mode or the plan.
    """
    found = predict(plan, expert_bytes, machine, mode, residents=residents, timeline=True)
    text: dict[str, Any] = {
        "title": "One transfer, rank by rank",
        "subtitle": f"{source}, predicted for {machine}, mode {found.mode}:"
        f" {found.time_us:,.1f} us, {found.over_bound:.3f} of the bound",
        "marks": {f"bound, {found.bound_us:,.1f} us": float(found.bound_us)},
    }
    spans, gap_us = found.timeline, found.time_us / _WIDTHS
    assert spans is not None
    drawn = chart_timeline(spans, plan.num_ranks, **text, gap_us=gap_us, max_lanes=_LANES)
    return drawn, chart_timeline(spans, plan.num_ranks, **text)


def chart_timeline(
    spans: NDArray[np.void],
    num_ranks: int,
    *,
    gap_us: float = 0.0,
    max_lanes: int | None = None,
    **text: Any,
) -> Chart:
    """Return the chart of one transfer: pieces and waits in lanes, the calls behind them.

    A piece is an entry of a rank's worklist: tiles of one expert that it stores or loads. Its
    overlapping tiles, to any peers, form one bar, and all its bars share a lane.

    Args:
        spans: the timeline of the transfer.
        num_ranks: G.
        gap_us: pauses of a piece up to this long are not shown.
        max_lanes: pieces of a rank that needs more lanes are merged by expert; None: no limit.
        text: further attributes of the chart.
    """
    bars = []
    for rank in range(num_ranks):
        own = spans[spans["rank"] == rank]
        row = _bars_of_rank(own, gap_us)
        if max_lanes is not None and max((bar.lane for bar in row), default=0) >= max_lanes:
            own = own.copy()
            own["piece"] = -1
            row = _bars_of_rank(own, gap_us)
        bars += row
    return Chart(num_ranks=num_ranks, bars=_sorted(bars), **text)


def _bars_of_rank(spans: NDArray[np.void], gap_us: float) -> list[Bar]:
    spans = np.sort(spans, order=[*_PIECE, "begin_us", "end_us"])
    pieces = _split(spans, spans[_PIECE][1:] != spans[_PIECE][:-1])
    rows = []
    for piece in pieces:
        reached = np.maximum.accumulate(piece["end_us"])
        apart = piece["begin_us"][1:] > reached[:-1] + gap_us
        row = [_bar_of(part) for part in _split(piece, apart)]
        # The bars of a piece share a lane; waits are apart.
        rows += [[bar] for bar in row] if piece["kind"][0] == Span.WAIT else [row]
    calls = [bar for row in rows for bar in row if bar.kind == "call"]
    others = [row for row in rows if row[0].kind != "call"]
    lanes = _pack([(row[0].begin_us, row[-1].end_us) for row in others])
    placed = [replace(b, lane=n) for row, n in zip(others, lanes, strict=True) for b in row]
    return [*calls, *placed]


def _split(spans: NDArray[np.void], where: NDArray[np.bool_]) -> list[NDArray[np.void]]:
    """Return the parts of spans; ``where`` tells of all but the first span if it begins one."""
    return np.split(spans, np.flatnonzero(where) + 1) if len(spans) else []


def _bar_of(spans: NDArray[np.void]) -> Bar:
    first = spans[0]
    kind, expert = Span(int(first["kind"])), int(first["expert"])
    peers = [str(peer) for peer in np.unique(spans["peer"]) if peer >= 0]
    details: dict[str, int | str] = {
        name: int(first[name]) for name in ("expert", "piece") if first[name] >= 0
    }
    if peers:
        details["peers"] = ", ".join(peers)
    label = f"e{expert}" if expert >= 0 else ""
    if kind in (Span.STORE, Span.LOAD):
        details["bytes"] = int(spans["bytes"].sum())
        arrow = "\u2192" if kind == Span.STORE else "\u2190"
        label += arrow + (",".join(peers) if len(peers) <= 2 else f"{len(peers)} ranks")
    return Bar(
        rank=int(first["rank"]),
        lane=CALL_LANE,
        kind=kind.name.lower(),
        begin_us=float(first["begin_us"]),
        end_us=float(spans["end_us"].max()),
        label=label,
        details=details,
    )
