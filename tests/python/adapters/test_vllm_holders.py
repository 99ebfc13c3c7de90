"""vLLM per batch: what a layer holds beside its parameters, at set-up and after a reload."""

from __future__ import annotations

import functools
import json
import re
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from fake_vllm_batch import (
    FakeKernel,
    G,
    H,
    K,
    P,
    add_model,
    make_layer,
    registered,
    run_batch,
)
from ranks import RankPool, own_group, raised

from ultraep_comm.adapters.vllm import checks


@pytest.fixture
def layer() -> Iterator[Any]:
    with registered() as (made,):
        yield made


class Slotted:
    __slots__ = ("alphas",)

    def __init__(self, alphas: Any) -> None:
        self.alphas = alphas


def closed(value: Any) -> Any:
    def run(self: Any, scale: Any = value) -> Any:
        return self, scale

    return run


def put_inside(layer: Any, value: Any) -> None:
    layer.inner = torch.nn.Module()
    layer.inner.register_buffer("alphas", value)


# Places where a layer (m), its method or its kernel may hold a value (v).
PLACES: dict[str, Callable[[Any, Any], Any]] = {
    "buffer": lambda m, v: m.register_buffer("alphas", v),
    "attribute": lambda m, v: setattr(m, "alphas", v),
    "of a parameter": lambda m, v: setattr(m.w13_weight, "alphas", v),
    "module inside": put_inside,
    "prepare_finalize": lambda m, v: setattr(
        m.quant_method.moe_kernel, "prepare_finalize", SimpleNamespace(alphas=v)
    ),
    "list": lambda m, v: setattr(experts_of(m), "alphas", [None, [v]]),
    "dict": lambda m, v: setattr(experts_of(m), "alphas", {"w1": {"a": v}}),
    "fallback": lambda m, v: setattr(experts_of(m), "fallback", Slotted({"x": Slotted(v)})),
    "field": lambda m, v: setattr(experts_of(m).quant_config._w1, "alpha_or_gscale", v),
    "closure": lambda m, v: setattr(experts_of(m), "act", lambda x: x * v),
    "default": lambda m, v: setattr(experts_of(m), "act", closed(v)),
    "partial": lambda m, v: setattr(experts_of(m), "act", functools.partial(torch.mul, v)),
    "bound": lambda m, v: setattr(
        m.quant_method, "run", types.MethodType(closed(None), Slotted(v))
    ),
}


def problem_of(layer: Any) -> str:
    return str(raised(lambda: checks.describe(layer)))


def experts_of(layer: Any) -> Any:
    return layer.quant_method.moe_kernel.fused_experts


@pytest.mark.parametrize("where", PLACES)
def test_what_has_a_part_of_an_expert_is_found(layer: Any, where: str) -> None:
    PLACES[where](layer, torch.arange(float(P)))
    problem = problem_of(layer)
    assert "of shape (4,) with [0.0, 1.0, 2.0, 3.0] has other values for each of 4 exp" in problem
    assert "set another moe_backend, or ULTRAEP_VLLM=eplb" in problem
    for is_view in (False, True):
        layer = make_layer(layer.vllm_config)
        PLACES[where](layer, layer.w13_bias.data.T if is_view else torch.full((P,), 0.5))
        assert checks.describe(layer)["are_copied"] == is_view


SPREAD = torch.arange(float(2 * P))


@pytest.mark.parametrize(
    "value",
    [
        SPREAD,  # [2L]
        SPREAD.view(P, 2).expand(3, P, 2),
        torch.arange(P).to(torch.float8_e4m3fn),
        torch.arange(P).to(torch.uint8).numpy(),
        torch.arange(float(P * H)),  # flattened
        {0: 0.0, 1: 1.0, 2: 2.0, 3: 3.0},
        [torch.tensor(float(e)) for e in range(P)],
    ],
)
def test_values_for_each_expert_are_refused_in_any_shape(layer: Any, value: Any) -> None:
    layer.quant_method.moe_kernel.alphas = value
    says = "its quant_method.moe_kernel.alphas .*has other values for each of 4 experts"
    assert re.match(says, problem_of(layer))


def test_what_cannot_be_read_is_refused(layer: Any) -> None:
    for value in (torch.eye(P).to_sparse(), [torch.eye(P).to_sparse()] * P):
        layer.quant_method.moe_kernel.alphas = value
        says = "its quant_method.moe_kernel.alphas.* cannot be read: "
        assert re.match(says, problem_of(layer))


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(3, P),
        torch.zeros(2 * P),
        torch.arange(3.0).expand(P, 3),
        torch.full((P, 1), float("nan")),
        torch.arange(5),
        torch.tensor([1j, 2.0, 3.0]),
        torch.empty(P, 0),
        [0.5] * P,
        {"block": 64, "stages": 3, "warps": 4, "split": 2},
        [None] * P,
        numpy.array(["a"] * P),
    ],
)
def test_what_holds_for_all_experts_is_accepted(layer: Any, value: Any) -> None:
    layer.quant_method.moe_kernel.alphas = value
    facts = checks.describe(layer)
    assert not facts["are_copied"]
    assert json.dumps(facts)


@pytest.mark.parametrize(
    "share",
    [
        lambda w: w.data.permute(1, 2, 0),
        lambda w: w.data.flatten(),
        lambda w: list(w.data),
        lambda w: w.data.view(torch.uint8),
        lambda w: w.data[1:, 2].numpy() if w.dtype == torch.float32 else w.data[1:],
        lambda w: torch.tensor([row.data_ptr() for row in w.data]),
        lambda w: {"pointers": [row.data_ptr() for row in w.data]},
    ],
)
def test_other_names_of_weights_keep_their_memory(layer: Any, share: Any) -> None:
    layer.quant_method.moe_kernel.weights = share(layer.w13_weight)
    assert checks.describe(layer)["are_copied"]


def test_what_is_of_no_layer_is_not_looked_at(layer: Any) -> None:
    config = layer.vllm_config
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
    assert not checks.describe(layer)["are_copied"]


def differ(rank: int, group: Any, where: str) -> str:
    """Let ranks hold other constants, at set-up or after another load of weights."""
    ids = torch.zeros(4, K, dtype=torch.int64)
    with registered(rank, 2) as layers:
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
                run_batch(each, ids)
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
            run_batch(layers[0], ids)
            if where == "equal":
                run_batch(layer, ids)
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
    own = own_group(rank, G, path)
    with registered(rank) as (layer,), pytest.MonkeyPatch.context() as short:
        add_model([layer], own)
        short.setenv("ULTRAEP_TIMEOUT", "1")
        if rank == 0:
            given = torch.tensor(0.25), "w13_input_scale", "w1", 0
            layer.weight_loader(layer.w13_input_scale, *given)
        error = raised(lambda: run_batch(layer, torch.zeros(4, K, dtype=torch.int64)))
    return f"{type(error).__name__}: {error}"


def test_a_rank_that_alone_loaded_weights_is_named_in_time(ranks: RankPool, tmp_path: Path) -> None:
    first, *others = ranks.run(G, load_alone, str(tmp_path / "store"))
    assert first.startswith("BootstrapError: rank 0: ")
    assert "ranks [1, 2, 3] did not join this" in first
    assert all(text.startswith("PeerRejectedError") for text in others), others
