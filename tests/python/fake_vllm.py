"""A stand-in for the modules of vLLM that both modes of its adapter use."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from fakes import differences_at

from ultraep_comm.adapters.vllm import FACTORY, batch, eplb


class FakeBase:
    def add_send(self, tensors: Any, dst_rank: int, expert_id: int) -> None:
        raise NotImplementedError

    def add_recv(self, tensors: Any, src_rank: int, expert_id: int) -> None:
        raise NotImplementedError

    def execute(self) -> None:
        raise NotImplementedError

    def set_transfer_context(self, old_indices: Any, layer_idx: int) -> None: ...

    @property
    def needs_profile_buffer_reservation(self) -> bool:
        return True

    def set_stream(self, stream: Any) -> None:
        self._stream = stream

    def _log_initialized(self) -> None: ...


class FakeElastic: ...


def original(group_coordinator: Any, backend: str, expert_weights: Any, expert_buffer: Any) -> str:
    del group_coordinator, expert_weights, expert_buffer
    return f"vLLM's {backend}"


@contextlib.contextmanager
def device_stream(stream: Any) -> Iterator[None]:
    stream.append("on") if stream is not None else None
    yield


class FakeVllm:
    """Puts the modules in place of vLLM's, and takes them away again.

    Args:
        mode: of the plugin.
        more: contents of further modules, by name.
        changed: methods of its communicator.
    """

    def __init__(self, mode: str = "eplb", more: Any = None, **changed: Any) -> None:
        self._mode = mode
        base = type("EplbCommunicator", (FakeBase,), changed)
        eplb = "vllm.distributed.eplb"
        factory = {"create_eplb_communicator": original}
        self._modules = {
            "vllm": {},
            "vllm.distributed": {},
            eplb: {},
            f"{eplb}.eplb_communicator": {"EplbCommunicator": base, **factory},
            f"{eplb}.eplb_state": factory,
            f"{eplb}.eplb_utils": {"device_stream": device_stream},
            "vllm.distributed.stateless_coordinator": {"StatelessGroupCoordinator": FakeElastic},
        }
        for name, contents in (more or {}).items():
            self._modules[name] = self._modules.get(name, {}) | contents

    def __enter__(self) -> Any:
        self._context = pytest.MonkeyPatch()
        self._context.setenv("ULTRAEP_VLLM", self._mode)
        self._context.setattr(importlib.metadata, "version", lambda _: "0.33.0")
        for name, contents in self._modules.items():
            module = ModuleType(name)
            vars(module).update(contents)
            self._context.setitem(sys.modules, name, module)
        return sys.modules["vllm.distributed.eplb.eplb_state"]

    def __exit__(self, *_: object) -> None:
        self._context.undo()


def differences() -> list[str]:
    """Return where the installed vLLM differs.

    Raises:
        ImportError: vLLM is not installed.
    """
    importlib.import_module("vllm")
    return differences_at({**FACTORY, **eplb.PATCH_POINTS, **batch.PATCH_POINTS})
