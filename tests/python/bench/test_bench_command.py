"""The minimal benchmark command of docs/developing.md works."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from benched import bench

from ultraep_comm.bench import cli

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "developing.md"


@pytest.fixture
def shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The command of the document's code block is one of the benchmark's."""
    text = DOCUMENT.read_text()
    found = re.search(r"runs this block -->\n```python\n(.*?)```", text, re.DOTALL)
    assert found is not None
    (tmp_path / "shown_command.py").write_text(found[1])
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("shown_command")
    monkeypatch.setattr(cli, "COMMANDS", (*cli.COMMANDS, module.COMMAND))
    yield
    del sys.modules["shown_command"]


@pytest.mark.usefixtures("shown")
def test_the_command_of_the_document(tmp_path: Path) -> None:
    few = ["gather", "--ranks", "2", "-n", "3", "-w", "0", "-c", "--json", "o.json"]
    done = bench(tmp_path, *few, "--max-over-bound", "1e-9")
    assert done.returncode == 3, done.stderr
    (record,) = done.document()["records"]
    assert record["over_bound"] >= 1
    assert list(done.rows()) == ["gather_load"]
    assert "# topology: 2 ranks on 1 host" in done.stdout
    done = bench(tmp_path, "gather", "--iters", "0")
    assert (done.returncode, done.stderr) == (2, "error: --iters is 0; expected at least 1\n")
