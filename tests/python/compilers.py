"""What tests of torch.compile share."""

from __future__ import annotations

import shutil
import sys
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None or sys.platform != "linux", reason="inductor needs g++"
)
# The first rank to call waits while others compile, for minutes on a busy machine.
COMPILE_TIMEOUT = 900.0
COMPILES = [
    pytest.mark.usefixtures("nothing_compiled"),
    pytest.mark.timeout(2 * COMPILE_TIMEOUT),
]
BACKENDS = [
    "aot_eager",
    pytest.param("inductor", marks=[pytest.mark.exhaustive, needs_compiler]),
]


def assert_same(got: Any, expected: Any) -> None:
    """Compare all tensors of two nested lists or dicts."""
    for one, other in zip(tree_leaves(got), tree_leaves(expected), strict=True):
        assert torch.equal(one, other)
