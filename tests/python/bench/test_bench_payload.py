"""The payload accepts correct bytes and finds every kind of wrong ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ultraep_comm.bench.payload import Payload

SIZES = {"w13": 4096, "w2": 1003, "scale": 5, "large": (1 << 20) + 3}
RIGHT = {"epoch": 1, "expert": 0, "segment": "w13"}


def filled(seed: int = 1, **other: int | str) -> np.ndarray:
    where: dict[str, int | str] = {**RIGHT, **other}
    data = np.empty(SIZES[str(where["segment"])], np.uint8)
    Payload(seed, SIZES).fill(data, **where)
    return data


@given(
    segment=st.sampled_from(sorted(SIZES)),
    places=st.sets(st.integers(0, 4), min_size=1),
    flip=st.integers(1, 255),
)
def test_every_wrong_byte_is_counted(segment: str, places: set[int], flip: int) -> None:
    where, data = {**RIGHT, "segment": segment}, filled(segment=segment)
    payload = Payload(1, SIZES)
    assert payload.count_wrong(data, **where) == 0
    at = [-1 - place for place in places]  # also in the last, partial word
    data[at] ^= np.uint8(flip)
    assert payload.count_wrong(data, **where) == len(places)


@pytest.mark.parametrize("other", [{"epoch": 2}, {"expert": 1}, {"epoch": 1 << 40}])
def test_bytes_of_another_transfer_are_wrong_in_every_word(other: dict[str, int]) -> None:
    data, right = filled(**other), filled()
    assert (data.view(np.uint64) != right.view(np.uint64)).all()


def test_another_seed_segment_or_offset_is_wrong() -> None:
    twins = Payload(1, {"a": 4096, "b": 4096})
    other = np.empty(4096, np.uint8)
    twins.fill(other, epoch=1, expert=0, segment="a")
    near_all = 0.98 * other.size
    assert twins.count_wrong(other, epoch=1, expert=0, segment="b") > near_all
    shifted = [np.roll(filled(), shift) for shift in (1, 8, 64, 1024)]
    for data in (filled(seed=2), *shifted):
        assert Payload(1, SIZES).count_wrong(data, **RIGHT) > near_all
