"""Replicas for each batch in SGLang's MoE layers, in their redundant rows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ultraep_comm.adapters import checks
from ultraep_comm.adapters.balancer import Balancer
from ultraep_comm.adapters.holders import Held
from ultraep_comm.errors import UnsupportedError
from ultraep_comm.group.layers import group_for

_LOGGER = logging.getLogger("ultraep_comm")


class Batches:
    """Gives SGLang's MoE layers replicas for each batch, in their redundant rows.

    Each layer's ``ultraep`` is its :class:`Balancer` then: ``plan`` is of the last batch.
    """

    def __init__(self, sglang: Mapping[str, Any]) -> None:
        """Keep what is called of SGLang, by name."""
        self._sglang = sglang
        self._layers: dict[int, Any] = {}
        self._routing: tuple[int, Any] | None = None  # layer, and how many tokens are no padding

    def lay_out(self, original: Callable[..., Any], model_config: Any, moe_ep_rank: int) -> Any:
        """Return locations by which a rank's rows are its experts, then slots."""
        found = original(model_config, moe_ep_rank)
        is_trivial = self._sglang["get_exec"]().moe.init_expert_location == "trivial"
        if found is None or not is_trivial or found.num_logical_experts % found.ep_size:
            return found
        experts, count = found.num_logical_experts, found.num_logical_experts // found.ep_size
        row = [
            (rank * count + i) % experts  # a slot starts with an expert of the next rank
            for rank in range(found.ep_size)
            for i in range(found.num_local_physical_experts)
        ]
        return type(found).init_by_mapping(model_config, [row] * found.num_layers, moe_ep_rank)

    def set_up(self, original: Callable[..., Any], model: Any, model_config: Any) -> None:
        """Create or join groups for the layers of a model that has been loaded. Collective.

        Raises:
            UnsupportedError: a setting, or a layer of any rank, does not go with replicas.
        """
        original(model=model, model_config=model_config)
        kind = self._sglang["FusedMoE"]
        layers = [m for m in model.modules() if isinstance(m, kind) and m.uses_expert_location]
        ranks = self._sglang["get_moe_ep_group"]()
        if not layers or checks.is_alone(ranks.cpu_group, "SGLang", "--ep-size above 1"):
            return
        checks.agree(ranks.cpu_group, self._describe, layers)
        for layer in layers:
            own = {name: p.data for name, p in layer.named_parameters(recurse=False)}
            experts = self._sglang["get_global_expert_location_metadata"]().num_logical_experts
            count = experts // ranks.cpu_group.size()
            on_cpu = next(iter(own.values())).is_cpu
            group = group_for(
                ranks.cpu_group if on_cpu else ranks.device_group,
                like={name: weight[:count] for name, weight in own.items()},
                slots_per_rank=layer.num_local_experts - count,
                num_experts=experts,
            ).group
            layer.ultraep = Balancer(group, {}, layer=layer.layer_id)
            self._layers[layer.layer_id] = layer
        _LOGGER.info("SGLang: %d MoE layers have replicas for each batch", len(layers))

    def note(
        self,
        original: Callable[..., Any],
        *,
        layer_id: int,
        num_token_non_padded: torch.Tensor | None = None,
        **given: Any,
    ) -> Any:
        """Note whose ids :meth:`map_ids` is about to get, which SGLang does not tell it."""
        self._routing = layer_id, num_token_non_padded
        given.update(layer_id=layer_id, num_token_non_padded=num_token_non_padded)
        try:
            return original(**given)
        finally:
            self._routing = None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def map_ids(
        self, original: Callable[..., Any], topk_ids: Any, info: Any, log2phy_prob: Any = None
    ) -> Any:
        """Plan a batch's replicas, start their transfer, and return physical ids. Collective."""
        if info is None or not self._layers:
            return original(topk_ids, info, log2phy_prob)
        if self._routing is None:
            raise UnsupportedError(
                "ULTRAEP_SGLANG=batch: a router other than SGLang's TopK maps experts, and does not"
                " say of which layer they are; unset ULTRAEP_SGLANG"
            )
        number, num_tokens = self._routing
        layer = self._layers[number]
        balancer: Balancer = layer.ultraep
        # Since weights were loaded again the layer's parameters may be others.
        count, names = balancer.group.num_local_experts, balancer.group.segments
        balancer.weights = {name: getattr(layer, name).data[:count] for name in names}
        return balancer.begin(topk_ids, num_tokens=num_tokens, source=0)

    def run(self, original: Callable[..., Any], layer: Any, dispatch_output: Any) -> Any:
        """Have the replicas behind the layer's own experts, in its tensors, before their kernel."""
        balancer: Balancer | None = getattr(layer, "ultraep", None)
        if balancer is not None and balancer.is_under_way:
            balancer.wait()
            for name, slots in balancer.group.slots.items():
                getattr(layer, name).data[balancer.group.num_local_experts :].copy_(slots)
        elif balancer is not None and len(dispatch_output.hidden_states):  # else no router has run
            raise UnsupportedError(
                f"ULTRAEP_SGLANG=batch: layer {layer.layer_id} routes inside of its kernel; choose"
                " another --moe-runner-backend, such as triton"
            )
        return original(layer, dispatch_output)

    def _describe(self, layer: Any) -> dict[str, Any]:
        """Describe a layer for :func:`checks.agree`."""
        config = self._sglang["get_exec"]()
        locations = self._sglang["get_global_expert_location_metadata"]()
        graphs = config.graph.cuda_graph_config
        num_ranks = self._sglang["get_moe_ep_group"]().cpu_group.size()
        checks.refuse((locations is None, "SGLang knows no expert locations of this model"))
        logical = torch.arange(locations.num_logical_experts, device="cpu")
        count = len(logical) // num_ranks
        found = locations.physical_to_logical_map_cpu[layer.layer_id].view(num_ranks, -1).cpu()
        checks.refuse(
            (
                self._sglang["is_moe_input_scattered_across_dp_ranks"](),
                "its ranks route different tokens; set --moe-a2a-backend none",
            ),
            (config.moe.enable_eplb, "EPLB would move experts; unset --enable-eplb"),
            (
                config.moe.ep_dispatch_algorithm != "dynamic",
                f"--ep-dispatch-algorithm {config.moe.ep_dispatch_algorithm}; set it to dynamic",
            ),
            (
                config.overlap.enable_two_batch_overlap,
                "two batches would share its slots; unset --enable-two-batch-overlap",
            ),
            (
                {graphs.decode.backend, graphs.prefill.backend} != {"disabled"},
                "never run in CUDA graphs; set --disable-decode-cuda-graph and"
                " --disable-prefill-cuda-graph",
            ),
            (
                layer.num_fused_shared_experts,
                "shared experts follow its own; set --disable-shared-experts-fusion",
            ),
            (
                len(logical) % num_ranks,
                f"it has {len(logical)} experts on {num_ranks} ranks; expected"
                f" {checks.even_ranks(len(logical))} (--ep-size). Or set ULTRAEP_SGLANG=eplb",
            ),
            (
                found.shape[1] <= count or not torch.equal(found[:, :count].flatten(), logical),
                f"a rank's rows are not its share of {len(logical)} experts, then slots; set"
                f" --ep-num-redundant-experts to a multiple of {num_ranks}, and leave"
                " --init-expert-location as it is",
            ),
        )
        checks.check_experts(layer, layer.num_local_experts, "unset ULTRAEP_SGLANG")
        weights = dict(layer.named_parameters())
        remedy = "set another --moe-runner-backend, or ULTRAEP_SGLANG=eplb"
        held = Held(layer, weights.values(), layer.num_local_experts, remedy)
        return {n: (tuple(w.shape), str(w.dtype)) for n, w in weights.items()} | held.facts
