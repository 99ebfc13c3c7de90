"""The example's claims, checked against the measurements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from training import Comparison, FreeRun

MAX_DIFFERENCE = 1e-5  # relative, fp32
MAX_IMBALANCE = 1.05  # busiest rank over mean, in any layer and step


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A measured value and its upper limit; None: informational only."""

    key: str
    text: str
    plain: str
    replicated: str
    value: float
    limit: float | None = None

    @property
    def holds(self) -> bool:
        """Return whether the value is within the limit; a NaN is not."""
        return self.limit is None or self.value <= self.limit


@dataclass(frozen=True, kw_only=True)
class Results:
    """The comparison, and the free runs with two seeds."""

    comparison: Comparison
    plain: FreeRun
    other_seed: FreeRun
    replicated: FreeRun

    def claims(self) -> list[Claim]:
        """Return all claims, in the order of the closing table."""
        return [*self._equal(), self._converges(), *self._balanced(), self._buffer()]

    def _equal(self) -> list[Claim]:
        made = []
        for key, differences in (
            ("outputs", self.comparison.outputs),
            ("gradients", self.comparison.grads),
        ):
            where, value = Comparison.worst(differences)
            made.append(
                Claim(
                    key=key,
                    text=f"{key} differ at most by, relative",
                    plain="",
                    replicated=f"{value:.1e} ({where})",
                    value=value,
                    limit=MAX_DIFFERENCE,
                )
            )
        return made

    def _converges(self) -> Claim:
        last = last_steps(len(self.plain.losses))
        spread = distance(self.plain.losses, self.other_seed.losses, last)
        ends = [mean(run.losses[-last:]) for run in (self.plain, self.other_seed, self.replicated)]
        return Claim(
            key="loss",
            text=f"loss of the last {last} steps; distance of curves, against that of two seeds",
            plain=f"{ends[0]:.4f}, {ends[1]:.4f}",
            replicated=f"{ends[2]:.4f}",
            value=distance(self.plain.losses, self.replicated.losses, last),
            limit=spread,
        )

    def _balanced(self) -> list[Claim]:
        home = self.replicated.imbalance(self.replicated.at_home)
        computed = self.replicated.imbalance(self.replicated.computed)
        return [
            Claim(
                key="imbalance",
                text="load of the busiest rank over the mean, worst layer and step",
                plain=f"{float(home.max()):.3f}",
                replicated=f"{float(computed.max()):.3f}",
                value=float(computed.max()),
                limit=MAX_IMBALANCE,
            ),
            Claim(
                key="mean_imbalance",
                text="the same, mean of layers and steps",
                plain=f"{float(home.mean()):.3f}",
                replicated=f"{float(computed.mean()):.3f}",
                value=float(computed.mean()),
            ),
        ]

    def _buffer(self) -> Claim:
        return Claim(
            key="buffer_bytes",
            text="largest buffer of rows before the experts, bytes",
            plain=f"{self.plain.buffer_bytes}",
            replicated=f"{self.replicated.buffer_bytes}",
            value=self.replicated.buffer_bytes,
        )

    def to_json(self) -> dict[str, Any]:
        """Return everything, ready for JSON."""
        return {
            "claims": {
                c.key: {
                    "text": c.text,
                    "plain": c.plain,
                    "replicated": c.replicated,
                    "value": c.value,
                    "limit": c.limit,
                    "holds": c.holds,
                }
                for c in self.claims()
            },
            "differences": {
                "outputs": self.comparison.outputs,
                "gradients": self.comparison.grads,
            },
            "runs": {
                name: {
                    "losses": run.losses,
                    "rows_at_home": [rows.long().tolist() for rows in run.at_home],
                    "rows_computed": [rows.long().tolist() for rows in run.computed],
                    "buffer_bytes": run.buffer_bytes,
                }
                for name, run in (
                    ("plain", self.plain),
                    ("other_seed", self.other_seed),
                    ("replicated", self.replicated),
                )
            },
        }


def last_steps(steps: int) -> int:
    """Return the number of steps that count as the end of a run: a tenth, at least ten."""
    return min(steps, max(10, steps // 10))


def mean(values: Sequence[float]) -> float:
    """Return the mean."""
    return math.fsum(values) / len(values)


def distance(a: Sequence[float], b: Sequence[float], last: int) -> float:
    """Return the mean absolute difference of two curves over their last steps."""
    return mean([abs(x - y) for x, y in zip(a[-last:], b[-last:], strict=True)])
