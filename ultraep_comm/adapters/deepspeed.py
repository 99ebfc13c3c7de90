"""Replicas for every microbatch in the AutoEP layers of DeepSpeed 0.19.8, up to ZeRO-2.

A layer's own forward pass runs on a view of it whose experts are instances: behind its router the
routing is planned and mapped, its own exchange takes tokens to instances, and its own grouped
experts compute them, on main weights and on slots.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import Tensor

from ultraep_comm.adapters import checks
from ultraep_comm.adapters.options import check_options, open_layer
from ultraep_comm.errors import InvalidArgumentError, UnsupportedError
from ultraep_comm.nn.traced import breaks_graph
from ultraep_comm.system import undocumented

_SETTING = "autoep_size above 1 in expert_parallel"
_LAYER = "deepspeed.module_inject.auto_ep_layer:AutoEPMoELayer"
_EXPERTS = "deepspeed.moe.ep_experts:GroupedExperts"
_COUNT = "deepspeed.moe.ep_count:count_tokens_per_expert"
_ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
_PIPELINE = "deepspeed.runtime.pipe.engine:PipelineEngine"
# What the adapter calls or overrides, and the parameters that it counts on.
PATCH_POINTS = {
    f"{_LAYER}._forward": "self hidden_states",
    f"{_LAYER}._finalize_output": "self output x hidden_states hdim",
    "deepspeed.moe.ep_router:TokenChoiceTopKRouter.forward": "self x expert_bias",
    f"{_EXPERTS}.forward": "self x num_tokens_per_expert",
    _COUNT: "selected_experts_indices num_experts",
    f"{_ENGINE}.zero_optimization_stage": "self",
}
# What the layer's forward pass reads, and the view has instead.
_VIEWED = ("router", "experts", "num_experts", "num_local_experts", "tokens_per_expert")
# Settings of a layer with which it takes another way.
_KNOWN = {"comm_backend": "comm", "async_split_plan": False, "folding_group_handles": None}


def replicate(engine: Any, /, slots_per_rank: int = 2, **options: Any) -> list[Any]:
    """Give every AutoEP layer of an engine replicas for each of its microbatches. Collective.

    Parameters, ``state_dict``, the optimizer and checkpoints stay as they are. From then on every
    pass of a layer is collective over its expert-parallel group. Experts of one shape share a
    group's slots.

    Args:
        engine: as of ``deepspeed.initialize`` with ``expert_parallel``.
        slots_per_rank: S.
        options: as for :func:`ultraep_comm.adapters.options.check_options`.

    Returns:
        The layers that have replicas now: none if expert parallelism has one rank. In each
        ``replica_plan`` is the plan of the last pass; None at first.

    Raises:
        InvalidArgumentError: another option, no engine, or a model without AutoEP layers.
        UnsupportedError: this version of DeepSpeed, the engine, or a layer on any rank does not go
            with replicas. No layer was changed.
    """
    checks.check_signatures("deepspeed", "0.19.8", PATCH_POINTS)
    check_options("replicate", options, "slots_per_rank")
    kind = checks.find(_LAYER)
    _check_body(kind)
    layers = _find_layers(engine, kind)
    layers = [m for m in layers if not checks.is_alone(m.ep_group, "DeepSpeed", _SETTING)]
    if not layers:
        return []
    checks.agree(engine.data_parallel_group, _describe, layers, "data-parallel rank")
    for layer in layers:
        weights = dict(layer.experts.named_parameters())
        layer.replicas = open_layer(
            layer.ep_group, weights, slots_per_rank=slots_per_rank, **options
        )
        checks.check_unchanged(layer.replicas, layer.experts)
        layer.replica_plan = None
        layer.__class__ = _layer_class(layer.__class__)
    return layers


def _check_body(kind: Any) -> None:
    read = undocumented(kind, "_forward").__code__.co_names
    if missing := [name for name in (*_VIEWED, "_finalize_output") if name not in read]:
        raise UnsupportedError(
            f"{kind.__name__}._forward reads no {missing}; the adapter was written for a release"
            " that does. Use a version of the framework that was tried: see docs/frameworks"
        )


def _find_layers(engine: Any, kind: Any) -> list[Any]:
    """Return an engine's AutoEP layers; raise if it has none, or none that can have replicas."""
    if not isinstance(engine, checks.find(_ENGINE)):
        raise InvalidArgumentError(
            f"replicate was given a {type(engine).__name__}; expected the engine that"
            " deepspeed.initialize returns"
        )
    layers = [m for m in engine.module.modules() if isinstance(m, kind)]
    if not layers:
        raise InvalidArgumentError(
            "the engine's model has no AutoEP layers; expected"
            ' "expert_parallel": {"enabled": true, "autoep_size": ...} in its configuration'
        )
    stage = engine.zero_optimization_stage()
    this = "this engine's layers cannot have replicas:"
    checks.refuse(
        (stage > 2, f"{this} ZeRO stage {stage} has only parts of the experts; expected at most 2"),
        (
            isinstance(engine, checks.find(_PIPELINE)),
            f"{this} a pipeline has several microbatches under way",
        ),
        (engine.mp_world_size > 1, f"{this} tensor parallelism: its ranks plan apart"),
        (engine.sequence_parallel_size > 1, f"{this} sequence parallelism has never run"),
    )
    return layers


