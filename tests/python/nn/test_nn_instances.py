"""Grouped GEMMs over local experts and slots, as one tensor or in two calls."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from ranks import loopback

import ultraep_comm as uec
from ultraep_comm import errors
from ultraep_comm.nn import Replication, grouped_mm, join_instances

K, N = 16, 24


def weights(count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn((count, K, N), generator=draw).to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("local", "slots", "rows"),
    [
        (2, 2, [3, 0, 4, 1]),
        (3, 1, [0, 0, 0, 5]),
        (1, 2, [6, 0, 0]),
        (2, 0, [2, 3]),
        (0, 2, [2, 3]),
    ],
)
def test_two_calls_are_one_over_all_instances(
    local: int, slots: int, rows: list[int], dtype: torch.dtype
) -> None:
    parts = [weights(local, dtype, 1), weights(slots, dtype, 2)]
    x = torch.randn((sum(rows), K), generator=torch.Generator().manual_seed(3)).to(dtype)
    x.requires_grad_()
    offs = torch.tensor(rows).cumsum(0).int()
    grouped_mm(x, *parts, offs).float().square().sum().backward()
    found = [x.grad, *(part.grad for part in parts if len(part))]
    x.grad = None
    whole = torch.cat([part.detach() for part in parts]).requires_grad_()
    own = [a @ b for a, b in zip(x.split(rows), whole, strict=True)]
    torch.cat(own).float().square().sum().backward()
    assert whole.grad is not None
    split = [grad for grad in whole.grad.split([local, slots]) if len(grad)]
    for one, other in zip(found, [x.grad, *split], strict=True):
        torch.testing.assert_close(one, other)


def test_experts_run_over_one_tensor(new_groups: Callable[..., list[uec.Group]]) -> None:
    """Parameters lie before the slots; gradients are those of the experts without replicas."""
    groups = new_groups(
        2,
        num_experts=4,
        slots_per_rank=1,
        expert={"w": ((K, N), torch.float32)},
        grads=torch.float32,
        instances=True,
    )
    every = weights(4, torch.float32, 5)
    rows = [[1, 4, 0], [2, 2, 3]]  # of local experts and of the slot, which has expert 1 on rank 1
    held = [[0, 1, 2], [2, 3, 1]]
    plan = uec.Plan.from_slots([[-1], [1]], num_experts=4)
    inputs = [torch.randn((sum(own), K)) for own in rows]

    def train(rank: int, layer: int) -> torch.Tensor:
        group = groups[rank]
        instances = group.banks[0].empty_instances()
        local = instances["w"][:2].copy_(every.detach()[2 * rank : 2 * rank + 2])
        parameter = torch.nn.Parameter(local)
        assert parameter.data_ptr() == instances["w"].data_ptr()
        run = Replication(group, layer=layer).begin({"w": parameter}, plan=plan)
        x, local, slots = run.before_experts(run.before_dispatch(inputs[rank].clone()))
        whole = join_instances(local, slots, group=group)["w"]
        assert whole.data_ptr() == parameter.data_ptr()
        assert whole.shape == (3, K, N)
        offs = torch.tensor(rows[rank]).cumsum(0).int()
        y = torch.nn.functional.grouped_mm(x, whole, offs=offs)
        run.after_experts(y).square().sum().backward()
        assert parameter.grad is not None
        return parameter.grad

    if not hasattr(torch.nn.functional, "grouped_mm"):
        pytest.skip("this torch has no grouped_mm")
    for rank in range(2):
        for part, expert in zip(inputs[rank].split(rows[rank]), held[rank], strict=True):
            (part @ every[expert]).square().sum().backward()
    assert every.grad is not None
    for layer in range(2):  # the second shares the slots
        found = loopback(2, lambda rank, layer=layer: train(rank, layer))
        torch.testing.assert_close(torch.cat(found), every.grad)


def test_weights_elsewhere_are_named(new_groups: Callable[..., list[uec.Group]]) -> None:
    (group,) = new_groups(
        1, num_experts=2, slots_per_rank=1, expert={"w": ((4, 4), torch.float32)}, instances=True
    )
    local = {"w": group.banks[0].empty_instances()["w"][:2]}
    assert join_instances(local, group.slots, group=group)["w"].shape == (3, 4, 4)
    with pytest.raises(
        errors.InvalidWeightsError, match=r"'w' are not in memory of empty_instances"
    ):
        join_instances({"w": local["w"].clone()}, group.slots, group=group)
    with pytest.raises(errors.InvalidWeightsError, match="not in memory"):
        join_instances({"w": local["w"][:1]}, group.slots, group=group)
