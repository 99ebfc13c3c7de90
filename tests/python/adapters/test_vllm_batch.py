"""Replicas for each batch in vLLM, against layers with the signatures of its release."""

from __future__ import annotations

import functools
import json
import re
import sys
import types
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from fake_vllm import FakeElastic, FakeVllm
from ranks import RankPool, raised

from ultraep_comm import errors
from ultraep_comm.adapters import vllm as adapter
from ultraep_comm.adapters.vllm import batch, checks

G, E, S, H, K, T, LAYERS = 4, 8, 2, 6, 2, 64, 3
M, P = E // G, E // G + S
MOE = "vllm.model_executor.layers.fused_moe"


# ---- a fake of vLLM ------------------------------------------------------------------------


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


def make_fake(config: Any, ranks: Any = None, **changed: Any) -> dict[str, dict[str, Any]]:
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

    def get_current_vllm_config() -> Any:
        return config

    def get_ep_group() -> Any:
        return SimpleNamespace(world_size=ranks or G)

    def is_forward_context_available() -> bool:
        return PADDING[0] is not None

    def get_forward_context() -> Any:
        return SimpleNamespace(is_padding=PADDING[0])

    parts = {"BaseRouter": FakeRouter, "FusedMoEExpertsModular": FakeKernel} | changed
    return {
        f"{MOE}.routed_experts": {"RoutedExperts": RoutedExperts},
        f"{MOE}.router.base_router": {"BaseRouter": parts["BaseRouter"]},
        f"{MOE}.modular_kernel": {"FusedMoEExpertsModular": parts["FusedMoEExpertsModular"]},
        "vllm.model_executor.custom_op": {"PluggableLayer": PluggableLayer},
        "vllm.forward_context": {
            "is_forward_context_available": is_forward_context_available,
            "get_forward_context": get_forward_context,
        },
        "vllm.config": {"get_current_vllm_config": get_current_vllm_config},
        "vllm.distributed.parallel_state": {"get_ep_group": get_ep_group},
        "vllm.distributed.eplb.eplb_state": {"EplbState": EplbState},
    }


