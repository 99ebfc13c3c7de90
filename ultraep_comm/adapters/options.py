"""Options of adapters whose frameworks' experts are one module, and what is made of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

import ultraep_comm as uec
from ultraep_comm.adapters.seams import agree, check_unchanged, name_code
from ultraep_comm.errors import InvalidArgumentError, UnsupportedError
from ultraep_comm.group.layers import group_for
from ultraep_comm.nn import Replication
from ultraep_comm.nn.weights import check_trained

OF_LAYER = ("target", "cost", "min_tokens", "mode", "reduce_mode", "backward_segments")
OF_GROUP = (
    *("engine", "fabric", "timeout", "num_sms", "tile_bytes", "check"),
    *("domains", "allow_cross_domain"),
)


class Options:
    """How layers replicate whose experts' module has a parameter for each segment.

    Attributes:
        slots_per_rank: replicas that a rank can hold at a time: memory for that many experts, and
            for their gradients in fp32, once for all layers of one shape.
        live: microbatches whose passes overlap; each takes slots of its own.
    """

    def __init__(
        self, call: str, slots_per_rank: int, live: int, options: Mapping[str, Any]
    ) -> None:
        """Divide what ``call`` was given.

        Args:
            call: for the error.
            slots_per_rank: see above.
            live: likewise.
            options: of layers, as for :class:`ultraep_comm.nn.Replication`: ``target``, ``cost``,
                ``min_tokens``, ``mode``, ``reduce_mode``, ``backward_segments``. Of groups, as for
                :func:`ultraep_comm.new_group`: ``engine``, ``fabric``, ``timeout``, ``num_sms``,
                ``tile_bytes``, ``check``, ``domains``, ``allow_cross_domain``. What is not given
                has its default there.

        Raises:
            InvalidArgumentError: another option.
        """
        if unknown := options.keys() - {*OF_LAYER, *OF_GROUP}:
            raise InvalidArgumentError(
                f"{call} has no option {sorted(unknown)}; expected some of slots_per_rank, live,"
                f" {', '.join((*OF_LAYER, *OF_GROUP))}"
            )
        self.slots_per_rank, self.live = slots_per_rank, live
        self._of_group = {n: value for n, value in options.items() if n in OF_GROUP}
        self._of_layer = {n: value for n, value in options.items() if n in OF_LAYER}

    def calls_of(
        self,
        calls: Replication | None,
        process_group: dist.ProcessGroup,
        weights: Mapping[str, torch.Tensor],
        check: Callable[[], None],
        experts: torch.nn.Module,
        hooks: bool = True,
    ) -> Replication:
        """Return a layer's calls; collective at first, and when other weights are trained.

        Args:
            calls: what was returned before; None: nothing.
            process_group: the expert-parallel group.
            weights: this rank's main weights.
            check: called before anything is created.
            experts: their module, which runs the same code on every rank and in every pass.
            hooks: as for :func:`check_unchanged`.

        Raises:
            UnsupportedError: on a rank ``check`` raised it, or weights are trained that are neither
                float32 nor bfloat16; or the experts were changed.
        """
        grads = {n: torch.float32 for n, weight in weights.items() if weight.requires_grad}
        if calls is not None and isinstance(calls.group, uec.Group):  # else it was loaded
            check_unchanged(calls, experts, hooks=hooks)
            if not grads or grads.keys() == calls.group.slot_grads.keys():
                return calls
        problem = ""
        try:
            check()
            if torch.is_grad_enabled():
                check_trained(weights, process_group.rank())
        except UnsupportedError as error:
            problem = str(error)
        agree(process_group, [(problem, [sorted(grads), name_code(experts, hooks=hooks)])])
        group, layer = group_for(
            process_group,
            like=weights,
            slots_per_rank=self.slots_per_rank,
            grads=grads or None,
            banks=self.live,
            **self._of_group,
        )
        calls = Replication(group, layer=layer, live=self.live, **self._of_layer)
        check_unchanged(calls, experts, hooks=hooks)
        return calls
