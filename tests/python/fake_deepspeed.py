"""The part of DeepSpeed that its adapter meets, written anew, for where that is not installed.

The layer exchanges tokens as the real one does: counts, then rows to the ranks of their experts,
whose experts compute them with rows behind them that nobody uses.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import fakes
import torch
from token_exchange import Mesh, send

from ultraep_comm.adapters import deepspeed

Tensor = torch.Tensor

VERSION = "0.19.8"
SPARE = 3


def count_tokens_per_expert(selected_experts_indices: Tensor, num_experts: int) -> Tensor:
    ids = selected_experts_indices.flatten()
    counts = torch.zeros(num_experts, dtype=torch.int32, device=ids.device)
    return counts.scatter_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))


class TokenChoiceTopKRouter(torch.nn.Module):
    def __init__(self, dim: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(dim, num_experts, bias=False)
        self.num_experts, self.top_k = num_experts, top_k

    def forward(self, x: Tensor, expert_bias: Tensor | None = None) -> Any:
        scores = self.gate(x).softmax(1)
        ids = (scores if expert_bias is None else scores + expert_bias).topk(self.top_k).indices
        return scores.gather(1, ids), ids, count_tokens_per_expert(ids, self.num_experts)


class GroupedExperts(torch.nn.Module):
    def __init__(self, w1: Tensor, w2: Tensor, w3: Tensor) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = (torch.nn.Parameter(w) for w in (w1, w2, w3))

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        counts = num_tokens_per_expert.tolist()
        assert len(counts) == len(self.w1) == len(self.w2) == len(self.w3)
        *parts, spare = x.split([*counts, len(x) - sum(counts)])
        each = zip(parts, self.w1, self.w2, self.w3, strict=True)
        out = [(torch.tanh(part @ w1.T) * (part @ w3.T)) @ w2.T for part, w1, w2, w3 in each]
        return torch.cat([*out, torch.full_like(spare, float("nan"))])


class AutoEPMoELayer(torch.nn.Module):
    """With the attributes that the adapter reads; made otherwise than the real one."""

    def __init__(
        self, gate: Tensor, experts: dict[str, Tensor], top_k: int, ep_group: Any = None
    ) -> None:
        super().__init__()
        self.ep_group, self.ep_size = ep_group, 1 if ep_group is None else ep_group.size()
        self.num_experts, self.top_k = len(gate), top_k
        self.num_local_experts = self.num_experts // self.ep_size
        self.router = TokenChoiceTopKRouter(gate.shape[1], self.num_experts, top_k)
        self.router.gate.weight.data.copy_(gate)
        self.experts = GroupedExperts(**experts)
        self.shared_experts = torch.nn.Identity()
        self.expert_bias = None
        self.register_buffer("tokens_per_expert", torch.zeros(len(gate)), persistent=False)
        self.comm_backend, self.async_split_plan = "comm", False
        self.folding_group_handles = None

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self._forward(hidden_states)

    def _forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        scores, ids, counts = self.router(x, self.expert_bias)
        with torch.no_grad():
            self.tokens_per_expert.add_(counts)
        sent = send(x, ids, self.num_experts, Mesh(self.ep_group))
        assert torch.equal(counts, torch.bincount(ids.flatten(), minlength=self.num_experts))
        assert len(sent.counts) == self.num_local_experts
        by_expert = sent.local.argsort(stable=True)
        rows = torch.cat([sent.rows[by_expert], x.new_zeros(SPARE, x.shape[1])])
        out = self.experts(rows, sent.counts)[:-SPARE][by_expert.argsort()]
        out = sent.give_back(out, self.top_k) * scores[..., None]
        output = out.sum(1).view_as(hidden_states)
        return self._finalize_output(output, x, hidden_states, x.shape[1])

    def _finalize_output(
        self, output: Tensor, x: Tensor, hidden_states: Tensor, hdim: int
    ) -> Tensor:
        assert x.shape[1] == hdim
        return output + self.shared_experts(hidden_states)


class DeepSpeedEngine(torch.nn.Module):
    def __init__(self, module: torch.nn.Module, group: Any = None, stage: int = 1) -> None:
        super().__init__()
        self.module, self.data_parallel_group, self._stage = module, group, stage
        self.mp_world_size = self.sequence_parallel_size = 1

    def zero_optimization_stage(self) -> int:
        return self._stage


class PipelineEngine(DeepSpeedEngine):
    pass


MODULES: dict[str, list[Any]] = {
    "deepspeed.module_inject.auto_ep_layer": [AutoEPMoELayer],
    "deepspeed.moe.ep_experts": [GroupedExperts],
    "deepspeed.moe.ep_router": [TokenChoiceTopKRouter],
    "deepspeed.moe.ep_count": [count_tokens_per_expert],
    "deepspeed.runtime.engine": [DeepSpeedEngine],
    "deepspeed.runtime.pipe.engine": [PipelineEngine],
}
# What the adapter reads of an instance: not to be found by a signature.
READ = {
    AutoEPMoELayer: [
        *("ep_group", "num_experts", "num_local_experts", "expert_bias", "tokens_per_expert"),
        *("comm_backend", "async_split_plan", "folding_group_handles"),
    ],
    GroupedExperts: ["w1", "w2", "w3"],
    DeepSpeedEngine: ["module", "data_parallel_group", "mp_world_size", "sequence_parallel_size"],
}


def adapter(**others: Any) -> Any:
    """Return the adapter, for which imports of DeepSpeed find the stand-in."""
    return fakes.installed(VERSION, MODULES, others, deepspeed)


def differences() -> list[str]:
    """Return where the installed release differs: parameters and attributes."""
    found = fakes.differences(MODULES, ["__init__"])
    for fake, names in READ.items():
        path = next(path for path, members in MODULES.items() if fake in members)
        source = inspect.getsource(getattr(importlib.import_module(path), fake.__name__))
        missing = [n for n in names if f"self.{n} =" not in source and f'"{n}"' not in source]
        found += [f"{path}:{fake.__name__} sets no {name}" for name in missing]
    return found