def make_config(**options: Any) -> Any:
    return SimpleNamespace(
        additional_config={"ultraep": options},
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


# ---- batches -------------------------------------------------------------------------------

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


def draw(seed: int, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens, weights and ids, most of them of experts 0 and 1, which are on one rank."""
    numbers = torch.Generator().manual_seed(50 * seed + rank)
    hot = torch.rand((T, E), generator=numbers) + torch.arange(E).lt(2) * 0.6
    weights, ids = hot.topk(K)
    return torch.randn((T, H), generator=numbers), weights, ids.to(torch.int32)


def run_dense(every: dict[str, torch.Tensor], x: Any, weights: Any, ids: Any) -> torch.Tensor:
    output = torch.zeros_like(x)
    for k in range(K):
        own = {name: tensor[ids[:, k].long()] for name, tensor in every.items()}
        y = torch.einsum("th,toh->to", x, own["w13_weight"].to(torch.float32))
        output += (y * own["w13_weight_scale"] + own["w13_bias"]) * weights[:, k, None]
    return output


def run_batches(rank: int, group: Any, gathers: bool, holds: str, real: int) -> list[Any]:
    GROUP[0] = group
    config, found = make_config(target=1.0, engine="host"), []
    with FakeVllm("batch", make_fake(config)):
        adapter.register()
        layers = [make_layer(config, rank, gathers=gathers, number=n) for n in range(LAYERS)]
        for n, layer in enumerate(layers):
            load(layer, rank, n, 0)
            if holds:  # a kernel that has tensors of its own with a parameter's memory
                kernel = layer.quant_method.moe_kernel.fused_experts
                view = layer.w13_bias.data.view(P, H)
                kernel.quant_config._w1.bias = list(view) if holds == "rows" else view
        keys = [sorted(layer.state_dict()) for layer in layers]
        assert add_model(layers, group) is None
        sys.modules["vllm.distributed.eplb.eplb_state"].EplbState().rearrange()
        for number in range(3):
            for n, layer in enumerate(layers):
                every = load(layer, rank, n, number // 2)  # new weights before the last one
                x, weights, ids = draw(10 * number + n, rank if gathers else 0)
                router = config.compilation_config.static_forward_context[layer.layer_name].router
                router.eplb_state.num_unpadded_tokens_tensors[0].fill_(real)
                with torch.inference_mode():
                    rows = router._apply_eplb_mapping(ids)
                    output = layer.forward_modular(x, weights, topk_ids=rows)
                torch.testing.assert_close(output, run_dense(every, x, weights, ids))
                held = range(rank * M, (rank + 1) * M)
                for name in NAMES:
                    assert torch.equal(getattr(layer, name)[:M], every[name][held])
                assert torch.equal(layer.e_score_correction_bias, torch.arange(float(P)))
                mine = rows[:real].to(torch.int64)
                computed = torch.bincount(mine.flatten() // P, minlength=G)
                if gathers:
                    dist.all_reduce(computed, group=group)
                assert (rows[real:] % P < M).all()  # padding stays with mains
                plan = layer.replica_plan
                assert (computed.max() / computed.double().mean()) == pytest.approx(plan.imbalance)
                found.append((plan.imbalance_before, plan.imbalance, plan.num_replicas))
                assert layer.replicas.are_copied == bool(holds)
        assert [sorted(layer.state_dict()) for layer in layers] == keys
        assert layers[0].state_dict()["w13_weight"].shape == (P, H, H)
        groups = {id(layer.replicas.balancer.group) for layer in layers}
    return [found, len(groups)]


@pytest.mark.parametrize(
    ("gathers", "holds", "real"),
    [
        (False, "", T),
        (True, "", T),
        (False, "a view", T),
        (False, "rows", T),
        (False, "", 40),
        (True, "", 40),
    ],
)
def test_outputs_are_those_without_replicas(
    ranks: RankPool, gathers: bool, holds: str, real: int
) -> None:
    """With tensor parallelism, or with tokens of its own on each rank; with padding."""
    for found, groups in ranks.run(G, run_batches, gathers, holds, real):
        assert groups == 1  # its slots are shared
        for before, after, replicas in found:
            assert before > 1.4
            assert after <= 1.02
            assert replicas > 0


def run_lonely(rank: int, group: Any, min_tokens: int) -> list[Any]:
    """All tokens go to rank 0's experts: with plans others compute, without they have nothing."""
    GROUP[0] = group
    config = make_config(min_tokens=min_tokens, engine="host")
    with FakeVllm("batch", make_fake(config)):
        adapter.register()
        layer = make_layer(config, rank, gathers=True)
        every = load(layer, rank, 0, 0)
        add_model([layer], group)
        x, weights, ids = draw(0, rank)
        ids = ids % M
        for _ in range(2):
            rows = layer.replicas.begin(ids)
            output = layer.forward_modular(x, weights, rows)
            torch.testing.assert_close(output, run_dense(every, x, weights, ids))
        runs = layer.quant_method.moe_kernel.fused_experts.runs
        return [layer.replica_plan.num_replicas, runs]


def test_small_batches_move_nothing(ranks: RankPool) -> None:
    found = ranks.run(G, run_lonely, G * T * K + 1)
    assert found == [[0, 2], [0, 0], [0, 0], [0, 0]]
    found = ranks.run(G, run_lonely, G * T * K)
    assert all(replicas > 0 and runs == 2 for replicas, runs in found)


def run_padded(rank: int, group: Any, gathers: bool) -> list[Any]:
    """Run batches whose padding vLLM tells by a mask; the number is the one of an earlier batch."""
    GROUP[0] = group
    config, found = make_config(target=1.0, engine="host"), []
    with FakeVllm("batch", make_fake(config)):
        adapter.register()
        layer = make_layer(config, rank, gathers=gathers)
        every = load(layer, rank, 0, 0)
        add_model([layer], group)
        for real in (40, 0, T):  # the second is a dummy run
            PADDING[0] = torch.arange(T) >= real
            x, weights, ids = draw(0, rank if gathers else 0)
            rows = layer.replicas.begin(ids)
            output = layer.forward_modular(x, weights, rows)
            torch.testing.assert_close(output, run_dense(every, x, weights, ids))
            assert (rows[real:] % P < M).all()
            plan = layer.replica_plan
            found.append([int(plan.load.sum()), plan.num_replicas > 0])
    PADDING[0] = None
    return found


@pytest.mark.parametrize("gathers", [False, True])
def test_padding_counts_in_no_batch(ranks: RankPool, gathers: bool) -> None:
    all_tokens = K * (G if gathers else 1)
    for found in ranks.run(G, run_padded, gathers):
        assert found == [[40 * all_tokens, True], [0, False], [T * all_tokens, True]]


def differ_in_layout(rank: int, group: Any) -> int:
    """Run layers of two layouts, which vLLM's own EPLB cannot move."""
    config = make_config(engine="host")
    with FakeVllm("batch", make_fake(config)):
        adapter.register()
        layers = [make_layer(config, rank, number=n) for n in range(3)]
        layers[1].w13_bias = torch.nn.Parameter(torch.zeros(P, H + 1), requires_grad=False)
        add_model(layers, group)
        ids = torch.zeros(4, K, dtype=torch.int64)
        for layer in layers:
            layer.w13_bias.fill_(rank)
            layer.replicas.begin(ids)
            layer.replicas.wait()
            held = layer.replica_plan.slot_expert[rank]
            homes = layer.w13_bias[M:][held >= 0][:, 0]
            assert torch.equal(homes, (held[held >= 0] // M).to(torch.float32))
        return len({id(layer.replicas.balancer.group) for layer in layers})


def test_layers_may_have_different_layouts(ranks: RankPool) -> None:
    assert ranks.run(G, differ_in_layout) == [2] * G


def come_again(rank: int, group: Any) -> int:
    """Set up a model after vLLM failed behind another's first layers."""
    settings = make_config(engine="host")
    with FakeVllm("batch", make_fake(settings)):
        adapter.register()
        layers = [make_layer(settings, rank, number=n) for n in range(3)]
        for layer in layers[:2]:
            layer.get_expert_weights()
        del layer, layers[0]
        add_model(layers, group)
        return sum(layer.replicas is not None for layer in layers)


def test_a_failed_set_up_leaves_no_layers_behind(ranks: RankPool) -> None:
    assert ranks.run(G, come_again) == [2] * G


# ---- what is refused -----------------------------------------------------------------------


@pytest.fixture
def config() -> Iterator[Any]:
    """Settings of a vLLM in which the plugin is registered, for two rows and more on a rank."""
    made = make_config()
    with FakeVllm("batch", make_fake(made)):
        adapter.register()
        yield made


def spoil(layer: Any, kind: str) -> None:
    if kind == "no rows":
        layer.w13_bias = torch.nn.Parameter(torch.zeros(P + 1, H), requires_grad=False)
    elif kind == "shared rows":
        shared = torch.zeros(H).expand(P, H)
        layer.w13_bias = torch.nn.Parameter(shared[:, :], requires_grad=False)
    elif kind == "no scale":
        layer.w13_weight.data = layer.w13_weight.data.to(torch.float8_e4m3fn)
        del layer.w13_weight_scale
        layer.quant_method.moe_kernel.fused_experts.quant_config._w1.scale = None
    elif kind == "derived":
        layer.quant_method.moe_kernel.fused_experts.g1_alphas = torch.arange(float(P))
    elif kind == "opaque":
        config = layer.quant_method.moe_kernel.fused_experts.quant_config
        config._w1.scale = object()
    elif kind == "inside":
        layer.norm = torch.nn.LayerNorm(H)
    elif kind == "other constant":
        layer.w13_input_scale.data = torch.tensor(0.25)


def set_up(rank: int, group: Any, kind: str) -> str:
    settings = make_config(engine="host")
    with FakeVllm("batch", make_fake(settings)):
        adapter.register()
        layers = [make_layer(settings, rank, number=n) for n in range(2)]
        before = [p.data_ptr() for layer in layers for p in layer.parameters()]
        if rank == 1:
            spoil(layers[1], kind)
            before = [p.data_ptr() for layer in layers for p in layer.parameters()]
        error = raised(lambda: add_model(layers, group))
        assert before == [p.data_ptr() for layer in layers for p in layer.parameters()]
        assert all(layer.replicas is None for layer in layers)
    return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("no rows", "a parameter w13_bias of shape (5, 6), without a row for each of 4"),
        ("shared rows", "a parameter w13_bias of shape (4, 6), whose rows share memory"),
        ("no scale", "w13_weight is of torch.float8_e4m3fn, and no parameter w13_...scale exists"),
        (
            "derived",
            "its quant_method.moe_kernel.fused_experts.g1_alphas of shape (4,) with"
            " [0.0, 1.0, 2.0, 3.0] has other values for each of 4 experts, and is in no parameter",
        ),
        ("opaque", "its quant_method.moe_quant_config._w1.scale is a object, which would stay"),
        ("inside", "a parameter norm.weight of shape (6,), of a module inside"),
    ],
)
def test_what_would_stay_behind_is_an_error_on_every_rank(
    ranks: RankPool, kind: str, says: str
) -> None:
    for text in ranks.run(G, set_up, kind):
        assert text.startswith("UnsupportedError: MoE layer 1 of expert-parallel rank 1 cannot")
        assert says in text


def test_constants_of_all_experts_are_those_of_all_ranks(ranks: RankPool) -> None:
    for text in ranks.run(G, set_up, "other constant"):
        assert text == (
            "UnsupportedError: expert-parallel rank 1 has MoE layers with experts"
            " [['w13_input_scale', 0.25]], and rank 0 [['w13_input_scale', 0.5]], in layer 1;"
            " expected the same on every rank"
        )


class Slotted:
    __slots__ = ("alphas",)

    def __init__(self, alphas: Any) -> None:
        self.alphas = alphas


def hide(layer: Any, value: Any, where: str) -> None:
    """Put a value where a layer, its method or its kernel may hold one."""
    method = layer.quant_method
    kernel = method.moe_kernel
    experts = kernel.fused_experts

    def closed(self: Any, scale: Any = value) -> Any:
        return self, scale

    puts: dict[str, Callable[[], Any]] = {
        "buffer": lambda: layer.register_buffer("alphas", value),
        "attribute": lambda: setattr(layer, "alphas", value),
        "of a parameter": lambda: setattr(layer.w13_weight, "alphas", value),
        "module inside": lambda: (
            layer.add_module("inner", torch.nn.Module())
            or layer.inner.register_buffer("alphas", value)
        ),
        "method": lambda: setattr(method, "alphas", value),
        "kernel's wrapper": lambda: setattr(kernel, "alphas", value),
        "prepare_finalize": lambda: setattr(
            kernel, "prepare_finalize", SimpleNamespace(alphas=value)
        ),
        "list": lambda: setattr(experts, "alphas", [None, [value]]),
        "dict": lambda: setattr(experts, "alphas", {"w1": {"a": value}}),
        "tuple": lambda: setattr(experts, "alphas", (None, value)),
        "nested": lambda: setattr(experts, "inner", SimpleNamespace(inner=Slotted(value))),
        "fallback": lambda: setattr(experts, "fallback", Slotted({"x": Slotted(value)})),
        "field": lambda: setattr(experts.quant_config._w1, "alpha_or_gscale", value),
        "other field": lambda: setattr(experts.quant_config, "gemm1_alpha", value),
        "closure": lambda: setattr(experts, "act", lambda x: x * value),
        "default": lambda: setattr(experts, "act", closed),
        "partial": lambda: setattr(experts, "act", functools.partial(torch.mul, value)),
        "bound": lambda: setattr(method, "run", types.MethodType(closed, Slotted(value))),
    }
    puts[where]()


WHERE = [
    "buffer",
    "attribute",
    "of a parameter",
    "module inside",
    "method",
    "kernel's wrapper",
    "prepare_finalize",
    "list",
    "dict",
    "tuple",
    "nested",
    "fallback",
    "field",
    "other field",
    "closure",
    "default",
    "partial",
    "bound",
]


@pytest.mark.parametrize("where", WHERE)
def test_what_has_a_part_of_an_expert_is_found(config: Any, where: str) -> None:
    layer = make_layer(config)
    hide(layer, torch.arange(float(P)), where)
    problem, _ = checks.describe(layer)
    assert "of shape (4,) with [0.0, 1.0, 2.0, 3.0] has other values for each of 4 exp" in problem
    assert "set another moe_backend, or ULTRAEP_VLLM=eplb" in problem
    for is_view in (False, True):
        layer = make_layer(config)
        hide(layer, layer.w13_bias.data.T if is_view else torch.full((P,), 0.5), where)
        problem, facts = checks.describe(layer)
        assert problem == ""
        assert facts["are_copied"] == is_view


SPREAD = torch.arange(float(2 * P))


@pytest.mark.parametrize(
    "value",
    [
        SPREAD,  # [2L]
        SPREAD.view(2, P),
        SPREAD.view(P, 2).expand(3, P, 2),
        torch.arange(P),
        torch.arange(P).to(torch.float8_e4m3fn),
        torch.arange(P).to(torch.uint8).numpy(),
        torch.arange(float(P * H)),  # flattened
        [0.0, 1.0, 2.0, 3.0],
        {0: 0.0, 1: 1.0, 2: 2.0, 3: 3.0},
        [torch.tensor(float(e)) for e in range(P)],
    ],
)
def test_values_for_each_expert_are_refused_in_any_shape(config: Any, value: Any) -> None:
    layer = make_layer(config)
    layer.quant_method.moe_kernel.alphas = value
    says = "its quant_method.moe_kernel.alphas .*has other values for each of 4 experts"
    assert re.match(says, checks.describe(layer)[0])


def test_what_cannot_be_read_is_refused(config: Any) -> None:
    for value in (torch.eye(P).to_sparse(), [torch.eye(P).to_sparse()] * P):
        layer = make_layer(config)
        layer.quant_method.moe_kernel.alphas = value
        says = "its quant_method.moe_kernel.alphas.* cannot be read: "
        assert re.match(says, checks.describe(layer)[0])


@pytest.mark.parametrize(
    "value",
    [
        torch.full((P,), 7),
        torch.ones(3, P),
        torch.zeros(2 * P),
        torch.arange(3.0).expand(P, 3),
        torch.full((P, 1), float("nan")),
        torch.arange(5),
        torch.tensor([1j, 2.0, 3.0]),
        torch.tensor([True, False, True]),
        1j,
        torch.empty(P, 0),
        [0.5] * P,
        {"block": 64, "stages": 3, "warps": 4, "split": 2},
        [None] * P,
        torch.Size([P, 2, 3, 5]),
        numpy.array(["a"] * P),
    ],
)
def test_what_holds_for_all_experts_is_accepted(config: Any, value: Any) -> None:
    layer = make_layer(config)
    layer.quant_method.moe_kernel.alphas = value
    problem, facts = checks.describe(layer)
    assert problem == ""
    assert not facts["are_copied"]
    assert json.dumps(facts)


@pytest.mark.parametrize(
    "share",
    [
        lambda w: w.data,
        lambda w: w.data.permute(1, 2, 0),
        lambda w: w.data.flatten(),
        lambda w: [w.data[0], w.data[1]],
        lambda w: list(w.data),
        lambda w: w.data.view(torch.uint8),
        lambda w: w.data[1:, 2].numpy() if w.dtype == torch.float32 else w.data[1:],
        lambda w: torch.tensor([row.data_ptr() for row in w.data]),
        lambda w: torch.tensor([[w.data_ptr(), 0]]),
        lambda w: w.data_ptr(),
        lambda w: {"pointers": [row.data_ptr() for row in w.data]},
    ],
)
def test_other_names_of_weights_keep_their_memory(config: Any, share: Any) -> None:
    layer = make_layer(config)
    layer.quant_method.moe_kernel.weights = share(layer.w13_weight)
    problem, facts = checks.describe(layer)
    assert problem == ""
    assert facts["are_copied"]


def test_what_is_of_no_layer_is_not_looked_at(config: Any) -> None:
    layer = make_layer(config)
    other = make_layer(config, number=1)
    spread = torch.arange(float(P))
    layer.custom_routing_function = SimpleNamespace(gate=spread)
    layer.register_buffer("_expert_map", torch.arange(G * P))
    layer.quant_method.runner = config.compilation_config.static_forward_context["layers.1"]
    layer.quant_method.runner.weights = spread
    layer.quant_method.other = other
    other.alphas = spread
    layer.quant_method.myself = layer.quant_method
    layer.quant_method.modules = [torch, SimpleNamespace, dist.ReduceOp.SUM, "text", b"bytes"]
    assert checks.describe(layer)[0] == ""


def differ(rank: int, group: Any, where: str) -> str:
    """Let ranks hold other constants, at set-up or after another load of weights."""
    settings = make_config(engine="host")
    ids = torch.zeros(4, K, dtype=torch.int64)
    with FakeVllm("batch", make_fake(settings)):
        adapter.register()
        layers = [make_layer(settings, rank, number=n) for n in range(2)]
        layer, value = layers[1], 0.5 - 0.25 * (rank == 2)
        assert layer.weight_loader.supports_moe_loading
        kernel = layer.quant_method.moe_kernel
        kernel.ep_rank, kernel.local_expert_offset = rank, rank * P
        kernel.limit = value if where == "number" else 1.0
        kernel.limits = torch.full((P,), value if where == "tensor" else 1.0)
        error = raised(lambda: add_model(layers, group)) if where in ("number", "tensor") else None
        if error is None:
            add_model(layers, group)
            for each in layers:
                each.replicas.begin(ids)
                each.replicas.wait()
                each.quant_method.moe_kernel.fused_experts.tokens = rank  # counted
            if where == "loader":
                given = torch.tensor(value), "w13_input_scale", "w1", 0
                layer.weight_loader(layer.w13_input_scale, *given)
            elif where == "in place":
                layer.w13_input_scale.fill_(value)
            elif where == "kernel":
                made = SimpleNamespace(fused_experts=kernel.fused_experts, limit=value)
                layer.quant_method.moe_kernel = made
            elif where == "derived":
                kernel.fused_experts = FakeKernel(layer)
                kernel.fused_experts.quant_config._w1.scale = torch.rand(P, 1)
            elif where == "equal":
                kernel.fused_experts = FakeKernel(layer)
                kernel.fused_experts.view = layer.w13_weight.data.flatten()
                for other in layers:
                    loaded = torch.tensor(0.125)
                    other.weight_loader(other.w13_input_scale, loaded, "w13_input_scale", "w1", 0)
            layers[0].replicas.begin(ids)
            layers[0].replicas.wait()
            if where == "equal":
                layer.replicas.begin(ids)
                layer.replicas.wait()
                assert layer.replicas.is_checked
                return "none"
            error = raised(lambda: layer.replicas.begin(ids))
            assert str(raised(lambda: layer.replicas.begin(ids))) == str(error)
    return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("number", "[['quant_method.moe_kernel.limit', 0.25]]"),
        ("tensor", "[['quant_method.moe_kernel.limits', ['torch.float32', [1], [0.25]]]]"),
        ("loader", "[['w13_input_scale', 0.25]]"),
        ("in place", "[['w13_input_scale', 0.25]]"),
        ("kernel", "[['quant_method.moe_kernel.limit', 0.25]]"),
        ("derived", "its quant_method.moe_quant_config._w1.scale of shape (4, 1) with [0."),
        ("equal", "none"),
    ],
)
def test_constants_are_compared_at_set_up_and_after_a_reload(
    ranks: RankPool, where: str, says: str
) -> None:
    for text in ranks.run(G, differ, where):
        if where not in ("equal", "derived"):
            assert "UnsupportedError: expert-parallel rank 2 has MoE layers with experts" in text
            assert "and rank 0 [" in text
            assert "in layer 1" in text
        assert says in text


