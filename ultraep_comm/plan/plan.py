"""The plan: which expert is in which slot, and how many tokens every instance receives."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ultraep_comm import _core
from ultraep_comm.errors import InvalidArgumentError, InvalidPlanError
from ultraep_comm.plan.bounds import find_token_bound
from ultraep_comm.plan.planner import PPM, Costs
from ultraep_comm.plan.topology import (
    MAX_COUNT,
    IntArray,
    IntsLike,
    as_int,
    as_number,
    contiguous_home,
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """A replication plan. All tensors are int32 and contiguous, on one device.

    The properties read the tensors; for a plan on a device they synchronise. Plans made on a
    group's device share ``home`` and ``domains``: do not write to these.

    Attributes:
        slot_expert: ``[G, S]``, the expert in each slot; -1: empty. Slot s of rank r has the
            physical id ``r * P + M + s``, where M is that rank's number of local experts: see
            :func:`reroute`.
        home: ``[E]``, the rank that owns each expert.
        slot_quota: ``[G, S]`` tokens for each replica; None: the plan cannot be rerouted.
        home_quota: ``[E]`` tokens for each main instance; None like ``slot_quota``.
        load: ``[G, E]`` tokens by source rank; None: the plan cannot be rerouted.
        domains: ``[G]``, or None for a single domain.
        slots_to_fill: bool ``[G, S]``, the slots to write, given what the bank held when the plan
            was made; None: all filled ones. A call determines them again.
        bank: the bank whose slots the plan fills.
        reuse: a call keeps what these hold, and writes only to those that lack their expert; False:
            they count as empty.
    """

    slot_expert: torch.Tensor
    home: torch.Tensor
    slot_quota: torch.Tensor | None = None
    home_quota: torch.Tensor | None = None
    load: torch.Tensor | None = None
    domains: torch.Tensor | None = None
    slots_to_fill: torch.Tensor | None = None
    bank: int = 0
    reuse: bool = False

    def __post_init__(self) -> None:
        slots = self._field("slot_expert", 2)
        num_ranks, num_slots = slots.shape
        (num_experts,) = self._field("home", 1).shape
        if num_ranks == 0 or num_experts == 0:
            raise InvalidPlanError("a plan needs at least one rank and one expert")
        shapes = {
            "slot_quota": (num_ranks, num_slots),
            "home_quota": (num_experts,),
            "load": (num_ranks, num_experts),
            "domains": (num_ranks,),
            "slots_to_fill": (num_ranks, num_slots),
        }
        for name, shape in shapes.items():
            if getattr(self, name) is not None:
                _check_shape(self._field(name, len(shape)), name, shape)
        if not 0 <= as_int(self.bank, "bank") <= MAX_COUNT:
            raise InvalidPlanError(f"bank is {self.bank}; expected the index of a bank")

    def _field(self, name: str, dims: int) -> torch.Tensor:
        value = getattr(self, name)
        if not isinstance(value, torch.Tensor):
            raise InvalidPlanError(f"{name} is a {type(value).__name__}; expected a tensor")
        dtype = torch.bool if name == "slots_to_fill" else torch.int32
        if value.dtype != dtype or value.dim() != dims or not value.is_contiguous():
            raise InvalidPlanError(
                f"{name} has shape {tuple(value.shape)}, dtype {value.dtype} and strides"
                f" {value.stride()}; expected {dims} dimensions, contiguous {dtype}."
                " Plan.from_slots converts other integers"
            )
        return value

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors that the plan has, by name."""
        return {name: t for name, t in vars(self).items() if isinstance(t, torch.Tensor)}

    @classmethod
    def from_slots(
        cls,
        slot_expert: torch.Tensor | IntsLike,
        *,
        num_experts: int,
        home: IntsLike | None = None,
        slot_quota: torch.Tensor | None = None,
        home_quota: torch.Tensor | None = None,
        load: torch.Tensor | None = None,
        domains: IntsLike | None = None,
        allow_cross_domain: bool = False,
        bank: int = 0,
        reuse: bool = False,
    ) -> Plan:
        """Make a plan by hand, or from another planner's output.

        Args:
            slot_expert: integers ``[G, S]``; -1: empty. The plan is on the same device.
            num_experts: E, at most 2**24.
            home: integers ``[E]``; None: contiguous, and the first E % G ranks have one more.
            slot_quota: integers ``[G, S]``, 0 in empty slots.
            home_quota: integers ``[E]``; required with ``slot_quota``.
            load: integers ``[G, E]``; the quotas of an expert's instances must sum to its load.
            domains: integers ``[G]``; None: a single domain.
            allow_cross_domain: replicas may lie outside their home's domain.
            bank, reuse: as the attributes.

        Raises:
            InvalidPlanError: shapes or dtypes are wrong; an expert is out of range, in a slot of
                its home, twice on a rank, or outside its domain; quotas are negative, on empty
                slots, or do not sum to the load.
        """
        num_experts = as_int(num_experts, "num_experts")
        if not 1 <= num_experts <= MAX_COUNT:
            raise InvalidPlanError(f"num_experts is {num_experts}; expected 1 to {MAX_COUNT}")
        slots = as_int_tensor(slot_expert, "slot_expert")
        if slots.ndim != 2 or slots.shape[0] == 0:
            raise InvalidPlanError(
                f"slot_expert has shape {tuple(slots.shape)}; expected [num_ranks, slots_per_rank]"
            )
        if home is None:
            home = contiguous_home(num_experts, len(slots))
        given = {
            "home": home,
            "slot_quota": slot_quota,
            "home_quota": home_quota,
            "load": load,
            "domains": domains,
        }
        tensors = {
            name: as_int_tensor(value, name).to(slots.device)
            for name, value in given.items()
            if value is not None
        }
        _check_shape(tensors["home"], "home", (num_experts,))
        plan = cls(slot_expert=slots, bank=as_int(bank, "bank"), reuse=reuse, **tensors)
        plan.validate(allow_cross_domain=allow_cross_domain)
        return plan

    def cpu(self) -> Plan:
        """Return the plan with its tensors on the CPU; from a device, this synchronises."""
        if self.slot_expert.device.type == "cpu":
            return self
        moved: dict[str, Any] = {name: t.cpu() for name, t in self.tensors().items()}
        return replace(self, **moved)

    def in_bank(self, bank: int, *, reuse: bool = False) -> Plan:
        """Return the plan for the slots of a bank; which of them are to be filled is not known."""
        return replace(self, bank=as_int(bank, "bank"), reuse=reuse, slots_to_fill=None)

    # ---- rules ----------------------------------------------------------------------------

    def validate(self, *, allow_cross_domain: bool = False) -> None:
        """Check every rule of a plan.

        Raises:
            InvalidPlanError: as in :meth:`from_slots`.
        """
        self._validate_placement(allow_cross_domain)
        self._validate_quotas()

    def _validate_placement(self, allow_cross_domain: bool) -> None:
        slots, home = self.slot_expert.cpu().numpy(), self.home.cpu().numpy()
        num_ranks, num_experts = slots.shape[0], home.shape[0]
        expected = f"expected an expert in [0, {num_experts}) or -1 for an empty slot"
        _reject_first((slots < -1) | (slots >= num_experts), "slot_expert", slots, expected)
        expected = f"expected a rank in [0, {num_ranks})"
        _reject_first((home < 0) | (home >= num_ranks), "home", home, expected)
        filled = slots >= 0
        homes = np.where(filled, home[slots], -1)
        ranks = np.arange(num_ranks)[:, None]
        on_home = "the slot is on the expert's home; expected another rank"
        _reject_first(filled & (homes == ranks), "slot_expert", slots, on_home)
        for rank, row in enumerate(slots):
            used = row[row >= 0]
            values, counts = np.unique(used, return_counts=True)
            if (counts > 1).any():
                raise InvalidPlanError(
                    f"expert {values[counts > 1][0]} is twice on rank {rank}: {row.tolist()};"
                    " expected at most one instance of an expert on a rank"
                )
        if self.domains is not None and not allow_cross_domain:
            domains = self.domains.cpu().numpy()
            _reject_first(
                filled & (domains[homes] != domains[:, None]),
                "slot_expert",
                slots,
                "the slot is outside the domain of the expert's home; place the replica inside, or"
                " pass allow_cross_domain=True",
            )

    def _validate_quotas(self) -> None:
        if (self.slot_quota is None) != (self.home_quota is None):
            given = "slot_quota" if self.home_quota is None else "home_quota"
            raise InvalidPlanError(f"only {given} was given; expected both quotas or neither")
        if self.slot_quota is None or self.home_quota is None:
            return
        is_empty, quota = self.slot_expert.cpu().numpy() < 0, self.slot_quota.cpu().numpy()
        at_home = self.home_quota.cpu().numpy()
        _reject_first(quota < 0, "slot_quota", quota, "expected a quota of at least 0")
        _reject_first(at_home < 0, "home_quota", at_home, "expected a quota of at least 0")
        empty = "the slot is empty; expected 0"
        _reject_first(is_empty & (quota != 0), "slot_quota", quota, empty)
        if self.load is None:
            return
        load, sums = self.load.cpu().numpy(), expert_tokens(self)
        _reject_first(load < 0, "load", load, "expected a count of at least 0")
        total = load.sum(axis=0, dtype=np.int64)
        bad = np.flatnonzero(total != sums)
        if bad.size:
            e = int(bad[0])
            raise InvalidPlanError(
                f"the quotas of expert {e} sum to {sums[e]}; expected its load, {total[e]}"
            )

    # ---- figures --------------------------------------------------------------------------

    @property
    def num_ranks(self) -> int:
        """Return G."""
        return int(self.slot_expert.shape[0])

    @property
    def slots_per_rank(self) -> int:
        """Return S."""
        return int(self.slot_expert.shape[1])

    @property
    def num_experts(self) -> int:
        """Return E."""
        return int(self.home.shape[0])

    @property
    def num_replicas(self) -> int:
        """Return the number of filled slots."""
        return int((self.slot_expert >= 0).sum())

    @property
    def num_slots_to_fill(self) -> int:
        """Return the number of slots to write, as of when the plan was made."""
        filled = self.slots_to_fill
        return self.num_replicas if filled is None else int(filled.sum())

    @property
    def max_imports(self) -> int:
        """Return the largest number of filled slots on a rank."""
        return int((self.slot_expert >= 0).sum(dim=1).max()) if self.slots_per_rank else 0

    @property
    def max_exports(self) -> int:
        """Return the largest number of distinct replicated experts at home on a rank."""
        experts = torch.unique(self.slot_expert[self.slot_expert >= 0]).long()
        if experts.numel() == 0:
            return 0
        return int(torch.bincount(self.home[experts], minlength=self.num_ranks).max())

    @property
    def imbalance(self) -> float:
        """Return the largest rank quota over the mean; 1.0 without load; nan without quotas."""
        return _imbalance(_rank_tokens(self))

    @property
    def imbalance_before(self) -> float:
        """Return what the imbalance would be without replicas; nan without load."""
        if self.load is None:
            return float("nan")
        tokens = self.load.sum(dim=0, dtype=torch.int64)
        ranks = tokens.new_zeros(self.num_ranks).index_add_(0, self.home.long(), tokens)
        return _imbalance(ranks)

    def _domains(self) -> IntArray:
        """Return ``[G]``, the domains; a single one if a replica lies outside its home's."""
        slots, home = self.slot_expert.cpu().numpy(), self.home.cpu().numpy()
        one = np.zeros(self.num_ranks, np.int32)
        domains = one if self.domains is None else self.domains.cpu().numpy()
        rank, slot = np.nonzero(slots >= 0)
        return one if (domains[home[slots[rank, slot]]] != domains[rank]).any() else domains

    @property
    def is_exact(self) -> bool:
        """Return whether every rank has the mean, rounded down or up; False without quotas.

        Plans with a target of 1.0 in a single domain are exact for every load with
        `slots_for_exact` slots, and for most loads with one.
        """
        ranks = _rank_tokens(self)
        return ranks is not None and int(ranks.max() - ranks.min()) <= 1

    @property
    def limited_by(self) -> str | None:
        """Return why the plan is not exact; None: it is, or has no quotas.

        "domains": there are several, which the planner does not balance to the token. "slots": a
        plan with a target of 1.0 is not exact either, with fewer slots than `slots_for_exact`.
        "target": a plan with a target of 1.0 is.
        """
        ranks = _rank_tokens(self)
        if ranks is None or self.is_exact:
            return None
        home, domains = self.home.cpu(), self._domains()
        if (domains != domains[0]).any():
            return "domains"
        _, slot_quota, home_quota = _core.plan_replicas(
            expert_tokens(self), home.numpy(), domains, self.slots_per_rank, False, PPM, None
        )
        ranks = sum_by_rank(torch.from_numpy(slot_quota), torch.from_numpy(home_quota), home)
        return "target" if int(ranks.max() - ranks.min()) <= 1 else "slots"

    @property
    def local_share(self) -> float:
        """Return the share of all tokens that stay on their source rank; the maximum possible.

        An instance serves at most its quota, and at most its own rank's load of the expert comes
        from that rank. 1.0 without tokens; nan without load or quotas.
        """
        if self.load is None or self.slot_quota is None or self.home_quota is None:
            return float("nan")
        load = self.load
        total = int(load.sum(dtype=torch.int64))
        at_home = load.gather(0, self.home.long()[None])[0]
        in_slots = load.gather(1, self.slot_expert.long().clamp(min=0))
        in_slots = in_slots.minimum(self.slot_quota)[self.slot_expert >= 0]
        kept = at_home.minimum(self.home_quota).sum(dtype=torch.int64)
        kept += in_slots.sum(dtype=torch.int64)
        return int(kept) / total if total else 1.0

    @property
    def imbalance_bound(self) -> float:
        """Return an imbalance that no plan with these slots, inside the domains, falls below.

        That is `find_token_bound` of the quotas' load, over the mean of all ranks: the tokens of
        the busiest domain, or of hot ranks whose experts find too few slots, in whole tokens. Not
        every load has a plan that reaches it. A plan some of whose replicas cross domains is
        compared with those that may. nan without quotas.
        """
        if self.slot_quota is None or self.home_quota is None:
            return float("nan")
        load, home = expert_tokens(self), self.home.cpu().numpy()
        total = int(load.sum())
        tokens, _, _ = find_token_bound(load, home, self._domains(), self.slots_per_rank)
        return tokens * self.num_ranks / total if total else 1.0


