"""The measurement of ``links``. bench/METRICS.md defines the figures."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ultraep_comm.bench.clock import Clock, HostClock, Meter, own_meter
from ultraep_comm.bench.commands.links import BESIDE, INCAST, PAIRS, RING, LinksSettings
from ultraep_comm.bench.commands.links.report import Link, print_links, slow_ranks, slowest_links
from ultraep_comm.bench.measure import add_up, figures_of, gather, interleave
from ultraep_comm.bench.payload import Payload
from ultraep_comm.bench.ranks import TILE_BYTES, WeightRanks, link_plan
from ultraep_comm.bench.report import Report
from ultraep_comm.bench.sizes import format_size
from ultraep_comm.bench.table import Column
from ultraep_comm.errors import InvalidArgumentError
from ultraep_comm.group.work import Work
from ultraep_comm.plan.plan import Plan

_SEGMENT = "w"
_COLUMNS = (
    Column("from", "rank", "source"),
    Column("to", "rank", "destination"),
    Column("time p50", "(us)", "time_us.p50", ".1f"),
    Column("max", "(us)", "time_us.max", ".1f"),
    Column("bandwidth", "(GB/s)", "gbps", ".2f"),
    Column("over", "median", "over_median", ".2f"),
    Column("#wrong", "(B)", "wrong_bytes"),
)


def run(settings: LinksSettings, report: Report, meter: Meter | None = None) -> int:
    """Measure every link; return the exit status. Collective, but in loopback.

    Raises:
        UltraEPError: the group could not be created, or a transfer failed.
    """
    meter = meter or own_meter(settings.engine)
    on_host = settings.engine == "host"
    many = settings.num_ranks - 1

    def make_ranks(slots: int) -> WeightRanks:
        return WeightRanks(
            meter,
            num_ranks=settings.num_ranks,
            num_experts=settings.num_ranks,  # rank r sends expert r
            fabric=settings.fabric,
            slots=slots,
            segments={_SEGMENT: settings.link_bytes},
            tile_bytes=settings.tile_bytes or (None if on_host else TILE_BYTES),
            num_sms=settings.num_sms
            if on_host
            else meter.num_sms(settings.num_sms, settings.ranks_here),
        )

    ranks = make_ranks(many if settings.pattern == INCAST else 1)
    group = ranks.groups[0]
    domains = group.topology.domain.tolist()
    rounds = make_rounds(domains, settings.pattern, one_at_a_time=settings.one_at_a_time)
    if not rounds:
        raise InvalidArgumentError(
            f"--pattern {settings.pattern} has no links: the ranks' domains are {domains}"
        )
    crowd = Crowd(make_ranks(many), domains, settings) if settings.pattern == BESIDE else None
    report.place(group, None if on_host else meter.describe())
    report.header("links", _describe(settings, len(rounds)))
    clock = HostClock(group) if on_host else ranks.clock()
    times_us, wrong_bytes = measure_links(settings, ranks, clock, rounds, report, crowd)
    wrong = int(wrong_bytes.sum()) + (0 if crowd is None else crowd.close())
    ranks.close()
    matrix = rates_of(times_us, settings)
    more = describe_matrix(matrix, settings.slowest)
    report.columns(_COLUMNS)
    links = [
        {
            "op": "links",
            "engine": settings.engine,
            "fabric": settings.fabric,
            "ranks": settings.num_ranks,
            "source": source,
            "destination": destination,
            "link_bytes": settings.link_bytes,
            "time_us": figures_of(times_us[source, destination], "min", "p50", "p90", "p99", "max"),
            "gbps": float(matrix[source, destination]),
            "over_median": float(matrix[source, destination]) / more["median_gbps"],
            "wrong_bytes": int(wrong_bytes[source, destination]),
        }
        for source, destination in np.argwhere(~np.isnan(matrix)).tolist()
    ]
    report.add(links, shown=False)  # the matrix is
    if report.prints:
        print_links(report.document(more))
    return report.finish(wrong=wrong, more=more)


class Crowd:
    """Ranks that send to rank 0, beside what is measured: of a group of their own."""

    def __init__(self, ranks: WeightRanks, domains: Sequence[int], settings: LinksSettings) -> None:
        (links,) = make_rounds(domains, INCAST)[:1]
        self._ranks, num_ranks = ranks, settings.num_ranks
        self._plan = link_plan(num_ranks, links, num_ranks - 1)
        self._payload = Payload(settings.seed, {_SEGMENT: settings.link_bytes})
        ranks.fill(self._plan, self._payload, 1)
        self._works: list[Work] = []

    def start(self) -> None:
        """Send, in the background."""
        self._works += self._ranks.start(self._plan, "direct")

    def finish(self) -> None:
        """Wait for what was started."""
        for work in self._works:
            work.synchronize()
        self._works.clear()

    def close(self) -> int:
        """Close the group; return the wrong bytes of all ranks. Collective, but in loopback."""
        wrong = np.array([self._ranks.count_wrong(self._plan, self._payload, 1)])
        self._ranks.close()
        return int(add_up(wrong, self._ranks.loopback)[0])


def _describe(settings: LinksSettings, num_rounds: int) -> list[str]:
    order = "one at a time" if settings.one_at_a_time else "links of a round at the same time"
    order += {
        PAIRS: "",
        INCAST: "; in each, all ranks send to one",
        RING: "; each rank but rank 0 sends to the next",
        BESIDE: "; each rank but rank 0 sends to the next, and beside that as much to rank 0",
    }[settings.pattern]
    gate = settings.gate.min_gbps
    return [
        f"{format_size(settings.link_bytes)} over each link, {num_rounds} rounds, {order}",
        *(["loopback: copies within one GPU's memory; no link is measured"] * settings.loopback),
        f"{settings.iters} iterations after {settings.warmup}, each with the rounds in another"
        f" order; checked: {'every one' if settings.check else 'the last one'}",
        *([] if gate is None else [f"gate: every link at least {gate:g} GB/s"]),
    ]


def make_rounds(
    domains: Sequence[int], pattern: str = PAIRS, *, one_at_a_time: bool = False
) -> list[list[Link]]:
    """Return every link inside a domain once, in rounds; of a ring only its links.

    No two links of a round of pairs share a rank: a round-robin tournament by the circle method,
    with each pairing once in each direction. In every round rank 0 meets one rank of the circle of
    all others, and ranks at equal distances from that one meet. An odd G gets a dummy rank.

    Args:
        domains: ``[G]``, equal for ranks that reach each other.
        pattern: PAIRS; INCAST: a round for each receiver, of all others; RING, BESIDE: one round,
            of the ranks of rank 0's domain but itself.
        one_at_a_time: put each link in a round of its own.
    """
    everybody = range(len(domains))
    if pattern == INCAST:
        into = [
            [(a, b) for a in everybody if a != b and domains[a] == domains[b]] for b in everybody
        ]
        return [links for links in into if links]
    if pattern in (RING, BESIDE):
        members = [rank for rank in everybody[1:] if domains[rank] == domains[0]]
        ring = list(zip(members, [*members[1:], *members[:1]], strict=True))
        return [ring] if len(members) > 1 else []
    num_ranks = len(domains)
    size = num_ranks + num_ranks % 2
    circle = size - 1
    rounds = []
    for turn in range(circle):
        pairs = [(0, 1 + turn)]
        for k in range(1, size // 2):
            pairs.append((1 + (turn + k) % circle, 1 + (turn - k) % circle))
        played = [(a, b) for a, b in pairs if max(a, b) < num_ranks and domains[a] == domains[b]]
        rounds += [played, [(b, a) for a, b in played]]
    if one_at_a_time:
        return [[link] for link in sorted(link for links in rounds for link in links)]
    return [links for links in rounds if links]


def times_of_links(
    rounds: Sequence[Sequence[Link]], spans_us: NDArray[np.float64], *, one_clock: bool
) -> NDArray[np.float64]:
    """Return the times of links ``[source, destination, iters]``, from those of ranks.

    Args:
        rounds: of links; others have NaN.
        spans_us: ``[G, 2, rounds, iters]``, start and end of every rank in every round.
        one_clock: the ranks' times are comparable. Otherwise the time of a link is that of the
            slower of its two ranks.
    """
    num_ranks, _, _, iters = spans_us.shape
    times = np.full((num_ranks, num_ranks, iters), np.nan)
    for r, links in enumerate(rounds):
        for link in links:
            starts, ends = spans_us[list(link), :, r].swapaxes(0, 1)
            whole = ends.max(axis=0) - starts.min(axis=0)
            times[link] = whole if one_clock else (ends - starts).max(axis=0)
    return times


def measure_links(
    settings: LinksSettings,
    ranks: WeightRanks,
    clock: Clock,
    rounds: Sequence[Sequence[Link]],
    report: Report,
    crowd: Crowd | None = None,
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Time every round in every iteration, shuffled. Collective, but in loopback.

    Returns:
        Times of links as `times_of_links`, and wrong bytes ``[source, destination]``.
    """
    payload = Payload(settings.seed, {_SEGMENT: settings.link_bytes})
    slots = ranks.groups[0].topology.slots_per_rank
    plans = [link_plan(settings.num_ranks, links, slots) for links in rounds]
    spans = np.zeros((2, len(rounds), settings.iters))
    wrong = np.zeros((settings.num_ranks, settings.num_ranks), np.int64)

    def call(plan: Plan) -> None:
        if crowd is not None:
            crowd.start()
        ranks.call(plan, "direct")

    text = f"iterations of {len(rounds)} rounds"
    for turn in interleave(settings, len(rounds), report.progress, text):
        plan = plans[turn.item]
        ranks.fill(plan, payload, turn.epoch)
        span = clock.span(partial(call, plan))
        if crowd is not None:
            crowd.finish()
        if turn.checked:
            wrong += count_wrong(ranks, plan, payload, turn.epoch)
        if turn.i >= 0:
            spans[:, turn.item, turn.i] = span
    everybody = gather(spans, clock.loopback)
    everybody = np.broadcast_to(everybody, (settings.num_ranks, *spans.shape))
    times = times_of_links(rounds, everybody, one_clock=clock.one_clock)
    return times, add_up(wrong, clock.loopback)


