"""vLLM's layers as its per-batch adapter sees them, written anew, and weights for them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from fake_vllm import faked

from ultraep_comm.adapters import vllm as adapter

G, E, S, H, K, T, LAYERS = 4, 8, 2, 6, 2, 64, 3
M, P = E // G, E // G + S
MOE = "vllm.model_executor.layers.fused_moe"


class FakeRouter:
    def __init__(self) -> None:
        self.eplb_state = SimpleNamespace(num_unpadded_tokens_tensors=[torch.tensor(T)])

    def _apply_eplb_mapping(self, topk_ids: torch.Tensor) -> torch.Tensor:
        raise AssertionError("vLLM's own map")


class FakeKernel:
    """An expert is ``(x @ weight.T) * scale + bias``."""

    def __init__(self, layer: Any) -> None:
        self.quant_config = SimpleNamespace(
            **{name: SimpleNamespace(scale=None, bias=None) for name in ("_a1", "_a2", "_w2")},
            _w1=SimpleNamespace(scale=layer.w13_weight_scale, bias=layer.w13_bias),
        )
        self.runs = 0

    def apply(
        self, output: Any, hidden_states: Any, w1: Any, w2: Any, topk_weights: Any, topk_ids: Any
    ) -> None:
        self.runs += 1
        held = self.quant_config._w1
        for row in range(P):
            at, place = (topk_ids == dist.get_rank(GROUP[0]) * P + row).nonzero(as_tuple=True)
            y = hidden_states[at] @ w1[row].to(torch.float32).T * held.scale[row] + held.bias[row]
            output.index_add_(0, at, y * topk_weights[at, place, None])
        del w2


GROUP: list[Any] = [None]
PADDING: list[Any] = [None]  # of a forward pass; None: vLLM told a number alone


class FakeMethod:
    is_monolithic = False

    def __init__(self) -> None:
        self.moe_quant_config: Any = None
        self.moe_kernel: Any = None

    def apply(self, layer: Any, x: Any, topk_weights: Any, topk_ids: Any) -> Any:
        """Dispatch, run and combine, as vLLM's modular kernels do."""
        group, gathers = GROUP[0], layer.moe_config.moe_parallel_config.use_all2all_kernels
        given = [x, topk_weights, topk_ids]
        for i, tensor in enumerate(given):
            if gathers:
                parts = [torch.empty_like(tensor) for _ in range(G)]
                dist.all_gather(parts, tensor.contiguous(), group=group)
                given[i] = torch.cat(parts)
        output = torch.zeros_like(given[0])
        layer.seen = given[2]
        if bool((given[2] // P == dist.get_rank(group)).any()):
            self.moe_kernel.fused_experts.apply(
                output, given[0], layer.w13_weight, None, given[1], given[2]
            )
        dist.all_reduce(output, group=group)
        own = dist.get_rank(group) * len(x)
        return output[own : own + len(x)] if gathers else output


def make_fake(config: Any, **changed: Any) -> dict[str, dict[str, Any]]:
    """Return the contents of the modules that the adapter uses."""
    registry: dict[str, type] = {}

    class PluggableLayer(torch.nn.Module):
        def __new__(cls, *_: Any, **__: Any) -> Any:
            return super().__new__(registry.get(cls.__name__, cls))

        @classmethod
        def register_oot(cls, _decorated_layer_cls: Any = None, name: str = "") -> Any:
            def register(layer: type) -> type:
                assert name not in registry, f"Duplicate layer name: {name}"
                registry[name] = layer
                return layer

            return register

    class RoutedExperts(PluggableLayer):
        def __init__(self, layer_name: str, params_dtype: Any, moe_config: Any) -> None:
            super().__init__()
            self.layer_name, self.moe_config = layer_name, moe_config
            self.local_num_experts = moe_config.num_local_experts
            self.expert_map_manager = SimpleNamespace(
                num_fused_shared_experts=0, placement_strategy="linear"
            )
            self.quant_method = FakeMethod()
            for name, tensor in {
                "w13_weight": torch.zeros(P, H, H, dtype=params_dtype),
                "w13_weight_scale": torch.zeros(P, 1),
                "w13_bias": torch.zeros(P, H),
                "e_score_correction_bias": torch.arange(float(P)),  # has as many by accident
                "w13_input_scale": torch.tensor(0.5),
            }.items():
                self.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))

        def _ensure_moe_quant_config_init(self) -> None:
            self.quant_method.moe_quant_config = (
                self.quant_method.moe_kernel.fused_experts.quant_config
            )

        def weight_loader(
            self, param: Any, loaded_weight: Any, weight_name: str, shard_id: str, expert_id: int
        ) -> None:
            del weight_name, shard_id, expert_id
            param.data.copy_(loaded_weight)

        weight_loader.supports_moe_loading = True  # type: ignore[attr-defined]

        def get_expert_weights(self) -> Any:
            return ["vLLM's"]

        def forward_modular(self, x: Any, topk_weights: Any, topk_ids: Any) -> Any:
            return self.quant_method.apply(self, x, topk_weights, topk_ids)

    class EplbState:
        @staticmethod
        def build_initial_global_physical_to_logical_map(
            num_routed_experts: int, num_redundant_experts: int
        ) -> list[int]:
            return list(range(num_routed_experts + num_redundant_experts))

        def rearrange(self, is_profile: bool = False, rank_mapping: Any = None) -> None:
            raise AssertionError("experts move")

    parts = {"BaseRouter": FakeRouter, "FusedMoEExpertsModular": FakeKernel} | changed
    return {
        f"{MOE}.routed_experts": {"RoutedExperts": RoutedExperts},
        f"{MOE}.router.base_router": {"BaseRouter": parts["BaseRouter"]},
        f"{MOE}.modular_kernel": {"FusedMoEExpertsModular": parts["FusedMoEExpertsModular"]},
        "vllm.model_executor.custom_op": {"PluggableLayer": PluggableLayer},
        "vllm.forward_context": {
            "is_forward_context_available": lambda: PADDING[0] is not None,
            "get_forward_context": lambda: SimpleNamespace(is_padding=PADDING[0]),
        },
        "vllm.config": {"get_current_vllm_config": lambda: config},
        "vllm.distributed.parallel_state": {"get_ep_group": lambda: SimpleNamespace(world_size=G)},
        "vllm.distributed.eplb.eplb_state": {"EplbState": EplbState},
    }


