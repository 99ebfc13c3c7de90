"""The measurement of ``layer``. bench/METRICS.md defines the figures."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from studies.layer import LayerSettings, Routing
from studies.layer.data import ROWS, Figures, LayerData
from studies.layer.moe import Layer
from studies.options import WORKLOAD_SEED, WORKLOADS
from studies.watch import PHASES, Stopwatch, watching
from ultraep_comm.bench.clock import HostClock
from ultraep_comm.bench.measure import Measured, gather, measure
from ultraep_comm.bench.report import Record, Report, describe_rounds
from ultraep_comm.bench.sizes import format_size
from ultraep_comm.bench.table import Column
from ultraep_comm.group.create import new_group


def run(settings: LayerSettings, report: Report) -> int:
    """Measure on an initialised process group; return the exit status.

    Raises:
        UltraEPError: the group could not be created, or a call failed.
    """
    torch.set_num_threads(1)
    group = new_group(
        num_experts=settings.experts,
        slots_per_rank=settings.slots,
        expert={name: (shape, torch.float32) for name, shape in settings.shapes.items()},
        grads=torch.float32,
        engine="host",
    )
    with group, watching() as watch:
        report.place(group)
        report.header("layer", _describe(settings))
        report.columns(_columns(settings))
        data = LayerData(settings, group)
        layer = Layer(group, data.weights)
        steps = [Step(name, data, layer, watch) for name in ROWS]
        wrong = 0
        for routing in settings.routings:
            data.routing = routing
            label = f", {routing.workload}" if routing.workload else ""
            measured = measure(
                settings, HostClock(group), steps, None, fill=data.fill, report=report, label=label
            )
            found = [gather(_figures(step.found[-settings.iters :]), False) for step in steps]
            rows = list(zip(measured, found, strict=True))
            for row in rows:
                record = make_record(settings, routing, row, rows[0], rows[-1])
                report.add([record], gated=record["routing"] == "replicated")
            wrong += sum(m.wrong for m in measured)
    return report.finish(wrong=wrong, more={"imbalance": settings.mean_imbalance})


class Step:
    """A row: the layer forward and backward, with one kind of routing."""

    def __init__(self, name: str, data: LayerData, layer: Layer, watch: Stopwatch) -> None:
        """Create a row; ``name`` is of `data.ROWS`."""
        self.name, self._data, self._layer, self._watch = name, data, layer, watch
        self.found: list[Figures] = []

    def run(self) -> None:
        """Run one step."""
        data, layer = self._data, self._layer
        started = time.thread_time_ns()
        tokens = data.tokens.clone().requires_grad_()
        out = layer.forward(tokens, data.ids[self.name], data.probs, self.name == "replicated")
        out.backward(data.out_grad)  # type: ignore[no-untyped-call]
        spent = time.thread_time_ns() - started
        assert tokens.grad is not None
        self.found.append(
            Figures(
                phases_ns=self._watch.take(),
                compute_ns=spent,
                rows=layer.rows,
                out=out.detach(),
                tokens_grad=tokens.grad,
                plan=layer.plan,
            )
        )

    def count_wrong(self, payload: object, epoch: int) -> int:
        """Return the wrong values of results, gradients and slots."""
        return self._data.count_wrong(self.name, self.found[-1])


def _figures(found: Sequence[Figures]) -> NDArray[np.int64]:
    """Return phases, compute_ns, rows and replicas of each step ``[iters, ...]``."""
    return np.array(
        [
            (*s.phases_ns, s.compute_ns, s.rows, 0 if s.plan is None else s.plan.num_replicas)
            for s in found
        ]
    )


def _describe(settings: LayerSettings) -> list[str]:
    expert_bytes = sum(4 * a * b for a, b in settings.shapes.values())
    limit, cores = settings.gate.max_over_bound, len(os.sched_getaffinity(0))
    lines = [
        f"ranks {settings.num_ranks}, experts {settings.experts}, slots {settings.slots},"
        f" expert {format_size(expert_bytes)} (hidden {settings.hidden}, inner {settings.inner})",
        f"{settings.tokens} tokens of each rank to {settings.topk} experts; seed {settings.seed}",
        *map(_describe_routing, settings.routings),
        describe_rounds(settings),
    ]
    if limit is not None:
        lines.append(f"gate: replicated at most {limit:g} times balanced")
    if settings.num_ranks > cores:
        lines.append(
            f"{settings.num_ranks} ranks share {cores} cores: busy ranks use idle ranks' cores,"
            " so step times hide the imbalance; compare compute times"
        )
    return lines


def _describe_routing(routing: Routing) -> str:
    name = routing.workload and f"{WORKLOADS[routing.workload]} of seed {WORKLOAD_SEED}, "
    return f"routing: {name}imbalance {routing.imbalance:.3f}"


Ranks = NDArray[np.int64]  # [G, iters, PHASES and compute_ns, rows, replicas]


Row = tuple[Measured, Ranks]


def make_record(
    settings: LayerSettings,
    routing: Routing,
    row: Row,
    plain: Row,
    ceiling: Row,
) -> Record:
    """Return the JSON record of one row, compared with others by iteration."""
    m, ranks = row
    times_us, replicated = m.times.iterations, m.mode == "replicated"
    last = len(PHASES)
    phases, compute = ranks[:, :, :last].max(axis=0), ranks[:, :, last].max(axis=0)
    rows = ranks[:, :, last + 1]
    share = float(np.median(ceiling[0].times.iterations / times_us))
    record = {
        "op": "layer",
        "routing": m.mode,
        "ranks": settings.num_ranks,
        "experts": settings.experts,
        "slots": settings.slots,
        **m.times.record(),
        "workload": routing.workload or None,
        "speedup": float(np.median(plain[0].times.iterations / times_us)),
        "share_of_balanced": share,
        "over_bound": 1 / share if replicated else None,
        "compute_us": float(np.median(compute)) / 1e3,
        "compute_share_of_balanced": float(np.median(ceiling[1][:, :, last].max(axis=0) / compute)),
        "imbalance": float(np.median(rows.max(axis=0) / rows.mean(axis=0))),
        "replicas": float(np.mean(ranks[0, :, last + 2])),
        "phases_us": None,
        "phases_share": None,
        "wrong_values": m.wrong,
    }
    if replicated:
        medians = (np.median(phases, axis=0) / 1e3).tolist()
        record["phases_us"] = dict(zip(PHASES, medians, strict=True))
        record["phases_share"] = float(np.median(phases.sum(axis=1) / 1e3 / times_us))
    return record


def _columns(settings: LayerSettings) -> list[Column]:
    named = [Column("", "", "workload")] if settings.routings[0].workload else []
    return [
        *named,
        Column("routing", "", "routing"),
        Column("imbalance", "", "imbalance", ".3f"),
        Column("replicas", "", "replicas", ".1f"),
        Column("time p50", "(us)", "time_us.p50", ".0f"),
        Column("max", "(us)", "time_us.max", ".0f"),
        Column("plain", "/time", "speedup", ".3f"),
        Column("balanced", "/time", "share_of_balanced", ".3f"),
        Column("compute", "(us)", "compute_us", ".0f"),
        Column("b. compute", "/compute", "compute_share_of_balanced", ".3f"),
        *(Column(name, "(us)", f"phases_us.{name}", ".0f") for name in PHASES),
        Column("phases", "/time", "phases_share", ".3f"),
        Column("#wrong", "", "wrong_values"),
    ]
