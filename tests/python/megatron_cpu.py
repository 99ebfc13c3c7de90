"""Lets megatron-core's code, which takes CUDA for granted, run on the CPU. Changes the process."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class _Stand:
    """A stream or an event: everything is in order on the CPU."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: _Stand()


class _OnTheCpu(TorchFunctionMode):
    """Makes tensors for device "cuda" on the CPU, and says that they are there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        result = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.")
        return result


def install() -> None:
    """Call it once, after ``init_process_group`` and before megatron-core is imported."""
    warnings.filterwarnings("ignore")  # that TransformerEngine and Apex are missing
    cuda, stream = torch.cuda, _Stand()
    cuda.Stream = cuda.Event = _Stand  # type: ignore[misc, assignment]
    cuda.current_stream = cuda.default_stream = lambda *_: stream  # type: ignore[assignment]
    cuda.stream = lambda _: contextlib.nullcontext()  # type: ignore[assignment]
    cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    cuda.get_rng_state = lambda *_: torch.get_rng_state()  # type: ignore[assignment]
    cuda.manual_seed = torch.manual_seed  # type: ignore[assignment]
    _OnTheCpu().__enter__()

    import megatron.core.tensor_parallel.random as states
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    states._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    states._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    if not hasattr(moe_utils, "te_general_gemm"):  # 0.16.1 reads it without TransformerEngine too
        moe_utils.te_general_gemm = None
    move = token_dispatcher.maybe_move_tensor_to_cpu

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if as_numpy and isinstance(tensor, torch.Tensor):
            return tensor.numpy()
        return move(tensor, as_numpy=as_numpy, record_stream=record_stream)

    token_dispatcher.maybe_move_tensor_to_cpu = to_host
