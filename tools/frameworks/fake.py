"""What an installed framework has otherwise than the fake of it in the tests."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from frameworks.table import Case


def run(case: Case, folder: Path) -> dict[str, Any]:
    """Compare what an adapter calls or overrides."""
    if case.given["of"] == "sglang":
        importlib.import_module("frameworks.sglang").import_sglang()  # with its stand-in
    fake = importlib.import_module(f"fake_{case.given['of']}")
    return {"failed": fake.differences()}
