"""Sizes of a sweep, with the arguments of nccl-tests."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from ultraep_comm.bench.arguments import parse_expert_bytes
from ultraep_comm.bench.sizes import parse_segments, parse_size
from ultraep_comm.errors import InvalidArgumentError

DEFAULT_FACTOR = 2
MAX_SIZES = 1000


def add_sweep_arguments(
    add: Callable[..., argparse.Action], *, expert_bytes: str, default: str
) -> None:
    """Add ``-b``, ``-e``, ``-f`` and ``-i``."""
    add(
        *("-b", "--expert-bytes", "--minbytes"),
        dest="expert_bytes",
        metavar="SIZE",
        help=f"{expert_bytes}, e.g. 64K; with -e the first of several (default {default})",
    )
    add(
        *("-e", "--maxbytes"),
        dest="max_bytes",
        metavar="SIZE",
        help="the last of several sizes, one row for each (default: only that of -b)",
    )
    add(
        *("-f", "--stepfactor"),
        dest="step_factor",
        type=int,
        metavar="N",
        help=f"from each size to the next, with -e (default {DEFAULT_FACTOR})",
    )
    add(
        *("-i", "--stepbytes"),
        dest="step_bytes",
        metavar="SIZE",
        help="added to each size for the next, with -e, in place of -f",
    )


def parse_sizes(options: argparse.Namespace, default_bytes: int) -> tuple[int, ...] | None:
    """Return the ascending sizes of ``-b``, ``-e``, ``-f`` and ``-i``; None: there is no ``-e``.

    Raises:
        InvalidArgumentError: they make no sweep, or one of more than a thousand sizes.
    """
    factor, step = options.step_factor, options.step_bytes
    if options.max_bytes is None:
        for flag, value in (("--stepfactor", factor), ("--stepbytes", step)):
            if value is not None:
                raise InvalidArgumentError(f"{flag} is {value}, but there is no --maxbytes")
        return None
    first = parse_expert_bytes(options) or default_bytes
    last = parse_size(options.max_bytes, "--maxbytes")
    if last < first:
        raise InvalidArgumentError(
            f"--maxbytes is {last}, below the first size, {first}; give --minbytes a smaller one"
        )
    if factor is not None and step is not None:
        raise InvalidArgumentError(
            f"--stepfactor is {factor} and --stepbytes is {step}; expected one of them"
        )
    if factor is not None and factor < 2:
        raise InvalidArgumentError(f"--stepfactor is {factor}; expected at least 2")
    added = 0 if step is None else parse_size(step, "--stepbytes")
    sizes = [first]
    while True:
        size = sizes[-1] + added if added else sizes[-1] * (factor or DEFAULT_FACTOR)
        if size > last:
            return tuple(sizes)
        if len(sizes) == MAX_SIZES:
            raise InvalidArgumentError(
                f"from {first} to {last} there are more than {MAX_SIZES} sizes; expected larger"
                " steps"
            )
        sizes.append(size)


def sweep_segments(options: argparse.Namespace, default_bytes: int) -> tuple[dict[str, int], ...]:
    """Return the segments of an expert of each size, at least one size.

    Raises:
        InvalidArgumentError: sizes or segments are wrong, or named segments meet several sizes.
    """
    sizes = parse_sizes(options, default_bytes)
    if sizes is None:
        given = parse_expert_bytes(options)
        return (parse_segments(options.segments, given, default_bytes),)
    if not options.segments.isdecimal():
        raise InvalidArgumentError(
            f"--segments {options.segments!r} has one size, but --maxbytes asks for several;"
            " expected a number of segments"
        )
    return tuple(parse_segments(options.segments, size, default_bytes) for size in sizes)
