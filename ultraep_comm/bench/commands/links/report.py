"""Find and print slow links and ranks."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Link = tuple[int, int]  # from a rank to another
_CODES = {"bold red": "1;31", "yellow": "33", "green": "32", "dim": "2"}  # of a terminal
SLOW = 0.9  # of the median of all links; a link, or a rank's links, below it are slow


def slowest_links(matrix: NDArray[np.float64], count: int) -> list[tuple[Link, float]]:
    """Return the ``count`` slowest links, ascending, with their bandwidth over the median."""
    order = np.argsort(matrix, axis=None, kind="stable")[: int((~np.isnan(matrix)).sum())]
    median = float(np.nanmedian(matrix))
    found = [divmod(int(at), matrix.shape[1]) for at in order[:count]]
    return [(link, float(matrix[link]) / median) for link in found]


def slow_ranks(matrix: NDArray[np.float64]) -> list[tuple[int, float, float]]:
    """Return the ranks whose links out or in are slow, with both medians over that of all links."""
    median, found = np.nanmedian(matrix), []
    for rank in range(len(matrix)):
        others = np.arange(len(matrix)) != rank
        sides = [matrix[rank, others], matrix[others, rank]]
        if any(np.isnan(side).all() for side in sides):
            continue  # alone in its domain
        out, into = (float(np.nanmedian(side) / median) for side in sides)
        if min(out, into) < SLOW:
            found.append((rank, out, into))
    return found


def print_links(document: Mapping[str, Any]) -> None:
    """Print the matrix of a document, in colour on a terminal, and the slow links and ranks."""
    cells = [[math.nan if x is None else x for x in row] for row in document["matrix_gbps"]]
    matrix, gate, records = np.array(cells), document["gate"], document["records"]
    of = "median" if document["settings"]["statistic"] == "median" else "slowest"
    marked = "; ! misses the gate" if gate else ""
    print(f"# GB/s from a row's rank to a column's, in the {of} iteration{marked}")
    for line in matrix_cells(matrix, gate["min_bandwidth_gbps"] if gate else None):
        print("".join(_colour(*cell) for cell in line).rstrip())
    slow = describe_slow(matrix, len(document["slowest"]))
    print("\n".join(f"# {line}" for line in slow))
    wrong = sum(record["wrong_bytes"] for record in records)
    print(f"# wrong bytes: {wrong} of {len(records)} links", flush=True)


def matrix_cells(matrix: NDArray[np.float64], least: float | None) -> list[list[tuple[str, str]]]:
    """Return the lines of the matrix, as aligned texts with styles."""
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


def _colour(text: str, style: str) -> str:
    return f"\033[{_CODES[style]}m{text}\033[0m" if style and sys.stdout.isatty() else text


def style_of(gbps: float, median: float, least: float | None) -> str:
    """Return the style of a bandwidth: red if it misses the gate, yellow if it is slow."""
    if np.isnan(gbps):
        return "dim"
    if least is not None and gbps < least:
        return "bold red"
    return "yellow" if gbps < SLOW * median else "green"


def _mark(gbps: float, least: float | None) -> str:
    digits = 2 if gbps < 10 else 1 if gbps < 100 else 0
    return f"{gbps:.{digits}f}" + ("" if least is None else "!" if gbps < least else " ")


def describe_slow(matrix: NDArray[np.float64], count: int) -> list[str]:
    """Return lines with median and extremes, the slowest links, and the slow ranks."""
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
