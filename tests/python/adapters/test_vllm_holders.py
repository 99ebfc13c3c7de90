"""vLLM per batch: what a layer holds beside its parameters, at set-up and after a reload."""

from __future__ import annotations

import functools
import json
import re
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
from fake_vllm import FakeVllm
from fake_vllm_batch import (
    FakeKernel,
    G,
    H,
    K,
    P,
    add_model,
    make_config,
    make_fake,
    make_layer,
    registered,
)
from ranks import RankPool, raised

from ultraep_comm.adapters import vllm as adapter
from ultraep_comm.adapters.vllm import checks


@pytest.fixture
def config() -> Iterator[Any]:
    with registered() as made:
        yield made


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
    assert first.startswith("BootstrapError: rank 0: ")
    assert "ranks [1, 2, 3] did not join this" in first
    assert all(text.startswith("PeerRejectedError") for text in others), others
