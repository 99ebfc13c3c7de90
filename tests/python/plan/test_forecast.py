"""LoadForecast: integers, equal on every rank, and errors for what cannot be a load."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

import ultraep_comm as uec
from ultraep_comm import errors


def test_the_last_load_is_expected_again() -> None:
    forecast = uec.LoadForecast()
    assert forecast.predict() is None
    load = torch.tensor([[1, 2], [3, 2**31 - 1]], dtype=torch.int32)
    forecast.update(load)
    load.zero_()
    expected = forecast.predict()
    assert expected is not None
    assert expected.dtype == torch.int64
    assert expected.tolist() == [4, 2**31 + 1]
    forecast.update(torch.tensor([5, 6]))
    assert forecast.predict().tolist() == [5, 6]


@pytest.mark.parametrize("decay", [0.0, 0.9])
def test_the_mean_decays(decay: float) -> None:
    forecast, mean = uec.LoadForecast("mean", decay=decay), Fraction(0)
    kept = Fraction(round(decay * 256), 256)
    generator = torch.Generator().manual_seed(1)
    for step in range(30):
        tokens = int(torch.randint(0, 2**31, (), generator=generator))
        forecast.update(torch.tensor([tokens, 0]))
        mean = Fraction(tokens) if step == 0 else mean * kept + tokens * (1 - kept)
        expected = forecast.predict()
        assert expected is not None
        # Each step rounds down to a part of a token, once; the sum of what is lost stays small.
        assert abs(Fraction(int(expected[0])) - mean) <= 1 + Fraction(1, 256) / (1 - kept)
        assert int(expected[1]) == 0


def test_a_function_gets_the_last_loads() -> None:
    seen = []

    def middle(loads: list[torch.Tensor]) -> torch.Tensor:
        seen.append([int(load[0]) for load in loads])
        return loads[len(loads) // 2]

    forecast = uec.LoadForecast(middle, history=3)
    for tokens in range(5):
        forecast.update(torch.tensor([tokens]))
        assert forecast.predict() is not None
    assert seen == [[0], [0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4]]


def test_what_cannot_be_is_refused() -> None:
    for options, text in (
        ({"method": "first"}, "method is 'first'"),
        ({"method": "mean", "decay": 1.0}, "decay is 1.0"),
        ({"history": 0}, "history is 0"),
    ):
        with pytest.raises(errors.InvalidArgumentError, match=text):
            uec.LoadForecast(**options)
    forecast = uec.LoadForecast()
    with pytest.raises(errors.InvalidLoadError, match="float"):
        forecast.update(torch.ones(3))
    forecast.update(torch.ones(3).int())
    with pytest.raises(errors.InvalidLoadError, match="expected 3, as before"):
        forecast.update(torch.ones(4).int())
