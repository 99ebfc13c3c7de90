# ruff: noqa: ANN001
"""slot_gemm.cu in Triton: programs wait for their own slot, while a call still fills others.

Run on a GPU, with `ready` and `slots` of `group.banks[i]` and `number` = `work.epoch`::

    slot_gemm[(num_slots * triton.cdiv(n, BLOCK),)](
        bank.ready, bank.slots["w"], tokens, out, slots_used, work.epoch, num_tokens, n, k, BLOCK
    )
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def slot_gemm(
    ready,  # int64 [S]
    slots,  # int8 [S, n, k]
    tokens,  # int8 [num_tokens, k]
    out,  # int32 [S, num_tokens, n]
    slots_used,  # int32 [num_slots]
    number,
    num_tokens,
    n,
    k,
    BLOCK: tl.constexpr,
) -> None:
    """Add up ``out[slot][token][n] = tokens[token] . slots[slot][n]`` for the slots listed."""
    blocks = tl.cdiv(n, BLOCK)  # of a slot
    slot = tl.load(slots_used + tl.program_id(0) // blocks)
    # Acquire at the device's scope, by one thread, and a barrier: pairs with the release of the
    # kernel that fills the slot. Triton's plain loads have no order.
    while tl.atomic_add(ready + slot, 0, sem="acquire", scope="gpu") <= number:
        pass
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = column < n
    rows = slots + (slot.to(tl.int64) * n + column) * k
    for token in range(num_tokens):
        total = tl.zeros((BLOCK,), dtype=tl.int32)
        for at in range(k):
            weight = tl.load(rows + at, mask=inside, other=0).to(tl.int32)
            total += weight * tl.load(tokens + token * k + at).to(tl.int32)
        tl.store(out + (slot.to(tl.int64) * num_tokens + token) * n + column, total, mask=inside)
