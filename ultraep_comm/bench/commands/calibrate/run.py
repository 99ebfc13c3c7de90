"""Measure the constants of the cost model. bench/METRICS.md has the rules."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass

import numpy as np
import torch

from ultraep_comm.bench.clock import Meter, own_meter
from ultraep_comm.bench.commands.calibrate import TINY, CalibrateSettings
from ultraep_comm.bench.launch import WRONG
from ultraep_comm.bench.measure import slowest
from ultraep_comm.bench.payload import Payload
from ultraep_comm.bench.ranks import (
    TILE_BYTES,
    TIMED_CALLS,
    WeightRanks,
    count_experts,
    link_plan,
    make_turns,
)
from ultraep_comm.bench.report import Report, write_output
from ultraep_comm.bench.traffic import GROUP_BYTES, list_hubs, make_schedule
from ultraep_comm.calibration import MAX_FIGURE, MeasuredCosts, device_name, make_calibration
from ultraep_comm.engines.c10d.make import open_channels
from ultraep_comm.engines.c10d.probe import measure
from ultraep_comm.engines.options import HOST_TILE_BYTES
from ultraep_comm.errors import UnsupportedError
from ultraep_comm.fabrics.rendezvous import Rendezvous
from ultraep_comm.plan.plan import Plan

MANY_GROUPS = 32
_TINY_CALLS, _SHORT_CALLS, _BIG_CALLS = 30, 10, 3  # in a row
_ATTEMPTS = 3  # while the machine is too busy


@dataclass(frozen=True)
class Shape:
    """A transfer to time.

    Attributes:
        segments: bytes of one expert, by segment; either all or none are TINY.
        links: each copies an expert from its home rank to another rank.
        mode: of the call.
    """

    segments: Mapping[str, int]
    links: Sequence[tuple[int, int]]
    mode: str

    @property
    def is_tiny(self) -> bool:
        """Return whether its time is that of flags rather than copies."""
        return max(self.segments.values()) <= TINY


def run(settings: CalibrateSettings, report: Report, meter: Meter | None = None) -> int:
    """Measure, print and write; return the exit status, 1 for wrong bytes.

    Raises:
        UltraEPError: a group could not be created, a transfer failed, times are inconsistent, or
            the file could not be written.
    """
    meter = meter or own_meter(settings.engine)
    if settings.engine == "c10d":
        return _finish(measure_messages(settings), 0, settings, report)
    probe = Probe(meter, settings, report)
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            found = probe.measure()
            break
        except UnsupportedError:  # on all ranks alike, as the times are the slowest rank's
            if attempt == _ATTEMPTS:
                raise
    return _finish(found, probe.wrong_bytes, settings, report)


def measure_messages(settings: CalibrateSettings) -> MeasuredCosts:
    """Return what messages of the process group cost. Collective."""
    rendezvous, device = Rendezvous(None), torch.device("cpu")
    with rendezvous.failure_scope(), ExitStack() as opened:
        channels = []
        for channel in open_channels(rendezvous, device):
            opened.callback(channel.close)
            channels.append(channel)
        found = measure(
            channels[0], rendezvous.rank, rendezvous.num_ranks, device, rounds=settings.iters
        )
        rendezvous.raise_if_any_failed()  # all have their answers
    return found


def _finish(
    found: MeasuredCosts, wrong_bytes: int, settings: CalibrateSettings, report: Report
) -> int:
    report.header("calibrate")
    report.show(format_costs(settings, found))
    if report.prints and wrong_bytes == 0 and settings.output is not None:
        costs = {**settings.kept, settings.section: found}
        text = json.dumps(make_calibration(costs), indent=2) + "\n"
        write_output("--output", settings.output, text)
        report.show(f"# wrote {settings.output}; for use set ULTRAEP_CALIBRATION to it on rank 0")
    return WRONG if wrong_bytes else 0


def format_costs(settings: CalibrateSettings, found: MeasuredCosts) -> str:
    """Return the text of the figures and of the cost model's constants."""
    names = ("store_per_kib", "load_per_kib", "group", "hop", "parallel_percent")
    constants = found.constants(found.ranks, scales=settings.section == "cuda")
    figures = {k: v for k, v in asdict(found).items() if isinstance(v, float)}
    lines = [f"  {name:<12} {value:.4g}" for name, value in figures.items()]
    model = ", ".join(f"{n} {v}" for n, v in zip(names, constants, strict=True))
    return "\n".join([f"# {settings.section}, on {found.device}", *lines, f"# cost model: {model}"])