def count_wrong(ranks: WeightRanks, plan: Plan, payload: Payload, epoch: int) -> NDArray[np.int64]:
    """Return the wrong bytes, ``[source, destination]``; 0 where another process received them."""
    num_ranks = plan.slot_expert.shape[0]
    wrong = np.zeros((num_ranks, num_ranks), np.int64)
    for group in ranks.groups:
        for slot, expert in enumerate(plan.slot_expert[group.rank].tolist()):
            if expert >= 0:
                data = group.slots[_SEGMENT][slot].cpu().numpy()
                where = {"epoch": epoch, "expert": expert}
                wrong[expert, group.rank] = payload.count_wrong(data, **where, segment=_SEGMENT)
    return wrong


def rates_of(times_us: NDArray[np.float64], settings: LinksSettings) -> NDArray[np.float64]:
    """Return the bandwidths ``[G, G]`` in GB/s, of the median or the slowest iteration."""
    slowest = settings.statistic == "min"
    times = times_us.max(axis=2) if slowest else np.median(times_us, axis=2)
    matrix: NDArray[np.float64] = settings.link_bytes / times / 1e3
    return matrix


def describe_matrix(matrix: NDArray[np.float64], num_slowest: int) -> dict[str, Any]:
    """Return the JSON fields of the matrix, the slowest links and the slow ranks."""
    return {
        "matrix_gbps": [[None if np.isnan(x) else float(x) for x in row] for row in matrix],
        "median_gbps": float(np.nanmedian(matrix)),
        "slowest": [
            {"source": link[0], "destination": link[1], "over_median": over}
            for link, over in slowest_links(matrix, num_slowest)
        ],
        "slow_ranks": [
            {"rank": rank, "out_over_median": out, "in_over_median": into}
            for rank, out, into in slow_ranks(matrix)
        ],
    }