def make_config(**options: Any) -> Any:
    return SimpleNamespace(
        additional_config={"ultraep": {"engine": "host"} | options},
        compilation_config=SimpleNamespace(static_forward_context={}),
        parallel_config=SimpleNamespace(use_ubatching=False),
    )


def make_layer(config: Any, rank: int = 0, *, gathers: bool = False, number: int = 0) -> Any:
    """Return a layer as vLLM's factory makes it, with its runner."""
    moe_config = SimpleNamespace(
        num_local_experts=P,
        num_logical_experts=E,
        is_lora_enabled=False,
        require_decomposed_backend=False,
        moe_parallel_config=SimpleNamespace(
            enable_eplb=True,
            ep_size=G,
            ep_rank=rank,
            sp_size=1,
            pcp_size=1,
            all2all_backend="allgather_reducescatter",
            use_all2all_kernels=gathers,
            use_passthrough_all2all=False,
            use_moonep_kernels=False,
        ),
    )
    made = sys.modules[f"{MOE}.routed_experts"].RoutedExperts
    layer = made(f"layers.{number}", torch.bfloat16, moe_config)
    layer.quant_method.moe_kernel = SimpleNamespace(fused_experts=FakeKernel(layer))
    config.compilation_config.static_forward_context[layer.layer_name] = SimpleNamespace(
        router=FakeRouter()
    )
    return layer


def add_model(layers: list[Any], group: Any) -> Any:
    """Do what vLLM's EplbState.add_model does."""
    state = sys.modules["vllm.distributed.eplb.eplb_state"]
    return state.create_eplb_communicator(
        SimpleNamespace(cpu_group=group, device_group=group),
        "torch_gloo",
        [layer.get_expert_weights() for layer in layers],
        [],
    )


NAMES = ("w13_weight", "w13_weight_scale", "w13_bias")


def whole(number: int, version: int) -> dict[str, torch.Tensor]:
    """Return the weights of all of a layer's experts."""
    numbers = torch.Generator().manual_seed(100 * number + version)
    return {
        "w13_weight": torch.randn((E, H, H), generator=numbers).to(torch.bfloat16),
        "w13_weight_scale": torch.rand((E, 1), generator=numbers),
        "w13_bias": torch.randn((E, H), generator=numbers),
    }


def load(layer: Any, rank: int, number: int, version: int) -> dict[str, torch.Tensor]:
    """Write a checkpoint into a layer's parameters as vLLM does, slots included."""
    every = whole(number, version)
    rows = sys.modules["vllm.distributed.eplb.eplb_state"].EplbState
    held = rows.build_initial_global_physical_to_logical_map(E, G * S)[rank * P : (rank + 1) * P]
    for name, tensor in every.items():
        getattr(layer, name).data.copy_(tensor[held])
    return every


@contextmanager
def registered(rank: int = 0, count: int = 1, group: Any = None, **options: Any) -> Iterator[Any]:
    """Return a rank's layers in a vLLM that has the plugin; ``options`` are the plugin's."""
    GROUP[0], gathers = group, options.pop("gathers", False)
    config = make_config(**options)
    with faked("batch", make_fake(config)):
        adapter.register()
        yield [make_layer(config, rank, gathers=gathers, number=n) for n in range(count)]


def run_batch(layer: Any, ids: torch.Tensor) -> None:
    """Fill a layer's slots for a batch of ids."""
    layer.replicas.begin(ids)
    layer.replicas.wait()
