"""What a run of links prints and writes; bench/METRICS.md has the formulas."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ultraep_comm.bench.colour import print_coloured
from ultraep_comm.bench.link_matrix import SLOW, LinkTimes, slow_ranks, slowest_links
from ultraep_comm.bench.links_settings import LinksSettings
from ultraep_comm.bench.machine import describe_machine, find_commit
from ultraep_comm.bench.placement import format_places
from ultraep_comm.bench.report import describe_gate, describe_run
from ultraep_comm.bench.sizes import format_size


def make_link_records(
    settings: LinksSettings, found: LinkTimes, places: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return one JSON record for each link, judged by the gate."""
    matrix = found.gbps(settings.link_bytes, settings.statistic)
    median = float(np.nanmedian(matrix))
    records = []
    for source, destination in found.links:
        times = found.times_us[source, destination]
        record = {
            "op": "links",
            "engine": settings.engine,
            "fabric": settings.fabric,
            "ranks": settings.num_ranks,
            "source": source,
            "destination": destination,
            "source_host": places[source]["host"],
            "destination_host": places[destination]["host"],
            "link_bytes": settings.link_bytes,
            "time_us": {
                name: float(np.percentile(times, at))
                for name, at in (("min", 0), ("p50", 50), ("p90", 90), ("p99", 99), ("max", 100))
            },
            "gbps": float(matrix[source, destination]),
            "over_median": float(matrix[source, destination]) / median,
            "wrong_bytes": int(found.wrong_bytes[source, destination]),
        }
        records.append({**record, "gate": settings.gate.judge(record)})
    return records


def make_links_document(
    settings: LinksSettings,
    found: LinkTimes,
    records: Sequence[dict[str, Any]],
    places: Sequence[dict[str, Any]],
    *,
    device: Mapping[str, Any] | None,
    header: str,
) -> dict[str, Any]:
    """Return the records with the matrix and what it was measured on."""
    matrix = found.gbps(settings.link_bytes, settings.statistic)
    names = ("link_bytes", "one_at_a_time", "statistic", "num_sms", "tile_bytes", "fabric")
    return {
        "header": header.splitlines(),
        "records": list(records),
        "matrix_gbps": [[None if np.isnan(x) else float(x) for x in row] for row in matrix],
        "median_gbps": float(np.nanmedian(matrix)),
        "slowest": [
            {"source": link[0], "destination": link[1], "over_median": over}
            for link, over in slowest_links(matrix, settings.slowest)
        ],
        "slow_ranks": [
            {"rank": rank, "out_over_median": out, "in_over_median": into}
            for rank, out, into in slow_ranks(matrix)
        ],
        "machine": {**describe_machine(), **(device or {})},
        "topology": list(places),
        "commit": find_commit(),
        "gate": describe_gate(settings.gate, records),
        "settings": {
            **{name: getattr(settings, name) for name in (*names, "iters", "warmup", "check")},
            "seed": settings.seed,
        },
    }


def format_links_header(
    settings: LinksSettings, places: Sequence[dict[str, Any]], num_rounds: int
) -> str:
    """Return what a reader must know before the figures."""
    order = "one at a time" if settings.one_at_a_time else "links of a round at the same time"
    gate, loopback = settings.gate.min_gbps, settings.fabric == "loopback"
    lines = [
        *describe_run("links"),
        *format_places(places, engine=settings.engine, fabric=settings.fabric),
        f"{format_size(settings.link_bytes)} over each link, {num_rounds} rounds, {order}",
        *(["loopback: copies within one GPU's memory; no link is measured"] * loopback),
        f"{settings.iters} iterations after {settings.warmup}, each with the rounds in another"
        f" order; checked: {'every one' if settings.check else 'the last one'}",
        *([] if gate is None else [f"gate: every link at least {gate:g} GB/s"]),
    ]
    return "\n".join(f"# {line}" for line in lines)


def print_links(document: Mapping[str, Any]) -> None:
    """Print a document's matrix, with colours on a terminal, and below it what stands out."""
    cells = [[math.nan if x is None else x for x in row] for row in document["matrix_gbps"]]
    matrix, gate, records = np.array(cells), document["gate"], document["records"]
    of = "median" if document["settings"]["statistic"] == "median" else "slowest"
    marked = "; ! misses the gate" if gate else ""
    print(f"# GB/s from a row's rank to a column's, in the {of} iteration{marked}")
    print_coloured(matrix_cells(matrix, gate["min_bandwidth_gbps"] if gate else None))
    slow = describe_slow(matrix, len(document["slowest"]))
    print("\n".join(f"# {line}" for line in slow))
    wrong = sum(record["wrong_bytes"] for record in records)
    print(f"# wrong bytes: {wrong} of {len(records)} links", flush=True)


def matrix_cells(matrix: NDArray[np.float64], least: float | None) -> list[list[tuple[str, str]]]:
    """Return the lines of the matrix, of texts with styles: the column's widest is its width."""
    median = float(np.nanmedian(matrix))
    numbers = [["-" if np.isnan(x) else _mark(x, least) for x in row] for row in matrix]
    width = max(len(text) for row in numbers for text in row)
    margin = len(str(len(matrix) - 1))
    lines = [[("# " + " " * margin, "")]]
    lines[0] += [(f" {rank:>{width}}", "") for rank in range(len(matrix))]
    for rank, row in enumerate(numbers):
        styles = (style_of(x, median, least) for x in matrix[rank])
        cells = [(f" {text:>{width}}", style) for text, style in zip(row, styles, strict=True)]
        lines.append([(f"  {rank:>{margin}}", ""), *cells])
    return lines


def style_of(gbps: float, median: float, least: float | None) -> str:
    """Return how a bandwidth is shown: red if it misses the gate, yellow if it stands out."""
    if np.isnan(gbps):
        return "dim"
    if least is not None and gbps < least:
        return "bold red"
    return "yellow" if gbps < SLOW * median else "green"


def _mark(gbps: float, least: float | None) -> str:
    digits = 2 if gbps < 10 else 1 if gbps < 100 else 0
    return f"{gbps:.{digits}f}" + ("" if least is None else "!" if gbps < least else " ")


def describe_slow(matrix: NDArray[np.float64], count: int) -> list[str]:
    """Return lines with the extremes, so many slowest links, and ranks whose links are all slow."""
    lines = [
        f"median {np.nanmedian(matrix):.2f} GB/s, least {np.nanmin(matrix):.2f}, most"
        f" {np.nanmax(matrix):.2f}"
    ]
    for (source, destination), over in slowest_links(matrix, count):
        if over >= 1:
            break
        gbps = matrix[source, destination]
        lines.append(f"slow: {source} to {destination}, {gbps:.2f} GB/s, {_away(over)} the median")
    for rank, out, into in slow_ranks(matrix):
        lines.append(f"rank {rank}: its links out are {_away(out)} the median, in {_away(into)}")
    return lines


def _away(over: float) -> str:
    return f"{100 * abs(1 - over):.0f}% {'below' if over < 1 else 'above'}"
