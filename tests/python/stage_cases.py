"""Random groups on a device, with loads and routings."""

from __future__ import annotations

from typing import Any

import torch

import ultraep_comm as uec

EXPERT = {"w": ((4,), torch.uint8)}
FIELDS = ("slot_expert", "slot_quota", "home_quota", "home", "load", "domains")


class Case:
    """A loopback group, its loads and routings."""

    def __init__(self, seed: int, **options: Any) -> None:
        self.draw = torch.Generator().manual_seed(seed)
        self.num_ranks = options.pop("num_ranks", None) or self.number(1, 5)
        self.num_experts = options.pop("num_experts", None) or self.number(self.num_ranks, 12)
        self.slots = options.pop("slots", None) or self.number(0, min(3, self.num_experts))
        home = None
        if seed % 3 == 1:
            home = torch.randint(self.num_ranks, (self.num_experts,), generator=self.draw).tolist()
        options = {
            "home": home,
            "domains": [r // 2 for r in range(self.num_ranks)] if seed % 4 == 3 else None,
            "allow_cross_domain": seed % 8 == 3,
            **options,
        }
        self.groups = uec.testing.new_loopback_groups(
            self.num_ranks,
            num_experts=self.num_experts,
            slots_per_rank=self.slots,
            expert=EXPERT,
            engine="cuda",
            num_sms=1,
            timeout=60.0,
            **options,
        )
        self.group = self.groups[seed % self.num_ranks]
        self.rank = self.group.rank

    def number(self, low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=self.draw))

    def load(self, most: int = 9) -> torch.Tensor:
        shape = (self.num_ranks, self.num_experts)
        drawn = torch.randint(most + 1, shape, generator=self.draw, dtype=torch.int32)
        hot = self.number(0, self.num_experts - 1)
        drawn[:, hot] *= 3
        return drawn * (torch.rand(shape, generator=self.draw) < 0.8)

    def ids(self, load: torch.Tensor, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """Return the ids that this source's row counts, shuffled and padded."""
        row = load[self.rank].long()
        ids = torch.repeat_interleave(torch.arange(self.num_experts), row)
        ids = torch.cat([ids, ids.new_full((self.number(0, 3),), -1)])
        return ids[torch.randperm(len(ids), generator=self.draw)].to(dtype).view(-1, 1)

    def map(self, load: torch.Tensor) -> torch.Tensor:
        row = load[self.rank]
        num_tokens = int(row.max()) + self.number(0, 3)
        result = torch.zeros(num_tokens, self.num_experts, dtype=torch.bool)
        for expert, count in enumerate(row.tolist()):
            result[torch.randperm(num_tokens, generator=self.draw)[:count], expert] = True
        return result

    def close(self) -> None:
        for group in self.groups:
            group.close()


def assert_same(found: uec.Plan, expected: uec.Plan) -> None:
    for name in FIELDS:
        a, b = getattr(found, name), getattr(expected, name)
        assert (a is None) == (b is None), name
        assert a is None or (a.dtype == b.dtype and torch.equal(a.cpu(), b)), name
