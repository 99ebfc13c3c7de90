"""The package's tensors are on the right device, whatever torch's default device is."""

from __future__ import annotations

import ast
from pathlib import Path

from torch.utils._device import _device_constructors

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "ultraep_comm"
COMMANDS = ("bench", "viz")  # programs, whose default device is torch's own


def test_every_tensor_is_made_on_a_named_device() -> None:
    factories = {function.__name__ for function in _device_constructors()}
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.relative_to(PACKAGE).parts[0] in COMMANDS:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and isinstance(node.func.value, ast.Name)
                and node.func.value.id == "torch"
                and node.func.attr in factories
                and not any(keyword.arg == "device" for keyword in node.keywords)
            ):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: torch.{node.func.attr}")
    assert found == []
