"""verify_plan: what a plan promises, checked and counted without either planner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch
from numpy.typing import NDArray

from ultraep_comm.errors import InvalidLoadError, InvalidPlanError
from ultraep_comm.plan.bounds import find_bottleneck, least_max_tokens
from ultraep_comm.plan.plan import Plan
from ultraep_comm.plan.topology import IntsLike

Int64Array = NDArray[np.int64]
_MAX_LOAD, _MAX_TOTAL = 2**31, 2**40  # tokens of an expert, and of all: less than this


@dataclass(frozen=True, kw_only=True)
class PlanCertificate:
    """What holds for a plan and its load; from :func:`verify_plan`. Every figure is exact.

    Attributes:
        rank_tokens: tokens of each rank, ``[G]``.
        bound_tokens: tokens of the fullest rank that no plan with as many slots falls below. A plan
            that reaches it is the most balanced; there may be none.
        num_replicas: filled slots.
        max_exports: k, the largest number of distinct replicated experts at home on a rank.
        max_imports: the largest number of filled slots of a rank.
        transfer_experts: T*, the time that no schedule of the plan beats, in experts over one link:
            times W / B, an expert's bytes over a link's rate, it is seconds.
        bottleneck: what T* comes from: "exports" or "imports" of one rank, the "set" of ranks that
            has to send most for its size, or "none" without replicas. The first that applies.
        bottleneck_ranks: every rank that exports or imports as much, or the set.
    """

    rank_tokens: tuple[int, ...]
    bound_tokens: int
    num_replicas: int
    max_exports: int
    max_imports: int
    transfer_experts: Fraction
    bottleneck: str
    bottleneck_ranks: tuple[int, ...]

    @property
    def total(self) -> int:
        """Return the tokens of all ranks."""
        return sum(self.rank_tokens)

    @property
    def max_tokens(self) -> int:
        """Return the tokens of the fullest rank."""
        return max(self.rank_tokens)

    @property
    def min_tokens(self) -> int:
        """Return the tokens of the emptiest rank."""
        return min(self.rank_tokens)

    @property
    def imbalance(self) -> Fraction:
        """Return the fullest rank's tokens over the mean."""
        return Fraction(self.max_tokens * len(self.rank_tokens), self.total)

    @property
    def is_exact(self) -> bool:
        """Return whether every rank has the mean, rounded down or up to whole tokens."""
        return self.max_tokens - self.min_tokens <= 1

    def fits(self, capacity: int) -> bool:
        """Return whether no rank has more than ``capacity`` tokens."""
        return self.max_tokens <= capacity


def verify_plan(plan: Plan, load: IntsLike, *, allow_cross_domain: bool = False) -> PlanCertificate:
    """Check every rule of a plan against a load, and return what holds for both.

    It uses neither planner, and integers only. Takes O(G * S + E), but for sorting, and but for
    plans in which a rank both exports and imports, whose T* takes some maximum flows. Local; a plan
    or load on a device is copied to the CPU, which synchronises.

    Args:
        plan: with quotas. If it has a load, that has to be this one.
        load: integers ``[G, E]`` by source rank, or ``[E]``, global sums.
        allow_cross_domain: replicas may lie outside their home's domain.

    Raises:
        InvalidLoadError: wrong shape or dtype, a negative load, an expert with 2**31 or more
            tokens, a total of 2**40 or more, or no tokens.
        InvalidPlanError: an expert or home is out of range; a replica is at home, twice on a rank,
            or outside its domain; there are no quotas, or they are negative, on empty slots, or do
            not sum to the load.
    """
    if not isinstance(plan, Plan):
        raise InvalidPlanError(f"plan is a {type(plan).__name__}; expected a Plan")
    given = _read_load(load, plan.num_ranks, plan.num_experts)
    total = given.sum(axis=0) if given.ndim == 2 else given
    slots, home = _wide(plan.slot_expert), _wide(plan.home)
    domains = np.zeros(plan.num_ranks, np.int64)
    if plan.domains is not None and not allow_cross_domain:
        domains = _wide(plan.domains)
    _check_placement(slots, home, domains)
    tokens = _count_tokens(plan, slots, home, total)
    if plan.load is not None:
        own = _wide(plan.load) if given.ndim == 2 else _wide(plan.load).sum(axis=0)
        _reject(
            own != given,
            lambda *at: (
                f"the plan's own load{list(at)}, which it is rerouted by, is {own[at]};"
                f" expected {given[at]}, the load given: plan this load, or give plan.load"
            ),
        )
    found = find_bottleneck(slots, home)
    return PlanCertificate(
        rank_tokens=tuple(tokens.tolist()),
        bound_tokens=least_max_tokens(total, home, domains, plan.slots_per_rank),
        num_replicas=int((slots >= 0).sum()),
        max_exports=found.max_exports,
        max_imports=found.max_imports,
        transfer_experts=found.experts,
        bottleneck=found.reason,
        bottleneck_ranks=found.ranks,
    )