class Probe:
    """The transfers from whose times the figures are computed."""

    def __init__(self, meter: Meter, settings: CalibrateSettings, report: Report) -> None:
        """Prepare; nothing is allocated yet."""
        self._meter, self._settings, self._report = meter, settings, report
        self._tile_bytes = HOST_TILE_BYTES if settings.engine == "host" else TILE_BYTES
        self._epoch = self.wrong_bytes = 0

    def measure(self) -> MeasuredCosts:
        """Time all shapes. Collective, but in loopback.

        Raises:
            UnsupportedError: the times are inconsistent, because the machine was too busy.
        """
        ranks = range(self._settings.num_ranks)
        one, two = [(0, 1)], [(0, 1), (0, 2)]
        ring = [(rank, (rank + 1) % len(ranks)) for rank in ranks]
        tiny, big = {"w": TINY}, {"w": self._settings.copy_bytes}
        tiles = MANY_GROUPS * max(1, GROUP_BYTES // self._tile_bytes)
        many = {f"s{i}": TINY for i in range(tiles)}
        shapes = [
            Shape(tiny, [], "direct"),
            Shape({"w": self._settings.short_bytes}, one, "direct"),
            Shape(big, one, "direct"),
            Shape(big, two, "direct"),
            Shape(big, ring, "direct"),
            Shape(tiny, two, "push"),
            Shape(many, two, "push"),
        ]
        empty, brief, alone, both, together, few_us, many_us = self._times(shapes)
        groups = self._forwarded(many, two) - self._forwarded(tiny, two)
        return make_costs(
            device=device_name(self._settings.section) or str(self._meter.describe().get("gpu")),
            ranks=len(ranks),
            copy_bytes=self._settings.copy_bytes,
            short_bytes=self._settings.short_bytes,
            empty_us=empty,
            short_us=brief,
            alone_us=alone,
            both_us=both,
            together_us=together,
            flag_us=(many_us - few_us) / groups,
        )

    def _forwarded(self, segments: Mapping[str, int], links: Sequence[tuple[int, int]]) -> int:
        """Return the number of flag groups that hubs other than the home rank forward."""
        plan = link_plan(self._settings.num_ranks, links)
        schedule = make_schedule(
            plan, "push", segment_bytes=list(segments.values()), tile_bytes=self._tile_bytes
        )
        _home, *hubs = list_hubs(schedule)[0]
        return sum(end - begin for _, begin, end in hubs)

    def _times(self, shapes: Sequence[Shape]) -> list[float]:
        """Return the minimum over iterations of each shape's time on the slowest rank."""
        groups: dict[tuple[int, ...], WeightRanks] = {}
        for shape in shapes:
            key = tuple(shape.segments.values())
            if key not in groups:
                groups[key] = self._make_ranks(shape)
        calls = []
        for shape in shapes:
            ranks = groups[tuple(shape.segments.values())]
            plans = self._plans(shape)
            self._epoch += 1
            payload = Payload(self._settings.seed, shape.segments)
            self.wrong_bytes += ranks.check(plans[0], shape.mode, payload, self._epoch)
            calls.append((ranks, itertools.cycle(plans), shape))
        # Interleaved, so that a slow second of the machine affects all shapes.
        times = np.zeros((self._settings.iters, len(shapes)))
        for i in range(self._settings.iters):
            self._report.progress(i, self._settings.iters, "rounds")
            for s, (ranks, turns, shape) in enumerate(calls):
                times[i, s] = self._time_us(ranks, turns, shape)
        self._report.progress(1, 1)
        for ranks in groups.values():
            ranks.close()
        return [float(least) for least in times.min(axis=0)]

    def _make_ranks(self, shape: Shape) -> WeightRanks:
        settings = self._settings
        ranks = WeightRanks(
            self._meter,
            num_ranks=settings.num_ranks,
            num_experts=settings.num_ranks * self._experts(shape),
            fabric=settings.fabric,
            slots=1,
            segments=shape.segments,
            tile_bytes=self._tile_bytes,
            num_sms=settings.num_sms  # None: the default of a group
            if settings.engine == "host"
            else self._meter.num_sms(settings.num_sms, settings.ranks_here),
        )
        if not self._report.places:
            described = None if settings.engine == "host" else self._meter.describe()
            self._report.place(ranks.groups[0], described)
        ranks.touch_weights()
        return ranks

    def _experts(self, shape: Shape) -> int:
        """Return the experts of a rank; 1 where caches do not affect the time."""
        if self._settings.engine != "host" or shape.is_tiny:
            return 1
        return count_experts(sum(shape.segments.values()), 1)

    def _plans(self, shape: Shape) -> list[Plan]:
        ranks = range(self._settings.num_ranks)
        filling = [[(a, 0) for a, b in shape.links if b == rank] for rank in ranks]
        return make_turns(filling, slots=1, experts=self._experts(shape), in_a_turn=1)

    def _calls(self, shape: Shape) -> int:
        if self._settings.engine != "host":
            return TIMED_CALLS
        if shape.is_tiny:
            return _TINY_CALLS
        is_short = sum(shape.segments.values()) < self._settings.copy_bytes
        return _SHORT_CALLS if is_short else _BIG_CALLS

    def _time_us(self, ranks: WeightRanks, plans: Iterator[Plan], shape: Shape) -> float:
        took = ranks.clock(self._calls(shape)).time_us(lambda: ranks.call(next(plans), shape.mode))
        return slowest(took, ranks.loopback)


def make_costs(
    *,
    device: str,
    ranks: int,
    copy_bytes: int,
    short_bytes: int,
    empty_us: float,
    short_us: float,
    alone_us: float,
    both_us: float | None,
    together_us: float,
    flag_us: float,
) -> MeasuredCosts:
    """Return the figures: the cost model solved for its constants.

    Args:
        device: name of the measured device.
        ranks: G.
        copy_bytes: bytes of the large expert.
        short_bytes: bytes of the short expert.
        empty_us: time of a call with an empty plan.
        short_us: time to store the short expert over one link.
        alone_us: time to store the large expert over one link.
        both_us: time to read the large expert once and store it over two links of one rank; None
            if there are no two links, and the store rate then includes the read.
        together_us: time if every rank stores a large expert to the next rank.
        flag_us: time of one more flag group.

    Raises:
        UnsupportedError: two copies took no longer than one, or one no longer than a short one.
    """
    # The line through the short and the large expert meets zero bytes at one call and two hops.
    copy_us = (alone_us - short_us) / (copy_bytes - short_bytes) * copy_bytes
    store_us = copy_us if both_us is None else both_us - alone_us
    if store_us <= 0 or copy_us <= 0 or short_us <= empty_us:
        two = "" if both_us is None else f"two {both_us:.4g}, "
        raise UnsupportedError(
            f"one copy took {alone_us:.4g} us, {two}a short one {short_us:.4g} and none"
            f" {empty_us:.4g}: the machine is too busy, or --bytes"
            " too small, to be calibrated"
        )
    load_us = max(copy_us - store_us, 0.0)
    hop_us = max(alone_us - copy_us - empty_us, 0.0) / 2
    return MeasuredCosts(
        device=device,
        ranks=ranks,
        store_gbps=copy_bytes / store_us / 1e3,
        # A read without cost gets the largest rate that a file can hold.
        load_gbps=min(copy_bytes / load_us / 1e3, MAX_FIGURE) if load_us else MAX_FIGURE,
        flag_us=max(flag_us, 0.0),
        hop_us=hop_us,
        parallel=min(max(ranks * alone_us / together_us, 1.0), float(ranks)),
        call_us=empty_us,
    )
