"""A small byte-level language model: attention and MoE layers, experts sharded over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from exchange import combine, dispatch, find_route
from experts import apply_experts
from placement import AtHome
from torch import nn
from torch.nn import functional

# (topk_ids, weights, grads, layer) -> placement of the experts for this pass
Place = Callable[[torch.Tensor, dict[str, torch.Tensor], dict[str, torch.Tensor], int], AtHome]

VOCABULARY = 256  # bytes


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The model's constants."""

    num_experts: int = 16
    topk: int = 2
    num_layers: int = 2
    hidden: int = 96
    inner: int = 192
    heads: int = 4
    context: int = 64

    def expert(self) -> dict[str, tuple[tuple[int, int], torch.dtype]]:
        """Return the tensors of one expert, as ``new_group`` takes them."""
        return {
            "w13": ((2 * self.inner, self.hidden), torch.float32),
            "w2": ((self.hidden, self.inner), torch.float32),
        }


@dataclass(kw_only=True)
class Trace:
    """Records of one forward pass, by MoE layer."""

    topk_ids: list[torch.Tensor] = field(default_factory=list)
    outputs: list[torch.Tensor] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)  # computed by this rank's experts
    buffer_bytes: int = 0  # the largest buffer of such rows


class MoELayer(nn.Module):
    """A router and this rank's experts."""

    def __init__(
        self, shape: Shape, layer: int, local_experts: Sequence[int], generator: torch.Generator
    ) -> None:
        super().__init__()
        self.layer, self.topk = layer, shape.topk
        self.router = _matrix(shape.num_experts, shape.hidden, generator)
        # Every rank draws all experts and keeps its own: the model is the same for any num_ranks.
        drawn = [
            {name: _matrix(*size, generator) for name, (size, _) in shape.expert().items()}
            for _ in range(shape.num_experts)
        ]
        self.experts = nn.ParameterDict(
            {
                name: torch.stack([drawn[e][name].data for e in local_experts])
                for name in shape.expert()
            }
        )
        for weights in self.experts.values():
            weights.grad = torch.zeros_like(weights)

    def forward(
        self, tokens: torch.Tensor, place: Place, trace: Trace, topk_ids: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the layer's results ``[T, H]``; ``topk_ids`` overrides the router's choice."""
        logits = tokens @ self.router.T
        if topk_ids is None:
            topk_ids = logits.topk(self.topk, dim=1).indices
        probs = logits.gather(1, topk_ids).softmax(dim=1)

        weights = {name: w.detach() for name, w in self.experts.items()}
        grads = {name: w.grad for name, w in self.experts.items()}
        placement = place(topk_ids, weights, grads, self.layer)
        route = find_route(placement.physical_ids, placement.instances_per_rank)
        rows = dispatch(placement.before_dispatch(tokens), route)
        rows = placement.before_experts(rows)
        rows = placement.after_experts(apply_experts(rows, route.counts, placement.instances))
        result = placement.after_combine(combine(rows, probs, route))

        trace.topk_ids.append(topk_ids)
        trace.outputs.append(result.detach())
        trace.rows.append(route.num_rows)
        trace.buffer_bytes = max(trace.buffer_bytes, rows.nbytes)
        return result


class Attention(nn.Module):
    """Causal self-attention; without biases, whose gradients may be nothing but rounding."""

    def __init__(self, shape: Shape, generator: torch.Generator) -> None:
        super().__init__()
        self.heads, self.context = shape.heads, shape.context
        self.qkv = _matrix(3 * shape.hidden, shape.hidden, generator)
        self.out = _matrix(shape.hidden, shape.hidden, generator)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return ``[T, H]`` for tokens ``[T, H]``, T a multiple of the context."""
        split = (tokens @ self.qkv.T).view(
            -1, self.context, 3, self.heads, tokens.shape[1] // self.heads
        )
        q, k, v = split.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return mixed.transpose(1, 2).reshape(tokens.shape) @ self.out.T


class Model(nn.Module):
    """Maps bytes to logits of the next byte."""

    def __init__(self, shape: Shape, local_experts: Sequence[int], seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.shape = shape
        self.embedding = _matrix(VOCABULARY, shape.hidden, generator)
        self.positions = _matrix(shape.context, shape.hidden, generator)
        self.attention = nn.ModuleList(Attention(shape, generator) for _ in range(shape.num_layers))
        self.moe = nn.ModuleList(
            MoELayer(shape, layer, local_experts, generator) for layer in range(shape.num_layers)
        )
        self.head = _matrix(VOCABULARY, shape.hidden, generator)

    def embed(self, text: torch.Tensor) -> torch.Tensor:
        """Return ``[B * L, H]`` for bytes ``[B, L]``."""
        return (self.embedding[text] + self.positions).flatten(0, 1)

    def forward(
        self,
        tokens: torch.Tensor,
        place: Place,
        trace: Trace,
        routing: Sequence[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Return logits ``[T, 256]``; ``routing``: expert ids by layer; None: from the router."""
        for i, (attention, moe) in enumerate(zip(self.attention, self.moe, strict=True)):
            tokens = tokens + attention(_norm(tokens))
            ids = None if routing is None else routing[i]
            tokens = tokens + moe(_norm(tokens), place, trace, ids)
        return _norm(tokens) @ self.head.T


def _norm(tokens: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(tokens, tokens.shape[-1:])


def _matrix(rows: int, columns: int, generator: torch.Generator) -> nn.Parameter:
    return nn.Parameter(torch.randn(rows, columns, generator=generator) / columns**0.5)
