"""Megatron-LM's adapter, on a stand-in of it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import fake_megatron
import pytest
import torch
from ranks import RankPool, raised

from ultraep_comm.adapters import megatron


class Model(torch.nn.Module):
    def __init__(self, pg: Any, layers: int = 2, **config: Any) -> None:
        super().__init__()
        torch.manual_seed(pg.rank())
        self.layers = torch.nn.ModuleList(
            fake_megatron.MoELayer(
                fake_megatron.TransformerConfig(**config),
                layer_number=i + 1,
                pg_collection=fake_megatron.groups(pg),
            )
            for i in range(layers)
        )
        for layer in self.layers:
            torch.manual_seed(17)
            torch.nn.init.normal_(layer.router.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)[0]
        return x


def on_the_stand_in(rank: int, pg: Any, run: Callable[[Any], Any]) -> Any:
    with fake_megatron.adapter():
        return run(pg)


def replicate(model: Any, **options: Any) -> list[Any]:
    return megatron.replicate(model, 1, engine="host", timeout=30.0, **options)


def outputs(pg: Any) -> list[int]:
    replicas = []
    for config in ({}, {"add_bias_linear": True, "moe_token_dispatcher_type": "allgather"}):
        model = Model(pg, **config)
        x = torch.randn(24, 6)
        with torch.no_grad():
            before, kept = model(x), {n: v.clone() for n, v in model.state_dict().items()}
            layers = replicate(model if not config else [model])  # or a pipeline's chunks
            torch.testing.assert_close(model(x), before)
            torch.testing.assert_close(torch.compile(model, backend="eager")(x), before)
            torch._dynamo.reset()
            with pytest.raises(
                torch._dynamo.exc.Unsupported, match=r"replicas .* fullgraph|disable"
            ):
                torch.compile(model, fullgraph=True, backend="eager")(x)
        assert [type(m).__name__ for m in layers] == ["ReplicatedMoELayer"] * 2
        assert all(isinstance(layer, fake_megatron.MoELayer) for layer in layers)
        assert type(layers[0]) is type(layers[1])
        assert layers[0].replicas.group is layers[1].replicas.group
        assert list(model.state_dict()) == list(kept)
        assert all(torch.equal(v, kept[n]) for n, v in model.state_dict().items())
        replicas += [layer.replica_plan.num_replicas for layer in layers]
    return replicas


def test_outputs_are_those_without_replicas(ranks: RankPool) -> None:
    found = ranks.run(2, on_the_stand_in, outputs)
    assert any(found[0])
    assert found[0] == found[1]


REFUSED: dict[str, Any] = {
    "overlap_moe_expert_parallel_comm": True,
    "delay_wgrad_compute": True,
    "gradient_accumulation_fusion": True,
    "moe_pad_expert_input_to_capacity": True,
    "moe_router_padding_for_quantization": True,
    "moe_latent_size": 4,
    "fp8": "e4m3",
    "fp4": "e2m1",
    "cuda_graph_impl": "local",
    "moe_flex_dispatcher_backend": "hybridep",
}


def of_each(change: Callable[[Any], Any]) -> Callable[[Any], None]:
    def change_all(layer: Any) -> None:
        for expert in layer.experts.local_experts:
            change(expert)

    return change_all


def widen(expert: Any) -> None:
    expert.linear_fc2.weight = torch.nn.Parameter(torch.zeros(6, 11))


# What happens to the second layer of rank 1, and what every rank is told.
CHANGED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "experts": (  # as TEGroupedMLP would be
        lambda m: setattr(m.experts, "__class__", torch.nn.Module),
        "it has a Module, which the adapter has never run",
    ),
    "dispatcher": (
        lambda m: setattr(m.token_dispatcher, "__class__", fake_megatron.MoETokenDispatcher),
        "it has a MoETokenDispatcher, which the adapter has never run",
    ),
    "tensor parallel": (
        lambda m: setattr(m.token_dispatcher, "tp_size", 2),
        "expert_tensor_parallel_size=2",
    ),
    "linear": (
        of_each(lambda e: setattr(e, "linear_fc1", torch.nn.Linear(6, 10, bias=False))),
        "it has a Linear, which the adapter has never run",
    ),
    "buffer": (  # which would stay behind
        of_each(lambda e: e.register_buffer("scale", torch.ones(1))),
        "it has a MLP, which the adapter has never run",
    ),
    "odd shape": (lambda m: widen(m.experts.local_experts[1]), "expert 1 has"),
    "another shape": (of_each(widen), "expert-parallel rank 1 has MoE layers with experts"),
    "partly frozen": (
        of_each(lambda e: e.linear_fc1.weight.requires_grad_(False)),
        "some parameters of its experts are frozen",
    ),
    "half": (lambda m: m.experts.half(), "need gradients and are torch.float16"),
    "again": (lambda m: setattr(m, "replicas", None), "it has replicas already"),
}


def refusals(pg: Any) -> dict[str, str]:
    found: dict[str, str] = {}

    def note(name: str, model: Model, **options: Any) -> None:
        kinds = [type(layer) for layer in model.layers]
        error = raised(lambda: replicate(model, **options))
        found[name] = f"{type(error).__name__}: {error}"
        assert [type(layer) for layer in model.layers] == kinds

    for name, value in REFUSED.items():
        note(name, Model(pg, **({name: value} if pg.rank() == 1 else {})))
    for name, (change, _) in CHANGED.items():
        model = Model(pg)
        if pg.rank() == 1:
            change(model.layers[1])
        note(name, model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fake_megatron.MoELayer, "combine", lambda self, output, shared: output)
        path = "megatron.core.transformer.moe.moe_layer:MoELayer.combine"
        patch.setitem(megatron.PATCH_POINTS, path, "self output bias")
        note("signature", Model(pg))
    return found


def test_what_cannot_work_is_an_error_on_every_rank(ranks: RankPool) -> None:
    found = ranks.run(2, on_the_stand_in, refusals)
    assert found[0] == found[1]
    assert all(text.startswith("UnsupportedError: ") for text in found[0].values())
    says = {name: f"{name}={value!r}" for name, value in REFUSED.items()}
    says |= {name: text for name, (_, text) in CHANGED.items()}
    for name, text in says.items():
        assert text in found[0][name], name
        assert "expert-parallel rank 1" in found[0][name]
    assert "takes ['self', 'output', 'shared']" in found[0]["signature"]


class Lora(torch.nn.Module):
    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner, self.bias = inner, None

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x)[0] + 1, None


def wrap(expert: Any) -> None:
    expert.linear_fc1 = Lora(expert.linear_fc1)


def hook(module: Any, given: Any, output: Any) -> Any:
    return 2 * output[0], output[1]


UNLIKE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "lora": (wrap, "linear_fc1"),
    "hook": (lambda e: e.register_forward_hook(hook), "forward_hooks"),
    "inner pre-hook": (
        lambda e: e.linear_fc2.register_forward_pre_hook(lambda m, x: (2 * x[0],)),
        "linear_fc2.forward_pre_hooks",
    ),
    "setting": (lambda e: setattr(e, "scale", 2.0), "scale: 2.0"),
    "mode": (lambda e: e.eval(), "training: False"),
    "class": (lambda e: setattr(e, "__class__", type("Other", (type(e),), {})), "class"),
}


def unlike(pg: Any) -> dict[str, str]:
    found = {}

    def note(name: str, call: Callable[[], Any]) -> None:
        error = raised(call)
        found[name] = f"{type(error).__name__}: {error}"

    for name, (change, _) in UNLIKE.items():
        model = Model(pg, layers=1)
        if pg.rank() == 1:
            change(model.layers[0].experts.local_experts[1])
        note(f"{name}, before", lambda model=model: replicate(model))
    model = Model(pg, layers=1)
    for expert in model.layers[0].experts.local_experts if pg.rank() == 1 else ():
        expert.register_forward_hook(hook)
    note("one rank's", lambda: replicate(model))
    for name, (change, _) in UNLIKE.items():
        model = Model(pg, layers=1)
        (layer,) = replicate(model)
        with torch.no_grad():
            model(torch.randn(24, 6))
            if pg.rank() == 1:
                change(layer.experts.local_experts[1])
            note(f"{name}, after", lambda model=model: model(torch.randn(24, 6)))
        layer.replicas.group.abort()
    model = Model(pg, layers=1)
    (layer,) = replicate(model)
    for expert in layer.experts.local_experts if pg.rank() == 1 else ():
        expert.register_forward_hook(hook)  # alike, but slots of other ranks would be without it
    note("all of one rank", lambda: model(torch.randn(24, 6)))
    layer.replicas.group.abort()
    return found


def test_experts_that_do_not_compute_alike_are_refused(ranks: RankPool) -> None:
    peer, own = ranks.run(2, on_the_stand_in, unlike)
    for name, (_, text) in UNLIKE.items():
        assert own[f"{name}, before"] == peer[f"{name}, before"]
        assert own[f"{name}, before"].startswith("UnsupportedError: MoE layer 0 of")
        for when in ("before", "after"):
            assert text in own[f"{name}, {when}"], (name, when, own)
    for name in (*(f"{name}, after" for name in UNLIKE), "all of one rank"):
        says = r"UnsupportedError: rank 1: the experts of layer \d+ were changed"
        assert re.match(says, own[name]), own
        assert "rank 1" in peer[name], peer
    assert own["one rank's"] == peer["one rank's"]
    assert "forward_hooks: test_megatron.hook" in own["one rank's"]
    assert "0.forward_hooks: ['test_megatron.hook at" in own["all of one rank"]


def nothing(pg: Any) -> bool:
    model = Model(pg)
    before = [type(m) for m in model.modules()]
    return replicate(model) == [] and [type(m) for m in model.modules()] == before


def test_one_rank_stays_as_it_is(ranks: RankPool) -> None:
    assert ranks.run(1, on_the_stand_in, nothing) == [True]
