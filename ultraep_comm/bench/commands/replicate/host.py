"""Time a collective on the CPU, with one process for each rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from ultraep_comm.bench.clock import HostClock, HostMeter
from ultraep_comm.bench.commands.replicate import ReplicateSettings, each_size, one_plan
from ultraep_comm.bench.commands.replicate.one_plan import Collective
from ultraep_comm.bench.measure import (
    Measured,
    critical_bytes,
    link_bound_us,
    paired_ratio,
    rate,
    transfer_bound,
)
from ultraep_comm.bench.report import Record, Report
from ultraep_comm.bench.table import Column
from ultraep_comm.plan.plan import Plan

_MACHINE = ("memcpy", "copy+add")  # baselines: the machine's own rate


def run_host(collective: Collective, settings: ReplicateSettings, report: Report) -> int:
    """Measure the modes, interleaved with the baselines; return the exit status. Collective."""
    torch.set_num_threads(1)
    wrong = 0
    for one, num_sms in (
        (one, count) for one in each_size(settings) for count in settings.num_sms or (None,)
    ):
        ranks = collective.make_ranks(HostMeter(settings.engine), one, num_sms)
        plan = one_plan.begin(settings, ranks, report)
        clock, compared = HostClock(ranks.groups[0]), collective.host_baselines(ranks, plan)
        modes, those = one_plan.time_modes(collective, one, ranks, plan, clock, compared, report)
        ranks.close()
        row = HostRow(collective, one, plan, num_sms, those)
        wrong += sum(m.wrong for m in (*modes, *those))
        columns = _columns(settings, [m.mode for m in those])
        report.columns(columns, one_plan.least_width(settings))
        report.add([row.record(m) for m in modes])
        report.add([row.transfer(m, "baseline") for m in those], gated=False)
    return report.finish(wrong=wrong)


@dataclasses.dataclass(frozen=True)
class HostRow:
    """One size with one number of workers: what its records share."""

    collective: Collective
    settings: ReplicateSettings
    plan: Plan
    num_sms: int | None
    baselines: Sequence[Measured]

    def record(self, m: Measured) -> Record:
        """Return the JSON record of a mode."""
        bound_us, over_bound = self._over_bound(m)
        others = sorted(self.baselines, key=lambda other: _is_of_users(other.mode))
        return {
            **self.transfer(m, self.settings.op),
            **one_plan.describe_mode(self.settings, self.plan, m),
            "over_model": self._over_model(m),
            "bound_us": bound_us,
            "over_bound": over_bound,
            **{key: value for other in others for key, value in _against(other, m).items()},
        }

    def transfer(self, m: Measured, op: str) -> Record:
        """Return the fields that modes and baselines share."""
        expert_bytes, plan = self.settings.expert_bytes, self.plan
        return {
            "op": op,
            "name": m.name,
            "mode": m.mode,
            "num_sms": self.num_sms,
            "expert_bytes": expert_bytes,
            "replicas": plan.num_replicas,
            "bytes": plan.num_replicas * expert_bytes,
            **m.times.record(),
            "algbw_gbps": rate(plan.num_replicas * expert_bytes, m.p50),
            "critical_gbps": rate(critical_bytes(plan, expert_bytes), m.p50),
            "wrong_bytes": m.wrong,
        }

    def _over_bound(self, m: Measured) -> tuple[float | None, float | None]:
        """Return the bound in microseconds and the time over it; None without replicas.

        Ranks of one machine share its memory. Without a link rate the bound is therefore the time
        of the machine's own baseline, if there is one, and the ratio is paired by iteration.
        """
        link_gbps = self.settings.link_gbps
        if not self.plan.num_replicas:
            return None, None
        if link_gbps is None:
            machine = next((b for b in self.baselines if not _is_of_users(b.mode)), None)
            return (machine.p50, paired_ratio(machine, m)) if machine else (None, None)
        bound = link_bound_us(self.plan, self.settings.expert_bytes, link_gbps)
        return bound, m.p50 / bound

    def _over_model(self, m: Measured) -> float | None:
        """Return the schedule's modelled time over its bound; None without replicas.

        See "The model and its bound" in bench/METRICS.md.
        """
        bound = transfer_bound(self.plan)
        if not bound:
            return None
        busiest = self.collective.busiest_rank(self.settings, self.plan, m.chosen)
        return max(busiest, self.plan.max_imports) / bound


def _against(other: Measured, m: Measured) -> Record:
    """Return the fields of a mode that compare it with a baseline."""
    ratio = {_ratio_key(other.mode): paired_ratio(m, other)}
    return (
        {f"{_key(other.mode)}_time_us": other.p50, **ratio} if _is_of_users(other.mode) else ratio
    )


def _is_of_users(baseline: str) -> bool:
    """Return whether a baseline is what users do, rather than the machine's own rate."""
    return baseline not in _MACHINE


def _key(baseline: str) -> str:
    """Return a baseline's name as it appears in JSON keys."""
    return baseline.replace("+", "_")


def _ratio_key(baseline: str) -> str:
    """Return the JSON key of a baseline's time over that of a mode."""
    return f"{'speedup_' if _is_of_users(baseline) else ''}over_{_key(baseline)}"


# ---- table --------------------------------------------------------------------------------------


def _columns(settings: ReplicateSettings, baselines: Sequence[str]) -> list[Column]:
    """Return the columns of modes, and of baselines with these names."""
    bound = settings.link_gbps is not None or settings.gate.max_over_bound is not None
    return [
        one_plan.MODE,
        *([one_plan.SIZE] * (len(settings.sizes) > 1)),
        *([Column("SMs", "", "num_sms")] * (len(settings.num_sms) > 1)),
        Column("replicas", "", "replicas"),
        Column("bytes", "(B)", "bytes"),
        *one_plan.time_columns(settings.times),
        Column("algbw", "(GB/s)", "algbw_gbps", ".2f"),
        Column("critbw", "(GB/s)", "critical_gbps", ".2f"),
        Column("model", "/T*", "over_model", ".3f"),
        *([one_plan.OVER_BOUND] * bound),
        *(
            Column(name, "/time", _ratio_key(name), ".2f")
            for name in sorted(baselines, key=_is_of_users)
        ),
        one_plan.WRONG,
        *([one_plan.GATE] * bool(settings.gate)),
    ]
