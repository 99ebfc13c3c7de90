"""The part of SGLang that its adapter uses, written anew, for where that is not installed.

Ranks run a layer over the same tokens and sum what their rows give, as without an all-to-all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import fakes
import torch
import torch.distributed as dist

Tensor = torch.Tensor
SRT = "sglang.srt"


class HookType(enum.Enum):
    AROUND = "around"
    REPLACE = "replace"


class HookRegistry:
    hooks: ClassVar[list[tuple[str, Any, HookType]]] = []

    @classmethod
    def register(cls, target: str, hook: Any, hook_type: HookType, *, source: Any = None) -> None:
        cls.hooks.append((target, hook, hook_type))

    @classmethod
    def apply_hooks(cls) -> None:
        """Change the fake modules, and no others."""
        for target, hook, kind in cls.hooks:
            path, _, name = target.rpartition(".")
            owner: Any = sys.modules.get(path)
            if owner is None:
                module, _, owner = path.rpartition(".")
                owner = getattr(sys.modules[module], owner)
            original = getattr(owner, name)

            def call(*a: Any, _o: Any = original, _h: Any = hook, _k: Any = kind, **g: Any) -> Any:
                return _h(*a, **g) if _k is HookType.REPLACE else _h(_o, *a, **g)

            setattr(owner, name, functools.wraps(original)(call))


# ---- EPLB ----------------------------------------------------------------------------------


class ElasticEPStateManager:
    state: ClassVar[Any] = None

    @classmethod
    def instance(cls) -> Any:
        return cls.state


def update_expert_weights_single_layer(
    routed_experts_weights: Any,
    temp_buffers: Any,
    old_physical_to_logical_map: Any,
    new_physical_to_logical_map: Any,
    num_local_physical_experts: int,
    num_gpu_per_node: int,
    rank: int,
    world_size: int | None = None,
    missing_logical_experts_info: Any = None,
    debug: bool = False,
    log_metrics: bool = False,
) -> Any:
    return "SGLang's own"


def create_temp_buffers(sample_tensors: Any) -> Any:
    return [torch.empty_like(tensor) for tensor in sample_tensors]


# ---- locations of experts, and their layers ------------------------------------------------


@dataclasses.dataclass
class ExpertLocationMetadata:
    physical_to_logical_map_cpu: Tensor
    ep_size: int
    num_logical_experts: int

    @property
    def num_layers(self) -> int:
        return len(self.physical_to_logical_map_cpu)

    @property
    def num_local_physical_experts(self) -> int:
        return self.physical_to_logical_map_cpu.shape[1] // self.ep_size

    @staticmethod
    def init_by_mapping(
        model_config: Any, physical_to_logical_map: Any, moe_ep_rank: int | None = None
    ) -> Any:
        maps = torch.as_tensor(physical_to_logical_map)
        return ExpertLocationMetadata(maps, get_moe_ep_group().world_size, model_config.experts)


def compute_initial_expert_location_metadata(model_config: Any, moe_ep_rank: int) -> Any:
    rows = torch.arange(model_config.experts + get_exec().moe.ep_num_redundant_experts)
    maps = (rows % model_config.experts).repeat(model_config.layers, 1)
    return ExpertLocationMetadata.init_by_mapping(model_config, maps, moe_ep_rank)


def get_global_expert_location_metadata() -> Any:
    return STATE.locations


def prepare_moe_topk(*, model: Any, model_config: Any) -> None:
    STATE.prepared += 1


def count_graphs(graph: Any, _: Any) -> Any:
    STATE.graphs += 1
    return graph.forward


def topk_ids_logical_to_physical(topk_ids: Any, info: Any, log2phy_prob: Any = None) -> Any:
    return topk_ids


def _post_process_topk_ids(
    topk_ids: Any,
    topk_weights: Any,
    topk_config: Any,
    router_logits: Any,
    layer_id: int,
    num_token_non_padded: Any = None,
    expert_location_dispatch_info: Any = None,
    padded_rows_masked: bool = False,
) -> Any:
    module = sys.modules[f"{SRT}.eplb.expert_location_dispatch"]
    function = module.topk_ids_logical_to_physical

    def map_ids(ids: Any, info: Any) -> Any:
        return function(ids, info)

    if padded_rows_masked:  # on GPUs SGLang compiles what is around the call
        map_ids = torch.compile(map_ids, dynamic=True, backend=count_graphs)
    ids = map_ids(topk_ids, expert_location_dispatch_info)
    if num_token_non_padded is not None:
        ids[num_token_non_padded:] = -1
    return ids, topk_weights, ids


class FusedMoE(torch.nn.Module):
    """L rows of experts with two matrices and a scale each, of float32."""

    def __init__(
        self, num_experts: int, hidden_size: int, intermediate_size: int, layer_id: int
    ) -> None:
        super().__init__()
        rows = num_experts // get_moe_ep_group().world_size
        self.layer_id, self.num_local_experts = layer_id, rows
        self.uses_expert_location, self.num_fused_shared_experts = True, 0
        for name, shape in (
            ("w13_weight", (intermediate_size, hidden_size)),
            ("w2_weight", (hidden_size, intermediate_size)),
            ("scale", ()),
        ):
            weight = torch.full((rows, *shape), torch.nan)
            self.register_parameter(name, torch.nn.Parameter(weight, requires_grad=False))

    def load(self, whole: dict[str, Tensor], rank: int) -> None:
        """Load every row of this rank, as SGLang's weight loader does: slots too."""
        row = STATE.locations.physical_to_logical_map_cpu[self.layer_id]
        own = row.view(-1, self.num_local_experts)[rank]
        for name, weight in whole.items():
            getattr(self, name).data.copy_(weight[own])

    def forward(self, x: Tensor, weights: Tensor, ids: Tensor, group: Any) -> Tensor:
        y: Tensor = self.run_moe_core(SimpleNamespace(hidden_states=x, topk_output=(weights, ids)))
        dist.all_reduce(y, group=group)
        return y

    def run_moe_core(self, dispatch_output: Any) -> Any:
        x, (weights, ids) = dispatch_output.hidden_states, dispatch_output.topk_output
        y, STATE.computed = torch.zeros_like(x), 0
        for row in range(self.num_local_experts):
            at, k = (
                ids == get_moe_ep_group().rank_in_group * self.num_local_experts + row
            ).nonzero(as_tuple=True)
            STATE.computed += len(at)
            hidden = torch.tanh(x[at] @ self.w13_weight[row].T) @ self.w2_weight[row].T
            y.index_add_(0, at, hidden * (self.scale[row] * weights[at, k])[:, None])
        return y


