"""Parse and print sizes, and split an expert's bytes into segments."""

from __future__ import annotations

from collections.abc import Mapping

from ultraep_comm.errors import InvalidArgumentError

_SUFFIXES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_MAX_BYTES = 1 << 48  # more than any machine addresses; sums of such sizes fit in 64 bits
_MAX_COUNT = 1 << 20
_MAX_SEGMENTS = 256
_ALIGN = 256  # so that stacked experts keep their alignment


def parse_count(text: str) -> int:
    """Return a decimal number; -1 if it is invalid or has more than 15 digits.

    (Python raises ValueError for an integer of thousands of digits.)
    """
    digits = text.lstrip("0") or text[:1]
    return int(digits) if digits.isdecimal() and len(digits) < 16 else -1


def parse_size(text: str, name: str = "") -> int:
    """Return the bytes of ``"4096"``, ``"64K"``, ``"16M"`` or ``"1G"``; factors are 1024.

    Raises:
        InvalidArgumentError: not a positive size, or too large; the message begins with ``name``.
    """
    flag = f"{name}: " if name else ""
    digits = text.strip().upper().removesuffix("B").removesuffix("I")
    suffix = digits[-1:] if digits[-1:].isalpha() else ""
    number = digits.removesuffix(suffix)
    if suffix not in _SUFFIXES or not number.isdecimal() or not number.strip("0"):
        raise InvalidArgumentError(
            f"{flag}{text!r} is not a size; expected for instance 4096, 64K or 16M"
        )
    size = parse_count(number) * _SUFFIXES[suffix]
    if not 0 <= size <= _MAX_BYTES:
        raise InvalidArgumentError(f"{flag}{text!r} is too large; expected at most 262144G")
    return size


def parse_counts(text: str, name: str) -> tuple[int, ...]:
    """Return the numbers of ``"8"`` or ``"4,8,16"``, ascending.

    Raises:
        InvalidArgumentError: not numbers from 1 to 2**20, each once.
    """
    counts = [parse_count(part.strip()) for part in text.split(",")]
    if not all(0 < count <= _MAX_COUNT for count in counts) or len(set(counts)) < len(counts):
        raise InvalidArgumentError(f"{name} is {text!r}; expected numbers, for instance 4,8,16")
    return tuple(sorted(counts))


def format_size(num_bytes: int) -> str:
    """Return a size in its largest unit, with at most two decimals."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.2f}".rstrip("0").rstrip(".") + f" {unit}"
    return f"{num_bytes} B"


def split_expert(expert_bytes: int, num_segments: int) -> dict[str, int]:
    """Split an expert into segments as models do; return ``{name: bytes}``.

    1: one tensor ``w``. 2: ``w13`` with two thirds, and ``w2``. More: also small tensors
    ``scale0``, ... of a 64th each, taken from the other two.

    Raises:
        InvalidArgumentError: the expert is too small, or there are more than 256 segments.
    """
    if not 1 <= num_segments <= min(expert_bytes, _MAX_SEGMENTS):
        raise InvalidArgumentError(
            f"{expert_bytes} bytes cannot be split into {num_segments} segments; expected 1 to"
            f" {_MAX_SEGMENTS} segments of at least a byte"
        )
    if num_segments == 1:
        return {"w": expert_bytes}
    small = max(1, min(expert_bytes // 64, expert_bytes // (2 * num_segments)))
    scales = {f"scale{i}": small for i in range(num_segments - 2)}
    rest = expert_bytes - sum(scales.values())
    w2 = max(1, rest // 3)
    if w2 >= _ALIGN:
        w2 -= w2 % _ALIGN
    return {"w13": rest - w2, "w2": w2, **scales}


def parse_segments(text: str, expert_bytes: int | None, default_bytes: int) -> dict[str, int]:
    """Return the segments of ``--segments``: a number, or ``name=size,name=size``.

    Raises:
        InvalidArgumentError: malformed, or the sizes do not sum to a given ``expert_bytes``.
    """
    if text.isdecimal():
        whole = default_bytes if expert_bytes is None else expert_bytes
        return split_expert(whole, parse_count(text))
    segments: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = part.partition("=")
        if not equals or not name or name in segments:
            raise InvalidArgumentError(
                f"--segments {text!r}: {part!r} is not name=size with a new name; expected a number"
                " of segments, or for instance w13=10M,w2=5M"
            )
        segments[name] = parse_size(size, f"--segments {name}")
    total = sum(segments.values())
    if expert_bytes is not None and total != expert_bytes:
        raise InvalidArgumentError(
            f"--segments {text!r} has {total} bytes, but --expert-bytes is {expert_bytes}; give one"
        )
    return segments


def describe_segments(segments: Mapping[str, int]) -> str:
    """Return the total and the parts as text."""
    parts = ", ".join(f"{name} {format_size(size)}" for name, size in segments.items())
    return f"{format_size(sum(segments.values()))} ({parts})"
