"""What a gradient reduction has to leave behind, written down from its definition alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def reduced(main: torch.Tensor, replicas: Sequence[torch.Tensor]) -> torch.Tensor:
    """``main + (r1 + r2 + ... + rn)``: added in fp32, one after the other, and rounded once.

    Args:
        main: gradient of the main instance, float32 or bfloat16.
        replicas: gradients of the same shape, by ascending rank; none: nothing is added.
    """
    if not replicas:
        return main.clone()
    total = replicas[0].float()
    for replica in replicas[1:]:
        total = total + replica.float()
    return (main.float() + total).to(main.dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal bit for bit: zeros have a sign. Of not-a-numbers, which is."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    bits = {2: torch.int16, 4: torch.int32}[a.dtype.itemsize]
    equal = a.contiguous().view(bits) == b.contiguous().view(bits)
    return bool((equal | (a.isnan() & b.isnan())).all())
