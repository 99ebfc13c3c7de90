"""vLLM: whether the experts of a layer can have replicas for each batch, and how."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

import ultraep_comm as uec
from ultraep_comm.adapters import seams
from ultraep_comm.adapters.options import OF_GROUP, OF_LAYER
from ultraep_comm.errors import InvalidArgumentError

Tensor = torch.Tensor

ROUTER = "vllm.model_executor.layers.fused_moe.router.base_router:BaseRouter"
_OF_ROUTER = ("e_score_correction_bias", "hash_indices_table")  # vLLM: of no expert


def find_router(layer: Any) -> Any:
    """Return the router of a layer's RoutedExperts."""
    runners = layer.vllm_config.compilation_config.static_forward_context
    return runners[layer.layer_name].router


def count_mains(layer: Any) -> int:
    """Return how many of a layer's rows are a rank's own experts; the others are slots."""
    config = layer.moe_config
    mains: int = config.num_logical_experts // config.moe_parallel_config.ep_size
    return mains


def read_options(layer: Any) -> dict[str, Any]:
    """Return what vLLM's ``additional_config`` says under "ultraep".

    Raises:
        InvalidArgumentError: another option.
    """
    given = layer.vllm_config.additional_config
    options = dict(given.get("ultraep", {})) if isinstance(given, dict) else {}
    if unknown := options.keys() - {*OF_LAYER, *OF_GROUP}:
        raise InvalidArgumentError(
            f"additional_config of vLLM has the ultraep options {sorted(unknown)}; expected some of"
            f" {', '.join((*OF_LAYER, *OF_GROUP))}"
        )
    if "cost" in options:
        options["cost"] = uec.PlanCost(**options["cost"])
    return options


def describe(layer: Any) -> tuple[str, Any]:
    """Return whether a layer can have replicas, for :func:`seams.agree`.

    Returns:
        What prevents replicas; or an empty text, and what all ranks have to have in common:
        ``(segments, are_copied, constants)``. Segments are parameters with a row for each expert.
        They are copied if other tensors share their memory, which therefore has to stay. Constants
        hold for all experts, so also for those of other ranks.
    """
    if problem := _find_setting(layer):
        return problem, None
    layer._ensure_moe_quant_config_init()  # noqa: SLF001 - as vLLM does before the first batch
    parameters = dict(layer.named_parameters())
    segments, constants = {}, []
    for name, weight in parameters.items():
        what = f"parameter {name} of shape {tuple(weight.shape)}"
        if name in _OF_ROUTER:
            continue
        if "." in name:
            return f"it has a {what}, of a module inside", None
        if weight.numel() == 1 or not any(weight.stride()):
            constants.append((name, float(weight.flatten()[0])))
        elif len(weight) != layer.local_num_experts:
            return f"it has a {what}, without a row for each of {layer.local_num_experts}", None
        elif weight.stride(0) < weight[0].numel():
            return f"it has a {what}, whose rows share memory", None
        else:
            segments[name] = weight
    places = {str(weight.device) for weight in segments.values()}
    if len(places) != 1:
        return f"its experts' weights are on {sorted(places) or 'no device'}; expected one", None
    scales = [name for name in parameters if "scale" in name and "input" not in name]
    for name, weight in segments.items():
        is_plain = weight.is_floating_point() and weight.element_size() > 1
        start = name.partition("_")[0] + "_"
        if not is_plain and not any(scale.startswith(start) for scale in scales):
            return f"its {name} is of {weight.dtype}, and no parameter {start}...scale exists", None
    are_copied, memory = False, {_memory_of(weight) for weight in segments.values()}
    known = {id(weight) for weight in parameters.values()}
    for name, value in _held(layer):
        if not torch.is_tensor(value):
            return f"its {name} is a {type(value).__name__}, which would stay behind", None
        if id(value) in known or not value.dim() or len(value) != layer.local_num_experts:
            continue
        if _memory_of(value) not in memory:
            return (
                f"its {name} of shape {tuple(value.shape)} is in no parameter of the layer, and"
                " would stay behind"
            ), None
        are_copied = True
    common = [(name, tuple(w.shape[1:]), w.stride(), str(w.dtype)) for name, w in segments.items()]
    return "", (common, are_copied, constants)


def _memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _held(layer: Any) -> Iterator[tuple[str, Any]]:
    """Yield tensors, and scales of other types, that a layer's method and its kernel hold."""
    method = layer.quant_method
    experts = [] if method.moe_kernel is None else [method.moe_kernel.fused_experts]
    configs = [method.moe_quant_config, *(e.quant_config for e in experts)]
    parts = [
        (f"moe_quant_config.{part}", getattr(config, part))
        for config in configs
        if config is not None
        for part in ("_a1", "_a2", "_w1", "_w2")
    ]
    holders = [(type(h).__name__, h) for h in (layer, method, *experts)]
    for name, holder in (*holders, *parts):
        for attribute, value in vars(holder).items():
            is_scale = attribute == "scale" and value is not None
            if is_scale or (torch.is_tensor(value) and attribute not in _OF_ROUTER):
                yield f"{name}.{attribute}", value


def _find_setting(layer: Any) -> str:
    """Return which of vLLM's settings prevents replicas; none: an empty text."""
    config, manager = layer.moe_config, layer.expert_map_manager
    parallel, whole = config.moe_parallel_config, layer.vllm_config.parallel_config
    never = "with which the adapter has never run"
    for prevents, why in (
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
            layer.local_num_experts <= count_mains(layer),
            "it has no row for a replica; set num_redundant_experts of --eplb-config to a multiple"
            f" of {parallel.ep_size}",
        ),
        (
            not isinstance(find_router(layer), seams.find(ROUTER)),
            f"its router is a {type(find_router(layer)).__name__}; expected one of vLLM's",
        ),
    ):
        if prevents:
            return why
    return ""
