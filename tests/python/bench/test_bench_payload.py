"""The payload accepts correct bytes and finds every kind of wrong ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ultraep_comm.bench.payload import SENTINEL, Bytes, Payload, count_disturbed

SIZES = {"w13": 4096, "w2": 1003, "scale": 5}


def filled(payload: Payload, *, epoch: int = 1, expert: int = 0, segment: str = "w13") -> Bytes:
    data = np.empty(SIZES[segment], np.uint8)
    payload.fill(data, epoch=epoch, expert=expert, segment=segment)
    return data


@pytest.mark.parametrize("segment", SIZES)
def test_what_was_filled_is_right(segment: str) -> None:
    payload = Payload(1, SIZES)
    data = filled(payload, segment=segment)
    assert payload.count_wrong(data, epoch=1, expert=0, segment=segment) == 0
    assert Payload(1, SIZES).count_wrong(data, epoch=1, expert=0, segment=segment) == 0


@given(
    segment=st.sampled_from(sorted(SIZES)),
    places=st.sets(st.integers(0, 4), min_size=1),
    flip=st.integers(1, 255),
)
def test_every_wrong_byte_is_counted(segment: str, places: set[int], flip: int) -> None:
    payload = Payload(1, SIZES)
    data = filled(payload, segment=segment)
    at = [-1 - place for place in places]  # also in the last, partial word
    data[at] ^= np.uint8(flip)
    assert payload.count_wrong(data, epoch=1, expert=0, segment=segment) == len(places)


@pytest.mark.parametrize(
    "other", [{"epoch": 2}, {"expert": 1}, {"epoch": 1 << 40}], ids=["stale", "expert", "late"]
)
def test_bytes_of_another_transfer_are_wrong_in_every_word(other: dict[str, int]) -> None:
    payload = Payload(1, SIZES)
    data = filled(payload, **other)
    right = filled(payload)
    assert (data.view(np.uint64) != right.view(np.uint64)).all()
    assert payload.count_wrong(data, epoch=1, expert=0, segment="w13") >= data.size // 8


def test_another_seed_segment_or_offset_is_wrong() -> None:
    payload = Payload(1, SIZES)
    data = filled(payload)
    near_all = 0.98 * data.size
    assert Payload(2, SIZES).count_wrong(data, epoch=1, expert=0, segment="w13") > near_all
    twins = Payload(1, {"a": 4096, "b": 4096})
    twins.fill(data, epoch=1, expert=0, segment="a")
    assert twins.count_wrong(data, epoch=1, expert=0, segment="b") > near_all
    payload.fill(data, epoch=1, expert=0, segment="w13")
    for shift in (1, 8, 64, 1024):
        moved = np.roll(data, shift)
        assert payload.count_wrong(moved, epoch=1, expert=0, segment="w13") > near_all


def test_large_segments_are_checked_to_the_end() -> None:
    size = (1 << 20) + 3
    payload = Payload(3, {"w": size})
    data = np.empty(size, np.uint8)
    payload.fill(data, epoch=9, expert=4, segment="w")
    assert payload.count_wrong(data, epoch=9, expert=4, segment="w") == 0
    assert len(np.unique(data.view(np.uint8)[: 1 << 16].view(np.uint64))) == 1 << 13
    data[[0, 1 << 18, size - 4, size - 1]] ^= 1
    assert payload.count_wrong(data, epoch=9, expert=4, segment="w") == 4


def test_a_touched_empty_slot_is_found() -> None:
    data = np.full(100, SENTINEL, np.uint8)
    assert count_disturbed(data) == 0
    data[[0, 99]] = 0
    assert count_disturbed(data) == 2
