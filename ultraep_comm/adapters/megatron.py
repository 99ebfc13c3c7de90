"""Replicas for every microbatch in the MoE layers of Megatron-LM's megatron-core 0.16.

The layer's own methods stay: behind its router the routing is planned and mapped to instances, its
dispatcher is one of instances, and its experts' own loop runs over main weights and slots.
"""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Sequence
from itertools import chain, zip_longest
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

import ultraep_comm as uec
from ultraep_comm.adapters import checks
from ultraep_comm.adapters.options import open_layer
from ultraep_comm.errors import UnsupportedError
from ultraep_comm.group.group import rejecting
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
    *,
    live: int = 1,
    **options: Any,
) -> list[Any]:
    """Give every ``MoELayer`` of a built model replicas for each of its microbatches. Collective.

    Before or after the model is wrapped in Megatron's ``DistributedDataParallel``. Parameters,
    their homes, ``state_dict`` and the optimizer stay as they are. From then on every pass of a
    layer is collective over its expert-parallel group. Experts of one shape share a group's slots.

    Args:
        model: a module, or the chunks of a virtual pipeline.
        slots_per_rank: S.
        live: 1: Megatron's dispatchers keep the state of one microbatch. Its schedules alternate
            whole forward and backward passes, and need no more.
        options: of layers, as for ``Replication`` (``target``, ``cost``, ``min_tokens``), and of
            their group, as for ``new_group``. ``grads`` is float32 unless the experts are frozen.

    Returns:
        The layers that have replicas now: none if expert parallelism has one rank. In each
        ``replica_plan`` is the plan of the last pass; None at first.

    Raises:
        UnsupportedError: this version of megatron-core, or a setting of a layer on any rank of its
            expert-parallel group, does not go with replicas. No layer was changed.
    """
    checks.check_signatures("megatron-core", "0.16", "0.16", PATCH_POINTS)
    if live != 1:
        raise UnsupportedError(
            f"live={live}; expected 1: Megatron's dispatchers keep the state of one microbatch"
        )
    chunks = [model] if isinstance(model, torch.nn.Module) else model
    layers = [m for chunk in chunks for m in chunk.modules() if isinstance(m, checks.find(_LAYER))]
    layers = [m for m in layers if not checks.is_alone(m.ep_group, "Megatron", _SETTING)]
    for process_group in {id(m.ep_group): m.ep_group for m in layers}.values():
        checks.agree(process_group, [_describe(m) for m in layers if m.ep_group is process_group])
    for layer in layers:
        each = [dict(expert.named_parameters()) for expert in layer.experts.local_experts]
        is_trained = any(p.requires_grad for p in each[0].values())
        calls = open_layer(
            layer.ep_group,
            {name: [own[name].detach() for own in each] for name in each[0]},
            slots_per_rank=slots_per_rank,
            num_experts=layer.config.num_moe_experts,
            **{"grads": torch.float32 if is_trained else None} | options,
        )
        _change(layer, calls)
    return layers


def _describe(layer: Any) -> tuple[str, Any]:
    """Return what prevents replicas in a layer, if anything, and its experts' parameters."""
    config, experts, dispatcher = layer.config, layer.experts, layer.token_dispatcher
    for name, why in _REFUSED.items():
        if getattr(config, name, None):
            return f"{name}={getattr(config, name)!r}: {why}", None
    for name, known in (("cuda_graph_impl", "none"), ("moe_flex_dispatcher_backend", "deepep")):
        if getattr(config, name) != known:
            return f"{name}={getattr(config, name)!r}; expected {known!r}", None
    if hasattr(layer, "replicas"):
        return "it has replicas already", None
    if dispatcher.tp_size > 1:
        return f"expert_tensor_parallel_size={dispatcher.tp_size}: its ranks plan apart", None
    never = "it has a {}, which the adapter has never run; expected {}"
    if not isinstance(dispatcher, tuple(map(checks.find, _KINDS))):
        return never.format(type(dispatcher).__name__, "one of Megatron's"), None
    if not isinstance(experts, checks.find(_EXPERTS)):
        return never.format(type(experts).__name__, "SequentialMLP: moe_grouped_gemm=False"), None
    linear = tuple(map(checks.find, _LINEAR))
    for module in experts.local_experts[0].modules():
        held = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if held and not isinstance(module, linear):
            return never.format(type(module).__name__, "layers of get_gpt_layer_local_spec"), None
    if unlike := checks.find_unlike(experts.local_experts):
        return unlike, None
    each = [dict(e.named_parameters()) for e in experts.local_experts]
    problem, shapes = checks.describe_experts(each)
    return problem, [shapes, checks.name_code(experts.local_experts[0])]


