"""Gradients that prove themselves: numbers out of a hash, other ones for every instance and epoch.

A number has the sign and the mantissa of its hash, and an exponent that puts it between 1/2 and 2.
So fp32 sums are rounded, and the order in which they are added shows in their bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from ultraep_comm.bench.payload import Payload

_KEPT = {torch.float32: 0x80FFFFFF, torch.bfloat16: 0x80FF}  # sign, last bit of exponent, mantissa
_SET = {torch.float32: 0x3F000000, torch.bfloat16: 0x3F00}
_WORDS = {torch.float32: np.uint32, torch.bfloat16: np.uint16}
MAIN = -1  # the rank of a main instance


class GradPayload:
    """What the gradients of every instance are, in every epoch."""

    def __init__(
        self,
        seed: int,
        elements: Mapping[str, int],
        num_experts: int,
        *,
        grad_dtype: torch.dtype,
        main_dtype: torch.dtype,
    ) -> None:
        """Compute the tables for segments ``{name: elements of one expert}``."""
        self._num_experts, self._elements = num_experts, dict(elements)
        self._dtypes = {True: main_dtype, False: grad_dtype}
        self._payloads = {
            dtype: Payload(seed, {name: n * dtype.itemsize for name, n in elements.items()})
            for dtype in {grad_dtype, main_dtype}
        }

    def fill(self, out: torch.Tensor, *, epoch: int, expert: int, rank: int, segment: str) -> None:
        """Write one segment's gradients, of the replica on ``rank`` or MAIN, to ``out``."""
        dtype = self._dtypes[rank == MAIN]
        data = out.view(torch.uint8).numpy()
        instance = expert + (rank + 1) * self._num_experts
        self._payloads[dtype].fill(data, epoch=epoch, expert=instance, segment=segment)
        words = data.view(_WORDS[dtype])
        words &= _WORDS[dtype](_KEPT[dtype])
        words |= _WORDS[dtype](_SET[dtype])

    def values(self, *, epoch: int, expert: int, rank: int, segment: str) -> torch.Tensor:
        """Return what :meth:`fill` writes."""
        out = torch.empty(self._elements[segment], dtype=self._dtypes[rank == MAIN])
        self.fill(out, epoch=epoch, expert=expert, rank=rank, segment=segment)
        return out

    def reduced(
        self, *, epoch: int, expert: int, ranks: Sequence[int], segment: str
    ) -> torch.Tensor:
        """Return ``main + (r1 + ... + rn)``, by the definition: in fp32, and rounded once.

        Args:
            epoch, expert, segment: of the gradients.
            ranks: that hold replicas, ascending.
        """
        total = torch.zeros(0)
        for i, rank in enumerate(ranks):
            more = self.values(epoch=epoch, expert=expert, rank=rank, segment=segment).float()
            total = more if i == 0 else total.add_(more)
        main = self.values(epoch=epoch, expert=expert, rank=MAIN, segment=segment)
        return (main.float() + total).to(main.dtype)


def count_different(data: torch.Tensor, wanted: torch.Tensor) -> int:
    """Return how many bytes of two tensors of one dtype differ."""
    return int((data.view(torch.uint8) != wanted.view(torch.uint8)).sum())
