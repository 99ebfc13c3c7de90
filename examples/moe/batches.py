"""Batches of text: each rank reads its own part, so that ranks see different topics."""

from __future__ import annotations

from pathlib import Path

import torch

TEXT = Path(__file__).with_name("text.txt")


class Batches:
    """Windows of one rank's part of the text, at positions that depend on seed, rank and step."""

    def __init__(
        self, *, rank: int, num_ranks: int, batch: int, context: int, seed: int, text: bytes = b""
    ) -> None:
        everything = torch.frombuffer(bytearray(text or TEXT.read_bytes()), dtype=torch.uint8)
        self._part = everything.tensor_split(num_ranks)[rank].long()
        if len(self._part) <= context:
            raise ValueError(
                f"rank {rank}: its part of the text has {len(self._part)} bytes; expected more than"
                f" context={context}; use fewer ranks or a shorter context"
            )
        self._rank, self._batch, self._context, self._seed = rank, batch, context, seed

    def draw(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return bytes ``[B, L]`` and the next bytes ``[B * L]``, int64."""
        seed = (self._seed * 1009 + self._rank) * 1_000_003 + step
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(
            len(self._part) - self._context, (self._batch, 1), generator=generator
        )
        at = starts + torch.arange(self._context)
        return self._part[at], self._part[at + 1].flatten()
