"""``reduce``: arguments and settings."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any, ClassVar

from ultraep_comm.bench.command import Command
from ultraep_comm.bench.commands.replicate import (
    ReplicateSettings,
    add_transfer_arguments,
    check_transfer,
)
from ultraep_comm.bench.options import check_memory, take
from ultraep_comm.errors import InvalidArgumentError

REDUCE_MODES = ("pull", "direct", "auto")
ITEM_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, kw_only=True)
class ReduceSettings(ReplicateSettings):
    """Checked arguments of ``reduce``. ``segments`` has the bytes of gradients in a slot.

    Attributes:
        grad_dtype: name of the dtype of slot gradients.
        main_dtype: name of the dtype of main gradients.
        zero: clear slot gradients after they are added.
    """

    op: ClassVar[str] = "reduce"

    grad_dtype: str
    main_dtype: str
    zero: bool

    @property
    def grad_bytes(self) -> int:
        """Return the bytes of an element of slot gradients."""
        return ITEM_BYTES[self.grad_dtype]

    @property
    def main_bytes(self) -> int:
        """Return the bytes of an element of main gradients."""
        return ITEM_BYTES[self.main_dtype]

    @property
    def elements(self) -> dict[str, int]:
        """Return the elements of one expert, by segment."""
        return {name: size // self.grad_bytes for name, size in self.segments.items()}

    @property
    def needed_bytes(self) -> int:
        """Return the bytes of main and slot gradients on all ranks, at the largest size."""
        mains = self.num_experts * self.main_bytes
        slots = self.num_ranks * self.slots * self.grad_bytes
        return (mains + slots) * (sum(self.sizes[-1].values()) // self.grad_bytes)

    @property
    def more(self) -> dict[str, Any]:
        """Return further settings for header and JSON."""
        return self.describe("grad_dtype", "main_dtype", "zero")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``reduce``."""
    add_transfer_arguments(
        parser, modes=REDUCE_MODES, expert_bytes="bytes of one expert's gradients in a slot"
    )
    add = parser.add_argument_group("gradients").add_argument
    add("--grad-dtype", choices=ITEM_BYTES, default="float32", help="in slots (default float32)")
    add("--main-dtype", choices=ITEM_BYTES, default="float32", help="at home (default float32)")
    add(
        "--zero",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="clear slot gradients after they are added (the default)",
    )


def make_settings(options: argparse.Namespace) -> ReduceSettings:
    """Check the arguments of ``reduce`` and make or read the load.

    Raises:
        InvalidArgumentError: an argument is invalid.
        OSError: the trace cannot be read.
    """
    settings = ReduceSettings(
        **check_transfer(options, REDUCE_MODES),
        **take(options, "grad_dtype", "main_dtype", "zero"),
    )
    item = settings.grad_bytes
    for name, size in (pair for segments in settings.sizes for pair in segments.items()):
        if size % item != 0:
            raise InvalidArgumentError(
                f"segment {name!r} has {size} bytes; expected a multiple of {item}, the size of"
                f" {options.grad_dtype}"
            )
    check_memory(settings.needed_bytes, settings.engine)
    return settings


COMMAND = Command(
    name="reduce",
    help="add the gradients of a plan's replicas to the main gradients",
    description="Time reduce_expert_grads against isend/irecv and adding, and against plain"
    " adding from shared memory (the engine c10d: against torch.distributed.reduce), on one plan,"
    " with interleaved iterations. Sizes take the suffixes K, M and G. The exit status is 1 if any"
    " byte is wrong, 3 if a limit is not met, 2 after other errors.",
    add_arguments=add_arguments,
    make_settings=make_settings,
    module="ultraep_comm.bench.commands.reduce.run",
)
