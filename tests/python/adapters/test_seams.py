"""Checks of frameworks at set-up."""

from __future__ import annotations

import importlib.metadata
import logging
import warnings
from typing import Any

import pytest
from torch.distributed import HashStore, ProcessGroup

from ultraep_comm.adapters.seams import check_signature, check_version, is_alone
from ultraep_comm.errors import UnsupportedError


@pytest.mark.parametrize(
    ("installed", "is_tried"),
    [
        ("5.22.9", False),
        ("5.23", True),
        ("5.23.0", True),
        ("5.23.1+cpu", True),
        ("5.24.7", True),
        ("5.25.0.dev0", False),
        ("6.0", False),
    ],
)
def test_other_versions_are_a_warning(
    monkeypatch: pytest.MonkeyPatch, installed: str, is_tried: bool
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: installed)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        check_version("transformers", "5.23", "5.24")
    assert (found == []) == is_tried
    if not is_tried:
        assert f"versions 5.23 to 5.24; {installed} is installed" in str(found[0].message)


def test_a_missing_framework_is_named() -> None:
    with pytest.raises(UnsupportedError, match=r"needs no-such-framework, 1\.0 to 2\.0"):
        check_version("no-such-framework", "1.0", "2.0")


def test_another_signature_is_an_error() -> None:
    def seam(layer: Any, ids: Any, weights: Any = None) -> None:
        del layer, ids, weights

    check_signature(seam, ["layer", "ids"])
    with pytest.raises(UnsupportedError, match=r"takes \['layer', 'ids', 'weights'\]; the adapter"):
        check_signature(seam, ["layer", "probs"])


def test_one_rank_has_nothing_to_replicate(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ultraep_comm")
    assert is_alone(ProcessGroup(HashStore(), 0, 1), "a layer")
    assert "a layer: one expert-parallel rank" in caplog.text
    assert not is_alone(ProcessGroup(HashStore(), 0, 2), "a layer")
