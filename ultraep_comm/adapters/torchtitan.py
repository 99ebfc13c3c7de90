"""torchtitan: replicas in MoE training with expert parallelism, by its own override mechanism::

    --override.imports ultraep_comm.adapters.torchtitan.replicate
    --override.imports 'ultraep_comm.adapters.torchtitan.replicate={"slots_per_rank": 2}'

Tokens travel by the model's own dispatcher, to instances instead of experts, and its own grouped
experts compute them, on main weights and on slots. Main weights are never copied, and parameters,
checkpoints and optimizers do not see replicas.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import spmd_types
import torch
from torch import nn
from torchtitan.config.override import derive, override
from torchtitan.distributed.spmd_types import maybe_set_sparse_mesh
from torchtitan.models.common.moe import RoutedExperts

import ultraep_comm as uec
from ultraep_comm.adapters import checks
from ultraep_comm.adapters.options import calls_of, check_options
from ultraep_comm.errors import UnsupportedError
from ultraep_comm.nn import Replication
from ultraep_comm.nn.traced import breaks_graph

Tensor = torch.Tensor

_SETTING = "expert_parallel_degree above 1"
_REMEDY = "train this model without the override ultraep_comm.adapters.torchtitan.replicate"
_MOE = "torchtitan.models.common.moe"
_DISPATCHER = "torchtitan.models.common.token_dispatcher:AllToAllTokenDispatcher"
_INPUTS = "x_BLD topk_scores_BLK topk_expert_ids_BLK num_local_tokens_per_expert_E"
# What is called or overridden here, and the parameters with which it was tried.
PATCH_POINTS = {
    "torchtitan.config.override:override": "target fqns description exact",
    "torchtitan.config.override:derive": "source target_cls deltas",
    "torchtitan.distributed.spmd_types:maybe_set_sparse_mesh": "",
    "torchtitan.distributed.parallel_dims:ParallelDims.get_optional_mesh": "self dims",
    f"{_MOE}:RoutedExperts.__init__": "self config",
    f"{_MOE}:RoutedExperts.forward": f"self {_INPUTS}",
    f"{_MOE}:RoutedExperts.parallelize": "self parallel_dims",
    f"{_MOE}:GroupedExperts.forward": "self x_RD num_tokens_per_expert_E",
    f"{_DISPATCHER}.wire_meshes": "self ep_mesh",
    f"{_DISPATCHER}.dispatch": f"self {_INPUTS.replace('BL', 'T')}",
    f"{_DISPATCHER}.combine": "self routed_output_RD metadata x_TD",
}


class ReplicatedRoutedExperts(RoutedExperts):
    """Routed experts: local ones, and replicas made for each microbatch. Calls are collective.

    Attributes:
        plan: of the last microbatch; None: there was none.
        group: shared by layers whose experts have the same shape; None before the first
            microbatch, and with one expert-parallel rank, which needs no replicas.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        """As of :func:`replicate`."""

        options: dict[str, Any] = field(default_factory=dict)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._options = config.options
        self._num_local_experts = 0
        self._is_alone: bool | None = None
        self._calls: Replication | None = None
        self.plan: uec.Plan | None = None

    @property
    def group(self) -> uec.Group | None:
        """Return the group."""
        return None if self._calls is None else self._calls.group

    def parallelize(self, parallel_dims: Any) -> None:
        """Set up the dispatcher for instances, and check the experts.

        Raises:
            UnsupportedError: something in the experts would not travel with a replica.
        """
        mesh = parallel_dims.get_optional_mesh("ep")
        if mesh is not None:
            # Before the dispatcher creates its buffers: it sees a model of this many experts.
            self._num_local_experts = self.token_dispatcher.num_experts // mesh.size()
            self.token_dispatcher.num_experts += mesh.size() * self._options["slots_per_rank"]
        super().parallelize(parallel_dims)
        if mesh is not None:
            checks.check_experts(self.inner_experts, self._num_local_experts, _REMEDY)

    @breaks_graph
    def forward(
        self,
        x_BLD: Tensor,
        topk_scores_BLK: Tensor,
        topk_expert_ids_BLK: Tensor,
        num_local_tokens_per_expert_E: Tensor,
    ) -> Tensor:
        """Return the weighted sum of the experts' outputs for each token.

        Shapes are in the names: ``[B, L, D]`` of this rank's tokens, and K logical ids for each.
        """
        dispatcher = self.token_dispatcher
        if self._is_alone is None:
            mesh = getattr(dispatcher, "ep_mesh", None)
            self._is_alone = checks.is_alone(mesh and mesh.get_group(), "torchtitan", _SETTING)
        if self._is_alone:
            output: Tensor = super().forward(
                x_BLD, topk_scores_BLK, topk_expert_ids_BLK, num_local_tokens_per_expert_E
            )
            return output
        if self._calls is None and spmd_types.is_type_checking():
            raise UnsupportedError(
                "plans have no SPMD types; expected debug.spmd_typechecking=False with replicas"
            )
        self._calls, weights = calls_of(
            self._calls,
            dispatcher.ep_mesh.get_group(),
            self.inner_experts,
            self._num_local_experts,
            _REMEDY,
            self._options,
        )
        run = self._calls.begin(weights, topk_expert_ids_BLK.flatten(0, 1))
        self.plan, ids = run.plan, run.topk_ids
        assert ids is not None
        counts = ids.new_zeros(dispatcher.num_experts)
        counts.scatter_add_(0, ids.flatten(), torch.ones_like(ids).flatten())
        x = run.before_dispatch(x_BLD.flatten(0, 1))
        rows, counts, metadata = dispatcher.dispatch(x, topk_scores_BLK.flatten(0, 1), ids, counts)
        rows, weights, slots = run.before_experts(rows)
        with maybe_set_sparse_mesh():
            rows = checks.run_grouped(self.inner_experts, rows, counts, weights, slots)
        out = dispatcher.combine(run.after_experts(rows), metadata, x)
        return run.after_combine(out).view(len(x_BLD), -1, x_BLD.shape[-1])


def replicate(config: Any, *, slots_per_rank: int = 2, live: int = 1, **options: Any) -> Any:
    """Return the configuration of experts with replicas. torchtitan calls it for each MoE layer.

    Args:
        config: of ``RoutedExperts``.
        slots_per_rank, live, options: as for :func:`ultraep_comm.adapters.options.open_layer`.

    Raises:
        InvalidArgumentError: another option.
        UnsupportedError: the configuration is of another class, whose forward pass is not known.
    """
    check_options("replicate", options, "slots_per_rank", "live")
    if type(config) is not RoutedExperts.Config:
        raise UnsupportedError(
            f"experts of {type(config).__qualname__} cannot be replicated; expected"
            " RoutedExperts.Config, of which only inner_experts and token_dispatcher differ"
        )
    options |= {"slots_per_rank": slots_per_rank, "live": live}
    return derive(config, ReplicatedRoutedExperts.Config, options=options)


override(target=RoutedExperts.Config, description="replicas by ultraep_comm")(replicate)


def layers(model: nn.Module) -> dict[str, ReplicatedRoutedExperts]:
    """Return a model's experts that are replicated, by the name of their module."""
    found = model.named_modules()
    return {name: layer for name, layer in found if isinstance(layer, ReplicatedRoutedExperts)}


checks.check_signatures("torchtitan", "0.3", PATCH_POINTS)