def _imbalance(ranks: torch.Tensor | None) -> float:
    """Return the largest over the mean; 1.0 of zeros; nan of None."""
    if ranks is None:
        return float("nan")
    total = int(ranks.sum())
    return int(ranks.max()) * len(ranks) / total if total else 1.0


def _rank_tokens(plan: Plan) -> torch.Tensor | None:
    """Return int64 ``[G]``, the quotas of each rank's instances; None without quotas."""
    if plan.slot_quota is None or plan.home_quota is None:
        return None
    return sum_by_rank(plan.slot_quota, plan.home_quota, plan.home)


def expert_tokens(plan: Plan) -> npt.NDArray[np.int64]:
    """Return ``[E]``, the sums of each expert's quotas; the plan must have quotas."""
    assert plan.slot_quota is not None
    assert plan.home_quota is not None
    slots, quota = plan.slot_expert.cpu().numpy(), plan.slot_quota.cpu().numpy()
    tokens: npt.NDArray[np.int64] = plan.home_quota.cpu().numpy().astype(np.int64)
    np.add.at(tokens, slots[slots >= 0], quota[slots >= 0])
    return tokens


def sum_by_rank(
    slot_quota: torch.Tensor, home_quota: torch.Tensor, home: torch.Tensor
) -> torch.Tensor:
    """Return int64 ``[G]``, the tokens of each rank."""
    ranks = slot_quota.sum(dim=1, dtype=torch.int64)
    return ranks.index_add(0, home.long(), home_quota.long())


