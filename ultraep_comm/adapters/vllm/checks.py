"""vLLM: whether the experts of a layer can have replicas for each batch, and how."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ultraep_comm as uec
from ultraep_comm.adapters import checks
from ultraep_comm.adapters.holders import Held
from ultraep_comm.adapters.options import check_options

ROUTER = "vllm.model_executor.layers.fused_moe.router.base_router:BaseRouter"
_OF_ROUTER = ("e_score_correction_bias", "hash_indices_table")  # vLLM: of no expert
_REMEDY = "set another moe_backend, or ULTRAEP_VLLM=eplb"


def find_router(layer: Any) -> Any:
    """Return the router of a layer's RoutedExperts."""
    runners = layer.vllm_config.compilation_config.static_forward_context
    return runners[layer.layer_name].router


def count_local_experts(layer: Any) -> int:
    """Return how many of a layer's rows are a rank's own experts; the others are slots."""
    config = layer.moe_config
    count: int = config.num_logical_experts // config.moe_parallel_config.ep_size
    return count


def read_options(layer: Any) -> dict[str, Any]:
    """Return what vLLM's ``additional_config`` says under "ultraep".

    Raises:
        InvalidArgumentError: another option.
    """
    given = layer.vllm_config.additional_config
    options = dict(given.get("ultraep", {})) if isinstance(given, dict) else {}
    check_options("ultraep in additional_config of vLLM", options)
    if "cost" in options:
        options["cost"] = uec.PlanCost(**options["cost"])
    return options


def describe(layer: Any, checked: Sequence[Any] = ()) -> dict[str, Any]:
    """Describe a layer for :func:`checks.agree`.

    Args:
        layer: its RoutedExperts.
        checked: what it holds that is not looked at.

    Returns:
        What all ranks have to have in common: ``segments``, parameters with a row for each expert,
        by name; ``are_copied``: anything else has their memory, which therefore has to stay; and by
        path the values that hold for all experts, so also for those of other ranks.

    Raises:
        UnsupportedError: the layer cannot have replicas.
    """
    _check_settings(layer)
    layer._ensure_moe_quant_config_init()  # noqa: SLF001 - as vLLM does before the first batch
    parameters = dict(layer.named_parameters())
    segments, constants = {}, dict[str, Any]()
    count = layer.local_num_experts
    for name, weight in parameters.items():
        if name in _OF_ROUTER or not weight.numel():
            continue
        what = f"it has a parameter {name} of shape {tuple(weight.shape)},"
        checks.refuse(("." in name, f"{what} of a module inside"))
        if weight.numel() == 1 or not any(weight.stride()):
            constants[name] = float(weight.flatten()[0])
            continue
        checks.refuse(
            (len(weight) != count, f"{what} without a row for each of {count}"),
            (weight.stride(0) < weight[0].numel(), f"{what} whose rows share memory"),
        )
        segments[name] = weight
    places = sorted({str(weight.device) for weight in segments.values()})
    devices = f"its experts' weights are on {places or 'no device'}; expected one"
    checks.refuse((len(places) != 1, devices))
    scales = [name for name in parameters if "scale" in name and "input" not in name]
    for name, weight in segments.items():
        is_plain = weight.is_floating_point() and weight.element_size() > 1
        start = name.partition("_")[0] + "_"
        has_scale = is_plain or any(scale.startswith(start) for scale in scales)
        lacks = f"its {name} is of {weight.dtype}, and no parameter {start}...scale exists"
        checks.refuse((not has_scale, lacks))
    of_others = layer.vllm_config.compilation_config.static_forward_context.values()
    held = Held(layer, segments.values(), count, _REMEDY, *of_others, *checked)
    shapes = {n: (tuple(w.shape[1:]), w.stride(), str(w.dtype)) for n, w in segments.items()}
    return {"segments": shapes, "are_copied": held.shares, **constants, **held.facts}


def _check_settings(layer: Any) -> None:
    """Raise UnsupportedError if one of vLLM's settings prevents replicas."""
    config, manager = layer.moe_config, layer.expert_map_manager
    parallel, whole = config.moe_parallel_config, layer.vllm_config.parallel_config
    never = "with which the adapter has never run"
    checks.refuse(
        (
            whole.use_ubatching,
            "dual-batch overlap has two microbatches under way, and a layer has slots for one;"
            " unset enable_dbo and ubatch_size",
        ),
        (
            parallel.use_passthrough_all2all or parallel.use_moonep_kernels,
            f"all2all_backend={parallel.all2all_backend!r} dispatches inside of its kernel",
        ),
        (parallel.pcp_size > 1, f"prefill_context_parallel_size={parallel.pcp_size}, {never}"),
        (config.is_lora_enabled, f"LoRA, {never}"),
        (layer.quant_method.is_monolithic, "its kernel routes by itself; set another moe_backend"),
        (manager.num_fused_shared_experts, f"shared experts fused with routed ones, {never}"),
        (
            manager.placement_strategy != "linear",
            f"expert_placement_strategy={manager.placement_strategy!r}; expected 'linear'",
        ),
        (
            layer.local_num_experts <= count_local_experts(layer),
            "it has no row for a replica; set num_redundant_experts of --eplb-config to a multiple"
            f" of {parallel.ep_size}",
        ),
        (
            not isinstance(find_router(layer), checks.find(ROUTER)),
            f"its router is a {type(find_router(layer)).__name__}; expected one of vLLM's",
        ),
    )
