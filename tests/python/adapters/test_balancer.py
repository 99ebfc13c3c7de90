"""A layer of one's own with physical ids: the same outputs as without replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import loopback, raised

import ultraep_comm as uec
from ultraep_comm import errors
from ultraep_comm.adapters.balancer import Balancer

G, E, S, H, T, K = 4, 8, 2, 5, 32, 2
M, P = E // G, E // G + S


def make(new_groups: Callable[..., list[uec.Group]], **options: Any) -> list[uec.Group]:
    return new_groups(
        G, num_experts=E, slots_per_rank=S, expert={"w": ((H, H), torch.float32)}, **options
    )


def draw(layer: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and their ids, most of them of experts 0 and 1, which are on one rank."""
    random = torch.Generator().manual_seed(10 * layer + rank)
    hot = torch.rand((T, E), generator=random) + torch.arange(E).lt(2) * 0.6
    return torch.randn((T, H), generator=random), hot.topk(K).indices


def weights_of(layer: int) -> torch.Tensor:
    return torch.randn((E, H, H), generator=torch.Generator().manual_seed(layer))


@pytest.mark.parametrize("has_all", [False, True])
def test_outputs_are_those_without_replicas(
    new_groups: Callable[..., list[uec.Group]], has_all: bool
) -> None:
    """``has_all``: every rank has all tokens, as with tensor parallelism."""
    groups = make(new_groups)
    for layer in range(3):  # sharing the slots
        every = weights_of(layer)
        tokens = [draw(layer, 0 if has_all else rank) for rank in range(G)]

        def route(rank: int, layer: int = layer, tokens: Any = tokens) -> Any:
            own = weights_of(layer)[rank * M : (rank + 1) * M]
            weights = groups[rank].bind({"w": own}) if has_all else {"w": own}
            balancer = Balancer(groups[rank], weights, layer=layer)
            ids = balancer.begin(tokens[rank][1], source=0 if has_all else None)
            balancer.wait()
            return balancer, ids, torch.cat([own, groups[rank].slots["w"]])

        found = loopback(G, route)
        held = torch.stack([instances for _, _, instances in found]).flatten(0, 1)
        rows = torch.zeros(G)
        for (balancer, ids, _), (x, logical) in zip(found, tokens, strict=True):
            assert balancer.num_instances == G * P
            torch.testing.assert_close(
                torch.einsum("th,tkih->tki", x, held[ids]),
                torch.einsum("th,tkih->tki", x, every[logical]),
            )
            rows += torch.bincount(ids.flatten() // P, minlength=G)
        plan = found[0][0].plan
        assert plan.imbalance_before > 1.5
        assert rows.max() / rows.mean() == pytest.approx(plan.imbalance)
        assert plan.imbalance < 1.05


def test_a_batch_is_waited_for_before_the_next(
    new_groups: Callable[..., list[uec.Group]],
) -> None:
    groups = make(new_groups, banks=2)
    ids = draw(0, 0)[1]

    def run(rank: int) -> list[BaseException | None]:
        own = {"w": weights_of(0)[rank * M : (rank + 1) * M]}
        balancer = Balancer(groups[rank], own)
        other = Balancer(groups[rank], own, bank=1, reuse=True)
        early = raised(balancer.wait)
        balancer.begin(ids)
        other.begin(ids)  # which has slots of its own
        balancer.wait()
        other.wait()
        balancer.begin(ids)
        return [early, raised(lambda: balancer.begin(ids))]

    for early, second in loopback(G, run):
        assert isinstance(early, errors.InvalidArgumentError)
        assert "without begin()" in str(early)
        assert isinstance(second, errors.InvalidArgumentError)
        assert "whose replicas would be overwritten" in str(second)