def _describe(layer: Any) -> list[Any]:
    """Describe a layer for :func:`checks.agree`."""
    checks.refuse((hasattr(layer, "replicas"), "it has replicas already"))
    for module, path in ((layer, _LAYER), (layer.experts, _EXPERTS)):
        name, known = type(module).__name__, checks.find(path)
        checks.refuse((type(module) is not known, f"it has a {name}; expected {known.__name__}"))
    for name, known in _KNOWN.items():
        value = getattr(layer, name)
        problem = f"{name}={value!r}, which the adapter has never run; expected {known!r}"
        checks.refuse((value != known, problem))
    checks.check_experts(layer.experts, layer.num_local_experts, "train without replicas")
    one = dict(layer.experts.named_parameters())
    return [checks.describe_experts([one], layer.ep_group.rank()), checks.name_code(layer.experts)]


@functools.cache
def _layer_class(base: Any) -> Any:
    class ReplicatedAutoEPMoELayer(base):
        @breaks_graph
        def _forward(self, hidden_states: Tensor) -> Any:
            checks.check_unchanged(self.replicas, self.experts)
            scores, ids, counts = self.router(hidden_states.flatten(0, -2), self.expert_bias)
            run = self.replicas.begin(dict(self.experts.named_parameters()), ids)
            self.replica_plan = run.plan
            with torch.no_grad():
                self.tokens_per_expert.add_(counts)

            def run_experts(rows: Tensor, counts: Tensor) -> Tensor:
                rows, weights, slots = run.before_experts(rows)
                rows = checks.run_grouped(self.experts, rows, counts, weights, slots)
                output: Tensor = run.after_experts(rows)
                return output

            def finalize(output: Tensor, *inputs: Any) -> Any:
                return self._finalize_output(run.after_combine(output), *inputs)

            topology = self.replicas.group.topology
            number = topology.num_ranks * topology.instances_per_rank
            counts = checks.find(_COUNT)(run.topk_ids, number)
            view = copy.copy(self)  # the same layer with other contents
            view.__dict__.update(
                router=lambda *_: (scores, run.topk_ids, counts),
                experts=run_experts,
                num_experts=number,
                num_local_experts=topology.instances_per_rank,
                tokens_per_expert=torch.zeros_like(counts),  # the layer's own are of experts
                _finalize_output=finalize,
            )
            return undocumented(base, "_forward")(view, run.before_dispatch(hidden_states))

    return ReplicatedAutoEPMoELayer
