"""A group's constants: which rank owns which expert, and which ranks reach each other's memory."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from ultraep_comm.errors import InvalidArgumentError, InvalidLoadError, UnsupportedError

IntArray = npt.NDArray[np.int32]
MAX_COUNT = 1 << 24  # ranks or experts: a larger map is a mistake, and would exhaust the memory
IntsLike = Sequence[int] | torch.Tensor | npt.NDArray[np.integer]


def contiguous_home(num_experts: int, num_ranks: int) -> IntArray:
    """Return the default home map ``[E]``: contiguous, the first E % G ranks with one more."""
    base, extra = divmod(num_experts, num_ranks)
    counts = [base + (r < extra) for r in range(num_ranks)]
    return np.repeat(np.arange(num_ranks, dtype=np.int32), counts)


def _as_ints(value: IntsLike, name: str, length: int) -> IntArray:
    try:
        array = np.asarray(value.cpu() if isinstance(value, torch.Tensor) else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidArgumentError(f"{name} is not an array: {error}") from None
    if array.shape != (length,) or array.dtype.kind not in "iu":
        raise InvalidArgumentError(
            f"{name} has shape {array.shape} and dtype {array.dtype}; expected [{length}] integers"
        )
    if array.size and (array.min() < -(2**31) or array.max() >= 2**31):
        raise InvalidArgumentError(f"{name} has a value beyond 32 bits")
    copy = array.astype(np.int32)  # the caller may write to its array
    copy.setflags(write=False)
    return copy


def as_int(value: object, name: str) -> int:
    """Return an integer argument as int.

    Raises:
        InvalidArgumentError: it is not an integer.
    """
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise InvalidArgumentError(f"{name} is {value!r}; expected an integer") from None


def as_number(value: object, name: str) -> float:
    """Return a number argument as float.

    Raises:
        InvalidArgumentError: it is not a real number.
    """
    if not isinstance(value, numbers.Real):
        raise InvalidArgumentError(f"{name} is {value!r}; expected a number")
    return float(value)


def check_load_form(load: object) -> None:
    """Raise InvalidLoadError for what is no tensor of integers ``[G, E]`` or ``[E]``."""
    if not isinstance(load, torch.Tensor) or load.dim() not in (1, 2):
        found = tuple(load.shape) if isinstance(load, torch.Tensor) else type(load).__name__
        raise InvalidLoadError(f"load is {found}; expected a tensor [G, E] or [E]")
    if load.dtype not in (torch.int32, torch.int64):
        raise InvalidLoadError(f"load is {load.dtype}; expected int32 or int64: pass load.long()")


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Constants that plans and schedules are computed from.

    Attributes:
        num_ranks: G.
        num_experts: E.
        slots_per_rank: S.
        home: int32 ``[E]``, the rank that owns each expert. By default contiguous, and the first
            E % G ranks own one more.
        domain: int32 ``[G]``; equal for ranks with load/store access to each other.
        allow_cross_domain: replicas may lie outside their home's domain.
    """

    num_ranks: int
    num_experts: int
    slots_per_rank: int
    home: IntArray
    domain: IntArray
    allow_cross_domain: bool = False

    @classmethod
    def make(
        cls,
        *,
        num_ranks: int,
        num_experts: int,
        slots_per_rank: int,
        home: IntsLike | None = None,
        domains: IntsLike | None = None,
        allow_cross_domain: bool = False,
    ) -> Topology:
        """Check the arguments and fill in defaults.

        Raises:
            InvalidArgumentError: a count below its minimum or above 2**24, more slots on a rank
                than experts, a map of the wrong shape, or a home outside ``[0, num_ranks)``.
        """
        num_ranks = as_int(num_ranks, "num_ranks")
        num_experts = as_int(num_experts, "num_experts")
        slots_per_rank = as_int(slots_per_rank, "slots_per_rank")
        for name, value, minimum in (
            ("num_ranks", num_ranks, 1),
            ("num_experts", num_experts, 1),
            ("slots_per_rank", slots_per_rank, 0),
        ):
            if not minimum <= value <= MAX_COUNT:
                raise InvalidArgumentError(f"{name} is {value}; expected {minimum} to {MAX_COUNT}")
        if slots_per_rank > num_experts:
            raise InvalidArgumentError(
                f"slots_per_rank is {slots_per_rank}, but there are {num_experts} experts; expected"
                " no more slots than experts, since a rank has at most one instance of each"
            )
        if home is None:
            home_map = contiguous_home(num_experts, num_ranks)
        else:
            home_map = _as_ints(home, "home", num_experts)
            bad = np.flatnonzero((home_map < 0) | (home_map >= num_ranks))
            if bad.size:
                raise InvalidArgumentError(
                    f"home[{bad[0]}] is {home_map[bad[0]]}; expected a rank in [0, {num_ranks})"
                )
        domain = (
            np.zeros(num_ranks, np.int32)
            if domains is None
            else _as_ints(domains, "domains", num_ranks)
        )
        return cls(
            num_ranks=num_ranks,
            num_experts=num_experts,
            slots_per_rank=slots_per_rank,
            home=home_map,
            domain=domain,
            allow_cross_domain=allow_cross_domain,
        )

    def with_domains(self, domain: IntArray) -> Topology:
        """Return this topology with other domains ``[G]``."""
        return replace(self, domain=domain)

    def local_experts(self, rank: int) -> IntArray:
        """Return the experts at home on ``rank``, ascending: the order of its main weights.

        Raises:
            InvalidArgumentError: there is no such rank.
        """
        if not 0 <= as_int(rank, "rank") < self.num_ranks:
            raise InvalidArgumentError(f"rank is {rank}; expected 0 to {self.num_ranks - 1}")
        return np.flatnonzero(self.home == rank).astype(np.int32)

    def token_capacity(self, num_tokens: int | IntsLike, topk: int) -> int:
        """Return the most tokens that a rank has under an exact plan: the mean, rounded up.

        Args:
            num_tokens: of every rank, or integers ``[G]``.
            topk: experts of a token.

        Raises:
            InvalidArgumentError: an argument is negative or misshapen; or no plan is exact, since
                replicas cannot leave their domain, or there are no slots.
        """
        one_domain = self.allow_cross_domain or (self.domain == self.domain[0]).all()
        if self.num_ranks > 1 and not (one_domain and self.slots_per_rank):
            found = "no slots" if one_domain else "several domains"
            raise InvalidArgumentError(
                f"the group has {found}, so that plans cannot be exact and no capacity holds for"
                " them; expected a slot on each rank, and a single domain or"
                " allow_cross_domain=True. See slots_for_exact()"
            )
        topk = as_int(topk, "topk")
        if isinstance(num_tokens, Sequence | torch.Tensor | np.ndarray):
            tokens: list[int] = _as_ints(num_tokens, "num_tokens", self.num_ranks).tolist()
        else:
            tokens = [as_int(num_tokens, "num_tokens")] * self.num_ranks
        if topk < 0 or min(tokens) < 0:
            raise InvalidArgumentError(
                f"num_tokens is {num_tokens} and topk {topk}; expected 0 or more"
            )
        return -(-sum(tokens) * topk // self.num_ranks)

    @property
    def max_local_experts(self) -> int:
        """Return M, the largest number of local experts on a rank."""
        return int(np.bincount(self.home, minlength=self.num_ranks).max())

    @cached_property
    def instances_per_rank(self) -> int:
        """Return P, the largest number of local experts on a rank plus its slots.

        Physical ids of rank r begin at ``r * P``: its M local experts, then its slots, with slot s
        at ``r * P + M + s``. Where M is less than on other ranks, the last ids are unused.
        """
        return self.max_local_experts + self.slots_per_rank


def slots_for_exact(
    *,
    num_ranks: int,
    num_experts: int,
    home: IntsLike | None = None,
    domains: IntsLike | None = None,
) -> int:
    """Return the slots of a rank with which a target of 1.0 is exact for every load.

    That is ceil(M * (G - 1) / G), where M is the largest number of local experts on a rank; the
    proof is at ``level_probe()`` in ``core/plan/probe.hpp``. Fewer are not enough if G - 1 ranks
    own M experts with as many tokens each: the last rank has to take the mean, M * (G - 1) / G
    experts' worth, and each of its slots takes one expert's at most. Most loads need a single slot.

    Args:
        num_ranks: G.
        num_experts: E.
        home: integers ``[E]``; None: contiguous, and the first E % G ranks have one more.
        domains: integers ``[G]``; None: a single domain.

    Raises:
        InvalidArgumentError: there are several domains, whose loads differ, so that no number of
            slots is enough; or as :meth:`Topology.make`.
    """
    topology = Topology.make(
        num_ranks=num_ranks, num_experts=num_experts, slots_per_rank=0, home=home, domains=domains
    )
    values = np.unique(topology.domain)
    if len(values) > 1:
        raise InvalidArgumentError(
            f"domains has {len(values)} values, {values.tolist()[:8]}; expected a single domain,"
            " since no replica can level domains with different loads. Leave out domains= if"
            " replicas may cross them (allow_cross_domain=True)"
        )
    return -(-topology.max_local_experts * (topology.num_ranks - 1) // topology.num_ranks)


def find_domains(reaches: Sequence[Sequence[int]]) -> IntArray:
    """Return domains ``[G]``, numbered in the order of their first ranks; equal on every rank.

    Args:
        reaches: ``[G][G]``, non-zero where the row's rank has load/store access to the column's.

    Raises:
        UnsupportedError: access is not mutual, or not the same for all ranks of a domain.
    """
    reach = np.array(reaches) != 0
    np.fill_diagonal(reach, True)
    domain = np.full(len(reach), -1, np.int32)
    for first, reached in enumerate(reach):
        if domain[first] < 0:
            domain[reached & (domain < 0)] = domain.max() + 1
    odd = np.argwhere((domain[:, None] == domain[None, :]) != reach)
    if len(odd):
        a, b = odd[0]
        has = "has" if reach[a, b] else "has no"
        raise UnsupportedError(
            f"the ranks do not form domains by their load/store access: rank {a} {has} access to"
            f" rank {b}, unlike others of its domain. Pass domains=, such that all ranks of a"
            " domain reach each other"
        )
    return domain


def check_domains(domain: IntArray, reaches: Sequence[Sequence[int]]) -> None:
    """Check domains that the caller passed; raises on every rank or on none.

    Raises:
        UnsupportedError: ranks of one domain do not reach each other's memory.
    """
    reach = np.array(reaches) != 0
    np.fill_diagonal(reach, True)
    missing = np.argwhere((domain[:, None] == domain[None, :]) & ~reach)
    if len(missing):
        a, b = missing[0]
        raise UnsupportedError(
            f"rank {a} has no load/store access to rank {b}, which is in the same domain"
            f" {domain[a]}. Leave domains=None to detect them, or check why peer access is off:"
            " nvidia-smi topo -p2p r, container isolation, IMEX channels between machines"
        )
