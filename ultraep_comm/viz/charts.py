"""Charts, rows of bars: of a timeline, recorded calls, a predicted transfer."""

from __future__ import annotations

import heapq
import importlib
import importlib.util
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ultraep_comm import _core
from ultraep_comm.errors import UnsupportedError
from ultraep_comm.model.timeline import Span
from ultraep_comm.plan.plan import Plan
from ultraep_comm.recording.file import OPERATIONS, Recording
from ultraep_comm.viz.style import count

CALL_LANE = -1
NEVER = 2**63 - 1
FAILED = "failed"  # kind of a call that failed, or came after a failed one
WIDTH = 12.0  # inches


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A time span of a rank.

    Attributes:
        rank: its row.
        lane: in the row, 0 or more, so that no two bars overlap; :data:`CALL_LANE`: behind them.
        kind: key of the legend.
        begin_us: microseconds.
        end_us: microseconds; equal to ``begin_us`` if the end is not known.
        label: a few characters to write into the bar.
        details: values by name.
    """

    rank: int
    lane: int
    kind: str
    begin_us: float
    end_us: float
    label: str
    details: dict[str, int | str]


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Rows of bars.

    Attributes:
        title: what the picture shows.
        subtitle: where the data is from.
        num_ranks: rows.
        bars: sorted by rank, lane and begin.
        marks: times in microseconds to mark by a line, by label.
        width: of the picture in inches; text keeps its size.
        rows: names of the rows; none: they are ranks.
    """

    title: str
    subtitle: str
    num_ranks: int
    bars: list[Bar]
    marks: dict[str, float] = field(default_factory=dict)
    width: float = WIDTH
    rows: Sequence[str] = ()

    def lanes_of(self, rank: int) -> int:
        """Return the number of lanes of a row, at least 1."""
        return 1 + max((bar.lane for bar in self.bars if bar.rank == rank), default=0)

    @property
    def end_us(self) -> float:
        """Return the end of the last bar."""
        return max((bar.end_us for bar in self.bars), default=0.0)


KINDS = {Span.CALL: "call", Span.STORE: "store", Span.LOAD: "load", Span.WAIT: "wait"}
_PIECE = ["kind", "expert", "piece"]  # identifies the spans of one piece


