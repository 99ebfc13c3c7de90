"""The rows of ``layer`` without a framework: that of `studies.moe`, and the calls around it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from studies.layer import LayerSettings
from studies.layer.data import ROWS, Figures, LayerData
from studies.moe import Instance, run_layer
from ultraep_comm.calls.gather import gather_load
from ultraep_comm.calls.plan import plan_replicas
from ultraep_comm.calls.reduce import reduce_expert_grads
from ultraep_comm.calls.replicate import replicate_experts
from ultraep_comm.calls.reroute import reroute
from ultraep_comm.group.create import new_group
from ultraep_comm.group.group import Group

PHASES = ("plan", "replicate", "reroute", "reduce")


class Native:
    """The instances of this rank, and what the calls take."""

    def __init__(self, data: LayerData, group: Group) -> None:
        """Bind weights and gradients; ``data`` gets the group's slots."""
        self.group = group
        data.slots, data.slot_grads = group.slots, group.slot_grads
        self.bound, self.bound_grads = group.bind(data.weights), group.bind_grads(data.grads)
        at_home = {**data.weights, **{f"{name}_grad": grad for name, grad in data.grads.items()}}
        in_slots = {
            **data.slots,
            **{f"{name}_grad": grad for name, grad in data.slot_grads.items()},
        }
        self.instances = [
            Instance(**{name: tensor[i] for name, tensor in held.items()})
            for held in (at_home, in_slots)
            for i in range(len(held["w13"]))
        ]
        topology = group.topology
        self._home_ids = torch.tensor(
            [
                int(home) * topology.instances_per_rank
                + topology.local_experts(int(home)).tolist().index(expert)
                for expert, home in enumerate(topology.home.tolist())
            ]
        )

    def at_home_ids(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the physical ids of main instances."""
        return self._home_ids[ids]


class Layer:
    """The layer with one kind of routing."""

    def __init__(self, data: LayerData, native: Native, name: str) -> None:
        """Create a row; ``name`` is of `data.ROWS`."""
        self.name, self._data, self._native = name, data, native
        self.found: list[Figures] = []

    def run(self) -> None:
        """Run one step."""
        data, native = self._data, self._native
        ids, group = data.ids[self.name], native.group
        plan, spent = None, [0] * len(PHASES)
        if self.name == "replicated":
            marks = [time.perf_counter_ns()]
            plan = plan_replicas(gather_load(ids, group=group), group=group)
            marks.append(time.perf_counter_ns())
            work = replicate_experts(native.bound, plan, group=group, async_op=True)
            marks.append(time.perf_counter_ns())
            physical_ids = reroute(ids, plan, group=group)
            marks.append(time.perf_counter_ns())
            assert work is not None
            work.wait()
            marks.append(time.perf_counter_ns())
            planned, submitted, rerouted, waited = np.diff(marks).tolist()
            spent = [planned, submitted + waited, rerouted, 0]
        else:
            physical_ids = native.at_home_ids(ids)
        passed = run_layer(
            data.tokens,
            physical_ids,
            data.probs,
            data.out_grad,
            native.instances,
            group.topology.instances_per_rank,
        )
        if plan is not None:
            start = time.perf_counter_ns()
            reduce_expert_grads(native.bound_grads, plan, group=group)
            spent[-1] = time.perf_counter_ns() - start
        self.found.append(Figures(phases_ns=spent, passed=passed, plan=plan))

    def count_wrong(self, payload: object, epoch: int) -> int:
        """Return the wrong values of results, gradients and slots."""
        return self._data.count_wrong(self.name, self.found[-1])


@contextmanager
def open_rows(settings: LayerSettings) -> Iterator[tuple[Group, LayerData, list[Layer]]]:
    """Create a group, and yield it, the data and the rows. Collective.

    Raises:
        UltraEPError: the group could not be created.
    """
    with new_group(
        num_experts=settings.experts,
        slots_per_rank=settings.slots,
        expert={name: (shape, torch.float32) for name, shape in settings.shapes.items()},
        grads=torch.float32,
        engine="host",
    ) as group:
        mains = group.topology.local_experts(group.rank).tolist()
        data = LayerData(settings, group.rank, mains, group.empty_weights())
        native = Native(data, group)
        yield group, data, [Layer(data, native, name) for name in ROWS]
