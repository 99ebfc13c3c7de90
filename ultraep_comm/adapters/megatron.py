"""Replicas for every microbatch in the MoE layers of Megatron-LM's megatron-core 0.16.

The layer's own methods stay: between its router and its dispatcher the routing is planned and
mapped to instances, the dispatcher is one for all instances, and the experts' own loop runs over
main weights and slots.
"""

from __future__ import annotations

import copy
import functools
import importlib
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

import ultraep_comm as uec
from ultraep_comm.adapters.seams import check_signature, check_version, is_alone
from ultraep_comm.errors import UnsupportedError
from ultraep_comm.nn import Replication
from ultraep_comm.nn.replication import LayerPass
from ultraep_comm.system import undocumented

Tensor = torch.Tensor

_MOE = "megatron.core.transformer.moe"
_DISPATCHER = ["self", "num_local_experts", "local_expert_indices", "config", "pg_collection"]
# What this adapter calls or overrides, and the parameters that it counts on.
SEAM = {
    f"{_MOE}.moe_layer:MoELayer.route": ["self", "hidden_states", "padding_mask"],
    f"{_MOE}.moe_layer:MoELayer.preprocess": ["self", "hidden_states", "probs", "routing_map"],
    f"{_MOE}.moe_layer:MoELayer.routed_experts_compute": ["self", "hidden_states", "probs"],
    f"{_MOE}.moe_layer:MoELayer.combine": ["self", "output"],
    f"{_MOE}.experts:SequentialMLP.forward": [
        "self",
        "permuted_local_hidden_states",
        "tokens_per_expert",
        "permuted_probs",
    ],
    f"{_MOE}.token_dispatcher:MoEAllGatherTokenDispatcher.__init__": _DISPATCHER,
    f"{_MOE}.token_dispatcher:MoEAlltoAllTokenDispatcher.__init__": _DISPATCHER,
}
_REFUSED = {
    "overlap_moe_expert_parallel_comm": "it has two microbatches under way in a layer at one time",
    "delay_wgrad_compute": "weights' gradients are then computed after those of replicas are sent",
    "gradient_accumulation_fusion": "gradients of experts would bypass the reduction",
    "moe_pad_expert_input_to_capacity": "every instance would get an expert's whole capacity",
    "moe_router_padding_for_quantization": "padding would go to slots without an expert",
    "moe_latent_size": "it needs TransformerEngine, with which this adapter has never run",
    "fp8": "the adapter has never run with quantized weights",
    "fp4": "the adapter has never run with quantized weights",
}


def replicate(
    model: torch.nn.Module | Sequence[torch.nn.Module],
    slots_per_rank: int = 2,
    *,
    live: int = 1,
    target: float = 1.01,
    cost: uec.PlanCost | None = None,
    min_tokens: int = 0,
    mode: str = "auto",
    reduce_mode: str = "auto",
    **options: Any,
) -> list[Any]:
    """Give every ``MoELayer`` of a built model replicas for each of its microbatches. Collective.

    Call it before or after the model is wrapped in Megatron's ``DistributedDataParallel``. Layers
    whose experts have the same shape share a group, and its slots. Parameters, their names and
    homes, ``state_dict`` and the optimizer stay as they are. The layers' forward and backward
    passes become collective over the expert-parallel group, also those of ranks without tokens.

    Args:
        model: a module, or the chunks of a virtual pipeline.
        slots_per_rank: S.
        live: 1: Megatron's dispatchers keep the state of one microbatch of a layer. Schedules that
            alternate whole forward and backward passes (1F1B, interleaved) need no more.
        target: as for ``Replication``.
        cost: likewise.
        min_tokens: likewise.
        mode: likewise.
        reduce_mode: likewise.
        options: as for ``new_group`` (``engine``, ``timeout``, ...). ``grads`` is float32 if the
            experts are trained.

    Returns:
        The layers that have replicas now, each with ``replica_plan``: the plan of its last pass, or
        None. Empty if the model has no MoE layer, or expert parallelism has one rank.

    Raises:
        UnsupportedError: this version, or a setting of a layer on any rank of the expert-parallel
            group, does not go with replicas; the text names it. No layer was changed.
    """
    check_version("megatron-core", "0.16", "0.16")
    check_seam()
    if live != 1:
        raise UnsupportedError(
            f"live={live}: a layer of Megatron-LM keeps the state of one microbatch between its"
            " router and its experts; expected live=1"
        )
    chunks = [model] if isinstance(model, torch.nn.Module) else model
    moe_layer = find("moe_layer:MoELayer")
    layers = [m for chunk in chunks for m in chunk.modules() if isinstance(m, moe_layer)]
    layers = [m for m in layers if not is_alone(m.ep_group, f"MoE layer {m.layer_number}")]
    _agree(layers)
    for layer in layers:
        likes = [dict(expert.named_parameters()) for expert in layer.experts.local_experts]
        like = {name: [own[name].detach() for own in likes] for name in likes[0]}
        if any(p.requires_grad for p in likes[0].values()):
            options.setdefault("grads", torch.float32)
        group, index = uec.group_for(
            layer.ep_group,
            like=like,
            slots_per_rank=slots_per_rank,
            num_experts=layer.config.num_moe_experts,
            **options,
        )
        calls = Replication(
            group,
            layer=index,
            target=target,
            cost=cost,
            min_tokens=min_tokens,
            mode=mode,
            reduce_mode=reduce_mode,
        )
        _change(layer, calls)
    return layers


