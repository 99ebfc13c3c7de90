"""Train a small MoE language model with expert parallelism, without replicas and with them.

torchrun --standalone --nproc-per-node 4 examples/train.py [counts.npz, for the tokens counted]

On GPUs, one for each rank: NCCL and bf16. Without GPUs: gloo and float32. See docs/one-node.md.
"""

import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_to_all_single_autograd as exchange
from torch.nn.functional import cross_entropy, rms_norm, silu

import ultraep_comm as uec
from ultraep_comm.nn import Replication, grouped_mm

device = "cuda" if torch.cuda.is_available() else "cpu"  # the rest follows from this
dtype = torch.bfloat16 if device == "cuda" else torch.float32
EXPERTS, TOPK, HIDDEN, INNER, LAYERS = 16, 2, 64, 128, 2
TOKENS, CONTEXT, STEPS = 512, 4, 20  # tokens of a rank


def parameter(*shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter((torch.randn(shape) / shape[-2] ** 0.5).to(device, dtype))


class MoELayer(torch.nn.Module):
    def __init__(self, group: uec.Group, layer: int) -> None:
        super().__init__()
        own = group.topology.local_experts(group.rank).tolist()
        self.router = parameter(HIDDEN, EXPERTS)
        every = parameter(EXPERTS, HIDDEN, 2 * INNER), parameter(EXPERTS, INNER, HIDDEN)
        self.w13, self.w2 = (torch.nn.Parameter(w.detach()[own]) for w in every)
        self.replication = Replication(group, layer=layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        probs, topk_ids = (x @ self.router).float().softmax(1).topk(TOPK)
        run = self.replication.begin({"w13": self.w13, "w2": self.w2}, topk_ids)
        self.plan = run.plan
        x = run.before_dispatch(x)
        # The dispatch by physical ids, beside the transfer: rows by rank, then by instance.
        ranks, instances = dist.get_world_size(), self.replication.group.topology.instances_per_rank
        ids = run.topk_ids.flatten()
        order = ids.argsort(stable=True)
        sent = ids.bincount(minlength=ranks * instances).view(ranks, instances)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        sends, receives = sent.sum(1).tolist(), received.sum(1).tolist()
        rows = exchange(x[order // TOPK], receives, sends, dist.group.WORLD)
        instance = torch.arange(instances, device=device).repeat(ranks)
        by_instance = instance.repeat_interleave(received.flatten()).argsort(stable=True)
        # The experts: local ones, then slots, which are filled by now.
        rows, weights, slots = run.before_experts(rows[by_instance])
        ends = received.sum(0).cumsum(0, dtype=torch.int32)
        gate, up = grouped_mm(rows, weights["w13"], slots["w13"], ends).chunk(2, 1)
        rows = grouped_mm(silu(gate) * up, weights["w2"], slots["w2"], ends)
        rows = run.after_experts(rows)[by_instance.argsort()]
        back = exchange(rows, sends, receives, dist.group.WORLD)  # the combine
        back = back[order.argsort()].view(-1, TOPK, HIDDEN)
        return run.after_combine((back * probs.to(dtype).unsqueeze(2)).sum(1))


class Model(torch.nn.Module):
    def __init__(self, group: uec.Group) -> None:
        super().__init__()
        torch.manual_seed(0)  # the same parameters on every rank
        self.embedding, self.mix = parameter(256, HIDDEN), parameter(CONTEXT * HIDDEN, HIDDEN)
        self.moe = torch.nn.ModuleList(MoELayer(group, layer) for layer in range(LAYERS))
        self.head = parameter(HIDDEN, 256)

    def forward(self, read: torch.Tensor) -> torch.Tensor:
        x = self.embedding[read].flatten(1) @ self.mix
        for layer in self.moe:
            x = x + layer(rms_norm(x, x.shape[-1:]))
        return (rms_norm(x, x.shape[-1:]) @ self.head).float()


def train(slots: int) -> tuple[list[float], list[uec.Plan]]:
    """Return the loss of each step, and the plans of its layers."""
    expert = {"w13": ((HIDDEN, 2 * INNER), dtype), "w2": ((INNER, HIDDEN), dtype)}
    losses, plans = [], []
    group = uec.new_group(num_experts=EXPERTS, slots_per_rank=slots, expert=expert, grads=dtype)
    model = Model(group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = torch.tensor(list(Path(__file__).with_name("text.txt").read_bytes()))
    draw = torch.Generator().manual_seed(group.rank)
    for _ in range(STEPS):
        start = torch.randint(len(text) - CONTEXT, (TOKENS, 1), generator=draw)
        window = text[start + torch.arange(CONTEXT + 1)].to(device)
        loss = cross_entropy(model(window[:, :-1]), window[:, -1]) / group.num_ranks
        loss.backward()
        for name, weight in model.named_parameters():
            if "w13" not in name and "w2" not in name:  # those have all ranks' tokens already
                dist.all_reduce(weight.grad)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach_())
        losses.append(loss.item())
        plans += [layer.plan for layer in model.moe]
    group.close()
    return losses, plans


dist.init_process_group("nccl" if device == "cuda" else "gloo")
if device == "cuda":
    torch.cuda.set_device(dist.get_node_local_rank())
plain, _ = train(slots=0)
replicated, plans = train(slots=2)
if dist.get_rank() == 0:
    before, after = max(p.imbalance_before for p in plans), max(p.imbalance for p in plans)
    print(f"step {STEPS}: loss {plain[-1]:.4f} without replicas, {replicated[-1]:.4f} with")
    print(f"busiest rank over the mean, at worst: {before:.2f} without replicas, {after:.2f} with")
    torch.testing.assert_close(replicated, plain, rtol=2e-2 if device == "cuda" else 1e-4, atol=0)
    if sys.argv[1:]:
        loads = torch.stack([plan.load for plan in plans]).view(STEPS, LAYERS, -1, EXPERTS)
        np.savez(sys.argv[1], counts_src=loads.cpu().numpy())
dist.destroy_process_group()
