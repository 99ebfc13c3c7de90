"""One MoE layer with replicated experts, from routing to the output, on four processes.

    python examples/moe_layer.py

Each rank routes its tokens, plans, replicates the hot experts, reroutes, exchanges tokens with
plain sends and receives, applies the experts it holds, and returns the results. The output is
compared with the same layer computed without replicas.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import ultraep_comm as uec

RANKS, EXPERTS, SLOTS, TOP_K = 4, 16, 2, 2
TOKENS, HIDDEN, INNER = 512, 64, 128


def route(tokens: torch.Tensor, router: torch.Tensor) -> torch.Tensor:
    """Return skewed ``topk_ids [T, k]``: low expert ids are popular."""
    popularity = torch.linspace(3, 0, EXPERTS)
    return (tokens @ router + popularity).topk(TOP_K, dim=1).indices


def apply_expert(tokens: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    """Apply one gated feed-forward expert."""
    gate, up = (tokens @ w13.T).chunk(2, dim=1)
    return (torch.nn.functional.silu(gate) * up) @ w2.T


def exchange(rows: torch.Tensor, send_counts: list[int], recv_counts: list[int]) -> torch.Tensor:
    """Send consecutive parts of ``rows`` to the ranks; the parts received, in rank order."""
    received = rows.new_empty((sum(recv_counts), *rows.shape[1:]))
    parts = list(received.split(recv_counts))
    me = dist.get_rank()
    mine = list(rows.split(send_counts))
    parts[me].copy_(mine[me])
    operations = [
        op
        for peer in range(RANKS)
        if peer != me
        for op in (
            dist.P2POp(dist.isend, mine[peer].contiguous(), peer),
            dist.P2POp(dist.irecv, parts[peer], peer),
        )
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return received


def layer(
    tokens: torch.Tensor, topk_ids: torch.Tensor, weights: dict[str, torch.Tensor], group: uec.Group
) -> tuple[torch.Tensor, uec.Plan, int]:
    """Run the layer; return its output, the plan, and how many rows this rank computed."""
    load = uec.gather_load(topk_ids, group=group)
    plan = uec.plan_replicas(load, group=group)
    work = uec.replicate_experts(weights, plan, group=group, async_op=True)
    physical = uec.reroute(topk_ids, plan, group=group).flatten()

    # Token dispatch: rows sorted by instance go to the instance's rank.
    instances = group.topology.instances_per_rank
    order = physical.argsort(stable=True)
    to_rank = torch.bincount(physical // instances, minlength=RANKS)
    from_rank = torch.empty_like(to_rank)
    table = [torch.empty_like(to_rank) for _ in range(RANKS)]
    dist.all_gather(table, to_rank)
    from_rank = torch.stack(table)[:, group.rank]
    sends, receives = to_rank.tolist(), from_rank.tolist()
    rows = exchange(tokens[order // TOP_K], sends, receives)
    which = exchange(physical[order] % instances, sends, receives)

    assert work is not None
    work.wait()
    out = torch.zeros_like(rows)
    for index in which.unique().tolist():
        mine = index < group.num_mains
        source = weights if mine else group.slots
        at = index if mine else index - group.num_mains
        chosen = which == index
        out[chosen] = apply_expert(rows[chosen], source["w13"][at], source["w2"][at])

    back = exchange(out, receives, sends)
    result = torch.zeros(len(order), HIDDEN)
    result[order] = back
    return result.view(len(tokens), TOP_K, HIDDEN).sum(dim=1), plan, len(rows)


def main(rank: int, store: str) -> None:
    """Run one rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    everyone = torch.Generator().manual_seed(0)
    router = torch.randn(HIDDEN, EXPERTS, generator=everyone) / HIDDEN**0.5
    w13 = torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=everyone) / HIDDEN**0.5
    w2 = torch.randn(EXPERTS, HIDDEN, INNER, generator=everyone) / INNER**0.5
    tokens = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(rank + 1))
    topk_ids = route(tokens, router)

    expert = {"w13": ((2 * INNER, HIDDEN), w13.dtype), "w2": ((HIDDEN, INNER), w2.dtype)}
    with uec.new_group(num_experts=EXPERTS, slots_per_rank=SLOTS, expert=expert) as group:
        mains = torch.from_numpy(group.topology.mains(rank)).long()
        weights = {"w13": w13[mains].contiguous(), "w2": w2[mains].contiguous()}
        result, plan, computed = layer(tokens, topk_ids, weights, group)

    expected = torch.zeros_like(result)
    for e in range(EXPERTS):
        for k in range(TOP_K):
            chosen = topk_ids[:, k] == e
            expected[chosen] += apply_expert(tokens[chosen], w13[e], w2[e])
    torch.testing.assert_close(result, expected)
    rows = [torch.zeros(1, dtype=torch.int64) for _ in range(RANKS)]
    dist.all_gather(rows, torch.tensor([computed]))
    if rank == 0:
        assert plan.load is not None
        home_rows = plan.load.sum(0).view(RANKS, -1).sum(1).tolist()
        print(f"rows per rank without replicas: {home_rows}")
        print(f"rows per rank with {plan.num_replicas} replicas: {[int(r) for r in rows]}")
        print("output equals the layer without replicas on every rank")
    # Its threads hold tensors, and must not outlive the interpreter.
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(main, (str(Path(folder) / "store"),), nprocs=RANKS)
