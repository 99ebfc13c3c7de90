"""The families of loads that only studies have, beside those of `ultraep_comm.bench.loads`."""

from __future__ import annotations

from studies.options import MOONEP_CASES, WORKLOADS
from studies.peers.moonep_cases import cases_of
from studies.workloads import workload_load
from ultraep_comm.bench import loads


def make_loads(
    family: str, *, num_ranks: int, num_experts: int, num_tokens: int, topk: int, seeds: int
) -> loads.Loads:
    """Return loads ``[E]`` of one family; see `ultraep_comm.bench.loads.make_loads`.

    Of a workload these are its first ``seeds`` steps; the number of MoonEP's cases is fixed, and
    they have their own tokens.
    """
    if family == MOONEP_CASES:
        return [case.load(num_ranks) for case in cases_of(num_ranks, num_experts)]
    shape = {"num_ranks": num_ranks, "num_experts": num_experts, "topk": topk}
    if family in WORKLOADS:
        shape["num_tokens"] = num_tokens // num_ranks
        return [workload_load(family, **shape, step=step) for step in range(seeds)]
    return loads.make_loads(family, **shape, num_tokens=num_tokens, seeds=seeds)
