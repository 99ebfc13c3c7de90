"""group_for: layers share a group by process group, shape of experts and options."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankPool, raised, run_python

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


def ask_for(
    rank: int, pg: Any, likes: list[Any], num_experts: int | None, first: Any = None
) -> str:
    options: dict[str, Any] = {"slots_per_rank": 1, "num_experts": num_experts, "engine": "host"}
    made = [] if first is None else [group_for(pg, like=first, **options)]
    error = raised(lambda: made.append(group_for(pg, like=likes[rank], **options)))
    for group, _ in made:
        group.close()
    return str(error)


@pytest.mark.parametrize("seen_before", [False, True])
@pytest.mark.parametrize(
    ("likes", "num_experts", "own", "peers"),
    [
        (
            [weights((1, 3)), weights((2, 3))],
            None,
            "on rank 0; expected 2",
            "on rank 0; expected 2",
        ),
        ([weights((2, 3)), weights((1, 3))], 4, "on rank 1; expected 2", "on rank 1; expected 2"),
        ([weights((2, 3)), weights((2, 5))], None, "expert['w']='(5,) ", "expert['w']='(5,) "),
        ([weights((2, 3)), {"w": []}], None, "is an empty sequence", "rank 1 failed: like['w']"),
        ([weights((2, 3)), None], None, "like is None", "rank 1 failed: like is None"),
    ],
)
def test_a_rank_with_other_experts_is_at_its_peers_at_once(
    ranks: RankPool,
    likes: list[Any],
    num_experts: int | None,
    own: str,
    peers: str,
    seen_before: bool,
) -> None:
    first = weights((2, 3)) if seen_before else None  # then rank 0 has a group already
    found = ranks.run(2, ask_for, likes, num_experts, first)
    assert peers in found[0]
    assert own in found[1]


def ask_with(rank: int, pg: Any, options: list[dict[str, Any]]) -> str:
    return str(
        raised(
            lambda: group_for(
                pg, like=weights((2, 3)), engine="host", **{"slots_per_rank": 1, **options[rank]}
            )
        )
    )


@pytest.mark.parametrize(
    ("own", "text"),
    [({"num_experts": 6}, "expected 3"), ({"slots_per_rank": -1}, "slots_per_rank")],
)
def test_options_that_one_rank_alone_refuses(
    ranks: RankPool, own: dict[str, Any], text: str
) -> None:
    found = ranks.run(2, ask_with, [{}, own])
    assert text in found[1]
    assert "rank 1 failed: " in found[0]
    assert text in found[0]


def test_ranks_without_experts(ranks: RankPool) -> None:
    likes = [weights((1, 3)), weights((1, 3)), weights((0, 3))]
    assert ranks.run(3, ask_for, likes, None) == ["None"] * 3


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


# ---- the end of the process ----------------------------------------------------------------------

ENDS = """
import os, sys, torch, torch.distributed as dist
import ultraep_comm as uec
from ultraep_comm.group.layers import group_for
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
like = {"w": torch.ones(2, 3)}
group, layer = group_for(like=like, slots_per_rank=1, grads=torch.float32, engine=sys.argv[3])
plan = group.save(uec.gather_and_plan(torch.tensor([[0]] * 8), group=group))
uec.replicate_experts(like, plan, group=group)
if rank == 0:
    dist.destroy_process_group()
"""  # a plan is still saved, and a process group is left or not


@pytest.mark.parametrize("engine", ["host", "c10d"])
def test_groups_end_with_the_process(tmp_path: Any, engine: str) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(2) as threads:
        done = list(
            threads.map(
                lambda rank: run_python("-c", ENDS, str(rank), str(tmp_path / "store"), engine),
                range(2),
            )
        )
    for process in done:
        assert process.returncode == 0, process.stderr
        assert "leak" not in process.stderr
        assert "ultraep" not in process.stderr


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
