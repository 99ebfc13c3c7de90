"""The adapter for torchtitan, on a fake of it."""

from __future__ import annotations

import io
from typing import Any

import fake_torchtitan as fake
import pytest
import torch
from fake_torchtitan import adapter
from ranks import RankPool, raised
from test_training import hook
from training_layers import E, G, OnTorchtitan, on

from ultraep_comm.errors import UnsupportedError


def hooked_on_one_rank(rank: int, pg: Any) -> str:
    with adapter() as api:
        made = OnTorchtitan(api, rank, pg)
        if rank == 1:
            made.experts.register_forward_hook(hook)
        return str(raised(lambda: made.step(made.x)))


def test_ranks_whose_experts_run_other_code_are_refused(ranks: RankPool) -> None:
    (text,) = set(ranks.run(G, hooked_on_one_rank))
    assert text.startswith("expert-parallel rank 1 has MoE layers with experts")
    assert "forward_hooks: test_training.hook" in text


def loaded(made: Any) -> None:
    first, file = made.step(made.x).detach(), io.BytesIO()
    dispatcher = made.layer.token_dispatcher
    assert dispatcher.experts_at_wiring == E + 2 * G
    mesh, dispatcher.ep_mesh = dispatcher.ep_mesh, None
    torch.save(made.layer, file)
    file.seek(0)
    other = torch.load(file, weights_only=False)
    dispatcher.ep_mesh = other.token_dispatcher.ep_mesh = mesh
    with torch.no_grad():
        other.inner_experts.w2.mul_(2)
        torch.testing.assert_close(made.step(made.x, other), 2 * first)
        assert torch.equal(made.step(made.x), first)
    assert made.group is not None
    assert other.group is made.group


def test_a_loaded_layer_has_its_own_experts(ranks: RankPool) -> None:
    ranks.run(G, on, "torchtitan", loaded)


def test_other_configurations_are_errors() -> None:
    with adapter() as api:
        assert fake.REGISTERED["ultraep_comm.adapters.torchtitan.replicate"] is (
            fake.RoutedExperts.Config
        )
        other = type("Config", (fake.RoutedExperts.Config,), {})
        with pytest.raises(UnsupportedError, match=r"expected RoutedExperts\.Config"):
            api.replicate(other(inner_experts=None, token_dispatcher=None))


def typed(rank: int, pg: Any) -> None:
    with adapter(is_type_checking=lambda: True) as api:
        made = OnTorchtitan(api, rank, pg)
        for _ in range(2):
            with pytest.raises(UnsupportedError, match=r"spmd_typechecking=False"):
                made.step(made.x)


def test_types_are_not_checked(ranks: RankPool) -> None:
    ranks.run(G, typed)


def test_other_signatures_are_an_error() -> None:
    other = type("RoutedExperts", (fake.RoutedExperts,), {"parallelize": lambda self, mesh: None})
    refused = pytest.raises(UnsupportedError, match=r"takes \['self', 'mesh'\]; the adapter")
    with refused, adapter(RoutedExperts=other):
        pass
