"""The measurement of ``layer``. bench/METRICS.md defines the figures."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from ultraep_comm.bench.clock import HostClock
from ultraep_comm.bench.commands.layer import LayerSettings
from ultraep_comm.bench.measure import Measured, gather, measure
from ultraep_comm.bench.moe import Instance, Passed, run_layer
from ultraep_comm.bench.options import WORKLOAD_SEED, WORKLOADS
from ultraep_comm.bench.report import Record, Report, describe_rounds
from ultraep_comm.bench.sizes import format_size
from ultraep_comm.bench.table import Column, format_records
from ultraep_comm.bench.workloads import route_tokens
from ultraep_comm.calls.gather import gather_load
from ultraep_comm.calls.plan import plan_replicas
from ultraep_comm.calls.reduce import reduce_expert_grads
from ultraep_comm.calls.replicate import replicate_experts
from ultraep_comm.calls.reroute import reroute
from ultraep_comm.group.create import new_group
from ultraep_comm.group.group import Group
from ultraep_comm.plan.plan import Plan

ROUTINGS = ("plain", "replicated", "balanced")  # the last one is the ceiling
PHASES = ("plan", "replicate", "reroute", "reduce")
_TOLERANCE = 1e-4  # of the largest value: sums of fp32 products in different orders
_PERIOD = 1021  # epochs after which weights repeat


def run(settings: LayerSettings, report: Report) -> int:
    """Measure on an initialised process group; return the exit status.

    Raises:
        UltraEPError: the group could not be created, or a call failed.
    """
    torch.set_num_threads(1)
    with new_group(
        num_experts=settings.num_experts,
        slots_per_rank=settings.slots,
        expert={name: (shape, torch.float32) for name, shape in settings.shapes.items()},
        grads=torch.float32,
        engine="host",
    ) as group:
        report.place(group)
        report.header("layer", _describe(settings))
        data = LayerData(settings, group)
        layers = [Layer(data, routing) for routing in ROUTINGS]
        measured = measure(settings, HostClock(group), layers, None, fill=data.fill, report=report)
        # PHASES, compute_ns, rows, replicas of each iteration, by rank
        found = [gather(np.array(layer.found[-settings.iters :]), False) for layer in layers]
        rows = zip(measured, found, strict=True)
        records = [make_record(settings, m, ranks, (measured[-1], found[-1])) for m, ranks in rows]
        report.show(format_records(_COLUMNS, records))
        names = ("tokens", "topk", "hidden", "inner", "imbalance", "workload", "iters", "warmup")
        return report.finish(
            records,
            settings.describe(*names, "check", "seed"),
            wrong=sum(m.wrong for m in measured),
        )


def _describe(settings: LayerSettings) -> list[str]:
    expert_bytes = sum(4 * a * b for a, b in settings.shapes.values())
    limit, cores = settings.gate.max_over_bound, len(os.sched_getaffinity(0))
    routing, rest = "", ""
    if settings.workload:
        routing, rest = f"{WORKLOADS[settings.workload]} of seed {WORKLOAD_SEED}, ", "all else of "
    lines = [
        f"ranks {settings.num_ranks}, experts {settings.num_experts}, slots {settings.slots},"
        f" expert {format_size(expert_bytes)} (hidden {settings.hidden}, inner {settings.inner})",
        f"{settings.tokens} tokens of each rank to {settings.topk} experts; {routing}imbalance"
        f" {settings.imbalance:.3f}, {rest}seed {settings.seed}",
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


Ranks = NDArray[np.int64]  # [G, iters, PHASES and compute_ns, rows, replicas]


def make_record(
    settings: LayerSettings, m: Measured, ranks: Ranks, ceiling: tuple[Measured, Ranks]
) -> Record:
    """Return the JSON record of one routing, compared with the ceiling by iteration."""
    times_us, replicated = m.times.iterations, m.mode == "replicated"
    last = len(PHASES)
    phases, compute = ranks[:, :, :last].max(axis=0), ranks[:, :, last].max(axis=0)
    rows = ranks[:, :, last + 1]
    share = float(np.median(ceiling[0].times.iterations / times_us))
    record = {
        "op": "layer",
        "routing": m.mode,
        "ranks": settings.num_ranks,
        "experts": settings.num_experts,
        "slots": settings.slots,
        **m.times.record(),
        "workload": settings.workload or None,
        "step_ms": {
            "mean": float(times_us.mean()) / 1e3,
            "p95": float(np.percentile(times_us, 95)) / 1e3,
            "min": float(times_us.min()) / 1e3,
        },
        "tokens_per_s": settings.num_ranks * settings.tokens / m.p50 * 1e6,
        "assignments_per_s": settings.num_ranks * settings.tokens * settings.topk / m.p50 * 1e6,
        "share_of_balanced": share,
        "over_bound": 1 / share if replicated else None,
        "compute_us": float(np.median(compute)) / 1e3,
        "compute_share_of_balanced": float(np.median(ceiling[1][:, :, last].max(axis=0) / compute)),
        "imbalance": float(np.median(rows.max(axis=0) / rows.mean(axis=0))),
        "replicas": float(np.mean(ranks[0, :, last + 2])),
        "phases_us": dict(zip(PHASES, (np.median(phases, axis=0) / 1e3).tolist(), strict=True)),
        "phases_share": float(np.median(phases.sum(axis=1) / 1e3 / times_us)),
        "wrong_values": m.wrong,
    }
    return {**record, "gate": settings.gate.judge(record) if replicated else None}


def _of_replicated(*path: str) -> Any:
    """Return a function for a value that only the row with replicas has."""

    def find(record: Any) -> Any:
        value = record if record["routing"] == "replicated" else None
        for name in path:
            value = None if value is None else value[name]
        return value

    return find


_COLUMNS = (
    Column("routing", "", "routing"),
    Column("imbalance", "", "imbalance", ".3f"),
    Column("replicas", "", "replicas", ".1f"),
    Column("time p50", "(us)", "time_us.p50", ".0f"),
    Column("max", "(us)", "time_us.max", ".0f"),
    Column("balanced", "/time", "share_of_balanced", ".3f"),
    Column("compute", "(us)", "compute_us", ".0f"),
    Column("b. compute", "/compute", "compute_share_of_balanced", ".3f"),
    *(Column(name, "(us)", _of_replicated("phases_us", name), ".0f") for name in PHASES),
    Column("phases", "/time", _of_replicated("phases_share"), ".3f"),
    Column("#wrong", "", "wrong_values"),
)


class LayerData:
    """What all routings of a run share: weights, tokens and the expected results.

    Every rank has all experts' weights, so that it can check slots and results alone.
    """

    def __init__(self, settings: LayerSettings, group: Group) -> None:
        """Create weights and tokens. Collective."""
        self.settings, self.group = settings, group
        generator = torch.Generator().manual_seed(settings.seed)
        self._base = {
            name: torch.randn((settings.num_experts, *shape), generator=generator) / shape[1] ** 0.5
            for name, shape in settings.shapes.items()
        }
        self.mains = group.topology.mains(group.rank).tolist()
        self.weights = group.empty_weights()
        self.grads = {name: torch.zeros_like(w) for name, w in self.weights.items()}
        self.bound, self.bound_grads = group.bind(self.weights), group.bind_grads(self.grads)
        own = torch.Generator().manual_seed(settings.seed * 1000 + group.rank)
        shape = (settings.tokens, settings.hidden)
        self.tokens = torch.randn(shape, generator=own)
        self.out_grad = torch.randn(shape, generator=own)
        self.probs = torch.rand((settings.tokens, settings.topk), generator=own).softmax(dim=1)
        rows = [[*self._at_home(i)] for i in range(len(self.mains))]
        self.at_home = [Instance(**dict(row)) for row in rows]
        self.in_slots = [
            Instance(
                w13=group.slots["w13"][s],
                w2=group.slots["w2"][s],
                w13_grad=group.slot_grads["w13"][s],
                w2_grad=group.slot_grads["w2"][s],
            )
            for s in range(settings.slots)
        ]
        self._home_ids = torch.tensor(
            [
                int(home) * group.topology.instances_per_rank
                + group.topology.mains(int(home)).tolist().index(expert)
                for expert, home in enumerate(group.topology.home.tolist())
            ]
        )
        self._epoch = 0
        self.ids: dict[str, torch.Tensor] = {}  # of this epoch, by routing

    def _at_home(self, i: int) -> list[tuple[str, torch.Tensor]]:
        return [(name, w[i]) for name, w in self.weights.items()] + [
            (f"{name}_grad", grad[i]) for name, grad in self.grads.items()
        ]

    def weights_of(self, name: str, expert: int) -> torch.Tensor:
        """Return an expert's weights in this epoch."""
        base: torch.Tensor = self._base[name][expert]
        return base * (1 + self._epoch % _PERIOD / 4096)

    def fill(self, payload: object, epoch: int) -> None:
        """Change the weights as an optimizer does, clear gradients, and fill slots with NaN."""
        self._epoch = epoch
        drawn = draw_ids(self.settings, (epoch - 1) // len(ROUTINGS), self.group.rank)
        balanced = balanced_ids(self.settings, self.group.rank)
        self.ids = {"plain": drawn, "replicated": drawn, "balanced": balanced}
        for name, stacked in self.weights.items():
            for i, expert in enumerate(self.mains):
                stacked[i].copy_(self.weights_of(name, expert))
            self.grads[name].zero_()
            self.group.slots[name].fill_(torch.nan)

    def at_home_ids(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the physical ids of main instances."""
        return self._home_ids[ids]

    def count_wrong(self, ids: torch.Tensor, passed: Passed, plan: Plan | None) -> int:
        """Return the wrong values of one pass, against a plain computation for the same tokens."""
        tokens = self.tokens.clone().requires_grad_()
        total = torch.zeros_like(self.tokens)
        grads = {name: torch.zeros_like(base) for name, base in self._base.items()}
        for expert in np.unique(ids.numpy()).tolist():
            weights = {n: self.weights_of(n, expert).requires_grad_() for n in self._base}
            shares = (self.probs * (ids == expert)).sum(1)
            rows = (ids == expert).any(1).nonzero().squeeze(1)
            gate, up = (tokens[rows] @ weights["w13"].T).chunk(2, dim=1)
            made = (torch.nn.functional.silu(gate) * up) @ weights["w2"].T
            made = made * shares[rows].unsqueeze(1)
            made.backward(self.out_grad[rows])
            total.index_add_(0, rows, made.detach())
            for name, w in weights.items():
                assert w.grad is not None
                grads[name][expert] = w.grad
        assert tokens.grad is not None
        wrong = _count_far(passed.out, total) + _count_far(passed.tokens_grad, tokens.grad)
        for name, grad in grads.items():
            dist.all_reduce(grad)
            wrong += _count_far(self.grads[name], grad[self.mains])
        return wrong + self._count_wrong_slots(plan)

    def _count_wrong_slots(self, plan: Plan | None) -> int:
        """Return the wrong values of slots, compared bitwise, and of their cleared gradients."""
        wrong = sum(int(grad.count_nonzero()) for grad in self.group.slot_grads.values())
        if plan is None:
            return wrong
        for slot, expert in enumerate(plan.slot_expert[self.group.rank].tolist()):
            for name, slots in self.group.slots.items():
                if expert >= 0:
                    wrong += int((slots[slot] != self.weights_of(name, expert)).sum())
                else:
                    wrong += int((~slots[slot].isnan()).sum())
        return wrong


class Layer:
    """The layer with one kind of routing."""

    def __init__(self, data: LayerData, routing: str) -> None:
        """Create the layer; ``data`` has weights and tokens."""
        self.name, self._data = routing, data
        self._passed: Passed | None = None
        self._plan: Plan | None = None
        self.found: list[tuple[int, ...]] = []  # PHASES, compute_ns, rows, replicas of each run

    def run(self) -> None:
        """Run one step."""
        data = self._data
        ids, group = data.ids[self.name], data.group
        plan, spent = None, [0] * len(PHASES)
        if self.name == "replicated":
            marks = [time.perf_counter_ns()]
            plan = plan_replicas(gather_load(ids, group=group), group=group)
            marks.append(time.perf_counter_ns())
            work = replicate_experts(data.bound, plan, group=group, async_op=True)
            marks.append(time.perf_counter_ns())
            physical_ids = reroute(ids, plan, group=group)
            marks.append(time.perf_counter_ns())
            assert work is not None
            work.wait()
            marks.append(time.perf_counter_ns())
            planned, submitted, rerouted, waited = np.diff(marks).tolist()
            spent = [planned, submitted + waited, rerouted, 0]
        else:
            physical_ids = data.at_home_ids(ids)
        per_rank = group.topology.instances_per_rank
        self._passed = run_layer(
            data.tokens,
            physical_ids,
            data.probs,
            data.out_grad,
            [*data.at_home, *data.in_slots],
            per_rank,
        )
        if plan is not None:
            start = time.perf_counter_ns()
            reduce_expert_grads(data.bound_grads, plan, group=group)
            spent[-1] = time.perf_counter_ns() - start
        self._plan = plan
        replicas = 0 if plan is None else plan.num_replicas
        self.found.append((*spent, self._passed.compute_ns, self._passed.num_rows, replicas))

    def count_wrong(self, payload: object, epoch: int) -> int:
        """Return the wrong values of results, gradients and slots."""
        assert self._passed is not None
        return self._data.count_wrong(self._data.ids[self.name], self._passed, self._plan)


def _count_far(found: torch.Tensor, wanted: torch.Tensor) -> int:
    far = (found - wanted).abs() > _TOLERANCE * wanted.abs().max()
    return int((far | found.isnan()).sum())


def draw_ids(settings: LayerSettings, iteration: int, rank: int) -> torch.Tensor:
    """Return int64 ids ``[T, k]``: of the workload, alike on all ranks, or drawn independently.

    A token may draw an expert twice.
    """
    if settings.workload:
        ids = route_tokens(
            settings.workload,
            num_experts=settings.num_experts,
            topk=settings.topk,
            num_tokens=settings.tokens,
            step=iteration,
        )
        return torch.from_numpy(ids)
    rng = np.random.default_rng([settings.seed, iteration, rank])
    shape = (settings.tokens, settings.topk)
    return torch.from_numpy(rng.choice(settings.num_experts, size=shape, p=settings.shares))


def balanced_ids(settings: LayerSettings, rank: int) -> torch.Tensor:
    """Return int64 ids ``[T, k]`` that give all experts the same number of tokens, to within 1."""
    first = rank * settings.tokens * settings.topk
    ids = torch.arange(first, first + settings.tokens * settings.topk) % settings.num_experts
    return ids.view(settings.tokens, settings.topk)
