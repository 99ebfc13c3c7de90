"""The rows of ``layer --framework``: a framework's own layer, and the same with its adapter.

Routers are replaced, as the routing is given; all else of a layer is the framework's own code. The
main weights of all rows are the same memory.
"""

from __future__ import annotations

import abc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from studies.layer import LayerSettings
from studies.layer.data import ROWS, Figures, LayerData
from studies.moe import Passed
from ultraep_comm.group.group import Group
from ultraep_comm.nn import hooks, replication
from ultraep_comm.plan.plan import Plan

Tensor = torch.Tensor
# Time in our calls: before the dispatch; in the rest of the forward pass; in the backward pass.
PHASES = ("begin", "forward", "backward")
_CALLS: dict[str, list[tuple[Any, str]]] = {
    "begin": [(replication.Replication, "begin")],
    "forward": [
        (replication.LayerPass, name)
        for name in ("before_dispatch", "before_experts", "after_experts", "after_combine")
    ],
    "backward": [(hooks.Hook, "backward")],
}


class Stopwatch:
    """Time that this process spends in our calls, by phase. They are replaced by timed ones."""

    def __init__(self) -> None:
        self.spent = dict.fromkeys(PHASES, 0)
        for phase, calls in _CALLS.items():
            for owner, name in calls:
                timed = self._timed(phase, getattr(owner, name))
                setattr(owner, name, staticmethod(timed) if owner is hooks.Hook else timed)

    def _timed(self, phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter_ns()
            try:
                return call(*args, **kwargs)
            finally:
                self.spent[phase] += time.perf_counter_ns() - start

        return timed

    def take(self) -> list[int]:
        """Return the time since the last call, by phase, in ns."""
        spent = list(self.spent.values())
        self.spent = dict.fromkeys(PHASES, 0)
        return spent


class FrameworkRow:
    """A framework's layer with one kind of routing."""

    def __init__(self, data: LayerData, name: str, layer: Layer, watch: Stopwatch) -> None:
        """Create a row; ``name`` is of `data.ROWS`."""
        self.name, self._data, self._layer, self._watch = name, data, layer, watch
        self.found: list[Figures] = []

    def run(self) -> None:
        """Run one step."""
        data, layer = self._data, self._layer
        started = time.thread_time_ns()
        tokens = data.tokens.clone().requires_grad_()
        out = layer.forward(tokens, data.ids[self.name], data.probs)
        out.backward(data.out_grad)  # type: ignore[no-untyped-call]
        spent = time.thread_time_ns() - started
        assert tokens.grad is not None
        passed = Passed(
            out=out.detach(), tokens_grad=tokens.grad, num_rows=layer.rows, compute_ns=spent
        )
        layer.rows = 0
        self.found.append(Figures(phases_ns=self._watch.take(), passed=passed, plan=layer.plan()))

    def count_wrong(self, payload: object, epoch: int) -> int:
        """Return the wrong values of results, gradients and slots."""
        return self._data.count_wrong(self.name, self.found[-1])


class Layer(abc.ABC):
    """What `FrameworkRow` needs of a framework's layer.

    Attributes:
        rows: that its experts have computed.
    """

    names: Mapping[str, str]  # of the group's segments, by name of `LayerData.weights`

    def __init__(self) -> None:
        self.rows = 0

    @abc.abstractmethod
    def forward(self, tokens: Tensor, ids: Tensor, probs: Tensor) -> Tensor:
        """Return the layer's output ``[T, H]``."""

    @abc.abstractmethod
    def group(self) -> Group:
        """Return the adapter's group."""

    @abc.abstractmethod
    def plan(self) -> Plan | None:
        """Return the plan of the last step; None: the layer has no replicas."""


class TransformersLayer(Layer):
    """Experts of Qwen3-MoE behind an implementation of transformers' expert parallelism."""

    names = MappingProxyType({"w13": "gate_up_proj", "w2": "down_proj"})

    def __init__(self, settings: LayerSettings, data: LayerData, replicated: bool) -> None:
        """Build the layer with the weights and gradients of ``data``."""
        super().__init__()
        from torch.distributed.device_mesh import init_device_mesh
        from transformers import Qwen3MoeConfig
        from transformers.distributed.expert_parallel import EpDispatchExpertsParallel
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

        from ultraep_comm.adapters import transformers as adapter

        adapter.configure(slots_per_rank=settings.slots, engine="host")
        config = Qwen3MoeConfig(
            hidden_size=settings.hidden,
            moe_intermediate_size=settings.inner,
            num_experts=len(data.mains),
            experts_implementation="grouped_mm",
        )
        experts = Qwen3MoeExperts(config)
        for ours, theirs in self.names.items():
            setattr(experts, theirs, _parameter(data.weights[ours], data.grads[ours]))
        self._count(experts)
        mesh = init_device_mesh("cpu", (settings.num_ranks, 1), mesh_dim_names=("ep", "tp"))
        way = adapter.NAME if replicated else "all_to_all"
        EpDispatchExpertsParallel().install_forward(
            experts, mesh["ep"], tp_mesh=mesh["tp"], ep_implementation=way
        )
        self._experts = experts
        self._ours = adapter.layers(experts).get("")

    def _count(self, experts: Any) -> None:
        own = experts.forward

        def counted(rows: Tensor, ids: Tensor, probs: Tensor) -> Tensor:
            self.rows += len(rows)
            result: Tensor = own(rows, ids, probs)
            return result

        experts.forward = counted

    def forward(self, tokens: Tensor, ids: Tensor, probs: Tensor) -> Tensor:
        """Return the layer's output ``[T, H]``."""
        out: Tensor = self._experts(tokens, ids, probs)
        return out

    def group(self) -> Group:
        """Return the adapter's group."""
        assert self._ours is not None
        assert self._ours.group is not None
        return self._ours.group

    def plan(self) -> Plan | None:
        """Return the plan of the last step."""
        return None if self._ours is None else self._ours.plan


class MegatronLayer(Layer):
    """megatron-core's ``MoELayer`` with its all-to-all and its sequential experts."""

    names = MappingProxyType({"w13": "linear_fc1.weight", "w2": "linear_fc2.weight"})

    def __init__(self, settings: LayerSettings, data: LayerData, replicated: bool) -> None:
        """Build the layer with the weights and gradients of ``data``."""
        super().__init__()
        from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
        from megatron.core.transformer.spec_utils import build_module
        from megatron.core.transformer.transformer_config import TransformerConfig

        from ultraep_comm.adapters.megatron import replicate

        config = TransformerConfig(
            num_layers=1,
            hidden_size=settings.hidden,
            num_attention_heads=1,
            moe_ffn_hidden_size=settings.inner,
            num_moe_experts=settings.experts,
            moe_router_topk=settings.topk,
            moe_token_dispatcher_type="alltoall",
            moe_router_load_balancing_type="none",
            expert_model_parallel_size=settings.num_ranks,
            add_bias_linear=False,
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            use_cpu_initialization=True,
            bias_activation_fusion=False,
            gradient_accumulation_fusion=False,
        )
        spec = get_moe_module_spec(use_te=False, num_experts=settings.experts)
        self._layer = layer = build_module(spec, config, layer_number=1)
        for i, expert in enumerate(layer.experts.local_experts):
            for ours, theirs in self.names.items():
                linear = expert.get_submodule(theirs.partition(".")[0])
                linear.weight = _parameter(data.weights[ours][i], data.grads[ours][i])
        layer.router = self._router = _Routing(settings.experts)
        layer.experts.register_forward_pre_hook(self._count)
        self._is_replicated = replicated
        if replicated:
            replicate(layer, settings.slots, engine="host")

    def _count(self, _: Any, given: Any) -> None:
        self.rows += len(given[0])

    def forward(self, tokens: Tensor, ids: Tensor, probs: Tensor) -> Tensor:
        """Return the layer's output ``[T, H]``."""
        self._router.ids, self._router.probs = ids, probs
        out, _ = self._layer(tokens.unsqueeze(1))
        result: Tensor = out.squeeze(1)
        return result

    def group(self) -> Group:
        """Return the adapter's group."""
        group: Group = self._layer.replicas.group
        return group

    def plan(self) -> Plan | None:
        """Return the plan of the last step."""
        return self._layer.replica_plan if self._is_replicated else None


def _prepare_megatron(num_ranks: int) -> None:
    """Let megatron-core run on the CPU, and name its ranks."""
    from studies.layer import megatron_cpu

    megatron_cpu.install()
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(expert_model_parallel_size=num_ranks)
    tensor_parallel.random.model_parallel_cuda_manual_seed(1, force_reset_rng=True)


class _Routing(torch.nn.Module):
    """A router that says what it is told, in Megatron's form."""

    ids: Tensor
    probs: Tensor

    def __init__(self, experts: int) -> None:
        super().__init__()
        self._experts = experts

    def forward(self, hidden: Tensor, padding_mask: Any = None) -> tuple[Tensor, Tensor]:
        table = hidden.new_zeros((len(self.ids), self._experts))
        return table.scatter(1, self.ids, self.probs), table.bool().scatter(1, self.ids, True)


def _parameter(weight: Tensor, grad: Tensor) -> torch.nn.Parameter:
    """Return a parameter in this memory, whose gradients are added in that memory."""
    parameter = torch.nn.Parameter(weight)
    parameter.grad = grad
    return parameter


_LAYERS: dict[str, type[Any]] = {"transformers": TransformersLayer, "megatron": MegatronLayer}


@contextmanager
def open_rows(settings: LayerSettings) -> Iterator[tuple[Group, LayerData, list[FrameworkRow]]]:
    """Build the layers, and yield the adapter's group, the data and the rows. Collective.

    Raises:
        UnsupportedError: the framework has not the version that was tried.
    """
    rank, mains = dist.get_rank(), settings.experts // settings.num_ranks
    weights = {name: torch.empty(mains, *shape) for name, shape in settings.shapes.items()}
    data = LayerData(settings, rank, range(rank * mains, (rank + 1) * mains), weights)
    kind = _LAYERS[settings.framework]
    if kind is MegatronLayer:
        _prepare_megatron(settings.num_ranks)
    plain, replicated = (kind(settings, data, way) for way in (False, True))
    layers = {"plain": plain, "replicated": replicated, "balanced": plain}
    watch = Stopwatch()
    rows = [FrameworkRow(data, name, layers[name], watch) for name in ROWS]
    data.fill(None, 1)
    rows[1].run()  # transformers' adapter opens its group in the first pass
    group = replicated.group()
    data.slots = {ours: group.slots[theirs] for ours, theirs in kind.names.items()}
    data.slot_grads = {ours: group.slot_grads[theirs] for ours, theirs in kind.names.items()}
    with group:
        yield group, data, rows
