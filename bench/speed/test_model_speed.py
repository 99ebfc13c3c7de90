"""Prediction of the transfer of a rack's plan."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from rack import EXPERT_BYTES, make_plan

from ultraep_comm.model import predict


@pytest.mark.benchmark(group="model")
@pytest.mark.parametrize("mode", ["push", "pull", "direct", "auto"])
def test_prediction(benchmark: Callable, mode: str) -> None:
    prediction = benchmark(predict, make_plan(2.0), EXPERT_BYTES, "nvl72", mode, may_pull=True)
    assert prediction.over_bound >= 1.0
