"""Lets megatron-core's code, which takes CUDA for granted, run on the CPU. Changes the process."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import torch
import torch.distributed as dist
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
    cuda: Any = torch.cuda
    stream = _Stand()
    cuda.Stream = cuda.Event = _Stand
    cuda.current_stream = cuda.default_stream = lambda *_: stream
    cuda.stream = lambda _: contextlib.nullcontext()
    cuda.current_device = lambda: torch.device("cpu")
    cuda.synchronize = lambda *_: None
    cuda.get_rng_state = lambda *_: torch.get_rng_state()
    cuda.manual_seed = torch.manual_seed
    _OnTheCpu().__enter__()  # type: ignore[no-untyped-call]

    from megatron.core import jit

    jit.jit_fuser = jit.noop_decorator  # would compile, at the first call
    import megatron.core.tensor_parallel.random as states
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    for name, replaced in {
        "_get_cuda_rng_state": lambda *_, **__: torch.get_rng_state(),
        "_set_cuda_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
    }.items():
        setattr(states, name, replaced)
    if not hasattr(moe_utils, "te_general_gemm"):  # 0.16.1 reads it without TransformerEngine too
        moe_utils.te_general_gemm = None
    move = token_dispatcher.maybe_move_tensor_to_cpu

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if as_numpy and isinstance(tensor, torch.Tensor):
            return tensor.numpy()
        return move(tensor, as_numpy=as_numpy, record_stream=record_stream)

    token_dispatcher.maybe_move_tensor_to_cpu = to_host
    token_dispatcher.fused_dispatch, token_dispatcher.fused_combine = _dispatch, _combine
    token_dispatcher.set_deepep_num_sms = lambda _: None


# ---- DeepEP's two calls, by messages ------------------------------------------------------------


def _dispatch(
    x: torch.Tensor,
    token_indices: torch.Tensor,
    token_probs: torch.Tensor,
    num_experts: int,
    group: Any,
    async_finish: bool = False,
    allocate_on_comm_stream: bool = False,
) -> Any:
    """Send each token once to every rank of its experts, with their local ids or -1."""
    from megatron.core.tensor_parallel import all_to_all

    ranks = group.size()
    local = num_experts // ranks
    assert token_probs.dtype == torch.float32
    owner = token_indices.div(local, rounding_mode="floor")
    wanted = (owner[:, :, None] == torch.arange(ranks)).any(1)
    rank, token = wanted.T.nonzero(as_tuple=True)
    sends = wanted.sum(0)
    receives = torch.empty_like(sends)
    dist.all_to_all_single(receives, sends, group=group)
    splits = receives.tolist(), sends.tolist()
    here = owner[token] == rank[:, None]
    ids = (token_indices[token] - rank[:, None] * local).where(here, torch.tensor(-1))
    arrived = ids.new_empty(sum(splits[0]), ids.shape[1])
    dist.all_to_all_single(arrived, ids, *splits, group=group)
    probs = all_to_all(group, token_probs[token] * here, *splits)
    counts = torch.bincount(arrived[arrived >= 0], minlength=local)
    return all_to_all(group, x[token], *splits), arrived, probs, counts, (token, splits, len(x))


def _combine(x: torch.Tensor, group: Any, handle: Any, **_: Any) -> Any:
    from megatron.core.tensor_parallel import all_to_all

    token, (receives, sends), length = handle
    back = all_to_all(group, x, sends, receives)
    return x.new_zeros(length, x.shape[1]).index_add(0, token, back), None