def _read_load(load: IntsLike, num_ranks: int, num_experts: int) -> Int64Array:
    """Return a load on the CPU, ``[G, E]`` or ``[E]`` as given, whose sums do not overflow."""
    try:
        array = load.detach().cpu().numpy() if isinstance(load, torch.Tensor) else np.asarray(load)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidLoadError(f"load is not an array of integers: {error}") from None
    shapes = (num_ranks, num_experts), (num_experts,)
    if array.dtype.kind not in "iu" or array.shape not in shapes:
        raise InvalidLoadError(
            f"load has shape {array.shape} and dtype {array.dtype}; expected integers {shapes[0]},"
            f" by source rank, or {shapes[1]}, as the plan has"
        )
    for at in np.argwhere((array < 0) | (array >= _MAX_LOAD))[:1].tolist():
        raise InvalidLoadError(
            f"load{at} is {array[tuple(at)]}; expected at least 0, below 2**31: counts of tokens"
        )
    wide = array.astype(np.int64)
    sums = wide.sum(axis=0) if wide.ndim == 2 else wide
    for e in np.flatnonzero(sums >= _MAX_LOAD)[:1]:
        raise InvalidLoadError(
            f"the load of expert {e} is {sums[e]}; expected less than 2**31: plan a smaller batch"
        )
    total = int(sums.sum())
    if not 0 < total < _MAX_TOTAL:
        raise InvalidLoadError(
            f"the sum of load is {total}; expected more than 0, less than 2**40: without tokens"
            " there is nothing to verify, and more need smaller batches"
        )
    return wide


def _check_placement(slots: Int64Array, home: Int64Array, domains: Int64Array) -> None:
    num_ranks, num_experts = len(slots), len(home)
    _reject(
        (home < 0) | (home >= num_ranks),
        lambda e: f"the home of expert {e} is {home[e]}; expected a rank in [0, {num_ranks})",
    )
    _reject(
        (slots < -1) | (slots >= num_experts),
        lambda r, s: (
            f"rank {r} has expert {slots[r, s]} in slot {s}; expected an expert in [0,"
            f" {num_experts}), or -1 for an empty slot"
        ),
    )
    rank, slot = np.nonzero(slots >= 0)
    expert = slots[rank, slot]
    _reject(
        home[expert] == rank,
        lambda i: (
            f"rank {rank[i]} has expert {expert[i]} in slot {slot[i]}, and is its home;"
            " expected another rank, since the main instance is here: empty the slot"
        ),
    )
    _reject(
        domains[home[expert]] != domains[rank],
        lambda i: (
            f"rank {rank[i]} has expert {expert[i]} in slot {slot[i]}, but is in domain"
            f" {domains[rank[i]]}; expected domain {domains[home[expert[i]]]}, like its home, rank"
            f" {home[expert[i]]}: move the replica, or pass allow_cross_domain=True"
        ),
    )
    instance = np.sort(rank * num_experts + expert)
    _reject(
        instance[1:] == instance[:-1],
        lambda i: (
            f"rank {instance[i] // num_experts} has expert {instance[i] % num_experts} in two"
            " slots; expected at most one instance of an expert on a rank: empty one of them"
        ),
    )


def _count_tokens(plan: Plan, slots: Int64Array, home: Int64Array, load: Int64Array) -> Int64Array:
    """Check the quotas against the load ``[E]``; return the tokens of each rank."""
    if plan.slot_quota is None or plan.home_quota is None:
        raise InvalidPlanError(
            "the plan has no quotas, so it does not say how many tokens a rank gets; expected"
            " slot_quota and home_quota: pass both to Plan.from_slots, or use plan_replicas"
        )
    slot_quota, home_quota = _wide(plan.slot_quota), _wide(plan.home_quota)
    _reject(
        slot_quota < 0,
        lambda r, s: (
            f"rank {r} has a quota of {slot_quota[r, s]} for slot {s}; expected tokens, at least 0"
        ),
    )
    _reject(
        home_quota < 0,
        lambda e: (
            f"expert {e} has a quota of {home_quota[e]} at home, rank {home[e]}; expected"
            " tokens, at least 0: its replicas have more than its load"
        ),
    )
    _reject(
        (slots < 0) & (slot_quota != 0),
        lambda r, s: (
            f"rank {r} has a quota of {slot_quota[r, s]} for slot {s}, which is empty; expected 0"
        ),
    )
    rank, slot = np.nonzero(slots >= 0)
    served = home_quota.copy()
    np.add.at(served, slots[rank, slot], slot_quota[rank, slot])
    _reject(
        served != load,
        lambda e: (
            f"the quotas of expert {e}, whose home is rank {home[e]}, sum to {served[e]};"
            f" expected its load, {load[e]}: make the plan from this load"
        ),
    )
    tokens: Int64Array = slot_quota.sum(axis=1)
    np.add.at(tokens, home, home_quota)
    return tokens


def _wide(tensor: torch.Tensor) -> Int64Array:
    array: Int64Array = tensor.cpu().numpy().astype(np.int64)
    return array


def _reject(bad: NDArray[np.bool_], say: Callable[..., str]) -> None:
    """Raise InvalidPlanError with what ``say`` makes of the first index that is ``bad``."""
    for index in np.argwhere(bad)[:1].tolist():
        raise InvalidPlanError(say(*index))
