"""Recorded routing: loads from valid files, and errors for others."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from ultraep_comm.bench.traces import TraceError, open_trace, regroup
from ultraep_comm.errors import UltraEPError


def load(path: Path, num_ranks: int, step: int = 0, layer: int = 0, tokens: int = 4) -> np.ndarray:
    trace = open_trace(path)
    return trace.load(num_ranks=num_ranks, step=step, layer=layer, tokens_per_rank=tokens)


@pytest.fixture
def counts(tmp_path: Path) -> tuple[Path, np.ndarray]:
    values = np.random.default_rng(0).integers(0, 1000, (3, 2, 8, 16)).astype(np.int32)
    np.savez(tmp_path / "counts.npz", counts_src=values)
    return tmp_path / "counts.npz", values


@pytest.mark.parametrize("num_ranks", [2, 8])
def test_fewer_ranks_add_neighbours(counts: tuple[Path, np.ndarray], num_ranks: int) -> None:
    path, values = counts
    found = load(path, num_ranks, step=2, layer=1)
    assert found.dtype == np.int32
    assert np.array_equal(found, values[2, 1].reshape(num_ranks, -1, 16).sum(axis=1))


@given(
    counts=arrays(
        np.int32, array_shapes(min_dims=2, max_dims=2), elements=st.integers(0, 2**31 - 1)
    ),
    num_ranks=st.integers(1, 12),
)
def test_regrouping_loses_no_token(counts: np.ndarray, num_ranks: int) -> None:
    grouped = regroup(counts, num_ranks)
    assert grouped.shape == (num_ranks, counts.shape[1])
    assert (grouped >= 0).all()
    assert np.array_equal(grouped.sum(axis=0), counts.sum(axis=0, dtype=np.int64))


def test_topk_windows(tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(0, 8, (35, 2, 3)).astype(np.uint8)
    np.savez(tmp_path / "t.npz", topk=ids, n_experts=10)
    result = load(tmp_path / "t.npz", 2, step=1, layer=1, tokens=5)
    for rank in range(2):
        window = ids[10 + 5 * rank : 15 + 5 * rank, 1]
        assert np.array_equal(result[rank], np.bincount(window.ravel(), minlength=10))
    assert load(tmp_path / "t.npz", 2, step=2, tokens=5).sum() == 30
    with pytest.raises(TraceError, match="3 steps"):
        load(tmp_path / "t.npz", 2, step=3, tokens=5)


def test_topk_padding_and_no_expert_count(tmp_path: Path) -> None:
    np.savez(tmp_path / "t.npz", topk=np.array([[[0, -1]], [[4, 2]]], np.int64))
    assert load(tmp_path / "t.npz", 1, tokens=2).tolist() == [[1, 0, 1, 0, 1]]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ({"other": np.zeros(3)}, "counts_src"),
        ({"counts_src": np.zeros((2, 2, 2), np.int32)}, "shape"),
        ({"counts_src": np.zeros((1, 1, 1, 1))}, "float64"),
        ({"counts_src": np.full((1, 1, 1, 4), -1)}, "outside"),
        ({"counts_src": np.full((1, 1, 2, 4), 2**30)}, "2\\*\\*31"),
        ({"counts_src": np.array([[[[object()]]]])}, "Object arrays"),
        ({"topk": np.full((4, 1, 2), 7), "n_experts": 7}, "\\[0, 7\\)"),
        ({"topk": np.zeros((4, 1, 2), int), "n_experts": np.array([1.5])}, "n_experts"),
        (b"", "it is not an .npz file"),
        (b"PK\x03\x04 not really a zip", "or is damaged"),
    ],
)
def test_other_files_are_refused(
    tmp_path: Path, content: dict[str, np.ndarray] | bytes, text: str
) -> None:
    path = tmp_path / "t.npz"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        np.savez(path, **content)
    with pytest.raises(TraceError, match=text) as caught:
        load(path, 1)
    assert isinstance(caught.value, UltraEPError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("place", [{"step": 3}, {"step": -1}, {"layer": 2}])
def test_places_out_of_range(counts: tuple[Path, np.ndarray], place: dict[str, int]) -> None:
    with pytest.raises(TraceError, match=next(iter(place))):
        load(counts[0], 8, **place)


@pytest.mark.trace
def test_recorded_tokens_give_the_recorded_counts(traces_dir: Path) -> None:
    """Both files come from the same tokens, so equal windows have equal totals."""
    where: dict[str, int] = {"num_ranks": 8, "step": 2, "layer": 3}
    counts = load(traces_dir / "gptoss20b_counts_G8_tok4096_topic.npz", **where)
    assert counts.shape == (8, 32)
    assert set(counts.sum(axis=1)) == {4096 * 4}
    result = load(traces_dir / "gptoss20b_topk.npz", **where, tokens=4096)
    assert np.array_equal(result, counts)
