"""group_for: layers share a group by process group, shape of experts and options."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankPool, raised

import ultraep_comm as uec
from ultraep_comm import Segment, errors
from ultraep_comm.group.layers import group_for

M = 2
SEGMENT = Segment((3, 4), torch.float32)


def weights(shape: tuple[int, ...] = (M, 3, 4), **options: Any) -> dict[str, torch.Tensor]:
    return {"w": torch.zeros(shape, **options)}


def ask(rank: int, pg: Any) -> None:
    first, layer = group_for(pg, like=weights(), slots_per_rank=1, engine="host")
    assert layer == 0
    assert first.topology.num_experts == 2 * M
    assert first.segments == {"w": SEGMENT}
    alike = [
        weights(),
        {"w": torch.nn.Parameter(torch.zeros(M, 3, 4))},
        {"w": [torch.zeros(3, 4) for _ in range(M)]},
    ]
    for i, like in enumerate(alike):
        again = group_for(pg, like=like, slots_per_rank=1, engine="host")
        assert again == (first, i + 1)
    others: list[tuple[Any, dict[str, Any]]] = [
        (weights((M, 4, 3)), {}),
        (weights(dtype=torch.float64), {}),
        ({"w": torch.zeros(M, 4, 3).transpose(1, 2)}, {}),
        ({"v": torch.zeros(M, 3, 4)}, {}),
        (weights(), {"grads": torch.float32}),
        (weights(), {"slots_per_rank": 2}),
        (weights(), {"home": torch.tensor([1, 1, 0, 0])}),
    ]
    made = [first]
    for like, options in others:
        given = {"slots_per_rank": 1, "engine": "host", **options}
        other = group_for(pg, like=like, **given)
        assert other.layer == 0
        assert all(other.group is not group for group in made)
        assert group_for(pg, like=like, **given).group is other.group
        made.append(other.group)
    # A transposed layout is the segment's.
    assert made[3].segments["w"].strides == (1, 3)
    # Only a group that takes calls is shared.
    first.close()
    replaced = group_for(pg, like=weights(), slots_per_rank=1, engine="host")
    assert replaced.group is not first
    assert replaced.layer == 0
    for group in (*made, replaced.group):
        group.close()


def test_layers_share_groups(ranks: RankPool) -> None:
    ranks.run(2, ask)


def ask_for(rank: int, pg: Any, asked: list[dict[str, Any]], seen_before: bool = False) -> str:
    options: dict[str, Any] = {"slots_per_rank": 1, "engine": "host"}
    made = [group_for(pg, like=weights(), **options)] if seen_before else []
    error = raised(lambda: made.append(group_for(pg, **{**options, **asked[rank]})))
    for group, _ in made:
        group.close()
    return str(error)


@pytest.mark.parametrize(
    ("own", "seen_before", "text", "peers"),
    [
        ({"like": weights((3, 3, 4))}, True, "on rank 0; expected 3", ""),
        ({"like": weights((2, 5))}, True, "expert['w']='(5,) ", ""),
        ({"like": weights((2, 5))}, False, "expert['w']='(5,) ", ""),
        ({"like": None}, False, "like is None", "rank 1 failed: "),
        ({"slots_per_rank": -1}, False, "slots_per_rank", "rank 1 failed: "),
        ({"num_experts": 6}, False, "like has 2 experts on rank 0; expected 3", "rank 1 failed: "),
    ],
)
def test_a_rank_that_asks_for_something_else_is_at_its_peers_at_once(
    ranks: RankPool, own: dict[str, Any], seen_before: bool, text: str, peers: str
) -> None:
    """`seen_before`: rank 0 has a group already."""
    usual = {"like": weights()}
    found = ranks.run(2, ask_for, [usual, usual | own], seen_before)
    assert text in found[1]
    assert peers + text in found[0]


def test_ranks_without_experts(ranks: RankPool) -> None:
    asked = [{"like": weights((count, 3))} for count in (1, 1, 0)]
    assert ranks.run(3, ask_for, asked) == ["None"] * 3


@pytest.mark.parametrize(
    ("like", "text"),
    [
        ({}, "expected {name: tensor"),
        ({"w": [torch.zeros(3, 4), torch.zeros(4, 3)]}, r"like\['w'\]\[1\] is .*of one shape"),
        ({"w": []}, r"like\['w'\] is an empty sequence"),
        ({"w": torch.zeros(2, 3), "scale": torch.zeros(1, 3)}, "scales and biases travel with"),
    ],
)
def test_experts_that_are_not_alike(like: Any, text: str) -> None:
    with pytest.raises(errors.InvalidArgumentError, match=text):
        uec.weights.segments.segments_like(like)


def test_segment_like_a_tensor() -> None:
    assert Segment.like(torch.zeros(3, 4)) == SEGMENT
    assert Segment.like(torch.zeros(4, 3).T) == Segment((3, 4), torch.float32, (1, 3))
    assert Segment.like(torch.zeros(5, 2, 3, dtype=torch.bfloat16)[1]).strides is None


# ---- process groups outside WORLD ---------------------------------------------------------------


def apart(rank: int, pg: Any, path: str, engine: str) -> None:
    """As elastic jobs make them: registered nowhere."""
    store = dist.FileStore(path, 2)
    elastic = dist.ProcessGroup(store, rank, 2)
    backend = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, 2, timedelta(seconds=30))
    elastic._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    elastic._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    local = {"w": torch.full((M, 3, 4), float(rank))}
    group, _ = group_for(elastic, like=local, slots_per_rank=1, engine=engine)
    with group:
        load = uec.gather_load(torch.zeros((5, 1), dtype=torch.int64), group=group)
        assert load.tolist() == [[5, 0, 0, 0]] * 2
        plan = uec.Plan.from_slots([[2], [0]], num_experts=2 * M)
        uec.replicate_experts(local, plan, group=group)
        assert (group.slots["w"] == 1 - rank).all()


@pytest.mark.parametrize("engine", ["host", "c10d", "auto"])
def test_a_process_group_outside_world(ranks: RankPool, tmp_path: Any, engine: str) -> None:
    ranks.run(2, apart, str(tmp_path / "store"), engine)
