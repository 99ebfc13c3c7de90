"""Names and defaults that studies share. Loads neither torch nor numpy."""

from ultraep_comm.bench.options import parse_names

EXACT_TARGET = 1.0  # imbalance at which a planner may stop
# The public balance workloads, by short name; see `workloads.route_tokens`.
WORKLOADS = {
    name[:2]: name
    for name in (
        "W0_balanced",
        "W1_hot_expert_set",
        "W2_hot_rank",
        "W3_spread_hot_experts",
        "W4_source_ragged",
        "W5_zero_expert_rank",
        "W6_rotating_hotspot",
        "W7_burst",
    )
}
WORKLOAD_SEED = 1234  # published, as are the defaults:
WORKLOAD_RANKS, WORKLOAD_EXPERTS, WORKLOAD_TOPK, WORKLOAD_TOKENS = 4, 8, 2, 128  # of each rank
MOONEP_CASES = "moonep"  # a family: the cases of `peers.moonep_cases` that have the size
PEER_NAMES = ("none", "moonep", "ultraep", "llep", "eplb", "eplb-hier", "lplb")  # peers.PEERS


def parse_workloads(text: str, flag: str) -> tuple[str, ...]:
    """Return the names of public workloads, of WORKLOADS."""
    return parse_names(text, flag, tuple(WORKLOADS))
