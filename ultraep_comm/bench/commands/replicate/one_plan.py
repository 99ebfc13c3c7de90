"""Time one collective on one plan: what the runs on the CPU and on GPUs share.

bench/METRICS.md has the formulas.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from ultraep_comm.bench.clock import Clock, Meter
from ultraep_comm.bench.commands.replicate import ReplicateSettings
from ultraep_comm.bench.loads import rank_imbalance
from ultraep_comm.bench.measure import (
    Measured,
    Transfer,
    check_gated,
    describe_link,
    measure,
    time_path,
    transfer_bound,
)
from ultraep_comm.bench.ranks import Mode, Ranks
from ultraep_comm.bench.report import Record, Report, describe_rounds
from ultraep_comm.bench.sizes import describe_segments, format_size
from ultraep_comm.bench.table import Column
from ultraep_comm.bench.traffic import Traffic
from ultraep_comm.calls.plan import plan_replicas
from ultraep_comm.plan.certificate import verify_plan
from ultraep_comm.plan.plan import Plan


class Collective(Protocol):
    """The collective to time.

    Attributes:
        calls: timed calls in a row, on a device.
        lined_up: line up the ranks with another call than the timed one.
        empty_mode: mode of the calls that time an empty plan.
    """

    calls: int
    lined_up: bool
    empty_mode: str

    def make_ranks(self, meter: Meter, settings: Any, num_sms: int | None) -> Any:
        """Create the groups and their data: a subclass of `Ranks`. Collective, but in loopback."""

    def make_payload(self, settings: Any) -> Any:
        """Return the expected contents."""

    def host_baselines(self, ranks: Any, plan: Plan) -> list[Transfer]:
        """Return the baselines: what users do today, and the machine's own rate."""

    def device_baselines(self, ranks: Any, plan: Plan) -> list[Transfer]:
        """Return the baselines besides plain copies."""

    def busiest_rank(self, settings: Any, plan: Plan, mode: str) -> float:
        """Return the most that any rank's link carries in a mode, in experts."""

    def traffic(self, settings: Any, plan: Plan, mode: str) -> Traffic:
        """Return the bytes that a call on a device moves."""

    def tile_us(self, meter: Meter, settings: Any, num_sms: int) -> float | None:
        """Return the time of one tile through a hub; None if it does not apply."""


def begin(settings: ReplicateSettings, ranks: Ranks, report: Report) -> Plan:
    """Return the plan of the load; the first time print the header. Collective, but in loopback.

    ``settings`` has all sizes, for the header.

    Raises:
        InvalidArgumentError: there is a gate, but nothing to transfer.
    """
    group = ranks.groups[0]
    plan = plan_replicas(torch.from_numpy(settings.load), group=group)
    if settings.check:
        verify_plan(plan, settings.load, allow_cross_domain=group.topology.allow_cross_domain)
    check_gated(plan, bool(settings.gate))
    if not report.places:
        report.place(group, ranks.meter.describe())
        engine, fabric = settings.engine, settings.fabric
        where = "" if engine == "host" else f", engine {engine}, fabric {fabric}"
        report.header(f"{settings.op}{where}", _header_lines(settings, plan))
    return plan


def time_modes(
    collective: Collective,
    settings: ReplicateSettings,
    ranks: Any,
    plan: Plan,
    clock: Clock,
    baselines: Sequence[Transfer],
    report: Report,
) -> tuple[list[Measured], list[Measured]]:
    """Time the library's modes and the baselines, interleaved; return modes and baselines."""
    measured = measure(
        settings,
        clock,
        [*(Mode(ranks, plan, mode) for mode in settings.modes), *baselines],
        collective.make_payload(settings),
        fill=partial(ranks.fill, plan),
        report=report,
        label=f" of {format_size(settings.expert_bytes)}",
    )
    num_modes = len(settings.modes)
    return measured[:num_modes], measured[num_modes:]


# ---- records ------------------------------------------------------------------------------------


