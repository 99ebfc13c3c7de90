"""What every adapter for training promises, on the fakes of their frameworks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import fake_megatron
import pytest
import torch
from new_tensors import NewTensors
from ranks import RankPool, raised
from torch.nn.utils import parametrize
from torch.optim.swa_utils import AveragedModel
from training_layers import FRAMEWORKS, LAYERS, G, M, on

from ultraep_comm.adapters.checks import warn_idle
from ultraep_comm.errors import InvalidArgumentError, UnsupportedError

lazy = pytest.mark.parametrize("framework", ["transformers", "torchtitan"])  # groups: in a pass


@pytest.fixture(params=FRAMEWORKS)
def framework(request: pytest.FixtureRequest) -> Any:
    return request.param


def train(made: Any, recompute: bool | None) -> list[tuple[float, float]]:
    model = made.model
    owned = dict(model.named_parameters())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    arrivals = dict.fromkeys(owned, 0)
    for name, parameter in owned.items():

        def count(_: Any, name: str = name) -> None:
            arrivals[name] += 1

        parameter.register_post_accumulate_grad_hook(count)
    groups = [made.group_of(layer) for layer in made.layers]
    every, plans = made.alone(), []
    for microbatch in range(2):
        x = made.tokens(made.rank, microbatch)
        with torch.no_grad():
            without_gradients = made.run(made.layers, x, made.rank)
        y = made.run(made.layers, x.requires_grad_(), made.rank, recompute)
        assert torch.equal(without_gradients, y)
        y.square().sum().backward()
        assert set(arrivals.values()) == {microbatch + 1}
        groups = [made.group_of(layer) for layer in made.layers]
        assert groups[0] is groups[1]
        assert len(groups[0].banks) == 1
        groups[0].assert_idle()
        plans += [made.plan_of(layer) for layer in made.layers]
        for r in range(G):
            theirs = made.tokens(r, microbatch).requires_grad_()
            wanted = made.run(every, theirs, r)
            wanted.square().sum().backward()
            if r == made.rank:
                torch.testing.assert_close(y, wanted)
                torch.testing.assert_close(x.grad, theirs.grad, rtol=1e-4, atol=made.rounding)
    for layer, whole in zip(made.layers, every, strict=True):
        for name, weight in made.experts_of(layer).named_parameters():
            right = getattr(made.experts_of(whole), name).grad
            mine = right[made.rank * M : (made.rank + 1) * M]
            torch.testing.assert_close(weight.grad, mine, rtol=1e-4, atol=made.rounding)
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert all(owned[name] is value for name, value in model.named_parameters())
    return [(p.imbalance_before, p.imbalance) for p in plans]


@pytest.mark.parametrize("recompute", [None, False, True])
def test_outputs_and_gradients_are_those_without_ranks(
    ranks: RankPool, framework: str, recompute: bool | None
) -> None:
    found = ranks.run(G, on, framework, train, recompute)[0]
    assert len(found) == 2 * LAYERS
    for before, after in found:
        assert after < 1.2
        assert before > 1.4


def test_one_rank_needs_no_replicas(framework: str, caplog: pytest.LogCaptureFixture) -> None:
    warn_idle.cache_clear()
    adapter, kind = FRAMEWORKS[framework]
    with adapter() as api:
        made = kind(api, 0)
        y = made.run(made.layers, made.x, 0)
        assert torch.equal(y, made.run(made.alone(), made.x, 0))
        assert made.group is None
    assert kind.idle in caplog.text


def spoiled(rank: int, pg: Any, framework: str) -> None:
    adapter, kind = FRAMEWORKS[framework]
    refused = pytest.raises(UnsupportedError, match=f"buffer w1_scale.*{kind.instead}")
    with adapter() as api, refused:
        kind(api, rank, pg, spoil=lambda e: e.register_buffer("w1_scale", torch.ones(M)))


@lazy
def test_what_would_stay_behind_is_said_at_setup_on_every_rank(
    ranks: RankPool, framework: str
) -> None:
    ranks.run(G, spoiled, framework)


def copied(made: Any) -> None:
    first = made.step(made.x).detach()
    assert made.api.layers(made.model) == {"0": made.layer, "1": made.layers[1]}
    second = made.api.layers(AveragedModel(made.model).module)["0"]
    assert second is not made.layer
    with torch.no_grad():
        made.experts_of(second).w2.mul_(2)
        torch.testing.assert_close(made.step(made.x, second), 2 * first)
        assert torch.equal(made.step(made.x), first)
    assert made.group_of(second) is made.group


@lazy
def test_a_copy_of_a_layer_has_its_own_experts(ranks: RankPool, framework: str) -> None:
    ranks.run(G, on, framework, copied)


class Doubled(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def hook(_module: Any, _given: Any, output: torch.Tensor) -> torch.Tensor:
    return 2 * output


def parametrise(experts: torch.nn.Module) -> None:
    parametrize.register_parametrization(experts, "w1", Doubled())


def subclass(experts: torch.nn.Module) -> None:
    experts.__class__ = type("Other", (type(experts),), {})


def add_row(experts: Any) -> None:
    experts.extra = torch.nn.Parameter(torch.ones(len(experts.w1)))


# The change, and what the error names.
CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "parametrised": (parametrise, "class"),
    "lora": (lambda e: e.add_module("lora", torch.nn.Linear(2, 2)), "lora.class"),
    "class": (subclass, "class"),
    "parameter": (add_row, "parameters"),
    "setting": (lambda e: setattr(e, "alpha", 2.0), "alpha"),
    "hook": (lambda e: e.register_forward_hook(hook), "forward_hooks"),
    "patched": (lambda e: setattr(e, "forward", lambda *given: given[0]), "forward"),
}


def change(made: Any, name: str) -> str:
    """Change rank 1's experts between two passes, and return what the second one raises."""
    with torch.no_grad():
        made.step(made.x)
        made.experts.eval()
        made.step(made.x)
        if made.rank == 1:
            CHANGES[name][0](made.experts)
        error = raised(lambda: made.step(made.x))
    return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(
    ("framework", "name"),
    [
        *(("torchtitan", name) for name in CHANGES),
        *(("transformers", "class"), ("transformers", "hook"), ("deepspeed", "class")),
    ],
)
def test_experts_that_were_changed_are_refused(ranks: RankPool, framework: str, name: str) -> None:
    found = ranks.run(G, on, framework, change, name)
    if (framework, name) == ("transformers", "hook"):  # around the dispatch
        assert set(found) == {"NoneType: None"}
        return
    says = "UnsupportedError: rank 1: the experts of layer 0 were changed after"
    assert found[1].startswith(says), found[1]
    assert f"they have {CHANGES[name][1]}: " in found[1]
    for text in (found[0], *found[2:]):
        assert "rank 1" in text, text
        assert "TimeoutError" not in text


