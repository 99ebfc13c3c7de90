"""MoonEP's own planning cases: 18 in its tests, for 2, 4 and 8 ranks, written anew.

Each rank has S tokens with K experts each, and `per_rank` experts are at home on every rank, so all
ranks are level at S K tokens. Routings: "balanced" goes round all ranks and, within a rank, round a
permutation of its experts; "biased" draws different experts in proportion to e^x, x normal with
deviation `bias` and seeded by `seed`, a rank's draws by the rank; "local" and "remote" go round the
experts of the token's own or of the next rank; "repeated" sends all K to the first expert of the
next rank; "single" sends everything to expert 0. 51 combinations apply. The draws are those of
torch's CPU generator, where the original uses a GPU's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

RANKS = (2, 4, 8)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One case; see the module."""

    name: str
    tokens: int
    topk: int
    per_rank: int
    routing: str = "balanced"
    bias: float = 0.0
    seed: int = 42
    least_ranks: int = 2
    most_ranks: int = max(RANKS)

    def applies(self, num_ranks: int) -> bool:
        """Return whether the case is for this number of ranks."""
        return self.least_ranks <= num_ranks <= self.most_ranks

    def load(self, num_ranks: int) -> NDArray[np.int64]:
        """Return the load ``[E]`` of all ranks."""
        num_experts = num_ranks * self.per_rank
        load = np.zeros(num_experts, np.int64)
        for rank in range(num_ranks):
            load += np.bincount(self._route(rank, num_ranks).ravel(), minlength=num_experts)
        return load

    def _route(self, rank: int, num_ranks: int) -> NDArray[np.int64]:
        token, choice = np.arange(self.tokens)[:, None], np.arange(self.topk)
        after = (rank + 1) % num_ranks * self.per_rank
        around: NDArray[np.int64] = (token + choice) % self.per_rank
        if self.routing == "local":
            return rank * self.per_rank + around
        if self.routing == "remote":
            return after + around
        if self.routing in ("repeated", "single"):
            only = after if self.routing == "repeated" else 0
            return np.full((self.tokens, self.topk), only)
        of_rank = torch.Generator().manual_seed(rank)
        if self.routing == "balanced":
            order = torch.randperm(self.per_rank, generator=of_rank).numpy()
            to = (token + choice) % num_ranks
            index = (token // num_ranks + choice) % self.per_rank
            routed: NDArray[np.int64] = to * self.per_rank + order[index]
            return routed
        shared = torch.Generator().manual_seed(self.seed)
        popularity = torch.normal(0.0, self.bias, (num_ranks * self.per_rank,), generator=shared)
        weights = popularity.exp().expand(self.tokens, -1)
        drawn: NDArray[np.int64] = torch.multinomial(weights, self.topk, generator=of_rank).numpy()
        return drawn


def _biased(name: str, tokens: int, topk: int, per_rank: int, bias: float, seed: int) -> Case:
    return Case(
        name=name,
        tokens=tokens,
        topk=topk,
        per_rank=per_rank,
        routing="biased",
        bias=bias,
        seed=seed,
    )


CASES = (
    Case(name="balanced_epn16", tokens=256, topk=8, per_rank=16),
    Case(name="tiny_s1_k1", tokens=1, topk=1, per_rank=1),
    _biased("tiny_biased_with_prefetch", 3, 5, 3, 1.0, 9002),
    _biased("no_padding", 33, 2, 2, 1.0, 10001),
    _biased("non_power_mild_bias", 17, 3, 3, 0.5, 10501),
    Case(name="small_balanced_with_prefetch", tokens=17, topk=3, per_rank=3, seed=11001),
    _biased("near_degenerate_bias", 64, 2, 5, 5.0, 12001),
    _biased("typical_bias", 32, 4, 4, 1.0, 13001),
    _biased("heavy_bias", 96, 3, 7, 2.0, 14001),
    Case(name="step1_cross_cta_group", tokens=1024, topk=1, per_rank=256),
    Case(name="step1_multi_chunk_full_tile", tokens=2048, topk=1, per_rank=320),
    Case(name="step1_segment_tail_full_tile", tokens=1536, topk=1, per_rank=320, least_ranks=4),
    Case(name="experts_gt_block_size", tokens=256, topk=1, per_rank=1025, most_ranks=2),
    Case(name="all_local", tokens=32, topk=4, per_rank=8, routing="local"),
    Case(name="all_remote_with_prefetch_slots", tokens=32, topk=4, per_rank=8, routing="remote"),
    Case(name="duplicate_topk", tokens=16, topk=4, per_rank=4, routing="repeated"),
    Case(name="single_expert_exact_padding", tokens=8, topk=2, per_rank=4, routing="single"),
    Case(name="single_expert_padding_tail", tokens=9, topk=2, per_rank=4, routing="single"),
)
"""All cases."""


def cases_of(num_ranks: int, num_experts: int) -> list[Case]:
    """Return the cases with this number of ranks and experts."""
    return [c for c in CASES if c.applies(num_ranks) and num_ranks * c.per_rank == num_experts]


def sizes_text() -> str:
    """Return the ranks and experts that have cases, in words."""
    per_rank = sorted({c.per_rank for c in CASES if all(map(c.applies, RANKS))})
    ranks = ", ".join(map(str, RANKS))
    return f"{ranks} ranks with {', '.join(map(str, per_rank))} experts each, as in 8/32/2"
