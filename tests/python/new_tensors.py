"""Which tensors a piece of code creates."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode


class NewTensors(TorchDispatchMode):
    """Notes the largest tensor that an operator creates: whose memory is none of its arguments'."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.by = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        known = {t.untyped_storage().data_ptr() for t in _plain((args, kwargs))}
        for tensor in _plain(results):
            is_new = tensor.untyped_storage().data_ptr() not in known
            if is_new and tensor.numel() > self.largest:
                self.largest, self.by = tensor.numel(), str(func)
        return results


def _plain(values: Any) -> list[torch.Tensor]:
    """Return the tensors in ``values`` but for wrappers, which have no memory of their own."""
    return [t for t in _pytree.tree_leaves(values) if type(t) in (torch.Tensor, torch.nn.Parameter)]
