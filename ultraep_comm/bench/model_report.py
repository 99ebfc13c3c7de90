"""What the table of modelled transfers prints and writes; bench/METRICS.md has the formulas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ultraep_comm.bench.machine import describe_machine, find_commit
from ultraep_comm.bench.model_published import PublishedRun
from ultraep_comm.bench.model_settings import ModelSettings
from ultraep_comm.bench.plan_settings import PlanSize
from ultraep_comm.bench.report import describe_run
from ultraep_comm.bench.sizes import format_size
from ultraep_comm.bench.table import format_table

WAYS = ("push", "pull", "direct", "relay")
OURS = ("push", "pull")

TARGET_RATIO, TARGET_US = 1.10, 8.0
WORST_RATIO = 1.09


def target_us(bound_us: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return what a transfer should take on average: near its bound, but for latencies."""
    return np.maximum(TARGET_RATIO * bound_us, bound_us + TARGET_US)


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelRow:
    """The predictions for one size and kind of load, N loads.

    Attributes:
        size: of the plans.
        kind: of the loads.
        replicas: ``[N]``.
        bound_us: ``[N]``, T*.
        time_us: ``[N, WAYS]``.
    """

    size: PlanSize
    kind: str
    replicas: NDArray[np.int64]
    bound_us: NDArray[np.float64]
    time_us: NDArray[np.float64]

    def over_bound(self, way: str) -> NDArray[np.float64]:
        """Return the times of one of WAYS over the bounds ``[N]``."""
        ratio: NDArray[np.float64] = self.time_us[:, WAYS.index(way)] / self.bound_us
        return ratio

    def over_target(self, way: str) -> NDArray[np.float64]:
        """Return the times of one of WAYS over the targets ``[N]``."""
        ratio: NDArray[np.float64] = self.time_us[:, WAYS.index(way)] / target_us(self.bound_us)
        return ratio

    def record(self) -> dict[str, Any]:
        """Return the row as JSON."""
        return {
            "op": "model",
            "ranks": self.size.num_ranks,
            "experts": self.size.num_experts,
            "slots": self.size.slots_per_rank,
            "load": self.kind,
            "loads": len(self.bound_us),
            "replicas": float(self.replicas.mean()),
            "bound_us": float(self.bound_us.mean()),
            "time_us": {way: float(self.time_us[:, i].mean()) for i, way in enumerate(WAYS)},
            "over_bound": {way: _mean_worst(self.over_bound(way)) for way in WAYS},
            "over_target": {way: _mean_worst(self.over_target(way)) for way in OURS},
        }


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One mode's times over their targets, over all loads of a size.

    Attributes:
        size: of the plans.
        mode: one of OURS.
        mean: has to be at most 1.
        worst: has to be at most WORST_RATIO.
    """

    size: PlanSize
    mode: str
    mean: float
    worst: float

    @property
    def holds(self) -> bool:
        """Return whether both are."""
        return self.mean <= 1 and self.worst <= WORST_RATIO

    def record(self) -> dict[str, Any]:
        """Return the claim as JSON."""
        return {
            "size": str(self.size),
            "mode": self.mode,
            "over_target": {"mean": self.mean, "worst": self.worst},
            "holds": self.holds,
        }


def sum_up(rows: Sequence[ModelRow]) -> list[Claim]:
    """Return the claims about each size and mode."""
    claims = []
    for size in dict.fromkeys(row.size for row in rows):
        for mode in OURS:
            ratio = np.concatenate([row.over_target(mode) for row in rows if row.size == size])
            claims.append(
                Claim(size=size, mode=mode, mean=float(ratio.mean()), worst=float(ratio.max()))
            )
    return claims


@dataclass(frozen=True, kw_only=True)
class PublishedRow:
    """A published measurement, and the model's times for a plan like its own, in microseconds."""

    run: PublishedRun
    direct_us: float
    relay_us: float
    push_us: float

    def record(self) -> dict[str, Any]:
        """Return the row as JSON."""
        return {
            "imbalance": self.run.imbalance,
            "replicas": self.run.num_replicas,
            "max_replicas": self.run.max_replicas,
            "published_us": {"direct": self.run.direct_us, "relay": self.run.relay_us},
            "model_us": {
                "direct": self.direct_us,
                "relay": self.relay_us,
                "push": self.push_us,
            },
        }


