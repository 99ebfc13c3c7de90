"""Reproducible contents for checks: bytes and gradients that differ by instance and epoch.

A word of 8 bytes is ``T(seed, segment, offset) xor K(seed, epoch, expert, segment)``, both terms by
SplitMix64. T is computed once per process, so that filling and checking take one pass over memory.
K is a bijection of the epoch, so every word differs between any two epochs.

A gradient has the sign and the mantissa of its hash, and an exponent that puts it between 1/2 and
2. So fp32 sums are rounded, and their bits depend on the order of addition.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from ultraep_comm.plan.plan import Plan

Bytes = NDArray[np.uint8]
Word: TypeAlias = np.unsignedinteger[Any]

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_CHUNK = 1 << 15  # words; fits in a cache
SENTINEL = 0xA5


def mix(value: int) -> int:
    """Return SplitMix64's output function of a 64-bit integer: a bijection."""
    value = (value ^ (value >> 30)) * _FACTORS[0] & _MASK
    value = (value ^ (value >> 27)) * _FACTORS[1] & _MASK
    return value ^ (value >> 31)


def chain(*values: int) -> int:
    """Return a hash of a sequence of integers; a bijection of the last one."""
    state = 0
    for value in values:
        state = mix((state + _GOLDEN + value) & _MASK)
    return state


def _table(seed: int, segment: int, num_words: int) -> NDArray[np.uint64]:
    words = np.arange(num_words, dtype=np.uint64)
    start = np.uint64(chain(seed, segment))
    for i in range(0, num_words, _CHUNK):  # `mix`, in place
        part = words[i : i + _CHUNK]
        part *= np.uint64(_GOLDEN)
        part += start
        for shift, factor in zip((30, 27), _FACTORS, strict=True):
            part ^= part >> np.uint64(shift)
            part *= np.uint64(factor)
        part ^= part >> np.uint64(31)
    return words


class Payload:
    """The expected bytes of every expert in every epoch."""

    def __init__(self, seed: int, segment_bytes: Mapping[str, int]) -> None:
        """Compute the tables; ``segment_bytes`` is ``{name: bytes of one expert}``."""
        self._seed = seed
        self._index = {name: i for i, name in enumerate(segment_bytes)}
        self._bytes = dict(segment_bytes)
        self._tables = {
            name: _table(seed, i, -(-segment_bytes[name] // 8)) for name, i in self._index.items()
        }
        self._scratch = np.empty(_CHUNK, np.uint64)

    def _key(self, epoch: int, expert: int, segment: str) -> Word:
        key: Word = np.uint64(chain(self._seed, self._index[segment], expert, epoch))
        return key

    def _tail(self, segment: str, key: Word, num_bytes: int) -> Bytes:
        last: Bytes = (self._tables[segment][-1:] ^ key).view(np.uint8)[:num_bytes]
        return last

    def fill(self, out: Bytes, *, epoch: int, expert: int, segment: str) -> None:
        """Write one segment of one expert to ``out``, contiguous uint8."""
        key, whole = self._key(epoch, expert, segment), self._whole(out, segment)
        np.bitwise_xor(self._tables[segment][: whole // 8], key, out=out[:whole].view(np.uint64))
        if whole < out.size:
            out[whole:] = self._tail(segment, key, out.size - whole)

    def count_wrong(self, data: Bytes, *, epoch: int, expert: int, segment: str) -> int:
        """Return how many bytes of ``data`` differ from those that :meth:`fill` writes."""
        key, whole = self._key(epoch, expert, segment), self._whole(data, segment)
        words, table = data[:whole].view(np.uint64), self._tables[segment]
        wrong = 0
        for i in range(0, words.size, _CHUNK):
            part = words[i : i + _CHUNK]
            difference = self._scratch[: part.size]
            np.bitwise_xor(table[i : i + part.size], key, out=difference)
            np.bitwise_xor(difference, part, out=difference)
            if difference.any():
                wrong += np.count_nonzero(difference.view(np.uint8))
        if whole < data.size:
            tail = self._tail(segment, key, data.size - whole)
            wrong += np.count_nonzero(data[whole:] != tail)
        return wrong

    def _whole(self, data: Bytes, segment: str) -> int:
        if data.dtype != np.uint8 or data.shape != (self._bytes[segment],):
            raise ValueError(
                f"segment {segment!r} is {data.dtype} {data.shape}; expected uint8"
                f" {(self._bytes[segment],)}"
            )
        return data.size & ~7


def count_disturbed(data: Bytes) -> int:
    """Return how many bytes differ from SENTINEL, which fills empty slots."""
    return int(np.count_nonzero(data != SENTINEL))


# ---- gradients ----------------------------------------------------------------------------------

_KEPT = {torch.float32: 0x80FFFFFF, torch.bfloat16: 0x80FF}  # sign, last bit of exponent, mantissa
_SET = {torch.float32: 0x3F000000, torch.bfloat16: 0x3F00}
_WORDS = {torch.float32: np.uint32, torch.bfloat16: np.uint16}
MAIN = -1  # in place of a rank: the main instance


class GradPayload:
    """The gradients of every instance in every epoch."""

    def __init__(
        self,
        seed: int,
        elements: Mapping[str, int],
        num_experts: int,
        *,
        grad_dtype: torch.dtype,
        main_dtype: torch.dtype,
    ) -> None:
        """Compute the tables; ``elements`` is ``{name: elements of one expert}``."""
        self._num_experts, self._elements = num_experts, dict(elements)
        self._dtypes = {True: main_dtype, False: grad_dtype}
        self._payloads = {
            dtype: Payload(seed, {name: n * dtype.itemsize for name, n in elements.items()})
            for dtype in {grad_dtype, main_dtype}
        }

    def fill(self, out: torch.Tensor, *, epoch: int, expert: int, rank: int, segment: str) -> None:
        """Write one segment's gradients to ``out``, of the replica on ``rank`` or of MAIN."""
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
        """Return ``main + (r1 + ... + rn)``, added in fp32 and rounded once.

        Args:
            epoch, expert, segment: of the gradients.
            ranks: of the replicas, ascending.
        """
        total = torch.zeros(0)
        for i, rank in enumerate(ranks):
            more = self.values(epoch=epoch, expert=expert, rank=rank, segment=segment).float()
            total = more if i == 0 else total.add_(more)
        main = self.values(epoch=epoch, expert=expert, rank=MAIN, segment=segment)
        return (main.float() + total).to(main.dtype)


def count_different(data: torch.Tensor, wanted: torch.Tensor) -> int:
    """Return how many bytes differ between two tensors of the same dtype."""
    return int((data.view(torch.uint8) != wanted.view(torch.uint8)).sum())


# ---- integers -----------------------------------------------------------------------------------


def count_unequal(found: torch.Tensor, expected: torch.Tensor) -> int:
    """Return how many values differ from those of a tensor on the CPU."""
    return int((found.cpu() != expected).sum())


def count_wrong_plan(found: Plan, expected: Plan) -> int:
    """Return how many entries of a plan differ from those of a plan on the CPU."""
    return sum(
        count_unequal(getattr(found, name), getattr(expected, name))
        for name in ("slot_expert", "slot_quota", "home_quota")
    )