def _run(expert: Any, weights: dict[str, Tensor], *given: Any) -> Any:
    return functional_call(expert, weights, given, tie_weights=False)


class _Replicas:
    """What a layer and its experts share."""

    def __init__(self, local_experts: Any, calls: Replication) -> None:
        self.calls = calls
        self._experts, every = local_experts, local_experts.modules()
        self._modules = [(undocumented(m, "_forward_pre_hooks"), m) for m in every]
        self._seen = checks.contents(local_experts.modules())
        self._names = [name for name, _ in local_experts[0].named_parameters()]
        self.run: LayerPass | None = None

    def _check(self) -> None:
        """Refuse what has been done to the experts since, on peers too."""
        seen = checks.contents(module for _, module in self._modules)
        if len(seen) == len(self._seen) and all(map(operator.is_, seen, self._seen)):
            return  # in a tenth of the time of what follows
        group = self.calls.group
        problem = checks.find_unlike(self._experts)
        names = [name for name, _ in self._experts[0].named_parameters()]
        every = zip_longest((module for _, module in self._modules), self._experts.modules())
        if not problem and (names != self._names or any(old is not new for old, new in every)):
            problem = f"its experts' modules were replaced; they had the parameters {self._names}"
            problem += f", and expert 0 has {names} now"
        if problem:
            error = UnsupportedError(
                f"rank {group.rank}: MoE layer {self.calls.layer} was changed after replicate():"
                f" {problem}. Change all experts alike, before replicate()"
            )
            with rejecting(group):
                raise error
        self._seen = seen

    def begin(self, probs: Tensor, routing_map: Tensor) -> LayerPass:
        self._check()
        # With overlap_param_gather DDP's hooks bring the weights, which the transfer reads now.
        for hooks, module in self._modules:
            for hook in hooks.values():
                if getattr(hook, "__qualname__", "").startswith("DistributedDataParallel."):
                    hook(module)
        weights = {n: [e.get_parameter(n) for e in self._experts] for n in self._names}
        self.run = self.calls.begin(weights, routing_map=routing_map, probs=probs)
        return self.run

    def instances(
        self, plan: uec.Plan, mains: dict[str, Any], slots: dict[str, Tensor]
    ) -> list[Any]:
        """Return, for each instance, its expert's module with its weights."""
        group = self.calls.group
        local = [*self._experts, *[self._experts[0]] * group.topology.slots_per_rank]
        by_expert = zip(*(mains[name] for name in self._names), strict=True)
        by_slot = zip(*(unbind_slots(slots[n], plan, group) for n in self._names), strict=True)
        weights = (dict(zip(self._names, own, strict=True)) for own in chain(by_expert, by_slot))
        return [functools.partial(_run, *own) for own in zip(local, weights, strict=True)]


def _change(layer: Any, calls: Replication) -> None:
    """Change the classes of a layer and of its experts, and give it a dispatcher of instances."""
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
    layer.replicas = layer.experts.replicas = _Replicas(layer.experts.local_experts, calls)
    layer.replica_plan = None
    layer.experts.__class__ = _experts_class(layer.experts.__class__)
    layer.__class__ = _layer_class(layer.__class__)


@functools.cache
def _layer_class(base: Any) -> Any:
    class ReplicatedMoELayer(base):
        @breaks_graph
        def forward(self, *given: Any, **named: Any) -> Any:
            return super().forward(*given, **named)

        def route(self, hidden_states: Tensor, padding_mask: Tensor | None = None) -> Any:
            run = self.replicas.begin(*super().route(hidden_states, padding_mask))
            self.replica_plan = run.plan
            return run.probs, run.routing_map

        def preprocess(self, hidden_states: Tensor, probs: Tensor, routing_map: Tensor) -> Any:
            hidden_states = self.replicas.run.before_dispatch(hidden_states)
            return super().preprocess(hidden_states, probs, routing_map)

        def combine(self, output: Tensor) -> Any:
            run, self.replicas.run = self.replicas.run, None
            return run.after_combine(super().combine(output))

    return ReplicatedMoELayer


@functools.cache
def _experts_class(base: Any) -> Any:
    class ReplicatedExperts(base):
        def forward(self, x: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> Any:
            replicas = self.replicas
            x, mains, slots = replicas.run.before_experts(x)
            each = replicas.instances(replicas.run.plan, mains, slots)
            s = SimpleNamespace(config=self.config, num_local_experts=len(each), local_experts=each)
            y, bias = base.forward(s, x, tokens_per_expert, probs)
            return replicas.run.after_experts(y), bias

    return ReplicatedExperts
