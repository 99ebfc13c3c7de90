"""A stand-in for the part of megatron-core that the adapter meets: the same names and parameters.

Its dispatchers gather all tokens on every rank. It computes no gradients of tokens.
"""

from __future__ import annotations

import dataclasses
import importlib
from types import SimpleNamespace
from typing import Any

import fakes
import torch
import torch.distributed as dist

from ultraep_comm.adapters import megatron

Tensor = torch.Tensor


@dataclasses.dataclass
class TransformerConfig:
    hidden_size: int = 6
    ffn_hidden_size: int = 10
    num_moe_experts: int = 4
    moe_router_topk: int = 2
    add_bias_linear: bool = False
    moe_token_dispatcher_type: str = "alltoall"
    moe_flex_dispatcher_backend: str = "deepep"
    cuda_graph_impl: str = "none"
    overlap_moe_expert_parallel_comm: bool = False
    delay_wgrad_compute: bool = False
    gradient_accumulation_fusion: bool = False
    moe_pad_expert_input_to_capacity: bool = False
    moe_router_padding_for_quantization: bool = False
    moe_latent_size: int | None = None
    fp8: str | None = None
    fp4: str | None = None


class ColumnParallelLinear(torch.nn.Module):
    def __init__(self, input_size: int, output_size: int, *, bias: bool = True) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(output_size, input_size) / 3)
        self.register_parameter("bias", None)
        if bias:
            self.bias = torch.nn.Parameter(torch.randn(output_size) / 3)

    def forward(self, input_: Tensor) -> Any:
        return input_ @ self.weight.T, self.bias


class RowParallelLinear(ColumnParallelLinear):
    pass


class MLP(torch.nn.Module):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.ffn_hidden_size, config.add_bias_linear
        self.linear_fc1 = ColumnParallelLinear(hidden, inner, bias=bias)
        self.linear_fc2 = RowParallelLinear(inner, hidden, bias=bias)

    def forward(self, hidden_states: Tensor, per_token_scale: Tensor) -> Any:
        x, bias = self.linear_fc1(hidden_states)
        x = torch.tanh(x if bias is None else x + bias) * per_token_scale[:, None]
        y, bias = self.linear_fc2(x)
        return y if bias is None else y + bias * per_token_scale[:, None], None


class SequentialMLP(torch.nn.Module):
    def __init__(
        self, num_local_experts: int, config: TransformerConfig, submodules: Any, pg_collection: Any
    ) -> None:
        super().__init__()
        self.config, self.num_local_experts = config, num_local_experts
        self.local_experts = torch.nn.ModuleList(MLP(config) for _ in range(num_local_experts))

    def forward(
        self,
        permuted_local_hidden_states: Tensor,
        tokens_per_expert: Tensor,
        permuted_probs: Tensor,
    ) -> Any:
        counts = tokens_per_expert.tolist()
        assert len(counts) == self.num_local_experts
        parts = zip(
            self.local_experts,
            permuted_local_hidden_states.split(counts),
            permuted_probs.split(counts),
            strict=True,
        )
        return torch.cat([expert(x, scale)[0] for expert, x, scale in parts]), None


class MoETokenDispatcher:
    def __init__(self, config: TransformerConfig, pg_collection: Any = None) -> None:
        self.config, self.shared_experts = config, None
        self.ep_group, self.tp_group = pg_collection.ep, pg_collection.expt_tp
        self.tp_ep_group, self.tp_size = pg_collection.tp_ep, pg_collection.expt_tp.size()


class MoEAllGatherTokenDispatcher(MoETokenDispatcher):
    def __init__(
        self,
        num_local_experts: int,
        local_expert_indices: list[int],
        config: TransformerConfig,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config, pg_collection)
        assert num_local_experts * self.ep_group.size() == config.num_moe_experts
        self.local = slice(local_expert_indices[0], local_expert_indices[-1] + 1)

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> Any:
        assert routing_map.shape[1] == self.config.num_moe_experts
        self.routing_map = routing_map
        return hidden_states, probs

    def _gather(self, tensor: Tensor) -> Tensor:
        every = [torch.empty_like(tensor) for _ in range(self.ep_group.size())]
        dist.all_gather(every, tensor.detach().contiguous(), group=self.ep_group)
        return torch.cat(every)

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> Any:
        self.routing_map = self._gather(self.routing_map)
        return self._gather(hidden_states), self._gather(probs)

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> Any:
        mine = self.routing_map[:, self.local].T
        self.tokens, self.shape = mine.nonzero()[:, 1], hidden_states.shape
        return hidden_states[self.tokens], mine.sum(1), probs[:, self.local].T[mine]

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        return hidden_states.new_zeros(self.shape).index_add(0, self.tokens, hidden_states)

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        dist.all_reduce(hidden_states, group=self.ep_group)
        return hidden_states.chunk(self.ep_group.size())[self.ep_group.rank()]

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        return hidden_states