def find(path: str) -> Any:
    """Return what ``"module:Class.method"`` names in Megatron's MoE package."""
    module, _, names = path.partition(":")
    module = module if module.startswith(_MOE) else f"{_MOE}.{module}"
    return functools.reduce(getattr, names.split("."), importlib.import_module(module))


def check_seam() -> None:
    """Raise UnsupportedError unless the installed release has the seam that this adapter knows."""
    for path, parameters in SEAM.items():
        check_signature(find(path), parameters)


# ---- what goes with replicas ---------------------------------------------------------------------


def _agree(layers: Sequence[Any]) -> None:
    """Raise UnsupportedError on all ranks if a layer of one, or a difference, prevents replicas."""
    groups = {id(layer.ep_group): layer.ep_group for layer in layers}
    for group in groups.values():
        own = [_describe(layer) for layer in layers if layer.ep_group is group]
        every: list[Any] = [None] * group.size()
        dist.all_gather_object(every, own, group=group)
        problems = [
            f"rank {rank}: {problem}"
            for rank, described in enumerate(every)
            for problem, _ in described
            if problem
        ]
        if problems:
            raise UnsupportedError(f"the model cannot have replicas: {problems[0]}")
        odd = next((r for r, described in enumerate(every) if described != every[0]), None)
        if odd is not None:
            raise UnsupportedError(
                f"the MoE layers of expert-parallel rank {odd} have experts {every[odd]}, and those"
                f" of rank 0 {every[0]}; expected the same layers, with experts of the same shapes"
            )


