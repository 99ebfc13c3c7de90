"""The plugins of servers: declared to them, without effect unless their variable is set."""

from __future__ import annotations

import importlib
import importlib.metadata

import pytest
from ranks import run_python

from ultraep_comm import errors

PLUGINS = [("vllm", "vllm.general_plugins"), ("sglang", "sglang.srt.plugins")]


@pytest.mark.parametrize(("server", "entry_points"), PLUGINS)
def test_a_plugin_is_declared_and_checks_its_variable(
    monkeypatch: pytest.MonkeyPatch, server: str, entry_points: str
) -> None:
    adapter = importlib.import_module(f"ultraep_comm.adapters.{server}")
    found = importlib.metadata.entry_points(group=entry_points, name="ultraep")
    assert [entry.load() for entry in found] == [adapter.register]
    variable = f"ULTRAEP_{server.upper()}"
    monkeypatch.setenv(variable, "on")
    with pytest.raises(
        errors.InvalidArgumentError, match=f"{variable}='on'; expected 'eplb', 'batch'"
    ):
        adapter.register()


@pytest.mark.parametrize("server", [server for server, _ in PLUGINS])
def test_without_its_variable_a_plugin_imports_nothing(server: str) -> None:
    code = (
        f"import sys; from ultraep_comm.adapters import {server}; {server}.register();"
        f"print([m for m in ('torch', '{server}', 'numpy') if m in sys.modules])"
    )
    done = run_python("-c", code, **{f"ULTRAEP_{server.upper()}": ""})
    assert done.stdout.strip() == "[]", done.stderr