class MoEAlltoAllTokenDispatcher(MoEAllGatherTokenDispatcher):
    pass


class MoEFlexTokenDispatcher(MoEAllGatherTokenDispatcher):
    pass


class MoELayer(torch.nn.Module):
    def __init__(
        self,
        config: TransformerConfig,
        submodules: Any = None,
        layer_number: int | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__()
        self.config, self.layer_number, self.ep_group = config, layer_number, pg_collection.ep
        count = config.num_moe_experts // self.ep_group.size()
        first = self.ep_group.rank() * count
        self.router = torch.nn.Linear(config.hidden_size, config.num_moe_experts, bias=False)
        kinds: dict[str, Any] = {
            "alltoall": MoEAlltoAllTokenDispatcher,
            "allgather": MoEAllGatherTokenDispatcher,
            "flex": MoEFlexTokenDispatcher,
        }
        self.token_dispatcher = kinds[config.moe_token_dispatcher_type](
            count, list(range(first, first + count)), config=config, pg_collection=pg_collection
        )
        self.experts = SequentialMLP(count, config, None, pg_collection)

    def route(self, hidden_states: Tensor, padding_mask: Tensor | None = None) -> Any:
        scores = self.router(hidden_states).softmax(1)
        best = scores.topk(self.config.moe_router_topk).indices
        routing_map = torch.zeros_like(scores, dtype=torch.bool).scatter(1, best, True)
        return scores * routing_map, routing_map

    def preprocess(self, hidden_states: Tensor, probs: Tensor, routing_map: Tensor) -> Any:
        return self.token_dispatcher.dispatch_preprocess(hidden_states, routing_map, probs)

    def dispatch(self, hidden_states: Tensor, probs: Tensor) -> Any:
        return self.token_dispatcher.token_dispatch(hidden_states, probs)

    def routed_experts_compute(self, hidden_states: Tensor, probs: Tensor) -> Any:
        x, counts, scale = self.token_dispatcher.dispatch_postprocess(hidden_states, probs)
        y, bias = self.experts(x, counts, scale)
        return self.token_dispatcher.combine_preprocess(y), bias

    def combine(self, output: Tensor) -> Tensor:
        return self.token_dispatcher.token_combine(output)

    def forward(self, hidden_states: Tensor) -> Any:
        probs, routing_map = self.route(hidden_states, None)
        x, probs = self.preprocess(hidden_states, probs, routing_map)
        x, probs = self.dispatch(x, probs)
        y, bias = self.routed_experts_compute(x, probs)
        return self.token_dispatcher.combine_postprocess(self.combine(y)), bias


_CORE = "megatron.core"
MODULES: dict[str, list[type]] = {
    f"{_CORE}.transformer.moe.moe_layer": [MoELayer],
    f"{_CORE}.transformer.moe.experts": [SequentialMLP],
    f"{_CORE}.transformer.moe.token_dispatcher": [
        MoETokenDispatcher,
        MoEAlltoAllTokenDispatcher,
        MoEAllGatherTokenDispatcher,
        MoEFlexTokenDispatcher,
    ],
    f"{_CORE}.transformer.mlp": [MLP],
    f"{_CORE}.transformer.transformer_config": [TransformerConfig],
    f"{_CORE}.tensor_parallel.layers": [ColumnParallelLinear, RowParallelLinear],
}


def adapter() -> Any:
    """Return the adapter, for which imports of megatron-core find the stand-in."""
    return fakes.installed("0.16.1", MODULES, adapter=megatron)


def groups(ep: Any) -> Any:
    """Return the process groups of an expert-parallel group without tensor parallelism."""
    return SimpleNamespace(ep=ep, expt_tp=SimpleNamespace(size=lambda: 1), tp_ep=ep)


def differences() -> list[str]:
    """Return where the installed release differs: names, fields, and first parameters."""
    config = importlib.import_module(f"{_CORE}.transformer.transformer_config").TransformerConfig
    known = {field.name for field in dataclasses.fields(config)}
    missing = [f.name for f in dataclasses.fields(TransformerConfig) if f.name not in known]
    found = [f"TransformerConfig has no field {name}" for name in missing]
    layers = {p: m for p, m in MODULES.items() if TransformerConfig not in m}
    return found + fakes.differences(layers, ["_gather"], exact=False)
