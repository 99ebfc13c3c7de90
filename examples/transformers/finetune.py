"""Fine-tune a tiny Qwen3-MoE with transformers, its hot experts replicated for each microbatch.

.venv/bin/pip install -c constraints.txt -e '.[transformers,viz]'
ULTRAEP_RECORD=run .venv/bin/torchrun --nproc-per-node 4 examples/transformers/finetune.py

Then `.venv/bin/python -m ultraep_comm.viz load run --out load.html load.png` draws the loads.
"""

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.distributed import DistributedConfig

import ultraep_comm.adapters.transformers as ultraep  # registers ep_implementation="ultraep"

STEPS, BATCH, LENGTH = 30, 8, 64
TINY = Qwen3MoeConfig(
    vocab_size=256,
    hidden_size=64,
    moe_intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    num_experts=16,
    num_experts_per_tok=2,
)

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.set_num_threads(1)
folder = Path(tempfile.gettempdir(), f"tiny-qwen3-moe-{os.getppid()}")  # torchrun's, of all ranks
if rank == 0:  # in place of a checkpoint from the hub
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(TINY).save_pretrained(folder)
dist.barrier()

ultraep.configure(slots_per_rank=2)
parallel = DistributedConfig(fsdp_size=ranks, ep_size=ranks, ep_implementation="ultraep")
model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=parallel).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
text = torch.tensor(list((Path(__file__).parents[1] / "text.txt").read_bytes()))
draw = torch.Generator().manual_seed(rank)
for step in range(STEPS):
    starts = torch.randint(len(text) - LENGTH, (BATCH, 1), generator=draw)
    ids = text[starts + torch.arange(LENGTH)]
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0 and (step + 1) % 5 == 0:
        plans = [layer.plan for layer in ultraep.layers(model).values()]
        shown = ", ".join(f"{p.imbalance_before:.2f} -> {p.imbalance:.2f}" for p in plans)
        print(f"step {step + 1}: loss {loss.item():.3f}; busiest rank over the mean: {shown}")

for group in {layer.group for layer in ultraep.layers(model).values()}:
    group.close()
dist.destroy_process_group()
