"""Plans that exceed the buffer of `Group.instance_offsets`, counted on the device."""

from __future__ import annotations

import torch

from ultraep_comm.engines.base import too_many_rows
from ultraep_comm.engines.cuda.device import Device


class Overruns:
    """One word: how many plans so far, times 2**40, plus the tokens of the last.

    The device counts, and copies the word to where the host looks.
    """

    def __init__(self, device: Device, rank: int) -> None:
        self._rank = rank
        self._word = device.allocate(8).view(torch.int64)
        self._copy = device.pinned(8).view(torch.int64)
        self._seen = self._copy.numpy()
        self._raised = 0
        self.has_counted = False

    def count(self, tokens: torch.Tensor, pad_to: int) -> None:
        """Count a plan with ``tokens`` ``[1]`` if they are too many, in the stream's order."""
        self.has_counted = True
        counted = ((self._word >> 40) + 1 << 40) + tokens
        self._word.copy_(torch.where(tokens > pad_to, counted, self._word))
        self._copy.copy_(self._word, non_blocking=True)

    def raise_new(self) -> None:
        """Raise InvalidPlanError, once, if plans were counted since the last call of this."""
        word = self._seen.item(0)
        if word != self._raised:
            self._raised = word
            limit = ", more than the pad_to of an earlier instance_offsets: its ends stop there"
            raise too_many_rows(self._rank, word & (1 << 40) - 1, limit)
