"""vLLM: replicas of hot experts for each batch, in the rows of its redundant experts.

A rank's rows are its own experts, then slots. Behind a layer's router the routing is planned and
mapped to rows, the slots are filled meanwhile, and the experts' kernel waits for them. Parameters
keep their names and shapes, and own experts their rows; vLLM's EPLB moves nothing any more.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import torch

import ultraep_comm as uec
from ultraep_comm.adapters import checks
from ultraep_comm.adapters.vllm import EPLB, LOGGER, replace_factory
from ultraep_comm.adapters.vllm.checks import ROUTER, describe
from ultraep_comm.adapters.vllm.replicas import CONTEXT, HAS_CONTEXT, Replicas
from ultraep_comm.errors import UnsupportedError

_MOE = "vllm.model_executor.layers.fused_moe"
_EXPERTS = f"{_MOE}.routed_experts:RoutedExperts"
_STATE = f"{EPLB}.eplb_state:EplbState"
_PLUGGABLE = "vllm.model_executor.custom_op:PluggableLayer"
_CONFIG = "vllm.config:get_current_vllm_config"
_RANKS = "vllm.distributed.parallel_state:get_ep_group"
# What is called, replaced or overridden, and the parameters that it was written for.
PATCH_POINTS = {
    f"{_STATE}.build_initial_global_physical_to_logical_map": (
        "num_routed_experts num_redundant_experts"
    ),
    f"{_STATE}.rearrange": "self is_profile rank_mapping",
    f"{_EXPERTS}.__init__": "self layer_name params_dtype moe_config",
    f"{_EXPERTS}.get_expert_weights": "self",
    f"{_EXPERTS}.forward_modular": "self x topk_weights topk_ids",
    f"{_EXPERTS}.weight_loader": "self param loaded_weight weight_name shard_id expert_id",
    f"{_EXPERTS}._ensure_moe_quant_config_init": "self",
    f"{ROUTER}._apply_eplb_mapping": "self topk_ids",
    f"{_MOE}.modular_kernel:FusedMoEExpertsModular.apply": "self output hidden_states w1 w2",
    f"{_PLUGGABLE}.register_oot": "_decorated_layer_cls name",
    CONTEXT: "",
    HAS_CONTEXT: "",
    _CONFIG: "",
    _RANKS: "",
}
# Layers between set_eplb_state and their communicator, which vLLM may fail to reach.
_waiting: list[weakref.ref[Any]] = []


def register() -> None:
    """Do what ``ULTRAEP_VLLM=batch`` says, in a process of vLLM.

    Raises:
        UnsupportedError: this release of vLLM has other signatures, or another plugin has replaced
            RoutedExperts.
    """
    if not replace_factory("batch", PATCH_POINTS, join):
        return
    vllm_own = checks.find(_EXPERTS)
    parts = {"weight_loader": _note_loads(vllm_own.weight_loader)}
    experts = type("ReplicatedExperts", (Experts, vllm_own), parts)
    try:
        checks.find(_PLUGGABLE).register_oot(name="RoutedExperts")(experts)
    except AssertionError as error:
        raise UnsupportedError(
            f"ULTRAEP_VLLM=batch: another plugin of vLLM has replaced RoutedExperts: {error}"
        ) from None
    state = checks.find(_STATE)
    state.build_initial_global_physical_to_logical_map = staticmethod(layout)
    state.rearrange = lambda *_, **__: None


def _note_loads(load: Any) -> Any:
    @functools.wraps(load)  # with the attributes by which vLLM knows it
    def weight_loader(self: Any, *args: Any, **more: Any) -> Any:
        if self.replicas:
            self.replicas.is_checked = False
        return load(self, *args, **more)

    return weight_loader


def layout(num_routed_experts: int, num_redundant_experts: int) -> list[int]:
    """Return the experts in all rows at first: of each rank its own, then any in its slots.

    Raises:
        UnsupportedError: ranks would have different numbers of rows or slots.
    """
    count = checks.find(_RANKS)().world_size if num_redundant_experts else 1
    if num_routed_experts % count:
        raise UnsupportedError(
            f"ULTRAEP_VLLM=batch: {num_routed_experts} experts on {count} ranks; expected"
            f" {checks.even_ranks(num_routed_experts)}. Or set ULTRAEP_VLLM=eplb, for which"
            f" num_redundant_experts={-num_routed_experts % count} will do"
        )
    if num_redundant_experts % count:
        nearest = num_redundant_experts + -num_redundant_experts % count
        raise UnsupportedError(
            f"ULTRAEP_VLLM=batch: num_redundant_experts={num_redundant_experts} on {count} ranks;"
            f" expected a multiple of {count}, such as {nearest}"
        )
    own, slots = num_routed_experts // count, num_redundant_experts // count
    return [
        (rank * own + row) % num_routed_experts
        for rank in range(count)
        for row in range(own + slots)
    ]


def join(coordinator: Any, expert_weights: Sequence[Sequence[torch.Tensor]], _: Any) -> None:
    """Give a model's layers replicas, in place of a communicator. Collective.

    Raises:
        UnsupportedError: a layer on any rank does not go with replicas. No layer was changed.
    """
    layers: list[Any] = [layer() for layer in _waiting[-len(expert_weights) :]]
    _waiting.clear()
    if any(expert_weights) or len(layers) != len(expert_weights):
        raise UnsupportedError(
            f"ULTRAEP_VLLM=batch: {len(layers)} of {len(expert_weights)} MoE layers are vLLM's own"
            " RoutedExperts; models with experts of another class cannot have replicas for each"
            " batch. Set ULTRAEP_VLLM=eplb, or unset it"
        )
    described = checks.agree(coordinator.cpu_group, describe, layers)
    for number, (layer, facts) in enumerate(zip(layers, described, strict=True)):
        layer.replicas = Replicas(layer, coordinator, number, facts)
    LOGGER.info("vLLM: %d MoE layers have replicas for each batch", len(layers))


class Experts:
    """What is put before vLLM's RoutedExperts.

    Attributes:
        replicas: None: expert parallelism or EPLB is off, or the model is not loaded yet.
    """

    def __init__(
        self, layer_name: str, params_dtype: torch.dtype, moe_config: Any, *args: Any, **more: Any
    ) -> None:
        parallel = moe_config.moe_parallel_config
        if not parallel.enable_eplb:
            warnings.warn(
                "ULTRAEP_VLLM=batch: nothing is replicated without --enable-eplb", stacklevel=2
            )
        elif parallel.ep_size > 1:
            moe_config.require_decomposed_backend = True  # routes are adjusted after routing
        super().__init__(layer_name, params_dtype, moe_config, *args, **more)  # type: ignore[call-arg]
        self.replicas: Replicas | None = None
        self.vllm_config = checks.find(_CONFIG)()

    @property
    def replica_plan(self) -> uec.Plan | None:
        """The plan of the last batch; None: there was none."""
        return self.replicas.balancer.plan if self.replicas else None

    def get_expert_weights(self: Any) -> Any:
        """Return nothing that vLLM's EPLB could move, or reserve a buffer for."""
        if self.moe_config.moe_parallel_config.ep_size == 1:
            return super().get_expert_weights()  # type: ignore[misc]
        _waiting.append(weakref.ref(self))
        return []

    def forward_modular(self: Any, *args: Any, **more: Any) -> Any:
        """Run the experts after the arrival of the replicas."""
        forward = super().forward_modular  # type: ignore[misc]
        replicas = self.replicas
        if replicas is None:
            return forward(*args, **more)
        if replicas.has_all:
            replicas.wait()
        else:
            replicas.wait_in(self.quant_method.moe_kernel.fused_experts)
        output = forward(*args, **more)
        replicas.wait()  # no token came to this rank, and no kernel ran
        return output