def as_int_tensor(value: torch.Tensor | IntsLike, name: str) -> torch.Tensor:
    """Return integers as a new contiguous int32 tensor, on the device of a given tensor.

    Raises:
        InvalidPlanError: it is not a dense tensor of integers, or has values beyond 32 bits.
    """
    try:
        tensor = value if isinstance(value, torch.Tensor) else torch.as_tensor(value, device="cpu")
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise InvalidPlanError(f"{name} is not a tensor of integers: {error}") from None
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise InvalidPlanError(f"{name} has dtype {tensor.dtype}; expected integers")
    if tensor.layout != torch.strided or tensor.is_meta:
        raise InvalidPlanError(
            f"{name} is on device {tensor.device} in layout {tensor.layout}; expected a dense"
            " tensor with values"
        )
    wide = tensor.to(torch.int64)
    bad = (wide < -(2**31)) | (wide >= 2**31)
    if not tensor.dtype.is_signed:
        bad |= wide < 0  # 2**63 or more
    if bad.any():
        first = tensor.flatten()[int(bad.flatten().to(torch.uint8).argmax())].item()
        raise InvalidPlanError(f"{name} has the value {first}; expected 32-bit integers")
    return tensor.to(torch.int32, copy=True).contiguous()  # the caller may write to its tensor