def chart_timeline(
    spans: NDArray[np.void],
    num_ranks: int,
    *,
    title: str,
    subtitle: str,
    marks: dict[str, float] | None = None,
    gap_us: float = 0.0,
    max_lanes: int | None = None,
) -> Chart:
    """Return the chart of one transfer: pieces and waits in lanes, the calls behind them.

    A piece is an entry of a rank's worklist: tiles of one expert that it stores or loads. Its
    overlapping tiles, to any peers, form one bar, and all its bars share a lane.

    Args:
        spans: the timeline of the transfer.
        num_ranks: G.
        title: what the chart shows.
        subtitle: where the data is from.
        marks: times in microseconds to mark, by label.
        gap_us: pauses of a piece up to this long are not shown.
        max_lanes: pieces of a rank that needs more lanes are merged by expert; None: no limit.
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
    marks = {} if marks is None else marks
    return _sorted_chart(title, subtitle, num_ranks, bars, marks)


def _bars_of_rank(spans: NDArray[np.void], gap_us: float) -> list[Bar]:
    spans = np.sort(spans, order=[*_PIECE, "begin_us", "end_us"])
    new = np.ones(len(spans), bool)
    new[1:] = spans[_PIECE][1:] != spans[_PIECE][:-1]
    bounds = [*np.flatnonzero(new).tolist(), len(spans)]
    pieces = [_join(spans[i:j], gap_us) for i, j in itertools.pairwise(bounds)]
    calls = [piece for piece in pieces if piece[0].kind == KINDS[Span.CALL]]
    waits = [piece for piece in pieces if piece[0].kind == KINDS[Span.WAIT]]
    work = [piece for piece in pieces if piece[0].kind in (KINDS[Span.STORE], KINDS[Span.LOAD])]
    lanes = _pack([(piece[0].begin_us, piece[-1].end_us) for piece in work])
    bars = [replace(b, lane=n) for piece, n in zip(work, lanes, strict=True) for b in piece]
    # A rank that waits rarely does anything else: its waits fit between the bars of lane 0.
    paused = [bar for piece in waits for bar in piece]
    if _are_apart([*paused, *(bar for bar in bars if bar.lane == 0)]):
        bars += [replace(bar, lane=0) for bar in paused]
    else:
        above = _pack([(bar.begin_us, bar.end_us) for bar in paused])
        first = max(lanes, default=-1) + 1
        bars += [replace(bar, lane=first + n) for bar, n in zip(paused, above, strict=True)]
    return [*(bar for piece in calls for bar in piece), *bars]


def _are_apart(bars: list[Bar]) -> bool:
    bars = sorted(bars, key=lambda bar: (bar.begin_us, bar.end_us))
    return all(one.end_us <= two.begin_us for one, two in itertools.pairwise(bars))


def _join(spans: NDArray[np.void], gap_us: float) -> list[Bar]:
    """Return the bars of a piece, whose spans are sorted by begin."""
    reached = np.maximum.accumulate(spans["end_us"])
    new = np.ones(len(spans), bool)
    new[1:] = spans["begin_us"][1:] > reached[:-1] + gap_us
    bounds = [*np.flatnonzero(new).tolist(), len(spans)]
    return [_bar_of(spans[i:j]) for i, j in itertools.pairwise(bounds)]


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
        kind=KINDS[kind],
        begin_us=float(first["begin_us"]),
        end_us=float(spans["end_us"].max()),
        label=label,
        details=details,
    )


def _pack(extents: Sequence[tuple[float, float]]) -> list[int]:
    """Return a lane for each (begin, end): the lowest that is free at its begin."""
    busy: list[tuple[float, int]] = []  # end, lane
    free: list[int] = []
    result, lanes = [0] * len(extents), 0
    for i in sorted(range(len(extents)), key=extents.__getitem__):
        begin, end = extents[i]
        while busy and busy[0][0] <= begin:
            heapq.heappush(free, heapq.heappop(busy)[1])
        result[i] = heapq.heappop(free) if free else lanes
        lanes = max(lanes, result[i] + 1)
        heapq.heappush(busy, (end, result[i]))
    return result


def chart_calls(
    recordings: Sequence[Recording], *, source: str, epochs: range | None = None
) -> Chart:
    """Return the chart of recorded calls, one after the other on every rank.

    Times are relative to the first call shown. Ranks on one machine share a clock; several machines
    are aligned by their wall clocks, as accurately as those are synchronised.

    Args:
        recordings: of one run.
        source: for the subtitle.
        epochs: of the calls to show; None: all.
    """
    shown = [
        (r, i)
        for r in recordings
        for i, epoch in enumerate(r.calls["epoch"].tolist())
        if epochs is None or epoch in epochs
    ]
    clocks: dict[str, int] = {}  # offset of each machine's clock to wall time, by its first rank
    for recording in recordings:
        clocks.setdefault(recording.machine, recording.epoch_ns)
    shift = {id(r): clocks[r.machine] - min(clocks.values()) for r in recordings}
    start = min((int(r.calls["begin_ns"][i]) + shift[id(r)] for r, i in shown), default=0)
    moved = {id(r): r.bytes_of_rank() for r in recordings}
    bars, endless = [], 0
    failed = min((r.failed_epoch for r in recordings if r.failed_epoch), default=0)
    for recording in recordings:
        own = [i for r, i in shown if r is recording]
        calls = recording.calls[own]
        begin = (calls["begin_ns"] + shift[id(recording)] - start) / 1e3
        end = (calls["end_ns"] + shift[id(recording)] - start) / 1e3
        end = np.where(calls["end_ns"] < 0, begin, end)
        lost = (calls["end_ns"] < 0) & (calls["epoch"] >= (recording.failed_epoch or NEVER))
        endless += int(((calls["end_ns"] < 0) & ~lost).sum())
        extents = list(zip(begin.tolist(), end.tolist(), strict=True))
        for i, extent, lane, is_lost in zip(own, extents, _pack(extents), lost, strict=True):
            call = recording.calls[i]
            bars.append(
                Bar(
                    rank=recording.rank,
                    lane=lane,
                    kind=FAILED if is_lost else OPERATIONS[call["operation"]],
                    begin_us=extent[0],
                    end_us=extent[1],
                    label=_call_label(call),
                    details=_call_details(call, int(moved[id(recording)][i])),
                )
            )
    subtitle = f"{source}: {count(len(recordings), 'rank')} of {recordings[0].num_ranks}"
    subtitle += f", {count(len(shown), 'call')}"
    subtitle += f"; {count(endless, 'call')} without a known end" if endless else ""
    subtitle += f"; call {failed} failed" if failed else ""
    title = "Calls of every rank, as recorded"
    return _sorted_chart(title, subtitle, recordings[0].num_ranks, bars, {})


def _call_label(call: np.void) -> str:
    if call["layer"] < 0:
        return f"#{call['epoch']}"
    return f"L{call['layer']} m{call['microbatch']}"


def _call_details(call: np.void, num_bytes: int) -> dict[str, int | str]:
    operation = OPERATIONS[call["operation"]]
    details: dict[str, int | str] = {"operation": operation, "epoch": int(call["epoch"])}
    if call["layer"] >= 0:
        details |= {"layer": int(call["layer"]), "microbatch": int(call["microbatch"])}
    if call["mode"] >= 0:
        details["mode"] = _core.Mode(call["mode"]).name.lower()
    if num_bytes >= 0:
        details["bytes"] = num_bytes
    return details


def _sorted_chart(
    title: str, subtitle: str, num_ranks: int, bars: list[Bar], marks: dict[str, float]
) -> Chart:
    bars.sort(key=lambda bar: (bar.rank, bar.lane, bar.begin_us, bar.end_us))
    return Chart(title=title, subtitle=subtitle, num_ranks=num_ranks, bars=bars, marks=marks)


# ---- predictions --------------------------------------------------------------------------------

_MODEL = "ultraep_comm.model"
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
    width: float = WIDTH,
) -> tuple[Chart, Chart]:
    """Return two charts of one predicted transfer: simplified for a picture, and in full.

    Args:
        plan: of the transfer.
        expert_bytes: W.
        machine: name of one of the model's machines.
        mode: of the transfer, or "auto".
        source: where the plan is from, for the subtitle.
        residents: ``[G, S]``, the expert that a slot holds already; -1, or None: none.
        width: of the picture in inches.

    Raises:
        UltraEPError: the model rejects the machine, the mode or the plan.
        UnsupportedError: this installation has no model.
    """
    if importlib.util.find_spec(_MODEL) is None:
        raise UnsupportedError(
            f"this installation has no {_MODEL}; draw recorded calls instead, without --predict"
        )
    model: Any = importlib.import_module(_MODEL)
    found = model.predict(plan, expert_bytes, machine, mode, residents=residents, timeline=True)
    subtitle = (
        f"{source}, predicted for {machine}, mode {found.mode}: {found.time_us:,.1f} us,"
        f" {found.over_bound:.3f} of the bound"
    )
    text: dict[str, Any] = {
        "spans": found.timeline,
        "num_ranks": plan.num_ranks,
        "title": "One transfer, rank by rank",
        "subtitle": subtitle,
        "marks": {f"bound, {found.bound_us:,.1f} us": float(found.bound_us)},
    }
    drawn = chart_timeline(**text, gap_us=found.time_us / _WIDTHS, max_lanes=_LANES)
    return replace(drawn, width=width), chart_timeline(**text)
