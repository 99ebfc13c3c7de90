"""Times of single links, and which of them are slow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ultraep_comm.bench.link_rounds import Link

SLOW = 0.9  # of the median of all links: below it a rank's links, or a link, stand out


@dataclass(frozen=True, kw_only=True, eq=False)
class LinkTimes:
    """What every link took.

    Attributes:
        times_us: ``[G, G, iters]`` from a rank to another; NaN where there is no link.
        wrong_bytes: ``[G, G]``.
    """

    times_us: NDArray[np.float64]
    wrong_bytes: NDArray[np.int64]

    @classmethod
    def make(
        cls,
        rounds: Sequence[Sequence[Link]],
        spans_us: NDArray[np.float64],
        wrong_bytes: NDArray[np.int64],
        *,
        one_clock: bool,
    ) -> LinkTimes:
        """Take the links' times out of their ranks'.

        Args:
            rounds: of links.
            spans_us: ``[G, 2, rounds, iters]``, start and end of every rank in every round.
            wrong_bytes: ``[rounds, G]``, that each rank received.
            one_clock: starts and ends of two ranks can be compared; else a link takes as long as
                the slower of its two ranks.
        """
        num_ranks, _, _, iters = spans_us.shape
        times = np.full((num_ranks, num_ranks, iters), np.nan)
        wrong = np.zeros((num_ranks, num_ranks), np.int64)
        for r, links in enumerate(rounds):
            for source, destination in links:
                starts, ends = spans_us[[source, destination], :, r].swapaxes(0, 1)
                whole = ends.max(axis=0) - starts.min(axis=0)
                times[source, destination] = whole if one_clock else (ends - starts).max(axis=0)
                wrong[source, destination] = wrong_bytes[r, destination]
        return cls(times_us=times, wrong_bytes=wrong)

    @property
    def links(self) -> list[Link]:
        """Return all links that were timed, by source and destination."""
        found = np.argwhere(~np.isnan(self.times_us[:, :, 0]))
        return [(int(source), int(destination)) for source, destination in found]

    def gbps(self, link_bytes: int, statistic: str) -> NDArray[np.float64]:
        """Return ``[G, G]`` 10^9 bytes a second, of the median or the slowest iteration."""
        times = self.times_us.max(axis=2) if statistic == "min" else np.median(self.times_us, 2)
        matrix: NDArray[np.float64] = link_bytes / times / 1e3
        return matrix


def slowest_links(matrix: NDArray[np.float64], count: int) -> list[tuple[Link, float]]:
    """Return so many links, the slowest first, with their bandwidth over the median of all."""
    order = np.argsort(matrix, axis=None, kind="stable")[: int((~np.isnan(matrix)).sum())]
    median = float(np.nanmedian(matrix))
    found = [divmod(int(at), matrix.shape[1]) for at in order[:count]]
    return [(link, float(matrix[link]) / median) for link in found]


def slow_ranks(matrix: NDArray[np.float64]) -> list[tuple[int, float, float]]:
    """Return ranks whose links out or in are slow, with both medians over the median of all."""
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
