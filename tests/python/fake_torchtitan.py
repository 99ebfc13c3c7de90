"""The part of torchtitan that its adapter uses, written anew, for where that is not installed.

The fake exchanges tokens as the real dispatcher promises to: a rank gets the rows for its experts,
by expert, with their number, and the combination takes the outputs back.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from typing import Any

import torch
from fakes import differences_at, installed
from token_exchange import Mesh, send

VERSION = "0.3.0"
ADAPTER = "ultraep_comm.adapters.torchtitan"


class ParallelDims:
    def __init__(self, group: Any = None) -> None:
        self._group = group

    def get_optional_mesh(self, dims: str) -> Mesh | None:
        assert dims == "ep"
        return None if self._group is None else Mesh(self._group)


class AllToAllTokenDispatcher:
    """Tokens to the ranks of their experts; the computation is here without a mesh too."""

    def __init__(self, num_experts: int, spare_rows: int = 0) -> None:
        self.num_experts = num_experts
        self.ep_mesh: Any = None
        self._spare = spare_rows

    def wire_meshes(self, *, ep_mesh: Any) -> None:
        self.ep_mesh = ep_mesh
        self.experts_at_wiring = self.num_experts

    def dispatch(
        self,
        x_TD: Any,
        topk_scores_TK: Any,
        topk_expert_ids_TK: Any,
        num_local_tokens_per_expert_E: Any,
    ) -> Any:
        ids, counts = topk_expert_ids_TK, num_local_tokens_per_expert_E
        assert torch.equal(counts, torch.bincount(ids.flatten(), minlength=self.num_experts))
        sent = send(x_TD, ids, self.num_experts, self.ep_mesh or Mesh())
        by_expert = sent.local.argsort(stable=True)
        spare = x_TD.new_full((self._spare, x_TD.shape[1]), 7.0)
        return (
            torch.cat([sent.rows[by_expert], spare]),
            sent.counts,
            (sent, by_expert, topk_scores_TK),
        )

    def combine(self, routed_output_RD: Any, metadata: Any, x_TD: Any) -> Any:
        sent, by_expert, scale = metadata
        rows = routed_output_RD[: len(by_expert)][by_expert.argsort()]
        return (sent.give_back(rows, scale.shape[1]) * scale[..., None]).sum(1)


class GroupedExperts(torch.nn.Module):
    """A rank's experts: two matrices and a bias each."""

    def __init__(self, **weights: torch.Tensor) -> None:
        super().__init__()
        for name, value in weights.items():
            self.register_parameter(name, torch.nn.Parameter(value))

    def forward(self, x_RD: Any, num_tokens_per_expert_E: Any) -> Any:
        counts = num_tokens_per_expert_E.tolist()
        assert len(counts) == len(self.w1)
        parts = x_RD.split([*counts, len(x_RD) - sum(counts)])
        out = [
            torch.tanh(part @ w1.T + bias) @ w2.T
            for part, w1, w2, bias in zip(parts, self.w1, self.w2, self.bias, strict=False)
        ]
        return torch.cat([*out, torch.full_like(parts[-1], float("nan"))])


class RoutedExperts(torch.nn.Module):
    @dataclass(kw_only=True)
    class Config:
        inner_experts: Any
        token_dispatcher: Any

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.inner_experts = config.inner_experts
        self.token_dispatcher = config.token_dispatcher

    def forward(
        self,
        x_BLD: Any,
        topk_scores_BLK: Any,
        topk_expert_ids_BLK: Any,
        num_local_tokens_per_expert_E: Any,
    ) -> Any:
        x, scores, ids = (t.flatten(0, 1) for t in (x_BLD, topk_scores_BLK, topk_expert_ids_BLK))
        rows, counts, metadata = self.token_dispatcher.dispatch(
            x, scores, ids, num_local_tokens_per_expert_E
        )
        out = self.token_dispatcher.combine(self.inner_experts(rows, counts), metadata, x)
        return out.view_as(x_BLD)

    def parallelize(self, parallel_dims: Any) -> None:
        self.token_dispatcher.wire_meshes(ep_mesh=parallel_dims.get_optional_mesh("ep"))


REGISTERED: dict[str, Any] = {}


def override(*, target: Any, fqns: Any = None, description: str = "", exact: bool = False) -> Any:
    def register(factory: Any) -> Any:
        REGISTERED[f"{factory.__module__}.{factory.__name__}"] = target
        return factory

    return register


def derive(source: Any, target_cls: Any, **deltas: Any) -> Any:
    shared = {f.name: getattr(source, f.name) for f in fields(source)}
    return target_cls(**shared | deltas)


def maybe_set_sparse_mesh() -> Any:
    return nullcontext()


def is_type_checking() -> bool:
    return False


HERE = {
    "torchtitan.config.override": (override, derive),
    "torchtitan.distributed.spmd_types": (maybe_set_sparse_mesh,),
    "torchtitan.distributed.parallel_dims": (ParallelDims,),
    "torchtitan.models.common.moe": (RoutedExperts, GroupedExperts),
    "torchtitan.models.common.token_dispatcher": (AllToAllTokenDispatcher,),
    "spmd_types": (is_type_checking,),
}


def adapter(**others: Any) -> AbstractContextManager[Any]:
    """Import the adapter on top of the fake, in which ``others`` replace what has their names."""
    return installed(VERSION, HERE, others, ADAPTER)


def differences() -> list[str]:
    """Return where the installed torchtitan differs.

    Raises:
        ImportError: torchtitan is not installed.
    """
    with adapter() as api:
        points = api.PATCH_POINTS
    importlib.import_module("torchtitan")
    return differences_at(points)
