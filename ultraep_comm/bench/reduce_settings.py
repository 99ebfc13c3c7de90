"""Arguments of ``reduce``, and the settings that they make."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from ultraep_comm.bench.arguments import check_memory
from ultraep_comm.bench.replicate_settings import add_transfer_arguments, check_transfer
from ultraep_comm.bench.settings import ReplicateSettings
from ultraep_comm.errors import InvalidArgumentError
from ultraep_comm.plan import Plan
from ultraep_comm.reduction import REDUCE_MODES

ALL_REDUCE_MODES = (*REDUCE_MODES, "auto")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class ReduceSettings(ReplicateSettings):
    """Checked arguments of ``reduce``. Segments have the bytes of gradients in a slot.

    Attributes:
        grad_dtype: of gradients in slots.
        main_dtype: of main gradients.
        zero: clear the slots that were added.
    """

    op: ClassVar[str] = "reduce"

    grad_dtype: torch.dtype
    main_dtype: torch.dtype
    zero: bool

    @property
    def elements(self) -> dict[str, int]:
        """Return the elements of one expert, by segment."""
        return {name: size // self.grad_dtype.itemsize for name, size in self.segments.items()}

    @property
    def expert(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return ``new_group``'s argument. Weights are not moved, and as small as can be."""
        return {name: ((count,), torch.uint8) for name, count in self.elements.items()}

    @property
    def needed_bytes(self) -> int:
        """Return the bytes of all ranks' main and slot gradients at the largest size."""
        mains = self.num_experts * self.main_dtype.itemsize
        slots = self.num_ranks * self.slots * self.grad_dtype.itemsize
        return (mains + slots) * (sum(self.sizes[-1].values()) // self.grad_dtype.itemsize)

    @property
    def more(self) -> dict[str, Any]:
        """Return what a header and JSON say of this command alone."""
        names = {dtype: name for name, dtype in _DTYPES.items()}
        return {
            "grad_dtype": names[self.grad_dtype],
            "main_dtype": names[self.main_dtype],
            "zero": self.zero,
        }

    def busiest_rank(self, plan: Plan, mode: str) -> float:
        """Return what the rank that loads most from others loads in a mode, in experts.

        In pull each of n replicas loads its share of the n - 1 others, and the home the sums; in
        direct, and of one replica, the home loads all.
        """
        loads = np.zeros(self.num_ranks)
        slots = plan.slot_expert.numpy()
        for expert in np.unique(slots[slots >= 0]):
            ranks = (slots == expert).any(axis=1).nonzero()[0]
            shared = mode == "pull" and len(ranks) > 1
            loads[int(plan.home[expert])] += 1 if shared else len(ranks)
            loads[ranks] += (len(ranks) - 1) / len(ranks) if shared else 0
        return float(loads.max())


def add_reduce_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``reduce`` and its arguments."""
    parser = commands.add_parser(
        "reduce",
        help="add the gradients of a plan's replicas to the main gradients",
        description="Time reduce_expert_grads against isend/irecv and adding, and against plain"
        " adding out of shared memory, on one plan, with interleaved iterations. Sizes take the"
        " suffixes K, M and G. The exit status is 1 if any byte is wrong, 3 if a limit is not met,"
        " 2 after other errors.",
    )
    add_transfer_arguments(
        parser, modes=ALL_REDUCE_MODES, expert_bytes="bytes of one expert's gradients in a slot"
    )
    add = parser.add_argument_group("gradients").add_argument
    add("--grad-dtype", choices=_DTYPES, default="float32", help="in slots (default float32)")
    add("--main-dtype", choices=_DTYPES, default="float32", help="at home (default float32)")
    add(
        "--zero",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="clear the slots that were added (the default)",
    )


def make_reduce_settings(options: argparse.Namespace) -> ReduceSettings:
    """Check the arguments of ``reduce`` and make or read the load.

    Raises:
        InvalidArgumentError: as its text says.
        OSError: the trace cannot be read.
    """
    settings = ReduceSettings(
        **check_transfer(options, ALL_REDUCE_MODES),
        grad_dtype=_DTYPES[options.grad_dtype],
        main_dtype=_DTYPES[options.main_dtype],
        zero=options.zero,
    )
    item = settings.grad_dtype.itemsize
    for name, size in (pair for segments in settings.sizes for pair in segments.items()):
        if size % item != 0:
            raise InvalidArgumentError(
                f"segment {name!r} has {size} bytes; expected a multiple of {item}, the bytes of"
                f" {options.grad_dtype}"
            )
    check_memory(settings.needed_bytes, settings.engine)
    return settings
