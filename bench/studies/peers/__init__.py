"""Other systems' planners beside ours, on the same loads: our readings, not their code.

Each is written from its published description, and checked against its authors' outputs where they
publish some; where a description leaves something open, the module says what was chosen. `PEERS`
lists them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from studies.peers.eplb import tokens_eplb, tokens_eplb_hierarchical
from studies.peers.llep import tokens_llep
from studies.peers.lplb import tokens_lplb
from studies.peers.moonep import tokens_moonep
from studies.peers.placement import Ints, Placed, at_home
from studies.peers.ultraep import tokens_ultraep


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One system's planner.

    Attributes:
        name: on the command line.
        reference: whose policy this is a reading of, and where it is published.
        transfer: how that system moves experts: "none", "direct", or "relay" (square-root relays).
        place: returns where the tokens of a load ``[E]`` go, given ``home`` ``[E]``, the number of
            ranks and the slots of a rank; None: the policy does not apply to this size.
    """

    name: str
    reference: str
    transfer: str
    place: Callable[[Ints, NDArray[np.int32], int, int], Placed | None]


def _none(load: Ints, home: NDArray[np.int32], num_ranks: int, slots: int) -> Placed:
    del slots
    return Placed(at_home(load, home, num_ranks))


PEERS = {
    peer.name: peer
    for peer in (
        Peer(name="none", reference="every expert at home", transfer="none", place=_none),
        Peer(
            name="moonep",
            reference="our reading of MoonEP's exact policy (MoonshotAI/MoonEP, 2026)",
            transfer="direct",
            place=tokens_moonep,
        ),
        Peer(
            name="ultraep",
            reference="our reading of UltraEP's quota planner (arXiv 2606.04101)",
            transfer="relay",
            place=tokens_ultraep,
        ),
        Peer(
            name="llep",
            reference="our reading of LLEP (SalesforceAIResearch/LeastLoadedEP, 2026)",
            transfer="direct",
            place=tokens_llep,
        ),
        Peer(
            name="eplb",
            reference="our reading of EPLB, global policy (deepseek-ai/EPLB, 2025)",
            transfer="direct",
            place=tokens_eplb,
        ),
        Peer(
            name="eplb-hier",
            reference="our reading of EPLB, hierarchical policy (deepseek-ai/EPLB, 2025)",
            transfer="direct",
            place=tokens_eplb_hierarchical,
        ),
        Peer(
            name="lplb",
            reference="our reading of LPLB's linear program on cubes (deepseek-ai/LPLB, 2025)",
            transfer="direct",
            place=tokens_lplb,
        ),
    )
}
"""Peers by name, in the order of tables."""
