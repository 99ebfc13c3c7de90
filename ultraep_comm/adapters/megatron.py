"""Replicas for every microbatch in the MoE layers of Megatron-LM's megatron-core 0.16.

The layer's own methods stay: behind its router the routing is planned and mapped to instances, its
dispatcher is one of instances, and its experts' own loop runs over main weights and slots.
"""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from ultraep_comm.adapters import checks
from ultraep_comm.adapters.options import check_options, open_layer
from ultraep_comm.nn import Replication
from ultraep_comm.nn.replication import LayerPass
from ultraep_comm.nn.traced import breaks_graph
from ultraep_comm.nn.weights import unbind_slots
from ultraep_comm.system import undocumented

_MOE = "megatron.core.transformer.moe"
_SETTING = "expert_model_parallel_size above 1"
_LAYER, _EXPERTS = f"{_MOE}.moe_layer:MoELayer", f"{_MOE}.experts:SequentialMLP"
_KINDS = [
    f"{_MOE}.token_dispatcher:MoE{k}TokenDispatcher" for k in ("AllGather", "AlltoAll", "Flex")
]
_LINEAR = [f"megatron.core.tensor_parallel.layers:{p}ParallelLinear" for p in ("Column", "Row")]
_MADE = "self num_local_experts local_expert_indices config pg_collection"
# What the adapter calls or overrides, and the parameters that it counts on.
PATCH_POINTS = {
    f"{_LAYER}.route": "self hidden_states padding_mask",
    f"{_LAYER}.preprocess": "self hidden_states probs routing_map",
    f"{_LAYER}.routed_experts_compute": "self hidden_states probs",
    f"{_LAYER}.combine": "self output",
    f"{_EXPERTS}.forward": "self permuted_local_hidden_states tokens_per_expert permuted_probs",
    **dict.fromkeys((f"{kind}.__init__" for kind in _KINDS), _MADE),
}
_REFUSED = {
    "overlap_moe_expert_parallel_comm": "it has two microbatches of a layer under way at a time",
    "delay_wgrad_compute": "weights' gradients would come after the reduction",
    "gradient_accumulation_fusion": "gradients would bypass the reduction",
    "moe_pad_expert_input_to_capacity": "every instance would get an expert's whole capacity",
    "moe_router_padding_for_quantization": "padding would go to slots without an expert",
    "moe_latent_size": "it needs TransformerEngine, with which the adapter has never run",
    "fp8": "quantized weights have never run",
    "fp4": "quantized weights have never run",
}


def replicate(
    model: torch.nn.Module | Sequence[torch.nn.Module],
    slots_per_rank: int = 2,
    **options: Any,
) -> list[Any]:
    """Give every ``MoELayer`` of a built model replicas for each of its microbatches. Collective.

    Before or after the model is wrapped in Megatron's ``DistributedDataParallel``. Parameters,
    their homes, ``state_dict`` and the optimizer stay as they are. From then on every pass of a
    layer is collective over its expert-parallel group. Experts of one shape share a group's slots.

    Args:
        model: a module, or the chunks of a virtual pipeline.
        slots_per_rank: S.
        options: as for :func:`ultraep_comm.adapters.options.check_options`.

    Returns:
        The layers that have replicas now: none if expert parallelism has one rank. In each
        ``replica_plan`` is the plan of the last pass; None at first.

    Raises:
        InvalidArgumentError: another option.
        UnsupportedError: this version of megatron-core, or a setting of a layer on any rank of its
            expert-parallel group, does not go with replicas. No layer was changed.
    """
    checks.check_signatures("megatron-core", "0.16", PATCH_POINTS)
    check_options("replicate", options, "slots_per_rank")
    chunks = [model] if isinstance(model, torch.nn.Module) else model
    layers = [m for chunk in chunks for m in chunk.modules() if isinstance(m, checks.find(_LAYER))]
    layers = [m for m in layers if not checks.is_alone(m.ep_group, "Megatron", _SETTING)]
    for process_group in {id(m.ep_group): m.ep_group for m in layers}.values():
        own = [layer for layer in layers if layer.ep_group is process_group]
        checks.agree(process_group, _describe, own)
    for layer in layers:
        experts = layer.experts.local_experts
        calls = open_layer(
            layer.ep_group, _weights(experts), slots_per_rank=slots_per_rank, **options
        )
        checks.check_unchanged(calls, experts)
        _change(layer, calls)
    return layers