def is_moe_input_scattered_across_dp_ranks() -> bool:
    return bool(get_exec().moe.moe_a2a_backend != "none")


def get_exec() -> Any:
    return STATE.config


def get_moe_ep_group() -> Any:
    return STATE.ranks


STATE = SimpleNamespace()
MODULES: dict[str, tuple[Any, ...]] = {
    f"{SRT}.plugins.hook_registry": (HookRegistry, HookType),
    f"{SRT}.eplb.expert_location_updater": (
        update_expert_weights_single_layer,
        create_temp_buffers,
    ),
    f"{SRT}.elastic_ep.elastic_ep": (ElasticEPStateManager,),
    f"{SRT}.eplb.expert_location": (
        ExpertLocationMetadata,
        compute_initial_expert_location_metadata,
        get_global_expert_location_metadata,
    ),
    f"{SRT}.eplb.expert_location_dispatch": (topk_ids_logical_to_physical,),
    f"{SRT}.model_executor.model_runner_components.moe_ep_setup": (prepare_moe_topk,),
    f"{SRT}.layers.moe.topk": (_post_process_topk_ids,),
    f"{SRT}.layers.moe.fused_moe_triton.layer": (FusedMoE,),
    f"{SRT}.layers.moe.utils": (is_moe_input_scattered_across_dp_ranks,),
    f"{SRT}.runtime_context": (get_exec,),
    f"{SRT}.distributed.parallel_state": (get_moe_ep_group,),
}
OWN = ("__init__", "forward", "load", "apply_hooks")  # methods of the fakes that no adapter meets


@contextlib.contextmanager
def faked(
    mode: str, group: Any = None, redundant: int = 0, **changed: Callable[..., Any]
) -> Iterator[Callable[[str], Any]]:
    """Put the modules in place of SGLang's; return a module by its path below ``sglang.srt``."""
    size, rank = (group.size(), group.rank()) if group is not None else (1, 0)
    graph = {p: SimpleNamespace(backend="disabled") for p in ("decode", "prefill")}
    STATE.prepared = STATE.computed = STATE.graphs = 0
    STATE.ranks = SimpleNamespace(
        world_size=size, rank_in_group=rank, cpu_group=group, device_group=group
    )
    STATE.config = SimpleNamespace(
        moe=SimpleNamespace(
            moe_a2a_backend="none",
            enable_eplb=False,
            ep_dispatch_algorithm="dynamic",
            init_expert_location="trivial",
            ep_num_redundant_experts=redundant,
        ),
        overlap=SimpleNamespace(enable_two_batch_overlap=False),
        graph=SimpleNamespace(cuda_graph_config=SimpleNamespace(**graph)),
    )
    with (
        mock.patch.dict(os.environ, ULTRAEP_SGLANG=mode),
        fakes.installed("0.5.23", MODULES, changed),
        mock.patch.object(HookRegistry, "hooks", []),
        mock.patch.object(FusedMoE, "run_moe_core", FusedMoE.run_moe_core),  # hooks change it
    ):
        yield lambda name: sys.modules[f"{SRT}.{name}"]


def differences() -> list[str]:
    """Return where the installed release differs: names, parameters, settings."""
    return fakes.differences(MODULES, OWN, exact=False) + _missing_settings()


SETTINGS = {
    "ExecMoe": "moe_a2a_backend enable_eplb ep_dispatch_algorithm init_expert_location"
    " ep_num_redundant_experts",
    "ExecOverlap": "enable_two_batch_overlap",
    "ExecGraph": "cuda_graph_config",
}


def _missing_settings() -> list[str]:
    fields = importlib.import_module(f"{SRT}.arg_groups.fields.exec_")
    layer = importlib.import_module(f"{SRT}.layers.moe.fused_moe_triton.layer").FusedMoE
    found = [
        f"{kind} has no {name}"
        for kind, names in SETTINGS.items()
        for name in names.split()
        if name not in getattr(getattr(fields, kind, None), "__annotations__", ())
    ]
    source = inspect.getsource(layer.__init__)
    names = ("layer_id", "uses_expert_location", "num_local_experts", "num_fused_shared_experts")
    return found + [f"FusedMoE has no {n}" for n in names if f"self.{n} = " not in source]
