"""What a plan costs, for users who would rather have the least time than a certain balance."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from ultraep_comm.errors import InvalidArgumentError
from ultraep_comm.planner import Costs

_BITS = Costs(per_token=22, per_transfer=40, per_replica=40)  # as `Objective` in core/planner.hpp


@dataclass(frozen=True, kw_only=True)
class PlanCost:
    """Seconds that a plan adds to a layer: pass the same values on every rank.

    A plan takes ``token`` times the tokens of its fullest rank, ``expert_byte`` times the bytes of
    as many experts as some rank exports or imports at most, and ``replica`` for every replica.

    Attributes:
        token: of one token in an expert (its grouped GEMMs, dispatch and combine).
        expert_byte: of one byte through a rank's link: one over the bandwidth. 0 where the transfer
            is hidden.
        replica: of one replica, for instance for the padding of its group.
        expert_bytes: bytes of one expert; None: those of the group.
    """

    token: float
    expert_byte: float
    replica: float = 0.0
    expert_bytes: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise InvalidArgumentError(
                    f"{field.name} is {value}; expected a finite number of at least 0"
                )

    def in_integers(self, group_bytes: int | None) -> Costs:
        """Return the costs in a common unit, as fine as the planner's integers allow.

        Raises:
            InvalidArgumentError: the bytes of an expert are not known, or nothing costs anything.
        """
        expert_bytes = self.expert_bytes if self.expert_bytes is not None else group_bytes
        if expert_bytes is None:
            raise InvalidArgumentError(
                "cost has no expert_bytes, and there is no group to take them from; expected one"
            )
        costs = (self.token, self.expert_byte * expert_bytes, self.replica)
        if not any(costs):
            raise InvalidArgumentError("cost is 0 for everything; expected something to minimise")
        finest = [
            bits - math.frexp(cost)[1] for cost, bits in zip(costs, _BITS, strict=True) if cost
        ]
        # The sum of a plan has to stay below 2**63: tokens below 2**40 give 2**62, the rest less.
        return Costs(*(int(math.ldexp(cost, min(finest))) for cost in costs))
