"""T*, the lower bound on the time of any schedule of a plan on a machine."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ultraep_comm.errors import UnsupportedError
from ultraep_comm.model.machine import Machine

Int64Array = NDArray[np.int64]


def transfer_bound_us(
    slot_expert: Int64Array,
    home: Int64Array,
    expert_bytes: int,
    machine: Machine,
    *,
    residents: Int64Array | None = None,
) -> float:
    """Return T* in microseconds, without latencies.

    Each replicated expert leaves its holders at least once, and each slot that does not hold its
    expert already is filled once. Holders are the home and the slots that do; it may leave several
    in parts. If homes are the only holders, no rank both exports and imports, and egress is not
    slower than ingress, the busiest link determines T*. Otherwise a linear program does, over how
    much of each expert each rank sends. With several domains, a rank's near and far links are added
    up, and everything that has to enter or leave a domain passes its far links: a lower bound, not
    always tight. If cores copy in one memory, any rank with an instance can make a copy, so only
    the sum of all copies counts, at the rate of as many concurrent stores as the memory sustains.

    Args:
        slot_expert: ``[G, S]``, a legal plan; -1: empty.
        home: ``[E]``.
        expert_bytes: W, of the transferred segments.
        machine: its full rates are used, without efficiencies.
        residents: ``[G, S]``, the expert that each slot holds already; -1, or None: none.

    Raises:
        UnsupportedError: the linear program is needed and SciPy is not installed.
    """
    num_ranks = len(slot_expert)
    keeps = (slot_expert >= 0) & (slot_expert == (-1 if residents is None else residents))
    rank, slot = np.nonzero((slot_expert >= 0) & ~keeps)
    if not len(rank) or not expert_bytes:
        return 0.0
    if machine.parallel is not None:
        at_once = min(machine.parallel, float(num_ranks))
        return len(rank) * expert_bytes / (machine.egress_gbps * at_once) / 1e3
    expert = slot_expert[rank, slot]
    experts = np.unique(expert)
    resident, slot = np.nonzero(keeps & np.isin(slot_expert, experts))
    holder = np.append(home[experts], resident)
    held = np.append(experts, slot_expert[resident, slot])
    crossings = _crossings(rank, expert, holder, held, machine)
    far_gbps = (machine.cross_gbps or 0.0) if len(crossings) else 0.0
    out_us = expert_bytes / (machine.egress_gbps + far_gbps) / 1e3
    in_us = expert_bytes / (machine.ingress_gbps + far_gbps) / 1e3
    imports = np.bincount(rank, minlength=num_ranks)
    exports = np.bincount(holder, minlength=num_ranks)
    max_exports, max_imports = float(exports.max()), float(imports.max())
    # If no rank both exports and imports, no set of ranks has to send more per rank than the
    # busiest home exports or the fullest rank imports.
    chained = bool(((exports > 0) & (imports > 0)).any())
    if chained or len(resident) or (max_imports > max_exports and out_us > in_us):
        max_exports = _min_egress(rank, expert, holder, held, num_ranks)
    bound = max(out_us * max_exports, in_us * max_imports)
    if far_gbps:
        bound = max(bound, crossings.max() * expert_bytes / far_gbps / 1e3)
    return bound


def _crossings(
    rank: Int64Array, expert: Int64Array, holder: Int64Array, held: Int64Array, machine: Machine
) -> NDArray[np.float64]:
    """Return how many experts at least enter or leave each domain, per rank of the domain.

    Empty if no expert has instances in several domains.

    Args:
        rank, expert: ``[R]``, of each slot to be filled.
        holder, held: a rank that holds an expert already, and the expert.
        machine: has the size of domains.
    """
    size = machine.domain_size
    if size is None:
        return np.zeros(0)
    to = {(e, d) for e, d in zip(expert.tolist(), (rank // size).tolist(), strict=True)}
    at: dict[int, set[int]] = {}  # domains that hold the expert already
    for e, d in zip(held.tolist(), (holder // size).tolist(), strict=True):
        at.setdefault(e, set()).add(d)
    if all(len(at[e] | {d}) == 1 for e, d in to):
        return np.zeros(0)
    far = [(e, d) for e, d in to if d not in at[e]]
    into = [d for _, d in far]
    out_of = [min(at[e]) for e in {e for e, _ in far} if len(at[e]) == 1]
    # The last domain may be smaller; assuming full size keeps this a lower bound.
    counts = [np.bincount(np.array(d, np.int64), minlength=1) for d in (into, out_of)]
    return np.concatenate(counts) / size


def _min_egress(
    rank: Int64Array, expert: Int64Array, holder: Int64Array, held: Int64Array, num_ranks: int
) -> float:
    """Return the lowest possible egress of the busiest rank, in experts.

    The instances of an expert with n replicas send it n times in total, its holders at least once.
    Arguments are those of `_crossings`.
    """
    linprog, coo_array = _scipy()
    experts, copies = np.unique(expert, return_counts=True)
    sender = np.append(holder, rank)
    of = np.searchsorted(experts, np.append(held, expert))
    count, first = len(sender), len(holder)
    columns, ranks = np.arange(count), np.arange(num_ranks)
    in_all = coo_array((np.ones(count), (of, columns)), (len(experts), count + 1))
    upper = coo_array(  # a row for each rank, and one for the holders of each expert
        (
            np.concatenate([np.ones(count), np.full(num_ranks, -1.0), np.full(first, -1.0)]),
            (
                np.concatenate([sender, ranks, num_ranks + of[:first]]),
                np.concatenate([columns, np.full(num_ranks, count), columns[:first]]),
            ),
        ),
        (num_ranks + len(experts), count + 1),
    )
    solution = linprog(
        np.append(np.zeros(count), 1.0),
        A_eq=in_all,
        b_eq=copies,
        A_ub=upper,
        b_ub=np.append(np.zeros(num_ranks), np.full(len(experts), -1.0)),
    )
    if not solution.success:
        raise UnsupportedError(f"the bound's linear program has no solution: {solution.message}")
    return float(solution.fun)


def _scipy() -> tuple[Any, Any]:
    try:
        from scipy.optimize import linprog
        from scipy.sparse import coo_array
    except ImportError:
        raise UnsupportedError(
            "the bound of a plan in which ranks both export and import, or that has residents, or"
            " of a machine whose egress is slower than its ingress, is a linear program, which"
            " needs SciPy; run:"
            " pip install 'ultraep_comm[model]'"
        ) from None
    return linprog, coo_array