def _check_shape(tensor: torch.Tensor, name: str, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise InvalidPlanError(f"{name} has shape {tuple(tensor.shape)}; expected {shape}")


def _reject_first(bad: np.ndarray, name: str, values: np.ndarray, expected: str) -> None:
    for index in np.argwhere(bad)[:1].tolist():
        raise InvalidPlanError(f"{name}{index} is {values[tuple(index)]}: {expected}")


_BITS = (22, 40, 40)  # of each of the costs, as `Objective` in plan/search.hpp


@dataclass(frozen=True, kw_only=True)
class PlanCost:
    """What a plan costs a layer, in seconds. Pass the same values on every rank.

    A plan costs ``token`` times the tokens of its fullest rank, plus ``expert_byte`` times the
    bytes of the most experts that a rank exports or imports, plus ``replica`` times its replicas.

    Attributes:
        token: seconds per token of an expert (grouped GEMMs, dispatch and combine).
        expert_byte: seconds per byte over a rank's link, one over its bandwidth; 0 if the transfer
            is hidden.
        replica: seconds per replica, for instance for the padding of its group.
        expert_bytes: bytes of one expert; None: taken from the group.
    """

    token: float
    expert_byte: float
    replica: float = 0.0
    expert_bytes: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None and field.name == "expert_bytes":
                continue
            if not 0 <= as_number(value, field.name) < math.inf:
                raise InvalidArgumentError(
                    f"{field.name} is {value}; expected a finite number of at least 0"
                )

    def in_integers(self, group_bytes: int | None) -> Costs:
        """Return the costs in a common unit, as fine as the planner's integers allow.

        Raises:
            InvalidArgumentError: the bytes of an expert are unknown, or all costs are 0.
        """
        expert_bytes = self.expert_bytes if self.expert_bytes is not None else group_bytes
        if expert_bytes is None:
            raise InvalidArgumentError(
                "cost has no expert_bytes, and there is no group to take them from; pass either"
            )
        costs = (self.token, self.expert_byte * expert_bytes, self.replica)
        if not any(costs):
            raise InvalidArgumentError("cost is 0 for everything; expected one value above 0")
        finest = [
            bits - math.frexp(cost)[1] for cost, bits in zip(costs, _BITS, strict=True) if cost
        ]
        # A plan's cost has to stay below 2**63: fewer than 2**40 tokens give 2**62, the rest less.
        token, transfer, replica = (int(math.ldexp(cost, min(finest))) for cost in costs)
        return token, transfer, replica