def describe_mode(settings: ReplicateSettings, plan: Plan, m: Measured) -> Record:
    """Return fields of the JSON record of a mode: what it was, and the imbalance."""
    return {
        "engine": settings.engine,
        "fabric": settings.fabric,
        "chosen": m.chosen,
        "ranks": settings.num_ranks,
        "experts": settings.num_experts,
        "slots": settings.slots,
        "imbalance_before": imbalance_before(settings),
        "imbalance_after": plan.imbalance,
    }


def imbalance_before(settings: ReplicateSettings) -> float:
    """Return the busiest rank's tokens over the mean, without replicas."""
    return rank_imbalance(settings.load.sum(axis=0, dtype=np.int64), settings.num_ranks)


# ---- settings and header ------------------------------------------------------------------------


def _header_lines(settings: ReplicateSettings, plan: Plan) -> list[str]:
    """Return the header lines about settings, plan and limits."""
    gate, limits, tiles = settings.gate, [], settings.tile_bytes
    if gate.min_gbps is not None:
        limits.append(f"critbw at least {gate.min_gbps:g} GB/s")
    if gate.max_over_bound is not None:
        rate_of = "the measured copy rate" if settings.link_gbps is None else "the link's rate"
        limits.append(f"time at most {gate.max_over_bound:g} times its bound at {rate_of}")
    return [
        f"ranks {settings.num_ranks}, experts {settings.num_experts}, slots {settings.slots},"
        f" expert {_describe_sizes(settings)}"
        + (f", tiles of {tiles}" if tiles and settings.engine == "cuda" else ""),
        *_describe_gradients(settings),
        f"load: {settings.load_source}; imbalance {imbalance_before(settings):.3f} before,"
        f" {plan.imbalance:.3f} after",
        _describe_plan(plan),
        describe_rounds(settings),
        *describe_link(settings),
        *([f"gate: {', '.join(limits)}"] if limits else []),
    ]


def _describe_gradients(settings: ReplicateSettings) -> list[str]:
    if settings.op == "replicate":
        return []
    return [f"gradients: {settings.grad_dtype} in slots, {settings.main_dtype} at home"]


def _describe_sizes(settings: ReplicateSettings) -> str:
    """Return the size with its segments, or the range of a sweep."""
    if len(settings.sizes) == 1:
        return describe_segments(settings.segments)
    first, last = (sum(settings.sizes[i].values()) for i in (0, -1))
    parts = ", ".join(settings.segments)
    return f"{format_size(first)} to {format_size(last)}, {len(settings.sizes)} sizes ({parts})"


def _describe_plan(plan: Plan) -> str:
    if plan.num_replicas == 0:
        return "plan: no replicas; nothing to transfer"
    slots = plan.slot_expert
    experts = len(set(slots[slots >= 0].tolist()))
    bound = transfer_bound(plan)
    return (
        f"plan: {plan.num_replicas} replicas of {experts} experts, at most"
        f" {plan.max_exports} exported and {plan.max_imports} imported by a rank; T* = {bound:.4g}"
        " experts over one link"
    )


# ---- columns ------------------------------------------------------------------------------------


def least_width(settings: ReplicateSettings) -> int:
    """Return the minimum width of a column, where rows of several sizes follow."""
    return 9 if len(settings.sizes) > 1 or len(settings.num_sms) > 1 else 0


def time_columns(names: Sequence[str]) -> list[Column]:
    """Return a column for each of the names, of `options.TIMES`."""
    titles = [f"time {names[0]}", *names[1:]]
    return [
        Column(title, "(us)", time_path(name), ".1f")
        for title, name in zip(titles, names, strict=True)
    ]


MODE = Column("mode", "", "name")
SIZE = Column("size", "(B)", "expert_bytes")
OVER_BOUND = Column("time", "/bound", "over_bound", ".3f")
WRONG = Column("#wrong", "(B)", "wrong_bytes")
GATE = Column("gate", "", "gate")