def _mean_worst(values: NDArray[np.float64]) -> dict[str, float]:
    return {"mean": float(values.mean()), "worst": float(values.max())}


def format_model_header(settings: ModelSettings) -> str:
    """Return what a reader must know before the figures."""
    m = settings.machine
    tiles = f"{m.tiles_in_flight} tiles of {format_size(m.tile_bytes)} in flight"
    lines = [
        *describe_run("model"),
        f"modelled, not measured: {m.name}, {m.egress_gbps:g} GB/s out and {m.ingress_gbps:g} in,"
        f" {m.hop_us:g} us a hop, {tiles}",
        f"experts of {format_size(settings.expert_bytes)}; loads: {settings.tokens} tokens of each"
        f" rank to {settings.topk} experts, {settings.seeds} of a kind",
        "times over the bound T*; relay: two levels, as published",
    ]
    return "\n".join(f"# {line}" for line in lines)


_COLUMNS = (
    ("size", "G/E/S"),
    ("load", ""),
    ("loads", ""),
    ("replicas", "mean"),
    ("T*", "mean us"),
    ("push", "mean"),
    ("", "worst"),
    ("pull", "mean"),
    ("", "worst"),
    ("direct", "mean"),
    ("", "worst"),
    ("relay", "mean"),
    ("", "worst"),
)


def format_model_table(rows: Sequence[ModelRow]) -> str:
    """Return the table: a row for each size and kind of load."""
    lines = []
    for row in rows:
        ratios = [_mean_worst(row.over_bound(way)) for way in WAYS]
        lines.append(
            (
                str(row.size),
                row.kind,
                str(len(row.bound_us)),
                f"{row.replicas.mean():.1f}",
                f"{row.bound_us.mean():.1f}",
                *(f"{ratio[which]:.3f}" for ratio in ratios for which in ("mean", "worst")),
            )
        )
    return format_table(list(zip(*_COLUMNS, strict=True)), lines)


def format_claims(claims: Sequence[Claim]) -> str:
    """Return the second table: what has to hold for each size and mode."""
    headers = [
        ("size", "mode", "time / target", "", ""),
        ("G/E/S", "", "mean", "worst", "holds"),
    ]
    lines = [
        (
            str(claim.size),
            claim.mode,
            f"{claim.mean:.3f}",
            f"{claim.worst:.3f}",
            "yes" if claim.holds else "NO",
        )
        for claim in claims
    ]
    title = (
        f"# target: max({TARGET_RATIO:.2f} T*, T* + {TARGET_US:g} us) on average, at most"
        f" {WORST_RATIO} of it in the worst case"
    )
    return f"{title}\n{format_table(headers, lines)}"


def format_published_table(rows: Sequence[PublishedRow]) -> str:
    """Return the third table: published times and the model's."""
    headers = [
        ("64/256/2", "replicas", "most of", "direct", "", "relay", "", "push"),
        ("imbalance", "", "an expert", "published", "model", "published", "model", "model"),
    ]
    lines = [
        (
            f"{row.run.imbalance:.2f}",
            str(row.run.num_replicas),
            str(row.run.max_replicas),
            f"{row.run.direct_us:.0f}",
            f"{row.direct_us:.1f}",
            f"{row.run.relay_us:.0f}",
            f"{row.relay_us:.1f}",
            f"{row.push_us:.1f}",
        )
        for row in rows
    ]
    return "# published, in us; the model's are for a plan with these numbers\n" + format_table(
        headers, lines
    )


def describe_results(
    settings: ModelSettings,
    rows: Sequence[ModelRow],
    published: Sequence[PublishedRow],
) -> dict[str, Any]:
    """Return the records with what they were computed for and on, as JSON."""
    return {
        "records": [row.record() for row in rows],
        "claims": [claim.record() for claim in sum_up(rows)],
        "published": [row.record() for row in published],
        "modelled_machine": asdict(settings.machine),
        "machine": describe_machine(),
        "commit": find_commit(),
        "settings": {
            "sizes": [str(size) for size in settings.sizes],
            "imbalances": list(settings.imbalances),
            "families": list(settings.families),
            "seeds": settings.seeds,
            "tokens": settings.tokens,
            "topk": settings.topk,
            "expert_bytes": settings.expert_bytes,
        },
    }