def load_alone(rank: int, group: Any, path: str) -> str:
    """Load weights again on rank 0 alone, over a process group that is not used afterwards."""
    del group
    backend = dist.ProcessGroupGloo(dist.FileStore(path, G), rank, G, timedelta(seconds=100))
    own = dist.ProcessGroup(dist.FileStore(path, G), rank, G)
    own._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    config, ids = make_config(engine="host"), torch.zeros(4, K, dtype=torch.int64)
    with FakeVllm("batch", make_fake(config)), pytest.MonkeyPatch.context() as short:
        adapter.register()
        layer = make_layer(config, rank)
        add_model([layer], own)
        short.setenv("ULTRAEP_TIMEOUT", "1")
        if rank == 0:
            given = torch.tensor(0.25), "w13_input_scale", "w1", 0
            layer.weight_loader(layer.w13_input_scale, *given)
        error = raised(lambda: [layer.replicas.begin(ids), layer.replicas.wait()])
    return f"{type(error).__name__}: {error}"


def test_a_rank_that_alone_loaded_weights_is_named_in_time(ranks: RankPool, tmp_path: Path) -> None:
    first, *others = ranks.run(G, load_alone, str(tmp_path / "store"))
    assert first.startswith("BootstrapError: rank 0: ranks [1, 2, 3] did not join this")
    assert all(text.startswith("PeerRejectedError") for text in others), others


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda c, _: vars(c.parallel_config).update(use_ubatching=True), "dual-batch overlap"),
        (lambda _, m: vars(m.moe_parallel_config).update(pcp_size=2), "context_parallel_size=2"),
        (
            lambda _, m: vars(m.moe_parallel_config).update(use_moonep_kernels=True),
            "all2all_backend='allgather_reducescatter' dispatches inside",
        ),
        (lambda _, m: vars(m).update(is_lora_enabled=True), "LoRA"),
        (lambda _, m: vars(m).update(num_logical_experts=G * P), "no row for a replica"),
    ],
)
def test_settings_that_are_refused(
    config: Any, change: Callable[[Any, Any], None], says: str
) -> None:
    layer = make_layer(config)
    assert checks.describe(layer)[0] == ""
    change(config, layer.moe_config)
    assert says in checks.describe(layer)[0]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda layer: setattr(layer.quant_method, "is_monolithic", True),
            "its kernel routes by itself",
        ),
        (
            lambda layer: setattr(layer.expert_map_manager, "num_fused_shared_experts", 1),
            "shared experts fused with routed ones",
        ),
        (
            lambda layer: setattr(layer.expert_map_manager, "placement_strategy", "round_robin"),
            "expert_placement_strategy='round_robin'",
        ),
        (
            lambda layer: layer.vllm_config.compilation_config.static_forward_context.update(
                {layer.layer_name: SimpleNamespace(router=object())}
            ),
            "its router is a object",
        ),
    ],
)
def test_layers_that_are_refused(config: Any, change: Callable[[Any], None], says: str) -> None:
    layer = make_layer(config)
    assert layer.moe_config.require_decomposed_backend
    change(layer)
    assert says in checks.describe(layer)[0]


