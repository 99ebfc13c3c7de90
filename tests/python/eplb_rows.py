"""Layers as EPLB has them: experts in physical rows, on each rank as many."""

from __future__ import annotations

from collections.abc import Sequence

import torch

KINDS = {  # one dtype each, shapes of one expert; () is one scale for each expert
    torch.bfloat16: (5, 8),
    torch.float8_e4m3fn: (33,),
    torch.uint8: (7, 3),
    torch.float32: (),
    torch.int32: (2,),
}


def make_rows(own: Sequence[int], layer: int = 0) -> list[torch.Tensor]:
    """Return tensors of rows ``[L, *shape]``, one transposed; values tell expert and place."""
    made = []
    for dtype, shape in KINDS.items():
        each = torch.arange(torch.Size(shape).numel()).view(shape)
        rows = [(int(e) * 37 + layer * 101 + each * 11) % 251 for e in own]
        made.append(torch.stack(rows).to(dtype))
    made[0] = made[0].transpose(1, 2).contiguous().transpose(1, 2)
    return made


def count_wrong(found: Sequence[torch.Tensor], own: Sequence[int], layer: int = 0) -> int:
    """Return how many tensors are not those of these experts, bit for bit."""
    pairs = zip(found, make_rows(own, layer), strict=True)
    as_bytes = [[t.contiguous().view(torch.uint8) for t in pair] for pair in pairs]
    return sum(not torch.equal(a, b) for a, b in as_bytes)


def random_map(generator: torch.Generator, experts: int, count: int) -> list[int]:
    """Return the experts in all physical rows: each somewhere, others at random."""
    rest = torch.randint(experts, (count - experts,), generator=generator)
    found = torch.cat([torch.arange(experts), rest])
    mixed: list[int] = found[torch.randperm(count, generator=generator)].tolist()
    return mixed
