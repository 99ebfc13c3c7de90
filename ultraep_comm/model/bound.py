"""T*, the lower bound on the time of any schedule of a plan on a machine."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

from ultraep_comm.model.machine import Machine
from ultraep_comm.plan.bounds import Int64Array, count_ends, find_busiest_set, list_transfers


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
    slower than ingress, the busiest link determines T*. Otherwise the set of ranks does that has to
    send most on average. With several domains, a rank's near and far links are added up, and
    everything that has to enter or leave a domain passes its far links: a lower bound, not always
    tight. If cores copy in one memory, any rank with an instance can make a copy, so only the sum
    of all copies counts, at the rate of as many concurrent stores as the memory sustains.

    Args:
        slot_expert: ``[G, S]``, a legal plan; -1: empty.
        home: ``[E]``.
        expert_bytes: W, of the transferred segments.
        machine: its full rates are used, without efficiencies.
        residents: ``[G, S]``, the expert that each slot holds already; -1, or None: none.
    """
    num_ranks = len(slot_expert)
    transfers = list_transfers(slot_expert, home, residents)
    if not transfers or not expert_bytes:
        return 0.0
    exports, imports = count_ends(transfers, num_ranks)
    if machine.parallel is not None:
        at_once = min(machine.parallel, float(num_ranks))
        return int(imports.sum()) * expert_bytes / (machine.egress_gbps * at_once) / 1e3
    crossings = _crossings(transfers, machine)
    far_gbps = 0.0 if crossings is None else machine.cross_gbps or 0.0
    out_us = expert_bytes / (machine.egress_gbps + far_gbps) / 1e3
    in_us = expert_bytes / (machine.ingress_gbps + far_gbps) / 1e3
    max_exports, max_imports = int(exports.max()), int(imports.max())
    chained = bool(((exports > 0) & (imports > 0)).any())
    several = any(len(holders) > 1 for holders, _ in transfers)
    egress = Fraction(max_exports)
    if chained or several or (max_imports > max_exports and out_us > in_us):
        egress, _ = find_busiest_set(transfers, exports, above=egress)
    bound = max(out_us * float(egress), in_us * max_imports)
    if crossings and far_gbps:
        bound = max(bound, crossings * expert_bytes / far_gbps / 1e3)
    return bound


def _crossings(transfers: list[tuple[list[int], list[int]]], machine: Machine) -> float | None:
    """Return how many experts at least enter or leave a domain, per rank of it; the largest.

    None if no expert has instances in several domains.
    """
    size = machine.domain_size
    if size is None:
        return None
    into, out_of = Counter[int](), Counter[int]()
    has_far = False
    for holders, targets in transfers:
        at = {rank // size for rank in holders}
        far = {rank // size for rank in targets} - at
        has_far |= len(at | far) > 1
        into.update(far)
        if far and len(at) == 1:
            out_of.update(at)
    # The last domain may be smaller; assuming full size keeps this a lower bound.
    return max([*into.values(), *out_of.values()], default=0) / size if has_far else None
