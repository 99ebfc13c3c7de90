"""The device for tests of local stages."""

import pytest
from emulated_device import EmulatedDevice

from ultraep_comm.engines.cuda import stages


@pytest.fixture
def device(emulated: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> EmulatedDevice:
    monkeypatch.setattr(stages, "MIN_RUNS", 4)
    return emulated
