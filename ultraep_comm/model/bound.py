"""The time that no schedule of a plan can beat on a machine, exactly."""

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
    """Return T* in microseconds, latencies apart.

    Each replicated expert leaves its home once and each slot is filled once. Where no rank both
    exports and imports, the busiest of these links decides, unless links out are slower than links
    in. Otherwise a linear program over who sends how much of what does. Across domains, near and
    far links of a rank count together, and what enters or leaves a domain has to pass its far
    links: a bound, and not always the best one. Where cores copy in one memory any of an expert's
    ranks can make a copy, and only their sum counts: as many stores at a time as the memory bears.

    Args:
        slot_expert: ``[G, S]``, a legal plan; -1: empty.
        home: ``[E]``.
        expert_bytes: of all segments that are transferred.
        machine: whose rates count in full, whatever its efficiencies.

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
    # Without such chains no set of ranks has to send more, for each of them, than the busiest home
    # exports or the fullest rank imports.
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
    """Return the experts that enter or leave each domain at least, for each rank of it.

    Empty where none does.
    """
    size = machine.domain_size
    if size is None:
        return np.zeros(0)
    far = rank // size != home[expert] // size
    if not far.any():
        return np.zeros(0)
    into = np.unique(np.stack([rank[far] // size, expert[far]]), axis=1)[0]
    out_of = home[np.unique(expert[far])] // size
    # A domain at the end may be smaller; as if it were not, the bound stays one.
    return np.append(np.bincount(into), np.bincount(out_of)) / size


def _least_egress(rank: Int64Array, expert: Int64Array, home: Int64Array, num_ranks: int) -> float:
    """Return the least that the busiest rank can send, in experts.

    Instances of an expert with n replicas send n in all, its home at least 1.
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
            "the bound of a plan in which ranks both export and import, or of links out that are"
            " slower than links in, is a linear program, for which SciPy is not installed; run:"
            " pip install 'ultraep_comm[model]'"
        ) from None
    return linprog, coo_array
