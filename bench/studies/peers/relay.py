"""The published relay on a modelled machine, for comparison: two levels, about sqrt(n) relays.

Experts with at least 4 replicas go from their home to about sqrt(n) replicas, which pass them on to
the others in chunks of 8 tiles with a ready flag each; other experts go to all replicas directly.
Where the published description is silent, the relay gets the benefit of the doubt: in how replicas
are assigned to relays, and in that a relay passes a chunk on as soon as it has arrived.
"""

from __future__ import annotations

import math

import numpy as np

from ultraep_comm import _core
from ultraep_comm.model.machine import Machine
from ultraep_comm.model.predict import ExpertBytes, Prediction, run_transfer
from ultraep_comm.plan.plan import Plan

MIN_RELAYED = 4  # replicas; an expert with fewer is sent directly
CHUNK_TILES = 8


def predict_relay(
    plan: Plan,
    expert_bytes: ExpertBytes,
    machine: str | Machine = "nvl72",
    *,
    timeline: bool = False,
) -> Prediction:
    """Predict the time of a plan with the published relay; see ``ultraep_comm.model.predict``.

    The prediction's ``mode`` is "push": homes store, and so do relays.
    """
    return run_transfer(
        plan,
        expert_bytes,
        machine,
        mode=_core.Mode.PUSH,
        timeline=timeline,
        parent=relay_parents(plan),
        chunk_tiles=CHUNK_TILES,
    )


def relay_parents(plan: Plan) -> list[int]:
    """Return the sender of each replica ``[R]``, by ascending expert and then rank.

    Experts are taken by descending number of replicas; each gets as relays the ranks that send
    least so far.
    """
    host = plan.cpu()
    slots, home = host.slot_expert.numpy(), host.home.numpy()
    rank, slot = np.nonzero(slots >= 0)
    expert = slots[rank, slot]
    replicas = {e: rank[expert == e] for e in np.unique(expert).tolist()}
    sends = np.zeros(len(slots), np.int64)
    parents: dict[int, list[int]] = {}
    for e in sorted(replicas, key=lambda e: (-len(replicas[e]), e)):
        ranks, at_home = replicas[e], int(home[e])
        parent = np.full(len(ranks), at_home)
        if len(ranks) < MIN_RELAYED:
            sends[at_home] += len(ranks)
        else:
            num_relays = round(math.sqrt(len(ranks)))
            by_load = np.argsort(sends[ranks], kind="stable")
            relays, others = by_load[:num_relays], np.sort(by_load[num_relays:])
            parent[others] = ranks[relays[np.arange(len(others)) % num_relays]]
            np.add.at(sends, parent, 1)
        parents[e] = parent.tolist()
    return [parent for e in sorted(parents) for parent in parents[e]]
