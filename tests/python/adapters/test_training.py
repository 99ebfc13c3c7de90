"""What every adapter for training promises, on the fakes of their frameworks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import fake_deepspeed
import fake_torchtitan
import fake_transformers
import pytest
import test_deepspeed
import test_torchtitan
import test_transformers
import torch
from changed_experts import CHANGES, change_after, check
from new_tensors import NewTensors
from ranks import RankPool

from ultraep_comm.adapters import checks, deepspeed
from ultraep_comm.errors import UnsupportedError

G = 4


class OnTransformers:
    """A layer with replicas, and what its forward pass is given."""

    def __init__(self, api: Any, rank: int, pg: Any, **options: Any) -> None:
        api.configure(**options)
        (self.layer,) = test_transformers.make_layers(api, rank, pg, None, 1)
        api.configure()  # for the next one
        self.rank, self.experts = rank, self.layer._experts
        self.runner = self.layer, "_run_instances"
        self.x = test_transformers.tokens(rank)

    @property
    def given(self) -> tuple[torch.Tensor, ...]:
        ids, scale = test_transformers.batch(self.rank, 0, len(self.x))
        return ids, scale.to(self.x.dtype)

    @property
    def plan(self) -> Any:
        return self.layer.plan

    @property
    def group(self) -> Any:
        return self.layer.group

    def step(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x, *self.given)
        return y


class OnTorchtitan(OnTransformers):
    def __init__(self, api: Any, rank: int, pg: Any, **options: Any) -> None:
        self.layer = test_torchtitan.make(api, pg, test_torchtitan.own(rank, 0), **options)
        self.rank, self.experts = rank, self.layer.inner_experts
        self.runner = self.layer, "_run_instances"
        self.x = test_torchtitan.tokens(rank)

    @property
    def given(self) -> tuple[torch.Tensor, ...]:
        scores, ids, counts = test_torchtitan.routing(self.rank, 0)
        return scores.to(self.x.dtype), ids, counts


class OnDeepSpeed(OnTransformers):
    given = ()

    def __init__(self, api: Any, rank: int, pg: Any, **options: Any) -> None:
        self.layer, _ = api.replicate(test_deepspeed.engine_of(pg), **options)
        self.rank, self.experts = rank, self.layer.experts
        self.runner = checks, "run_grouped"
        self.x = test_deepspeed.tokens(rank)[:1, :2]

    @property
    def plan(self) -> Any:
        return self.layer.replica_plan

    @property
    def group(self) -> Any:
        return self.layer.replicas.group


@contextlib.contextmanager
def deepspeed_adapter() -> Iterator[Any]:
    with fake_deepspeed.installed(), test_deepspeed.VERSION:
        yield deepspeed


FRAMEWORKS: dict[str, tuple[Any, Any]] = {
    "transformers": (fake_transformers.adapter, OnTransformers),
    "torchtitan": (fake_torchtitan.adapter, OnTorchtitan),
    "deepspeed": (deepspeed_adapter, OnDeepSpeed),
}


@pytest.fixture(params=FRAMEWORKS)
def framework(request: pytest.FixtureRequest) -> Any:
    return request.param


def on(
    rank: int, pg: Any, framework: str, run: Callable[..., Any], *args: Any, **options: Any
) -> Any:
    adapter, kind = FRAMEWORKS[framework]
    with adapter() as api:
        made = kind(api, rank, pg, engine="host", timeout=60.0, **options)
        found = run(made, *args)
        made.group.abort()
        return found


def change(made: Any, name: str) -> str:
    return change_after(made.rank, name, made.experts, lambda: made.step(made.x))


@pytest.mark.parametrize("name", CHANGES)
def test_experts_that_were_changed_are_refused(ranks: RankPool, framework: str, name: str) -> None:
    found = ranks.run(G, on, framework, change, name)
    if framework == "transformers" and name in ("hook", "patched"):  # around the dispatch
        assert set(found) == {"NoneType: None"}
    else:
        check(name, found)


def largest(made: Any, copies: bool) -> tuple[int, int, int]:
    with torch.no_grad():  # creates the group
        made.step(made.x)
    inner = getattr(*made.runner)

    def joined(*given: Any) -> Any:
        mains, slots = given[-2:]
        torch.cat([mains["w1"], slots["w1"]])  # what the test has to notice
        return inner(*given)

    run = joined if copies else inner
    with mock.patch.object(*made.runner, run), NewTensors() as found:
        made.step(made.x.requires_grad_())
    return found.largest, made.experts.w1.numel(), made.plan.num_replicas


def test_no_tensor_as_large_as_main_weights_is_created(ranks: RankPool, framework: str) -> None:
    for size, mains, replicas in ranks.run(G, on, framework, largest, False):
        assert replicas > 0
        assert 0 < size < mains
    assert all(size >= mains for size, mains, _ in ranks.run(G, on, framework, largest, True))


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


@pytest.mark.parametrize("framework", ["transformers", "torchtitan"])
def test_float16_is_for_inference(ranks: RankPool, framework: str) -> None:
    ranks.run(G, on, framework, in_float16)


def twice(layer: Any, x: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = layer(2 * x, *given)
    return y


def compiled(made: Any, is_first: bool) -> None:
    x = made.x.requires_grad_()
    expected = None if is_first else made.step(x).detach()
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"replicas .* fullgraph|disable"):
        torch.compile(made.layer, fullgraph=True, backend="eager")(x, *made.given)
    found = torch.compile(twice, backend="eager")(made.layer, x / 2, *made.given)
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


def configured(rank: int, pg: Any, framework: str) -> None:
    def run(made: Any) -> None:
        with torch.no_grad():
            made.step(made.x)
        assert made.plan.num_replicas == 0
        assert (len(made.group.banks), len(made.group.slots["w1"])) == (2, 1)

    on(rank, pg, framework, run, slots_per_rank=1, live=2, min_tokens=10_000)


def test_options_reach_the_layer_and_its_group(ranks: RankPool, framework: str) -> None:
    ranks.run(G, configured, framework)
