"""The adapter for vLLM, against modules with the signatures of its release."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from eplb_rows import count_wrong, make_rows, random_map
from fake_vllm import FakeBase, FakeElastic, faked, original, shown
from ranks import RankPool, own_group, raised

from ultraep_comm import errors
from ultraep_comm.adapters import checks
from ultraep_comm.adapters import vllm as adapter
from ultraep_comm.fabrics.rendezvous import Rendezvous

G, L, LAYERS = 4, 3, 3


def make_mover(group: Any, weights: Any, buffer: Any) -> Any:
    """Return what vLLM with the plugin makes in place of a communicator."""
    with faked() as state:
        adapter.register()
        coordinator = SimpleNamespace(cpu_group=group, device_group=group)
        return state.create_eplb_communicator(coordinator, "torch_nccl", weights, buffer)


# ---- rearrangements ------------------------------------------------------------------------


def flows(old: np.ndarray, new: np.ndarray, rng: np.random.Generator) -> list[tuple[int, ...]]:
    """Return what EPLB sends: (source rank, destination rank, expert, source row, slot)."""
    before, after = old.reshape(G, L), new.reshape(G, L)
    found = []
    for rank in range(G):
        for expert in sorted(set(after[rank]) - set(before[rank])):
            source = int(rng.choice([r for r in range(G) if expert in before[r]]))
            row, slot = (int(np.flatnonzero(m == expert)[0]) for m in (before[source], after[rank]))
            found.append((source, rank, int(expert), row, slot))
    return found


def move(
    mover: Any,
    rank: int,
    layer: int,
    maps: tuple[np.ndarray, np.ndarray],
    weights: list[torch.Tensor],
    buffer: list[torch.Tensor],
    batches: Sequence[Sequence[tuple[int, ...]]],
) -> None:
    """Do to a layer what vLLM's move_to_buffer and move_from_buffer do."""
    before, after = (m.reshape(G, L)[rank] for m in maps)
    for slot in range(L):
        if after[slot] in before and after[slot] != before[slot]:
            for w, b in zip(weights, buffer, strict=True):
                b[slot].copy_(w[int(np.flatnonzero(before == after[slot])[0])])
    for batch in batches:
        mover.set_transfer_context(maps[0], layer)
        for source, destination, expert, row, slot in batch:
            if source == rank:
                mover.add_send([w[row] for w in weights], destination, expert_id=expert)
            if destination == rank:
                mover.add_recv([b[slot] for b in buffer], source, expert_id=expert)
        mover.execute()
    for slot in range(L):
        if after[slot] != before[slot]:
            have = int(np.flatnonzero(after == after[slot])[0])
            from_slot = slot if after[slot] in before else have
            for w, b in zip(weights, buffer, strict=True):
                w[slot].copy_(b[from_slot])


def rearrange(rank: int, group: dist.ProcessGroup, how: str) -> tuple[int, int, int, list[str]]:
    """Return experts moved as counted here and by the mover, wrong rows, and uses of a stream."""
    rng = np.random.default_rng(len(how))  # the same on every rank, as the next one
    generator = torch.Generator().manual_seed(len(how))
    maps = [np.array(random_map(generator, 8, G * L)) for _ in range(LAYERS)]
    weights = [make_rows(maps[n].reshape(G, L)[rank], n) for n in range(LAYERS)]
    buffer = [torch.empty_like(w) for w in weights[0]]
    given, stream, count = list(buffer), [], 0
    with shown() as text:
        mover = make_mover(group, weights, buffer)
    assert f"EPLB moves experts by ultraep_comm: {L} rows a rank" in text.getvalue()
    assert isinstance(mover, FakeBase)
    assert not mover.needs_profile_buffer_reservation
    assert all(a is not b and a.shape == b.shape for a, b in zip(buffer, given, strict=True))
    mover.set_stream(stream)
    start = mover.moved

    def run() -> None:
        nonlocal count
        for _ in range(4):
            for layer in range(LAYERS):
                new = np.array(random_map(generator, 8, G * L))
                all_flows = flows(maps[layer], new, rng)
                parts = 2 if how == "batches" else 1
                batches = [all_flows[i::parts] for i in range(parts)]
                count += len(all_flows)
                both = maps[layer], new
                move(mover, rank, layer, both, weights[layer], buffer, batches)
                maps[layer] = new

    with torch.inference_mode(how == "inference"):
        if how == "thread":
            thread = threading.Thread(target=run)
            thread.start()
            thread.join()
        else:
            run()
    mine = [m.reshape(G, L)[rank] for m in maps]
    wrong = sum(count_wrong(weights[n], mine[n], n) for n in range(LAYERS))
    return count, mover.moved - start, wrong, stream


@pytest.mark.parametrize("how", ["plain", "batches", "thread", "inference"])
def test_every_byte_of_random_rearrangements(ranks: RankPool, how: str) -> None:
    for count, moved, wrong, stream in ranks.run(G, rearrange, how):
        assert wrong == 0
        assert moved == count > 20
        assert len(stream) > 10


# ---- what is refused -----------------------------------------------------------------------


def make_bad(kind: str) -> tuple[list[list[torch.Tensor]], Any]:
    good = [[torch.zeros(L, 4), torch.zeros(L)] for _ in range(2)]
    buffer: Any = [torch.empty_like(w) for w in good[0]]
    if kind == "one scale for all":
        good[1][1] = torch.zeros(1)
    elif kind == "shared rows":
        good[0][1] = good[1][1] = torch.zeros(1).expand(L)
    elif kind == "another shape":
        good[1][0] = torch.zeros(L, 5)
    elif kind == "no list":
        buffer = tuple(buffer)
    elif kind == "gaps":
        for layer in good:
            layer[0] = torch.zeros(L, 8)[:, ::2]
    return good, buffer


