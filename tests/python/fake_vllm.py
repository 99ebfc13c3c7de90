"""A stand-in for the modules of vLLM that both modes of its adapter use."""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import os
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

from fakes import differences_at, installed

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


class FakeElastic: ...


def original(group_coordinator: Any, backend: str, expert_weights: Any, expert_buffer: Any) -> str:
    del group_coordinator, expert_weights, expert_buffer
    return f"vLLM's {backend}"


@contextlib.contextmanager
def device_stream(stream: Any) -> Iterator[None]:
    stream.append("on") if stream is not None else None
    yield


@contextlib.contextmanager
def faked(mode: str = "eplb", more: Any = None, **changed: Any) -> Iterator[Any]:
    """Put the modules in place of vLLM's; return that of the state of its EPLB.

    Args:
        mode: of the plugin.
        more: contents of further modules, by name.
        changed: methods of its communicator.
    """
    eplb = "vllm.distributed.eplb"
    base = type("EplbCommunicator", (FakeBase,), changed)
    factory = {"create_eplb_communicator": original}
    modules: dict[str, dict[str, Any]] = {
        f"{eplb}.eplb_communicator": {"EplbCommunicator": base, **factory},
        f"{eplb}.eplb_state": factory,
        f"{eplb}.eplb_utils": {"device_stream": device_stream},
        "vllm.distributed.stateless_coordinator": {"StatelessGroupCoordinator": FakeElastic},
    }
    for name, contents in (more or {}).items():
        modules[name] = modules.get(name, {}) | contents
    with mock.patch.dict(os.environ, ULTRAEP_VLLM=mode), installed("0.33.0", modules):
        yield sys.modules[f"{eplb}.eplb_state"]


@contextlib.contextmanager
def shown() -> Iterator[io.StringIO]:
    """Return what vLLM's own configuration of ``logging`` lets a server print."""
    text = io.StringIO()
    logger, handler = logging.getLogger("vllm"), logging.StreamHandler(text)
    logger.addHandler(handler)
    logger.setLevel("INFO")
    try:
        yield text
    finally:
        logger.removeHandler(handler)
        logger.setLevel("NOTSET")


def differences() -> list[str]:
    """Return where the installed vLLM differs.

    Raises:
        ImportError: vLLM is not installed.
    """
    importlib.import_module("vllm")
    return differences_at({**FACTORY, **eplb.PATCH_POINTS, **batch.PATCH_POINTS})