def test_layers_of_other_classes_are_refused(config: Any) -> None:
    group = SimpleNamespace(size=lambda: 2)
    layer = make_layer(config)
    other = SimpleNamespace(get_expert_weights=lambda: [torch.zeros(1)])
    for layers in ([layer, other], [other]):
        with pytest.raises(
            errors.UnsupportedError, match=f"{len(layers) - 1} of {len(layers)} MoE"
        ):
            add_model(layers, group)
    with pytest.raises(errors.UnsupportedError, match="ULTRAEP_VLLM=batch: elastic"):
        sys.modules["vllm.distributed.eplb.eplb_state"].create_eplb_communicator(
            FakeElastic(), "nixl", [[]], []
        )


def test_options(config: Any) -> None:
    layer = make_layer(config)
    config.additional_config = {"ultraep": {"cost": {"token": 1e-9, "expert_byte": 1e-12}}}
    assert checks.read_options(layer)["cost"].token == 1e-9
    config.additional_config = {"ultraep": {"slots": 2}}
    with pytest.raises(errors.InvalidArgumentError, match=r"options \['slots'\]; expected some of"):
        checks.read_options(layer)


def move(rank: int, group: Any) -> str:
    config = make_config(engine="host")
    with FakeVllm("batch", make_fake(config)):
        adapter.register()
        layer = make_layer(config, rank)
        add_model([layer], group)
        ids = torch.zeros(4, K, dtype=torch.int64)
        layer.replicas.begin(ids)
        layer.replicas.wait()
        layer.w13_bias.data = layer.w13_bias.data.clone()
        error = raised(lambda: layer.replicas.begin(ids))
    return f"{type(error).__name__}: {error}"