def set_up(rank: int, group: dist.ProcessGroup, kind: str, where: int) -> str:
    weights, buffer = make_bad(kind if where in (rank, -1) else "")
    error = raised(lambda: make_mover(group, weights, buffer))
    return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("one scale for all", "rank 1 has a tensor 1 of layer 1 with shape (1,), without one row"),
        ("shared rows", "rank 1 has a tensor 1 of layer 0 with shape (3,), whose rows share"),
        ("another shape", "rank 1 has layer 1 with tensors"),
        ("no list", "rank 1 has tuple as receive buffer"),
    ],
)
def test_tensors_that_cannot_travel_are_an_error_on_every_rank(
    ranks: RankPool, kind: str, says: str
) -> None:
    for text in ranks.run(2, set_up, kind, 1):
        assert text.startswith("UnsupportedError: ULTRAEP_VLLM=eplb: expert-parallel ")
        assert says in text
        assert "set ULTRAEP_VLLM=batch" in text  # vLLM's own EPLB aborts, or hangs
        assert "unset" not in text


def test_rows_with_gaps_are_an_error(ranks: RankPool) -> None:
    for text in ranks.run(2, set_up, "gaps", -1):
        assert text.startswith("InvalidArgumentError: ")
        assert "'tensor 0' of shape (4,) has strides (2,), which are not dense" in text


def disagree(rank: int, group: dist.ProcessGroup, kind: str) -> list[str]:
    weights = [[torch.full((2, 3), float(rank))]]
    buffer = [torch.empty(2, 3)]
    mover = make_mover(group, weights, buffer)
    mover.set_transfer_context(np.array([0, 1, 2, 3]), 0)
    if rank == 0:
        expert = 7 if kind == "no such expert" else 2
        given = torch.empty(2, 3) if kind == "other memory" else buffer[0]
        mover.add_recv([given[1]], 1, expert)
    elif kind != "no sender":
        mover.add_send([weights[0][0][0]], 0, 2)
    error = raised(mover.execute)
    mover.group.abort()
    return [type(error).__name__, str(error)]


@pytest.mark.parametrize(
    ("kind", "who", "says"),
    [
        ("no such expert", (0,), "rank 0 expects expert 7 of rank 1, which has none"),
        ("other memory", (0,), "rank 0 has expert 2 in memory that was not given at set-up"),
        ("no sender", (1,), "rank 1 sends [], (row, rank), and its peers need [(0, 0)]"),
    ],
)
def test_maps_that_do_not_match_are_an_error(
    ranks: RankPool, kind: str, who: Sequence[int], says: str
) -> None:
    found = ranks.run(2, disagree, kind)
    for rank, (name, text) in enumerate(found):
        if rank in who:
            assert name == "InvalidPlanError"
            assert f"EPLB of layer 0: {says}" in text
        else:
            assert name == "PeerRejectedError"


def come_alone(rank: int, group: dist.ProcessGroup, path: str) -> list[str]:
    """Rank 1 is absent: from an exchange at set-up, then from a layer's."""
    del group
    own = own_group(rank, 2, path)
    weights, buffer = [[torch.zeros(2, 3)]], [torch.empty(2, 3)]
    with pytest.MonkeyPatch.context() as short:
        short.setenv("ULTRAEP_TIMEOUT", "2")
        with pytest.MonkeyPatch.context() as patient:  # set-up may take longer on a busy machine
            patient.setattr(checks, "Rendezvous", lambda group, **_: Rendezvous(group))
            mover = make_mover(own, weights, buffer)
        mover.set_transfer_context(np.array([0, 1, 2, 3]), 0)
        if rank == 1:
            return []
        found = [raised(mover.execute), raised(lambda: checks.gather_json(own, "here"))]
    mover.group.abort()
    return [f"{type(error).__name__}: {error}" for error in found]


def test_a_rank_that_does_not_come_is_named_in_time(ranks: RankPool, tmp_path: Path) -> None:
    found = ranks.run(2, come_alone, str(tmp_path / "store"), timeout=90)[0]
    assert found[0].startswith("TransferTimeoutError: ")
    assert "rank 1" in found[0]
    assert "because rank 1 failed: ranks [1] did not join this" in found[1]


# ---- the plugin ----------------------------------------------------------------------------


def test_other_releases_are_noticed() -> None:
    def add_recv(self: Any, tensors: Any, source: int, expert_id: int) -> None: ...

    with faked(add_recv=add_recv) as state:
        with pytest.raises(errors.UnsupportedError, match=r"add_recv takes .*'source'"):
            adapter.register()
        assert state.create_eplb_communicator is original


def test_where_it_leaves_vllm_alone() -> None:
    alone = dist.ProcessGroup(dist.HashStore(), 0, 1)
    with faked() as state:
        adapter.register()
        make = state.create_eplb_communicator
        adapter.register()
        assert state.create_eplb_communicator is make
        assert (
            sys.modules["vllm.distributed.eplb.eplb_communicator"].create_eplb_communicator is make
        )
        one = SimpleNamespace(cpu_group=alone)
        assert make(one, "nixl", [[torch.zeros(1)]], [torch.zeros(1)]) == "vLLM's nixl"
        with pytest.raises(errors.UnsupportedError, match="unset ULTRAEP_VLLM, or enable_elastic"):
            make(FakeElastic(), "nixl", [[torch.zeros(1)]], [torch.zeros(1)])
