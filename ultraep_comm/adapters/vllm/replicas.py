"""vLLM: the replicas of a layer, for each batch."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch

from ultraep_comm.adapters.balancer import Balancer
from ultraep_comm.adapters.checks import agree, find
from ultraep_comm.adapters.options import OF_GROUP, OF_LAYER
from ultraep_comm.adapters.vllm import LOGGER
from ultraep_comm.adapters.vllm.checks import (
    count_local_experts,
    describe,
    find_router,
    read_options,
)
from ultraep_comm.errors import InvalidWeightsError, UnsupportedError
from ultraep_comm.group.group import rejecting
from ultraep_comm.group.layers import group_for
from ultraep_comm.system import undocumented

Tensor = torch.Tensor

CONTEXT = "vllm.forward_context:get_forward_context"
HAS_CONTEXT = "vllm.forward_context:is_forward_context_available"


class Replicas:
    """A layer's replicas: where its router and its experts' kernel meet this library.

    Attributes:
        balancer: see there.
        are_copied: slots are copied behind the main rows for each batch; else they are there.
        is_checked: nothing was loaded since ranks compared what holds for all experts.
    """

    def __init__(self, layer: Any, coordinator: Any, number: int, facts: Mapping[str, Any]) -> None:
        """Join or create a group, and put the weights before its slots. Collective.

        ``coordinator``: of the expert-parallel ranks; ``number``: of the layer in its model;
        ``facts``: what ``describe`` has returned of it.
        """
        are_copied = facts["are_copied"]
        weights = {name: getattr(layer, name) for name in facts["segments"]}
        config, options = layer.moe_config, read_options(layer)
        count = count_local_experts(layer)
        device = next(iter(weights.values())).device
        on_cpu = device.type == "cpu"
        group, index = group_for(
            coordinator.cpu_group if on_cpu else coordinator.device_group,
            like={name: weight.data[:count] for name, weight in weights.items()},
            slots_per_rank=config.num_local_experts - count,
            num_experts=config.num_logical_experts,
            instances=not are_copied,
            device=device,
            **{name: value for name, value in options.items() if name in OF_GROUP},
        )
        whole = {}
        if not are_copied:
            try:
                whole = group.banks[0].empty_instances()
            except UnsupportedError as error:
                LOGGER.info("vLLM: slots are copied for each batch: %s", error)
        for name, rows in whole.items():
            rows[:count].copy_(weights[name].data[:count])
            weights[name].data = rows
        self.are_copied = not whole
        self._tails = [
            (weight.data[count:], group.slots[name])
            for name, weight in weights.items()
            if self.are_copied
        ]
        self._layer, self._num_local_experts = layer, count
        self._places = {name: weight.data_ptr() for name, weight in weights.items()}
        self.balancer = Balancer(
            group,
            group.bind({name: weight.data[:count] for name, weight in weights.items()}),
            layer=index,
            **{name: value for name, value in options.items() if name in OF_LAYER},
        )
        self._cpu_group, self._number = coordinator.cpu_group, number
        self._constants = [p for n, p in layer.named_parameters() if n not in weights]
        self._known, self.is_checked = self._find_known(), True
        self._contexts = find(HAS_CONTEXT), find(CONTEXT)
        self._router = find_router(layer)
        self._router._apply_eplb_mapping = self.begin  # noqa: SLF001 - its patch point

    @property
    def has_all(self) -> bool:
        """Whether every rank has the tokens of all when it routes."""
        parallel = self._layer.moe_config.moe_parallel_config
        return not parallel.use_all2all_kernels or self._layer.quant_method.moe_kernel is None

    def _find_known(self) -> tuple[list[Any], list[int]]:
        """Return what another load of weights makes anew, and the versions of constants."""
        method = self._layer.quant_method
        kernel = method.moe_kernel
        parts = [getattr(kernel, name, None) for name in ("prepare_finalize", "fused_experts")]
        return [*parts, kernel, method, method.moe_quant_config], [
            0 if constant.is_inference() else undocumented(constant, "_version")
            for constant in self._constants
        ]

    def _check_again(self) -> None:
        """Compare what holds for the experts of all ranks, if it may be another. Collective."""
        (parts, versions), (before, then) = known, _ = self._find_known(), self._known
        if self.is_checked and versions == then and all(map(operator.is_, parts, before)):
            return
        # Unless it is new, what a dispatcher holds may be of a batch; of a kernel, what it counts.
        is_new = all(part is not old for part, old in zip(parts[:3], before, strict=False))

        def describe_again(layer: Any) -> dict[str, Any]:
            facts = describe(layer, [p for p in parts[:1] if p is before[0]])
            return {
                path: fact
                for path, fact in facts.items()
                if path != "are_copied" and (is_new or not isinstance(fact, int))
            }

        with rejecting(self.balancer.group):  # a rank may be in the next call, if it loaded nothing
            agree(self._cpu_group, describe_again, [self._layer], first=self._number)
        self._known, self.is_checked = known, True

    def begin(self, topk_ids: Tensor) -> Tensor:
        """Plan a batch, start to fill the slots, and return rows. Collective.

        Args:
            topk_ids: int ``[T, k]``, experts; those of padding stay with their own rows.

        Raises:
            InvalidWeightsError: weights have moved since set-up.
            UnsupportedError: experts were loaded again, and ranks now differ in what holds for
                all, or a layer has what would stay behind.
            BootstrapError: a rank did not join to compare that.
        """
        group = self.balancer.group
        for name, place in self._places.items():
            if getattr(self._layer, name).data_ptr() != place:
                error = InvalidWeightsError(
                    f"rank {group.rank}: {name} of {self._layer.layer_name} has moved since it was"
                    " loaded; expected new weights in the same memory"
                )
                with rejecting(group):
                    raise error
        self._check_again()
        number = self._count_tokens(len(topk_ids))
        source = 0 if self.has_all else None
        rows = self.balancer.begin(topk_ids, num_tokens=number, source=source)
        if number is None:
            return rows
        own = topk_ids + topk_ids // self._num_local_experts * group.topology.slots_per_rank
        return torch.where((rows < 0) & (topk_ids >= 0), own, rows)

    def _count_tokens(self, rows: int) -> Tensor | None:
        """Return how many of a batch's rows are tokens, where vLLM says it."""
        parallel = self._layer.moe_config.moe_parallel_config
        if self.has_all and parallel.use_all2all_kernels:
            return None  # gathered rows have padding in between
        has_context, get_context = self._contexts
        padding = get_context().is_padding if has_context() else None
        counts = self._router.eplb_state.num_unpadded_tokens_tensors
        if padding is not None:  # also of a dummy run, before which vLLM tells no number
            counts = [(~padding).sum()]
        if not counts:
            return None
        before = parallel.ep_rank % parallel.sp_size * rows  # of sequence-parallel ranks
        number: Tensor = (counts[0] - before).clamp(0, rows)
        return number

    def wait(self) -> None:
        """Order what follows after the replicas' arrival, once for each batch."""
        if self.balancer.is_under_way:
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
