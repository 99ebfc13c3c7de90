"""verify_plan: what holds for a plan and its load, counted without either planner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch

from ultraep_comm.errors import InvalidLoadError, InvalidPlanError
from ultraep_comm.plan.bounds import Int64Array, find_token_bound, find_transfer_bound
from ultraep_comm.plan.plan import Plan, expert_tokens, sum_by_rank
from ultraep_comm.plan.planner import MAX_LOAD, MAX_TOTAL_LOAD
from ultraep_comm.plan.topology import IntsLike

_NAMED = 4  # ranks that a text lists


@dataclass(frozen=True, kw_only=True)
class PlanCertificate:
    """What holds for a plan and its load, in exact numbers; from :func:`verify_plan`.

    Attributes:
        rank_tokens: tokens of each rank, ``[G]``.
        bound_tokens: no plan with as many slots brings the fullest rank below this. A plan that
            reaches it is the most balanced; there may be none.
        bound_reason: "mean" of all ranks, rounded up; "domains", whose means differ; or "slots",
            too few for the experts of some ranks.
        bound_ranks: all ranks; the busiest domain; or those ranks.
        num_replicas: filled slots.
        max_exports: k, the largest number of distinct replicated experts at home on a rank.
        max_imports: the largest number of filled slots of a rank.
        transfer_experts: T*, which no schedule of the plan beats, in experts over one link: times
            W / B, an expert's bytes over a link's rate, it is seconds.
        transfer_reason: "exports" of a rank, "imports" of a rank, or the "set" of ranks that has to
            send most for its size; "none" without replicas. The first that is T*.
        transfer_ranks: all ranks that export or import as much; or the set.
    """

    rank_tokens: tuple[int, ...]
    bound_tokens: int
    bound_reason: str
    bound_ranks: tuple[int, ...]
    num_replicas: int
    max_exports: int
    max_imports: int
    transfer_experts: Fraction
    transfer_reason: str
    transfer_ranks: tuple[int, ...]

    @property
    def max_tokens(self) -> int:
        """Return the tokens of the fullest rank."""
        return max(self.rank_tokens)

    @property
    def fullest_ranks(self) -> tuple[int, ...]:
        """Return the ranks that have :attr:`max_tokens`."""
        fullest = self.max_tokens
        return tuple(r for r, tokens in enumerate(self.rank_tokens) if tokens == fullest)

    @property
    def mean_tokens(self) -> Fraction:
        """Return the mean of the ranks."""
        return Fraction(sum(self.rank_tokens), len(self.rank_tokens))

    @property
    def imbalance(self) -> Fraction:
        """Return the fullest rank's tokens over the mean; 1 without tokens."""
        return self.max_tokens / self.mean_tokens if self.max_tokens else Fraction(1)

    @property
    def over_bound(self) -> int:
        """Return by how many tokens the fullest rank is above the bound; 0: none is better."""
        return self.max_tokens - self.bound_tokens

    @property
    def is_exact(self) -> bool:
        """Return whether every rank has the mean, rounded down or up to whole tokens."""
        return self.max_tokens - min(self.rank_tokens) <= 1

    def __str__(self) -> str:
        """Return it in one line."""
        over = f" + {self.over_bound}" if self.over_bound else ""
        exact = ", exact" if self.is_exact else f" on {_name(self.fullest_ranks)}"
        text = f"at most {self.max_tokens} tokens{exact}, imbalance {float(self.imbalance):.4f};"
        text += f" bound {self.bound_tokens}{over} by {self.bound_reason}"
        text += f" of {_name(self.bound_ranks)}" if self.bound_reason != "mean" else ""
        text += f"; {self.num_replicas} replicas, k {self.max_exports}, in {self.max_imports}"
        if self.num_replicas:
            text += f", T* {self.transfer_experts} by {self.transfer_reason}"
            text += f" of {_name(self.transfer_ranks)}"
        return text


