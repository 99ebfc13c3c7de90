"""Tiny models of transformers, trained by its own expert parallelism and with replicas.

torchrun --nproc-per-node 4 tests/python/transformers_training.py RESULTS.json [CASE...]

Rank 0 writes, for each case, the losses of both ways, the largest differences, and the imbalance
before and after.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import transformers as tf
from new_tensors import NewTensors
from tiny_models import make_model
from trained_alike import apart, full, run_cases
from transformers.distributed import DistributedConfig

from ultraep_comm.adapters import transformers as adapter

# The size of experts, and of the configuration what is not as in all tiny models.
MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    "qwen3_moe": (32, {}),
    "gptoss": (32, {}),
    "mixtral": (32, {}),
    "deepseek_v3": (32, {"first_k_dense_replace": 1}),
}
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


@dataclass(frozen=True)
class Case:
    model: str
    fsdp: int = 4
    tp: int = 1
    ep: int = 4
    experts: str = "grouped_mm"
    dtype: torch.dtype = torch.float32
    optimizer: str = "sgd"
    checkpointing: dict[str, Any] | None = None
    compiled: bool = False  # with replicas
    options: dict[str, Any] = field(default_factory=dict)
    batch: tuple[int, int] = (4, 16)
    learning_rate: float = 0.1
    trained: str = ""  # part of the names of the parameters that are trained


CASES = {
    "qwen3": Case("qwen3_moe"),
    "gptoss": Case("gptoss", experts="eager"),
    "mixtral, two copies of an expert": Case("mixtral", ep=2, experts="batched_mm"),
    "dsv3": Case("deepseek_v3"),
    "shared batches": Case("qwen3_moe", fsdp=2, tp=2),
    "recomputed": Case("qwen3_moe", checkpointing={"use_reentrant": False}),
    "recomputed, reentrant": Case("gptoss", checkpointing={"use_reentrant": True}),
    "adamw": Case("qwen3_moe", optimizer="adamw", experts="eager", learning_rate=1e-3),
    "compiled": Case("qwen3_moe", compiled=True),
    "bf16": Case("qwen3_moe", dtype=torch.bfloat16),
    "routers alone": Case("qwen3_moe", trained="mlp.gate."),
    "no replicas for few tokens": Case("qwen3_moe", options={"min_tokens": 10_000}),
    # Two tokens in a group of four: half of the ranks have none.
    "ranks without tokens": Case("qwen3_moe", fsdp=1, tp=4, batch=(1, 2), learning_rate=0.01),
}


@dataclass
class Run:
    """What a run leaves: tensors are whole, in fp32."""

    losses: list[float]
    grads: list[dict[str, torch.Tensor]]
    state: dict[str, torch.Tensor]
    optimizer: dict[str, torch.Tensor]
    logits: torch.Tensor
    imbalance: list[tuple[int, float, float, int]]


def load(folder: Path, case: Case, way: str) -> Any:
    return tf.AutoModelForCausalLM.from_pretrained(
        folder / case.model,
        dtype=case.dtype,
        experts_implementation=case.experts,
        distributed_config=DistributedConfig(
            fsdp_size=case.fsdp,
            tp_size=case.tp,
            ep_size=case.ep,
            ep_implementation=way,
        ),
    )


def train(folder: Path, case: Case, way: str) -> Run:
    model = load(folder, case, way)
    model.train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(case.trained in name)
    if case.checkpointing is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=case.checkpointing)
    if case.compiled and way == adapter.NAME:
        model.compile(backend="eager")
    seed = torch.Generator().manual_seed(7 + dist.get_rank() // case.tp)
    ids = torch.randint(3, 128, case.batch, generator=seed)
    if case.optimizer == "sgd":
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=case.learning_rate, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=case.learning_rate)
    losses, grads, imbalance = [], [], []
    for _ in range(3):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        grads.append({n: full(p.grad) for n, p in model.named_parameters() if p.grad is not None})
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
        for layer, one in enumerate(adapter.layers(model).values()):
            assert one.plan is not None
            assert one.group is not None
            one.group.assert_idle()
            plan = one.plan
            imbalance.append((layer, plan.imbalance_before, plan.imbalance, plan.num_replicas))
        optimizer.step()
        optimizer.zero_grad()
    names = {p: n for n, p in model.named_parameters()}
    moments = {
        f"{names[p]}.{key}": full(value)
        for p, values in optimizer.state.items()
        for key, value in values.items()
        if torch.is_tensor(value) and value.dim()
    }
    state = {name: full(value) for name, value in model.state_dict().items()}
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    return Run(losses, grads, state, moments, full(logits), imbalance)


def compare(folder: Path, case: Case) -> dict[str, Any]:
    adapter.configure(slots_per_rank=2, timeout=60.0, engine="host", **case.options)
    runs = [train(folder, case, way) for way in ("all_to_all", adapter.NAME)]
    plain, ours = runs
    result = {
        "losses": [run.losses for run in runs],
        "gradients": [apart(a, b) for a, b in zip(ours.grads, plain.grads, strict=True)],
        "state": apart(ours.state, plain.state),
        "optimizer": apart(ours.optimizer, plain.optimizer),
        "logits": apart({"": ours.logits}, {"": plain.logits}),
        "imbalance": ours.imbalance,
    }
    if case.dtype != torch.float32:  # how far both are from fp32
        exact = train(folder, replace(case, dtype=torch.float32), "all_to_all")
        result["from_fp32"] = [apart(run.grads[0], exact.grads[0]) for run in runs]
    return result


def largest_new_tensor(folder: Path) -> dict[str, Any]:
    """Return the largest tensor that a layer creates, and the size of the smallest main weight."""
    case = Case("qwen3_moe", batch=(1, 4))
    model = load(folder, case, adapter.NAME)
    ids = torch.arange(4)[None] + 3
    model(input_ids=ids, labels=ids).loss.backward()  # creates the group
    found, call = NewTensors(), adapter.UltraEP.__call__

    def watch(self: Any, *tensors: torch.Tensor) -> Any:
        with found:
            return call(self, *tensors)

    with mock.patch.object(adapter.UltraEP, "__call__", watch):
        model(input_ids=ids, labels=ids).loss.backward()
    num_elements = min(p.to_local().numel() for n, p in model.named_parameters() if "experts" in n)
    layer = next(iter(adapter.layers(model).values()))
    return {
        "largest": found.largest,
        "num_elements": num_elements,
        "replicas": layer.plan.num_replicas,
    }


def main(path: str, names: list[str]) -> None:
    torch.set_num_threads(1)
    tf.logging.set_verbosity_error()
    tf.utils.logging.disable_progress_bar()
    dist.init_process_group("gloo")
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    if dist.get_rank() == 0:
        for name, (inner, more) in MODELS.items():
            make_model(name, inner, **IDS, **more).save_pretrained(Path(folder[0]) / name)
    dist.barrier()
    cases: dict[str, Any] = {n: partial(compare, Path(folder[0]), c) for n, c in CASES.items()}
    cases["new tensors"] = partial(largest_new_tensor, Path(folder[0]))
    run_cases(path, names, cases, shows=False)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
