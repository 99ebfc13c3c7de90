"""vLLM: the replicas of a layer, for each batch."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

import ultraep_comm as uec
from ultraep_comm.adapters.balancer import Balancer
from ultraep_comm.adapters.options import OF_GROUP, OF_LAYER
from ultraep_comm.adapters.vllm.checks import count_mains, find_router, read_options
from ultraep_comm.errors import InvalidWeightsError, UnsupportedError

Tensor = torch.Tensor

_LOGGER = logging.getLogger("ultraep_comm")


class Replicas:
    """A layer's replicas: where its router and its experts' kernel meet this library.

    Attributes:
        balancer: see there.
        are_copied: slots are copied behind the main rows for each batch; else they are there.
    """

    def __init__(
        self, layer: Any, coordinator: Any, names: Sequence[str], *, are_copied: bool
    ) -> None:
        """Join or create a group, and put the weights before its slots. Collective."""
        weights = {name: getattr(layer, name) for name in names}
        config, options = layer.moe_config, read_options(layer)
        mains = count_mains(layer)
        device = weights[names[0]].device
        on_cpu = device.type == "cpu"
        group, number = uec.group_for(
            coordinator.cpu_group if on_cpu else coordinator.device_group,
            like={name: weight.data[:mains] for name, weight in weights.items()},
            slots_per_rank=config.num_local_experts - mains,
            num_experts=config.num_logical_experts,
            instances=not are_copied,
            device=device,
            **{name: value for name, value in options.items() if name in OF_GROUP},
        )
        whole = {}
        if not are_copied:
            try:
                whole = group.empty_instances()
            except UnsupportedError as error:
                _LOGGER.info("vLLM: slots are copied for each batch: %s", error)
        for name, rows in whole.items():
            rows[:mains].copy_(weights[name].data[:mains])
            weights[name].data = rows
        self.are_copied = not whole
        self._tails = [
            (weight.data[mains:], group.slots[name])
            for name, weight in weights.items()
            if self.are_copied
        ]
        self._layer, self._mains = layer, mains
        self._places = {name: weight.data_ptr() for name, weight in weights.items()}
        self._is_under_way = False
        self.balancer = Balancer(
            group,
            group.bind({name: weight.data[:mains] for name, weight in weights.items()}),
            layer=number,
            **{name: value for name, value in options.items() if name in OF_LAYER},
        )
        self._router = find_router(layer)
        self._router._apply_eplb_mapping = self.begin  # noqa: SLF001 - the seam

    @property
    def has_all(self) -> bool:
        """Whether every rank has the tokens of all when it routes."""
        parallel = self._layer.moe_config.moe_parallel_config
        return not parallel.use_all2all_kernels or self._layer.quant_method.moe_kernel is None

    def begin(self, topk_ids: Tensor) -> Tensor:
        """Plan a batch, start to fill the slots, and return rows. Collective.

        Args:
            topk_ids: int ``[T, k]``, experts; those of padding stay with their own rows.

        Raises:
            InvalidWeightsError: weights have moved since set-up.
        """
        group = self.balancer.group
        for name, place in self._places.items():
            if getattr(self._layer, name).data_ptr() != place:
                error = InvalidWeightsError(
                    f"rank {group.rank}: {name} of {self._layer.layer_name} has moved since it was"
                    " loaded; expected new weights in the same memory"
                )
                group.session.reject(error)
                raise error
        number = self._count_tokens(len(topk_ids))
        source = 0 if self.has_all else None
        self._is_under_way = True
        rows = self.balancer.begin(topk_ids, num_tokens=number, source=source)
        if number is None:
            return rows
        own = topk_ids + topk_ids // self._mains * group.topology.slots_per_rank
        return torch.where((rows < 0) & (topk_ids >= 0), own, rows)

    def _count_tokens(self, rows: int) -> Tensor | None:
        """Return how many of a batch's rows are tokens, where vLLM says it."""
        parallel = self._layer.moe_config.moe_parallel_config
        told = self._router.eplb_state.num_unpadded_tokens_tensors
        if not told or (self.has_all and parallel.use_all2all_kernels):
            return None  # gathered rows have padding in between
        before = parallel.ep_rank % parallel.sp_size * rows  # of sequence-parallel ranks
        number: Tensor = (told[0] - before).clamp(0, rows)
        return number

    def wait(self) -> None:
        """Order what follows after the replicas' arrival, once for each batch."""
        if self._is_under_way:
            self._is_under_way = False
            self.balancer.wait()
            for tail, slots in self._tails:
                tail.copy_(slots)

    def wait_in(self, experts: Any) -> None:
        """Let a kernel wait, behind the dispatch of its tokens."""
        run = experts.apply
        if getattr(run, "replicas", None) is self:
            return

        def apply(*args: Any, **more: Any) -> Any:
            self.wait()
            return run(*args, **more)

        apply.replicas = self  # type: ignore[attr-defined]
        experts.apply = apply