def _name(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    return f"ranks {', '.join(map(str, ranks[:_NAMED]))}{more}"


def verify_plan(plan: Plan, load: IntsLike, *, allow_cross_domain: bool = False) -> PlanCertificate:
    """Check every rule of a plan against a load, and return what holds for both.

    Neither planner is used, and only integers and fractions are. Local. A plan or load on a device
    is copied to the CPU, which synchronises. Takes O(E + G * S) besides sorting, but for loads that
    have no plan at the mean (see `find_token_bound`), and for plans in which a rank both exports
    and imports, whose T* takes some maximum flows (see `find_transfer_bound`).

    Args:
        plan: with quotas. If it has a load, that has to be this one.
        load: integers ``[G, E]`` by source rank, or ``[E]``, global sums. May be all zero.
        allow_cross_domain: replicas may lie outside their home's domain.

    Raises:
        InvalidLoadError: wrong shape or dtype, a negative load, an expert with 2**31 or more
            tokens, or a total of 2**40 or more.
        InvalidPlanError: the plan breaks a rule of :meth:`Plan.from_slots`, has no quotas, or they
            do not sum to the load.
    """
    if not isinstance(plan, Plan):
        raise InvalidPlanError(f"plan is a {type(plan).__name__}; expected a Plan")
    given = read_load(load, plan.num_ranks, plan.num_experts)
    plan = plan.cpu()
    plan.validate(allow_cross_domain=allow_cross_domain)
    total: Int64Array = given.sum(axis=0) if given.ndim == 2 else given
    _check_same_load(plan, given)
    slots, home = plan.slot_expert.numpy(), plan.home.numpy()
    domains = np.zeros(plan.num_ranks, np.int32)
    if plan.domains is not None and not allow_cross_domain:
        domains = plan.domains.numpy()
    bound, bound_reason, bound_ranks = find_token_bound(total, home, domains, plan.slots_per_rank)
    experts, transfer_reason, transfer_ranks = find_transfer_bound(slots, home)
    return PlanCertificate(
        rank_tokens=tuple(_count_tokens(plan, total).tolist()),
        bound_tokens=bound,
        bound_reason=bound_reason,
        bound_ranks=bound_ranks,
        num_replicas=plan.num_replicas,
        max_exports=plan.max_exports,
        max_imports=plan.max_imports,
        transfer_experts=experts,
        transfer_reason=transfer_reason,
        transfer_ranks=transfer_ranks,
    )


def read_load(load: IntsLike, num_ranks: int, num_experts: int) -> Int64Array:
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
    for at in np.argwhere((array < 0) | (array > MAX_LOAD))[:1].tolist():
        raise InvalidLoadError(
            f"load{at} is {array[tuple(at)]}; expected at least 0, below 2**31: counts of tokens"
        )
    wide: Int64Array = array.astype(np.int64)
    sums = wide.sum(axis=0) if wide.ndim == 2 else wide
    for e in np.flatnonzero(sums > MAX_LOAD)[:1]:
        raise InvalidLoadError(
            f"the load of expert {e} is {sums[e]}; expected less than 2**31: plan a smaller batch"
        )
    if sums.sum() > MAX_TOTAL_LOAD:
        raise InvalidLoadError(
            f"the loads sum to {sums.sum()}; expected less than 2**40: plan a smaller batch"
        )
    return wide


def _check_same_load(plan: Plan, given: Int64Array) -> None:
    """Raise InvalidPlanError if the plan's own load, which it is rerouted by, is another."""
    if plan.load is None:
        return
    own = plan.load.numpy().astype(np.int64)
    own = own if given.ndim == 2 else own.sum(axis=0)
    for at in np.argwhere(own != given)[:1].tolist():
        raise InvalidPlanError(
            f"the plan's own load{at} is {own[tuple(at)]}; expected {given[tuple(at)]}, the load"
            " given: plan this load, or verify with plan.load"
        )


def _count_tokens(plan: Plan, load: Int64Array) -> Int64Array:
    """Return the tokens of each rank; a valid plan's quotas are compared with the load ``[E]``."""
    if plan.slot_quota is None or plan.home_quota is None:
        raise InvalidPlanError(
            "the plan has no quotas, so it does not say how many tokens a rank gets; expected"
            " slot_quota and home_quota: pass both to Plan.from_slots, or use plan_replicas"
        )
    served = expert_tokens(plan)
    for e in np.flatnonzero(served != load)[:1]:
        raise InvalidPlanError(
            f"the quotas of expert {e}, whose home is rank {plan.home[e]}, sum to {served[e]};"
            f" expected its load, {load[e]}: make the plan from this load"
        )
    tokens: Int64Array = sum_by_rank(plan.slot_quota, plan.home_quota, plan.home).numpy()
    return tokens