def test_weights_that_have_moved_are_an_error(ranks: RankPool) -> None:
    for rank, text in enumerate(ranks.run(G, move)):
        assert text.startswith(f"InvalidWeightsError: rank {rank}: w13_bias of layers.0 has moved")


# ---- the plugin ----------------------------------------------------------------------------


def test_rows_are_mains_then_slots(config: Any) -> None:
    del config
    state = sys.modules["vllm.distributed.eplb.eplb_state"].EplbState
    rows = state.build_initial_global_physical_to_logical_map
    assert rows(8, 8) == [0, 1, 2, 3, 2, 3, 4, 5, 4, 5, 6, 7, 6, 7, 0, 1]
    assert rows(7, 0) == list(range(7))
    with pytest.raises(errors.UnsupportedError, match=r"=6 on 4 ranks; .* 4, such as 8"):
        rows(8, 6)
    says = (
        "ULTRAEP_VLLM=batch: 18 experts on 4 ranks; expected as many experts on each rank, with 2,"
        " 3, 6, 9, 18 ranks. Or set ULTRAEP_VLLM=eplb, for which num_redundant_experts=2 will do"
    )
    with pytest.raises(errors.UnsupportedError, match=says):
        rows(18, 4)


def test_it_registers_once() -> None:
    with FakeVllm("batch", make_fake(make_config())):
        adapter.register()
        adapter.register()
    with FakeVllm("batch", make_fake(make_config())):
        register = sys.modules["vllm.model_executor.custom_op"].PluggableLayer.register_oot
        register(name="RoutedExperts")(object)
        with pytest.raises(errors.UnsupportedError, match="another plugin"):
            adapter.register()


def test_other_releases_are_noticed() -> None:
    class Router(FakeRouter):
        def _apply_eplb_mapping(self, ids: Any) -> Any: ...

    says = r"_apply_eplb_mapping takes .*'ids'"
    with (
        FakeVllm("batch", make_fake(make_config(), BaseRouter=Router)),
        pytest.raises(errors.UnsupportedError, match=says),
    ):
        adapter.register()


def test_where_it_leaves_vllm_alone(config: Any) -> None:
    layer = make_layer(config)
    layer.moe_config.moe_parallel_config.ep_size = 1
    alone = dist.ProcessGroup(dist.HashStore(), 0, 1)
    assert layer.get_expert_weights() == ["vLLM's"]
    assert add_model([layer], alone) == "vLLM's torch_gloo"
    assert layer.replicas is None
    assert layer.replica_plan is None
    layer.moe_config.moe_parallel_config.enable_eplb = False
    with pytest.warns(UserWarning, match="nothing is replicated without --enable-eplb"):
        made = type(layer)("plain", torch.bfloat16, layer.moe_config)
    assert isinstance(made, batch.Experts)