def _describe(layer: Any) -> tuple[str, Any]:
    """Return what prevents replicas in a layer, if anything, and its experts' parameters."""
    where = f"MoE layer {layer.layer_number}"
    problem, shapes = _problem(layer), None
    if not problem:
        every = [
            [(n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in expert.named_parameters()]
            for expert in layer.experts.local_experts
        ]
        shapes = every[0]
        odd = next((i for i, own in enumerate(every) if own != shapes), None)
        if odd is not None:
            problem = f"expert {odd} has {every[odd]}, and expert 0 {shapes}; expected one shape"
        elif len({trained for *_, trained in shapes}) > 1:
            problem = f"only some parameters of an expert are trained: {shapes}"
        elif any(t and d not in (torch.float32, torch.bfloat16) for *_, d, t in shapes):
            problem = f"experts are trained in {shapes[0][2]}; expected float32 or bfloat16"
    return f"{where}: {problem}" if problem else "", shapes


def _problem(layer: Any) -> str:
    config, experts, dispatcher = layer.config, layer.experts, layer.token_dispatcher
    for name, why in _REFUSED.items():
        if getattr(config, name, None):
            return f"{name}={getattr(config, name)!r} is not supported: {why}"
    if config.cuda_graph_impl != "none":
        return f"cuda_graph_impl={config.cuda_graph_impl!r} is not supported: expected 'none'"
    if isinstance(layer, _Replicated):
        return "it has replicas already"
    if not isinstance(experts, find("experts:SequentialMLP")):
        return (
            f"its experts are a {type(experts).__name__}; this adapter has run SequentialMLP only:"
            " build the model with moe_grouped_gemm=False"
        )
    known = [path.split(":")[1].split(".")[0] for path in SEAM if path.endswith("__init__")]
    if type(dispatcher).__name__ not in known:
        return (
            f"its dispatcher is a {type(dispatcher).__name__}; this adapter has run {known}: set"
            " moe_token_dispatcher_type='alltoall' or 'allgather'"
        )
    if dispatcher.tp_size > 1:
        return (
            f"experts are split over {dispatcher.tp_size} tensor-parallel ranks, which would make"
            " different plans; set expert_tensor_parallel_size=1"
        )
    linear = importlib.import_module("megatron.core.tensor_parallel.layers")
    for name, module in experts.local_experts[0].named_modules():
        if any(True for _ in module.parameters(recurse=False)) and not isinstance(
            module, linear.ColumnParallelLinear | linear.RowParallelLinear
        ):
            return (
                f"{name} of its experts is a {type(module).__name__}; this adapter has run Megatron"
                "'s own linear layers only: use get_gpt_layer_local_spec"
            )
    return ""


# ---- the layer -----------------------------------------------------------------------------------


class _Replicated:
    """Marks layers that have replicas."""


class _Replicas:
    """What a layer and its experts share."""

    def __init__(self, experts: Any, calls: Replication) -> None:
        self.calls = calls
        self._modules = list(experts.modules())
        # Where each expert has each parameter: a module's own dictionary, and the name there.
        self._places = []
        for expert in experts.local_experts:
            at = {n: (expert.get_submodule(n.rpartition(".")[0]), n.rpartition(".")[2])
                  for n, _ in expert.named_parameters()}
            self._places.append([(undocumented(m, "_parameters"), leaf) for m, leaf in at.values()])
            self._names = list(at)
        self.run: LayerPass | None = None

    def begin(self, probs: Tensor, routing_map: Tensor) -> tuple[Tensor, Tensor]:
        # With overlap_param_gather, weights arrive by these hooks; the transfer reads them now.
        for module in self._modules:
            for hook in undocumented(module, "_forward_pre_hooks").values():
                if getattr(hook, "__qualname__", "").startswith("DistributedDataParallel."):
                    hook(module)
        weights = {
            name: [own[i][0][own[i][1]] for own in self._places]
            for i, name in enumerate(self._names)
        }
        self.run = run = self.calls.begin(weights, routing_map=routing_map, probs=probs)
        assert run.probs is not None
        assert run.routing_map is not None
        return run.probs, run.routing_map

    def instances(self, experts: Any, mains: Any, slots: Any) -> list[Callable[..., Any]]:
        """Return the experts to call: mains in their own modules, slots in the first expert's."""
        local = list(experts.local_experts)
        each = [zip(*(mains[n] for n in self._names), strict=True)]
        each.append(zip(*(slots[n].unbind() for n in self._names), strict=True))
        mine, others = ([list(one) for one in part] for part in each)
        calls = [
            functools.partial(_call, *given)
            for given in zip(local, self._places, mine, strict=True)
        ]
        return calls + [functools.partial(_call, local[0], self._places[0], one) for one in others]


def _call(expert: Any, places: list[tuple[Any, str]], weights: list[Tensor], *given: Any) -> Any:
    """Do functional_call, which takes a tenth of a layer's host time for every instance."""
    own = [module[name] for module, name in places]
    try:
        for (module, name), weight in zip(places, weights, strict=True):
            module[name] = weight
        return expert(*given)
    finally:
        for (module, name), weight in zip(places, own, strict=True):
            module[name] = weight


def _change(layer: Any, calls: Replication) -> None:
    """Change the classes of a layer and of its experts, and give it a dispatcher of instances."""
    group, old = calls.group, layer.token_dispatcher
    per_rank = group.topology.instances_per_rank
    config = copy.copy(layer.config)
    config.num_moe_experts = group.num_ranks * per_rank
    first = group.rank * per_rank
    layer.token_dispatcher = type(old)(
        per_rank,
        list(range(first, first + per_rank)),
        config=config,
        pg_collection=SimpleNamespace(ep=old.ep_group, expt_tp=old.tp_group, tp_ep=old.tp_ep_group),
    )
    if old.shared_experts is not None:
        layer.token_dispatcher.set_shared_experts(old.shared_experts)
    layer.replicas = layer.experts.replicas = _Replicas(layer.experts, calls)
    layer.replica_plan = None
    layer.experts.num_instances = per_rank
    layer.experts.__class__ = _experts_class(type(layer.experts))
    layer.__class__ = _layer_class(type(layer))


@functools.cache
def _layer_class(base: Any) -> Any:
    class ReplicatedMoELayer(_Replicated, base):  # type: ignore[misc]
        def route(self, hidden_states: Tensor, padding_mask: Tensor | None = None) -> Any:
            probs, routing_map = super().route(hidden_states, padding_mask)
            probs, routing_map = self.replicas.begin(probs, routing_map)
            self.replica_plan = self.replicas.run.plan
            return probs, routing_map

        def preprocess(self, hidden_states: Tensor, probs: Tensor, routing_map: Tensor) -> Any:
            hidden_states = self.replicas.run.before_dispatch(hidden_states)
            return super().preprocess(hidden_states, probs, routing_map)

        def combine(self, output: Tensor) -> Any:
            run, self.replicas.run = self.replicas.run, None
            return run.after_combine(super().combine(output))

    return ReplicatedMoELayer


@functools.cache
def _experts_class(base: Any) -> Any:
    class ReplicatedExperts(base):  # type: ignore[misc]
        def forward(self, x: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> Any:
            run = self.replicas.run
            x, mains, slots = run.before_experts(x)
            experts = SimpleNamespace(
                config=self.config,
                num_local_experts=self.num_instances,
                local_experts=self.replicas.instances(self, mains, slots),
            )
            y, bias = base.forward(experts, x, tokens_per_expert, probs)
            return run.after_experts(y), bias

    return ReplicatedExperts
