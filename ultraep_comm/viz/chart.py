"""Bars in rows of ranks: what a timeline or recorded calls come to before they are drawn."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ultraep_comm.recording import OPERATIONS, Recording
from ultraep_comm.schedule import MODES
from ultraep_comm.timeline import Span, Timeline
from ultraep_comm.viz.style import count

CALL_LANE = -1
ONE_CLOCK_NS = 50_000_000  # of machines that differ by more, monotonic clocks have no common start


@dataclass(frozen=True, kw_only=True)
class Bar:
    """Some time of a rank.

    Attributes:
        rank: whose row.
        lane: in the row, from 0 up, so that no two bars overlap; :data:`CALL_LANE`: behind them.
        kind: what the legend calls it.
        begin_us: microseconds.
        end_us: microseconds; the same: when it ended is not known.
        label: a few characters to write into it.
        details: numbers by name.
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
        subtitle: of what.
        num_ranks: rows.
        bars: by rank, lane and begin.
        marks: times in microseconds that a line is drawn at, by what they are.
    """

    title: str
    subtitle: str
    num_ranks: int
    bars: list[Bar]
    marks: dict[str, float] = field(default_factory=dict)

    def lanes_of(self, rank: int) -> int:
        """Return how many lanes a row has, at least 1."""
        return 1 + max((bar.lane for bar in self.bars if bar.rank == rank), default=0)

    @property
    def end_us(self) -> float:
        """Return the last end of a bar."""
        return max((bar.end_us for bar in self.bars), default=0.0)


KINDS = {Span.CALL: "call", Span.STORE: "store", Span.LOAD: "load", Span.WAIT: "wait"}


def chart_timeline(
    timeline: Timeline, *, title: str, subtitle: str, marks: dict[str, float] | None = None
) -> Chart:
    """Return the chart of one transfer: pieces and waits in lanes, the calls behind them."""
    spans = timeline.spans
    bars = []
    for rank in range(timeline.num_ranks):
        own = spans[spans["rank"] == rank]
        lanes = _pack(own[own["kind"] != Span.CALL])
        bars += [_bar_of_span(span, CALL_LANE) for span in own[own["kind"] == Span.CALL]]
        bars += [_bar_of_span(span, lane) for span, lane in lanes]
    marks = {} if marks is None else marks
    return _sorted_chart(title, subtitle, timeline.num_ranks, bars, marks)


def _pack(spans: np.ndarray) -> list[tuple[np.void, int]]:
    """Return every span with the lowest lane that is free at its begin."""
    busy: list[tuple[float, int]] = []  # end, lane
    free: list[int] = []
    result, lanes = [], 0
    for span in spans[np.lexsort((spans["end_us"], spans["begin_us"]))]:
        while busy and busy[0][0] <= span["begin_us"]:
            heapq.heappush(free, heapq.heappop(busy)[1])
        lane = heapq.heappop(free) if free else lanes
        lanes = max(lanes, lane + 1)
        heapq.heappush(busy, (float(span["end_us"]), lane))
        result.append((span, lane))
    return result


def _bar_of_span(span: np.void, lane: int) -> Bar:
    kind = Span(int(span["kind"]))
    expert, peer = int(span["expert"]), int(span["peer"])
    arrow = {Span.STORE: "\u2192", Span.LOAD: "\u2190", Span.WAIT: "\u231b"}.get(kind, "")
    label = f"e{expert}" if expert >= 0 else ""
    label += f"{arrow}{peer}" if peer >= 0 and kind != Span.WAIT else ""
    known = {name: int(span[name]) for name in ("expert", "peer", "piece") if span[name] >= 0}
    if kind in (Span.STORE, Span.LOAD):
        known["bytes"] = int(span["bytes"])
    return Bar(
        rank=int(span["rank"]),
        lane=lane,
        kind=KINDS[kind],
        begin_us=float(span["begin_us"]),
        end_us=float(span["end_us"]),
        label=label,
        details={**known},
    )


def chart_calls(
    recordings: Sequence[Recording], *, source: str, epochs: range | None = None
) -> Chart:
    """Return the chart of recorded calls, one after the other on every rank.

    Times count from the first call that is shown. Ranks of one machine have one clock; those of
    several are laid side by side by their wall clocks, which agree as far as the machines' do.

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
    offsets = [r.epoch_ns for r in recordings]
    one_clock = max(offsets) - min(offsets) < ONE_CLOCK_NS
    shift = {id(r): 0 if one_clock else r.epoch_ns - min(offsets) for r in recordings}
    start = min((int(r.calls["begin_ns"][i]) + shift[id(r)] for r, i in shown), default=0)
    moved = {id(r): r.bytes_of_rank() for r in recordings}
    bars, endless = [], 0
    for recording in recordings:
        own = [i for r, i in shown if r is recording]
        calls = recording.calls[own]
        begin = (calls["begin_ns"] + shift[id(recording)] - start) / 1e3
        end = (calls["end_ns"] + shift[id(recording)] - start) / 1e3
        end = np.where(calls["end_ns"] < 0, begin, end)
        endless += int((calls["end_ns"] < 0).sum())
        spans = np.zeros(len(own), [("begin_us", float), ("end_us", float), ("at", int)])
        spans["begin_us"], spans["end_us"], spans["at"] = begin, end, own
        for span, lane in _pack(spans):
            call = recording.calls[int(span["at"])]
            bars.append(
                Bar(
                    rank=recording.rank,
                    lane=lane,
                    kind=OPERATIONS[call["operation"]],
                    begin_us=float(span["begin_us"]),
                    end_us=float(span["end_us"]),
                    label=_call_label(call),
                    details=_call_details(call, int(moved[id(recording)][int(span["at"])])),
                )
            )
    subtitle = f"{source}: {count(len(recordings), 'rank')} of {recordings[0].num_ranks}"
    subtitle += f", {count(len(shown), 'call')}"
    subtitle += f"; of {count(endless, 'call')} only the begin is known" if endless else ""
    title = "Calls of every rank, as recorded"
    return _sorted_chart(title, subtitle, recordings[0].num_ranks, bars, {})


def _call_label(call: np.void) -> str:
    if call["layer"] < 0:
        return f"#{call['epoch']}"
    return f"L{call['layer']} m{call['microbatch']}"


def _call_details(call: np.void, num_bytes: int) -> dict[str, int | str]:
    details: dict[str, int | str] = {"epoch": int(call["epoch"])}
    if call["layer"] >= 0:
        details |= {"layer": int(call["layer"]), "microbatch": int(call["microbatch"])}
    if call["mode"] >= 0:
        details["mode"] = MODES[call["mode"]]
    if num_bytes >= 0:
        details["bytes"] = num_bytes
    return details


def _sorted_chart(
    title: str, subtitle: str, num_ranks: int, bars: list[Bar], marks: dict[str, float]
) -> Chart:
    bars.sort(key=lambda bar: (bar.rank, bar.lane, bar.begin_us, bar.end_us))
    return Chart(title=title, subtitle=subtitle, num_ranks=num_ranks, bars=bars, marks=marks)