def largest(made: Any, copies: bool) -> tuple[int, int, int]:
    with torch.no_grad():  # creates the group
        made.step(made.x)
    inner = getattr(*made.runner)

    def joined(*given: Any) -> Any:
        weights, slots = given[-2:]
        torch.cat([weights["w1"], slots["w1"]])  # what the test has to notice
        return inner(*given)

    run = joined if copies else inner
    with mock.patch.object(*made.runner, run), NewTensors() as found:
        made.step(made.x.requires_grad_())
    return found.largest, made.experts.w1.numel(), made.plan.num_replicas


def test_no_tensor_as_large_as_main_weights_is_created(ranks: RankPool, framework: str) -> None:
    for size, num_elements, replicas in ranks.run(G, on, framework, largest, False):
        assert replicas > 0
        assert 0 < size < num_elements
    assert all(
        size >= num_elements for size, num_elements, _ in ranks.run(G, on, framework, largest, True)
    )


def in_float16(made: Any) -> None:
    made.experts.half()
    made.x = made.x.half()
    for opened in (False, True):
        with pytest.raises(UnsupportedError, match=r"'w1' .*float16.*bfloat16: train in one"):
            made.step(made.x.clone().requires_grad_())
        assert (made.group is not None) == opened
        if not opened:
            with torch.no_grad():
                made.step(made.x)
            assert made.plan.num_replicas > 0


@lazy
def test_float16_is_for_inference(ranks: RankPool, framework: str) -> None:
    ranks.run(G, on, framework, in_float16)


def twice(layer: Any, x: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = layer(2 * x, *given)
    return y


def compiled(made: Any, is_first: bool) -> None:
    x = made.x.requires_grad_()
    expected, given = None if is_first else made.step(x).detach(), made.given(x, made.rank)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"replicas .* fullgraph|disable"):
        torch.compile(made.layer, fullgraph=True, backend="eager")(x, *given)
    found = torch.compile(twice, backend="eager")(made.layer, x / 2, *given)
    found.sum().backward()
    torch.testing.assert_close(found, made.step(x) if expected is None else expected)
    assert made.plan.num_replicas > 0
    if expected is not None:
        made.group.assert_idle()


@pytest.mark.parametrize("is_first", [True, False])
def test_compiled_models_break_the_graph_at_a_layer(
    ranks: RankPool, framework: str, is_first: bool
) -> None:
    ranks.run(G, on, framework, compiled, is_first)


def configured(made: Any, banks: int) -> None:
    with torch.no_grad():
        made.step(made.x)
    assert made.plan.num_replicas == 0
    assert (len(made.group.banks), len(made.group.slots["w1"])) == (banks, 1)


def test_options_reach_the_layer_and_its_group(ranks: RankPool, framework: str) -> None:
    live = {} if framework == "deepspeed" else {"live": 2}
    options = {"slots_per_rank": 1, "min_tokens": 10_000, **live}
    ranks.run(G, partial(on, **options), framework, configured, 1 + len(live))


@pytest.mark.parametrize("framework", [*FRAMEWORKS, "megatron"])
def test_other_options_are_errors(framework: str) -> None:
    adapters = {name: adapter for name, (adapter, _) in FRAMEWORKS.items()}
    adapters["megatron"] = fake_megatron.adapter
    unknown = pytest.raises(InvalidArgumentError, match=r"no option \['slots'\]; expected some of")
    with adapters[framework]() as api, unknown:
        (api.configure if framework == "transformers" else partial(api.replicate, None))(slots=3)
