"""T*, the lower bound on the time of any schedule of a plan on a machine."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ultraep_comm.errors import UnsupportedError
from ultraep_comm.model.machine import Machine

Int64Array = NDArray[np.int64]


def transfer_bound_us(
    slot_expert: Int64Array, home: Int64Array, expert_bytes: int, machine: Machine
) -> float:
    """Return T* in microseconds, without latencies.

    Each replicated expert leaves its home at least once, and each slot is filled once. If no rank
    both exports and imports, and egress is not slower than ingress, the busiest link gives T*.
    Otherwise a linear program does, over how much of each expert each rank sends. With several
    domains, a rank's near and far links are added up, and everything that enters or leaves a domain
    passes its far links: a lower bound, not always tight. If cores copy in one memory, any rank
    with an instance can make a copy, so only the sum of all copies counts, at the rate of as many
    concurrent stores as the memory sustains.

    Args:
        slot_expert: ``[G, S]``, a legal plan; -1: empty.
        home: ``[E]``.
        expert_bytes: W, of the transferred segments.
        machine: its rates count in full; efficiencies are ignored.

    Raises:
        UnsupportedError: the linear program is needed and SciPy is not installed.
    """
    num_ranks = len(slot_expert)
    rank, slot = np.nonzero(slot_expert >= 0)
    if not len(rank) or not expert_bytes:
        return 0.0
    if machine.parallel is not None:
        at_once = min(machine.parallel, float(num_ranks))
        return len(rank) * expert_bytes / (machine.egress_gbps * at_once) / 1e3
    expert = slot_expert[rank, slot]
    crossings = _crossings(rank, expert, home, machine)
    far_gbps = (machine.cross_gbps or 0.0) if len(crossings) else 0.0
    out_us = expert_bytes / (machine.egress_gbps + far_gbps) / 1e3
    in_us = expert_bytes / (machine.ingress_gbps + far_gbps) / 1e3
    imports = np.bincount(rank, minlength=num_ranks)
    exports = np.bincount(home[np.unique(expert)], minlength=num_ranks)
    most_out, most_in = float(exports.max()), float(imports.max())
    # If no rank both exports and imports, no set of ranks has to send more per rank than the
    # busiest home exports or the fullest rank imports.
    chained = bool(((exports > 0) & (imports > 0)).any())
    if chained or (most_in > most_out and out_us > in_us):
        most_out = _least_egress(rank, expert, home, num_ranks)
    bound = max(out_us * most_out, in_us * most_in)
    if far_gbps:
        bound = max(bound, crossings.max() * expert_bytes / far_gbps / 1e3)
    return bound


def _crossings(
    rank: Int64Array, expert: Int64Array, home: Int64Array, machine: Machine
) -> NDArray[np.float64]:
    """Return the least number of experts that enter or leave each domain, per rank of the domain.

    Empty if none crosses domains.
    """
    size = machine.domain_size
    if size is None:
        return np.zeros(0)
    far = rank // size != home[expert] // size
    if not far.any():
        return np.zeros(0)
    into = np.unique(np.stack([rank[far] // size, expert[far]]), axis=1)[0]
    out_of = home[np.unique(expert[far])] // size
    # The last domain may be smaller; assuming full size keeps this a lower bound.
    return np.append(np.bincount(into), np.bincount(out_of)) / size


def _least_egress(rank: Int64Array, expert: Int64Array, home: Int64Array, num_ranks: int) -> float:
    """Return the least possible egress of the busiest rank, in experts.

    The instances of an expert with n replicas send it n times in total, its home at least once.
    """
    linprog, coo_array = _scipy()
    experts, x = np.unique(expert, return_inverse=True)
    at_home = home[experts]
    sender = np.append(at_home, rank)
    of = np.append(np.arange(len(experts)), x)
    count = len(sender)
    columns, ranks = np.arange(count), np.arange(num_ranks)
    in_all = coo_array((np.ones(count), (of, columns)), (len(experts), count + 1))
    by_rank = coo_array(
        (
            np.append(np.ones(count), np.full(num_ranks, -1.0)),
            (np.append(sender, ranks), np.append(columns, np.full(num_ranks, count))),
        ),
        (num_ranks, count + 1),
    )
    least = np.append(np.ones(len(experts)), np.zeros(len(rank) + 1))
    solution = linprog(
        np.append(np.zeros(count), 1.0),
        A_eq=in_all,
        b_eq=np.bincount(x),
        A_ub=by_rank,
        b_ub=np.zeros(num_ranks),
        bounds=[(value, None) for value in least],
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
            "the bound of a plan in which ranks both export and import, or of a machine whose"
            " egress is slower than its ingress, is a linear program, which needs SciPy; run:"
            " pip install 'ultraep_comm[model]'"
        ) from None
    return linprog, coo_array
