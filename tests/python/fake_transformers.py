"""The part of transformers that its adapter uses, written anew, for where that is not installed.

The fake exchanges tokens as the real one promises to: an implementation's dispatch brings a rank
the rows for its experts with local ids, and the combination takes the outputs back.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, ClassVar

import fakes
import torch
import torch.distributed as dist
from token_exchange import send

VERSION = "5.23.0"
PATH = "transformers.distributed.expert_parallel"
CONFIG = "transformers.distributed.configuration_utils"
ADAPTER = "ultraep_comm.adapters.transformers"


class EPImplementation:
    def __init__(self, experts: Any, ep_mesh: Any, tp_mesh: Any) -> None:
        self.experts_forward = experts.forward
        self.num_local_experts = experts.num_experts
        self.ep_mesh = ep_mesh
        self.tp_mesh = tp_mesh

    def __call__(self, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
        raise NotImplementedError


class AllToAllEP(EPImplementation):
    def __call__(self, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
        *given, state = self._dispatch_tokens(hidden_states, top_k_index, top_k_weights)
        return self._combine_tokens(self.experts_forward(*given), state)

    def _dispatch_tokens(self, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
        num_tokens, parts = len(hidden_states), self.tp_mesh.size()
        if parts > 1 and torch.is_grad_enabled():
            raise NotImplementedError("the fake shares batches without gradients only")
        most = -(-num_tokens // parts)
        rows = slice(self.tp_mesh.get_local_rank() * most, None)
        rows = slice(rows.start, rows.start + most)
        x, ids, scale = hidden_states[rows], top_k_index[rows], top_k_weights[rows]
        sent = send(x, ids, self.num_local_experts * self.ep_mesh.size(), self.ep_mesh)
        ones = torch.ones(len(sent.rows), 1, dtype=x.dtype)
        return sent.rows, sent.local[:, None], ones, (sent, scale, rows, num_tokens)

    def _combine_tokens(self, expert_output: Any, state: Any) -> Any:
        sent, scale, rows, num_tokens = state
        output = (sent.give_back(expert_output, scale.shape[1]) * scale[..., None]).sum(1)
        if self.tp_mesh.size() == 1:
            return output
        whole = output.new_zeros(num_tokens, output.shape[1])
        whole[rows] = output
        dist.all_reduce(whole, group=self.tp_mesh.get_group())
        return whole


class EPImplementationInterface:
    known: ClassVar[dict[str, Any]] = {}

    @classmethod
    def register(cls, key: str, value: Any) -> None:
        cls.known[key] = value


class Experts(torch.nn.Module):
    """A rank's experts: two matrices and a bias each."""

    def __init__(self, **weights: torch.Tensor) -> None:
        super().__init__()
        for name, value in weights.items():
            self.register_parameter(name, torch.nn.Parameter(value))
        self.register_parameter("no_bias", None)
        self.num_experts = len(next(iter(weights.values())))

    def forward(self, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
        output = torch.zeros_like(hidden_states)
        for e in range(self.num_experts):
            token, k = (top_k_index == e).nonzero(as_tuple=True)
            if len(token):
                y = torch.tanh(hidden_states[token] @ self.w1[e].T + self.bias[e]) @ self.w2[e].T
                output = output.index_add(0, token, y * top_k_weights[token, k][:, None])
        return output


class DistributedConfig:
    """What a model is loaded with; the sizes that are not given are 1."""

    def __init__(self, ep_size: int | None = None, ep_implementation: str = "auto") -> None:
        self.ep_size, self.ep_implementation = ep_size, ep_implementation
        self.__post_init__()

    def __post_init__(self) -> None:
        self.ep_size = self.ep_size or 1


FAKES = (EPImplementation, AllToAllEP, EPImplementationInterface)


def adapter(**others: Any) -> AbstractContextManager[Any]:
    """Import the adapter on top of the fake, in which ``others`` replace what has their names."""
    return fakes.installed(VERSION, {PATH: FAKES, CONFIG: [DistributedConfig]}, others, ADAPTER)


def differences() -> list[str]:
    """Return how the fake's signatures differ from those of the installed transformers."""
    return fakes.differences({PATH: FAKES})