def _describe(layer: Any) -> list[Any]:
    """Describe a layer for :func:`checks.agree`."""
    config, experts, dispatcher = layer.config, layer.experts, layer.token_dispatcher
    for name, why in _REFUSED.items():
        value = getattr(config, name, None)
        checks.refuse((value, f"{name}={value!r}: {why}"))
    for name, known in (("cuda_graph_impl", "none"), ("moe_flex_dispatcher_backend", "deepep")):
        value = getattr(config, name)
        checks.refuse((value != known, f"{name}={value!r}; expected {known!r}"))
    tp_size = dispatcher.tp_size
    checks.refuse(
        (hasattr(layer, "replicas"), "it has replicas already"),
        (tp_size > 1, f"expert_tensor_parallel_size={tp_size}: its ranks plan apart"),
    )
    _check_kind(dispatcher, _KINDS, "one of Megatron's")
    _check_kind(experts, [_EXPERTS], "SequentialMLP: moe_grouped_gemm=False")
    for module in experts.local_experts[0].modules():
        if [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            _check_kind(module, _LINEAR, "layers of get_gpt_layer_local_spec")
    checks.check_alike(experts.local_experts)
    each = [dict(expert.named_parameters()) for expert in experts.local_experts]
    shapes = checks.describe_experts(each, layer.ep_group.rank())
    return [shapes, checks.name_code(experts.local_experts[0])]


def _check_kind(found: Any, known: Sequence[str], expected: str) -> None:
    never = f"it has a {type(found).__name__}, which the adapter has never run; expected {expected}"
    checks.refuse((not isinstance(found, tuple(map(checks.find, known))), never))


def _change(layer: Any, calls: Replication) -> None:
    """Change a layer's class and its experts' pass, and give it a dispatcher of instances."""
    group, old = calls.group, layer.token_dispatcher
    per_rank = group.topology.instances_per_rank
    config = copy.copy(layer.config)
    config.num_moe_experts = group.num_ranks * per_rank
    layer.token_dispatcher = type(old)(
        per_rank,
        list(range(group.rank * per_rank, (group.rank + 1) * per_rank)),
        config=config,
        pg_collection=SimpleNamespace(ep=old.ep_group, expt_tp=old.tp_group, tp_ep=old.tp_ep_group),
    )
    if old.shared_experts is not None:
        layer.token_dispatcher.set_shared_experts(old.shared_experts)
    layer.replicas, layer.replica_plan = calls, None
    layer.experts.forward = functools.partial(_run_experts, layer)
    layer.__class__ = _layer_class(layer.__class__)


@functools.cache
def _layer_class(base: Any) -> Any:
    class ReplicatedMoELayer(base):
        replica_pass: Any = None  # the LayerPass of a microbatch under way
        known_contents: Any = ()

        @breaks_graph
        def forward(self, *given: Any, **named: Any) -> Any:
            return super().forward(*given, **named)

        def route(self, hidden_states: Tensor, padding_mask: Tensor | None = None) -> Any:
            run = _begin(self, *super().route(hidden_states, padding_mask))
            return run.probs, run.routing_map

        def preprocess(self, hidden_states: Tensor, probs: Tensor, routing_map: Tensor) -> Any:
            hidden_states = self.replica_pass.before_dispatch(hidden_states)
            return super().preprocess(hidden_states, probs, routing_map)

        def combine(self, output: Tensor) -> Any:
            run, self.replica_pass = self.replica_pass, None
            return run.after_combine(super().combine(output))

    return ReplicatedMoELayer


def _begin(layer: Any, probs: Tensor, routing_map: Tensor) -> LayerPass:
    experts = layer.experts.local_experts
    modules = [*experts.modules()]
    contents, known = _contents(modules), layer.known_contents
    if len(contents) != len(known) or any(map(operator.is_not, contents, known)):
        checks.check_unchanged(layer.replicas, experts)  # takes ten times as long
        layer.known_contents = contents
    # With overlap_param_gather DDP's hooks bring the weights, which the transfer reads now.
    for module in modules:
        for hook in undocumented(module, "_forward_pre_hooks").values():
            if getattr(hook, "__qualname__", "").startswith("DistributedDataParallel."):
                hook(module)
    run: LayerPass = layer.replicas.begin(_weights(experts), routing_map=routing_map, probs=probs)
    layer.replica_pass, layer.replica_plan = run, run.plan
    return run


def _weights(experts: Any) -> dict[str, list[Tensor]]:
    names = [name for name, _ in experts[0].named_parameters()]
    return {name: [expert.get_parameter(name) for expert in experts] for name in names}


def _contents(modules: Sequence[torch.nn.Module]) -> list[object]:
    """Return all that modules have. If each thing is still the same one, nothing has changed."""
    found: list[object] = []
    for module in modules:
        own = vars(module)
        found.append(type(module))
        found += own.values()
        for kind in ("_parameters", "_buffers", "_modules", *checks.HOOKS):
            found += own[kind].values()
    return found


def _run_experts(layer: Any, x: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> Any:
    """Run the forward pass of a layer's experts on instances: local experts, then slots."""
    run, group, own = layer.replica_pass, layer.replicas.group, layer.experts
    x, weights, slots = run.before_experts(x)
    every = {n: [*weights[n], *unbind_slots(slots[n], run.plan, group)] for n in weights}
    modules = [*own.local_experts, *[own.local_experts[0]] * group.topology.slots_per_rank]
    instances = [
        functools.partial(_run, module, dict(zip(every, tensors, strict=True)))
        for module, tensors in zip(modules, zip(*every.values(), strict=True), strict=True)
    ]
    view = SimpleNamespace(
        config=own.config, num_local_experts=len(instances), local_experts=instances
    )
    y, bias = type(own).forward(view, x, tokens_per_expert, probs)
    return run.after_experts(y), bias


def _run(expert: Any, weights: dict[str, Tensor], *given: Any) -> Any:
    return functional_call(expert, weights, given, tie_weights=False)
