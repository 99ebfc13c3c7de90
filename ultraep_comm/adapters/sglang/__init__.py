"""SGLang: its EPLB moves weights by this library, or experts get replicas for each batch.

Installing the library declares :func:`register` as a plugin of SGLang. It does nothing unless the
environment variable ULTRAEP_SGLANG is set, so that this module imports neither torch nor SGLang.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ultraep_comm import env

_EPLB = "sglang.srt.eplb"
_MOE = "sglang.srt.layers.moe"
_UPDATE = f"{_EPLB}.expert_location_updater:update_expert_weights_single_layer"
_BUFFERS = f"{_EPLB}.expert_location_updater:create_temp_buffers"
_ELASTIC = "sglang.srt.elastic_ep.elastic_ep:ElasticEPStateManager.instance"
_LOCATION = f"{_EPLB}.expert_location"
_LAY_OUT = f"{_LOCATION}:compute_initial_expert_location_metadata"
_SET_UP = "sglang.srt.model_executor.model_runner_components.moe_ep_setup:prepare_moe_topk"
_ROUTED = f"{_MOE}.topk:_post_process_topk_ids"
_MAP_IDS = f"{_EPLB}.expert_location_dispatch:topk_ids_logical_to_physical"
_EXPERTS = f"{_MOE}.fused_moe_triton.layer:FusedMoE"

# What is called or replaced, for each mode, and the parameters that it was written for.
PATCH_POINTS = {
    "eplb": {
        _UPDATE: "routed_experts_weights temp_buffers old_physical_to_logical_map"
        " new_physical_to_logical_map num_local_physical_experts num_gpu_per_node rank"
        " world_size missing_logical_experts_info debug log_metrics",
        _BUFFERS: "sample_tensors",
        _ELASTIC: "",
    },
    "batch": {
        _LAY_OUT: "model_config moe_ep_rank",
        f"{_LOCATION}:ExpertLocationMetadata.init_by_mapping": "model_config"
        " physical_to_logical_map moe_ep_rank",
        f"{_LOCATION}:get_global_expert_location_metadata": "",
        _SET_UP: "model model_config",
        _ROUTED: "topk_ids topk_weights topk_config router_logits layer_id num_token_non_padded"
        " expert_location_dispatch_info",
        _MAP_IDS: "topk_ids info log2phy_prob",
        _EXPERTS: "num_experts hidden_size intermediate_size layer_id",
        f"{_EXPERTS}.run_moe_core": "self dispatch_output",
        f"{_MOE}.utils:is_moe_input_scattered_across_dp_ranks": "",
        "sglang.srt.distributed.parallel_state:get_moe_ep_group": "",
        "sglang.srt.runtime_context:get_exec": "",
    },
}


def register() -> None:
    """Do what ULTRAEP_SGLANG says, in a process of SGLang: nothing, ``eplb`` or ``batch``.

    Raises:
        InvalidArgumentError: the variable has another value.
        UnsupportedError: this release of SGLang has other signatures.
    """
    mode = env.sglang()
    if mode is None:
        return
    from ultraep_comm.adapters import checks

    found = checks.check_signatures("sglang", "0.5.23", PATCH_POINTS[mode])
    hooks: Any = checks.find("sglang.srt.plugins.hook_registry:HookRegistry")
    kinds: Any = checks.find("sglang.srt.plugins.hook_registry:HookType")

    def around(path: str, hook: Callable[..., Any]) -> None:
        hooks.register(path.replace(":", "."), hook, kinds.AROUND)

    if mode == "eplb":
        from ultraep_comm.adapters.sglang import eplb

        def update(*args: Any, **given: Any) -> Any:
            return eplb.update(found[_UPDATE], found[_ELASTIC], *args, **given)

        hooks.register(_UPDATE.replace(":", "."), update, kinds.REPLACE)
        around(_BUFFERS, eplb.make_buffers)
        return
    from ultraep_comm.adapters.sglang.batch import Batches

    batches = Batches({path.rpartition(":")[2]: each for path, each in found.items()})
    around(_LAY_OUT, batches.lay_out)
    around(_SET_UP, batches.set_up)
    around(_ROUTED, batches.note)
    around(_MAP_IDS, batches.map_ids)
    around(f"{_EXPERTS}.run_moe_core", batches.run)
