"""The layer benchmark, as every rank runs it. bench/METRICS.md says what the figures mean."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ultraep_comm.bench.gate import exit_code
from ultraep_comm.bench.interleaved import Transfer, measure
from ultraep_comm.bench.layer_report import (
    PHASES,
    LayerRow,
    format_layer_header,
    format_layer_results,
    make_layer_document,
    make_layer_records,
)
from ultraep_comm.bench.layer_settings import LayerSettings
from ultraep_comm.bench.moe import Instance, Passed, run_layer
from ultraep_comm.bench.outputs import write_outputs
from ultraep_comm.bench.placement import gather_places
from ultraep_comm.bench.report import Measurement
from ultraep_comm.collectives import gather_load, replicate_experts
from ultraep_comm.creation import new_group
from ultraep_comm.group import Group
from ultraep_comm.plan import Plan
from ultraep_comm.planning import plan_replicas
from ultraep_comm.reduction import reduce_expert_grads
from ultraep_comm.rerouting import reroute

ROUTINGS = ("plain", "replicated", "balanced")
_TOLERANCE = 1e-4  # of the largest value: sums of fp32 products in different orders
_MANY = 1021  # weights come back after so many epochs


def run(settings: LayerSettings) -> int:
    """Measure on an initialised process group; rank 0 prints.

    Returns:
        The exit status, 1: wrong values, 3: the gate is not met.

    Raises:
        UltraEPError: the group could not be made, or a call failed.
    """
    torch.set_num_threads(1)
    with new_group(
        num_experts=settings.num_experts,
        slots_per_rank=settings.slots,
        expert=settings.expert,
        grads=torch.float32,
        engine="host",
    ) as group:
        places = gather_places(group)
        if group.rank == 0:
            print(format_layer_header(settings, places), flush=True)
        stage = LayerStage(settings, group)
        layers = [Layer(stage, routing) for routing in ROUTINGS]
        transfers: list[Transfer[Any]] = [*layers]
        measured = measure(settings, stage, None, transfers)
        rows = [
            _gather(layer, one, settings.iters) for layer, one in zip(layers, measured, strict=True)
        ]
        if group.rank == 0:
            print(format_layer_results(settings, rows), flush=True)
            document = make_layer_document(settings, rows, places)
            write_outputs(document, json_path=settings.json, csv_path=settings.csv)
        records = make_layer_records(settings, rows)
        wrong = sum(row.wrong_values for row in rows)
        return exit_code(settings.gate, records, wrong, speaks=group.rank == 0)


class LayerStage:
    """What all routings of a run share: weights, tokens, and the model that they must agree with.

    Every rank knows all experts' weights, so that it can check slots and results by itself.
    """

    def __init__(self, settings: LayerSettings, group: Group) -> None:
        """Make weights and tokens. Collective."""
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
        """Return what an expert's weights are in this epoch."""
        base: torch.Tensor = self._base[name][expert]
        return base * (1 + self._epoch % _MANY / 4096)

    def fill(self, payload: object, epoch: int) -> None:
        """Change the weights, as an optimizer does; clear gradients, and spoil the slots."""
        self._epoch = epoch
        drawn = self.settings.draw_ids((epoch - 1) // len(ROUTINGS), self.group.rank)
        balanced = self.settings.balanced_ids(self.group.rank)
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
        """Compare one pass with the definition, computed here for this rank's own tokens."""
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
        """Compare slots bit for bit; their gradients have been cleared."""
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

    def __init__(self, stage: LayerStage, routing: str) -> None:
        """Run on the stage's weights and tokens."""
        self.name, self._stage = routing, stage
        self._passed: Passed | None = None
        self._plan: Plan | None = None
        self.found: list[tuple[int, ...]] = []  # PHASES, compute_ns, rows, replicas of each run

    def run(self) -> None:
        """Do one step."""
        stage = self._stage
        ids, group = stage.ids[self.name], stage.group
        plan, spent = None, [0] * len(PHASES)
        if self.name == "replicated":
            marks = [time.perf_counter_ns()]
            plan = plan_replicas(gather_load(ids, group=group), group=group)
            marks.append(time.perf_counter_ns())
            work = replicate_experts(stage.bound, plan, group=group, async_op=True)
            marks.append(time.perf_counter_ns())
            physical_ids = reroute(ids, plan, group=group)
            marks.append(time.perf_counter_ns())
            assert work is not None
            work.wait()
            marks.append(time.perf_counter_ns())
            planned, submitted, rerouted, waited = np.diff(marks).tolist()
            spent = [planned, submitted + waited, rerouted, 0]
        else:
            physical_ids = stage.at_home_ids(ids)
        per_rank = group.topology.instances_per_rank
        self._passed = run_layer(
            stage.tokens,
            physical_ids,
            stage.probs,
            stage.out_grad,
            [*stage.at_home, *stage.in_slots],
            per_rank,
        )
        if plan is not None:
            start = time.perf_counter_ns()
            reduce_expert_grads(stage.bound_grads, plan, group=group)
            spent[-1] = time.perf_counter_ns() - start
        self._plan = plan
        replicas = 0 if plan is None else plan.num_replicas
        self.found.append((*spent, self._passed.compute_ns, self._passed.num_rows, replicas))

    def count_wrong(self, payload: object, epoch: int) -> int:
        """Compare results, gradients and slots."""
        assert self._passed is not None
        return self._stage.count_wrong(self._stage.ids[self.name], self._passed, self._plan)


def _count_far(found: torch.Tensor, wanted: torch.Tensor) -> int:
    far = (found - wanted).abs() > _TOLERANCE * wanted.abs().max()
    return int((far | found.isnan()).sum())


def _gather(layer: Layer, measured: Measurement, iters: int) -> LayerRow:
    """Put together what the ranks found. Collective."""
    mine = torch.tensor(layer.found[-iters:], dtype=torch.int64)
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, mine)
    ranks = torch.stack(gathered).numpy()
    phases = len(PHASES)
    rows = ranks[:, :, phases + 1]
    return LayerRow(
        routing=layer.name,
        times=measured.times,
        rank_times=measured.rank_times,
        phases=ranks[:, :, :phases].max(axis=0),
        compute=ranks[:, :, phases].max(axis=0),
        imbalance=rows.max(axis=0) / rows.mean(axis=0),
        replicas=ranks[0, :, phases + 2],
        wrong_values=measured.wrong_bytes,
    )
