"""Tiny models in DeepSpeed's AutoEP, trained as it is and with replicas.

DeepSpeed itself is unchanged, but for an operation that it would compile.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from frameworks.table import Case
from frameworks.tiny_models import make_model
from frameworks.training import GROUP, ROUNDED, Limits, Tensors, Training, compare, full

os.environ["DS_ACCELERATOR"] = "cpu"  # before DeepSpeed asks for it

import deepspeed
from deepspeed.utils import groups, safe_get_full_fp32_param, safe_get_full_grad

from ultraep_comm.adapters.deepspeed import replicate

BATCH, LENGTH = 4, 16
# By AutoEP's preset: the size of experts, and what is not as in all tiny models.
MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    "qwen3_moe": (48, {"norm_topk_prob": True}),
    "mixtral": (64, {}),
    "deepseek_v3": (48, {"first_k_dense_replace": 0}),
}


class OnDeepSpeed(Training):
    """A model of transformers in DeepSpeed's engine. Its routers prefer one expert."""

    def __init__(self, case: Case, replicated: bool) -> None:
        """Create the engine, as in a process of its own."""
        for of in ("EXPERT_PARALLEL_GROUP", "EXPERT_DATA_PARALLEL_GROUP"):
            for known in (f"_{of}", f"_{of}_RANKS"):
                getattr(groups, known).clear()
        given = case.given
        kind = given.get("model", "qwen3_moe")
        inner, more = MODELS[kind]
        model = make_model(kind, inner, **more)
        if checkpointing := given.get("checkpointing"):
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing)
        self.microbatches = given.get("microbatches", 1)
        self.engine, *_ = deepspeed.initialize(
            model=model,
            model_parameters=model.parameters(),
            config={
                "train_micro_batch_size_per_gpu": BATCH,
                "gradient_accumulation_steps": self.microbatches,
                "zero_optimization": {"stage": given.get("stage", 1), **given.get("zero", {})},
                "zero_allow_untested_optimizer": True,
                "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
                "bf16": {"enabled": not case.exact},
                "expert_parallel": {
                    "enabled": True,
                    "autoep_size": given.get("ep", 4),
                    "preset_model": kind,
                    **given.get("autoep", {}),
                },
                **given.get("config", {}),
            },
        )
        options = {**GROUP, **given.get("options", {})}
        self.layers = replicate(self.engine, **options) if replicated else []
        self.parameters = dict(self.engine.module.named_parameters())

    def ids(self, seed: int) -> torch.Tensor:
        """Return this rank's tokens."""
        draw = torch.Generator().manual_seed(100 * seed + dist.get_rank())
        return torch.randint(3, 128, (BATCH, LENGTH), generator=draw)

    def forward(self, step: int, microbatch: int) -> torch.Tensor:
        """Return the loss of a microbatch, which is the same in each step."""
        ids = self.ids(microbatch)
        loss: torch.Tensor = self.engine(input_ids=ids, labels=ids).loss
        return loss

    def backward(self, loss: torch.Tensor, microbatch: int) -> None:
        """Add gradients."""
        self.engine.backward(loss)
        if not self.engine.is_gradient_accumulation_boundary():
            self.engine.step()

    def replicated(self) -> dict[str, tuple[Any, Any]]:
        """Return the plan and the group of each layer."""
        layers = enumerate(self.layers)
        return {str(n): (layer.replica_plan, layer.replicas.group) for n, layer in layers}

    def whole(self, read: Any, otherwise: Any) -> Tensors:
        """Return what ZeRO has of each parameter, from all of the ranks that share it."""
        found = {name: (p, read(p)) for name, p in self.parameters.items()}
        return {n: full(otherwise(p) if v is None else v) for n, (p, v) in found.items()}

    def gradients(self) -> Tensors:
        """Return whole gradients."""
        return self.whole(safe_get_full_grad, lambda p: p.grad)

    def update(self) -> None:
        """Take a step."""
        self.engine.step()

    def left(self) -> dict[str, Tensors]:
        """Return the state of model and optimizer, and what the model computes now."""
        optimizer = getattr(self.engine.optimizer, "optimizer", self.engine.optimizer)
        states = enumerate(optimizer.state.values())
        every = [(f"{n}.{key}", value) for n, s in states for key, value in s.items()]
        found = {
            "parameters": self.whole(safe_get_full_fp32_param, lambda p: p),
            "moments": {name: full(value) for name, value in every if torch.is_tensor(value)},
            "state": {n: full(value) for n, value in self.engine.module_state_dict().items()},
        }
        self.engine.eval()
        with torch.no_grad():
            return found | {"logits": {"": full(self.engine(input_ids=self.ids(0)).logits)}}

    def step(self, number: int) -> float:
        """Take one whole step on tokens of its own, and return this rank's loss."""
        ids = self.ids(number)
        loss = self.engine(input_ids=ids, labels=ids).loss
        self.engine.backward(loss)
        self.engine.step()
        return float(loss.detach())

    def close(self) -> None:
        """Close the groups and the engine."""
        for group in {id(g): g for _, g in self.replicated().values()}.values():
            group.close()
        self.engine.destroy()


def run(case: Case, folder: Path) -> dict[str, Any]:
    """Compare training, or checkpoints."""
    backend = sys.modules["deepspeed.comm.torch"]  # deepspeed.comm has torch itself by that name
    backend.build_shm_op = lambda: None  # type: ignore[attr-defined]  # minutes of a compiler
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    if case.given.get("saves"):
        return save_and_load(case, folder)
    return compare(
        lambda replicated: OnDeepSpeed(case, replicated),
        Limits(first=5e-6, gradients=5e-6, left=5e-6, imbalance=1.02) if case.exact else ROUNDED,
        few=case.few,
        plans=case.given.get("ep") != 1,
    )


def save_and_load(case: Case, folder: Path) -> dict[str, Any]:
    """Return what is saved without and with replicas, and how training goes on.

    From the state itself, both ways; from that of the run with replicas, loaded without and with
    them; and from another one.
    """
    files, losses = [], []
    for way, replicated in (("plain", False), ("ours", True)):
        training = OnDeepSpeed(case, replicated)
        training.step(0)
        training.engine.save_checkpoint(str(folder / way), tag="first")
        dist.barrier()
        found = sorted(p for p in (folder / way).rglob("*") if p.is_file())
        files.append([[str(p.relative_to(folder / way)), p.stat().st_size] for p in found])
        losses.append([training.step(1), training.step(2)])
        training.close()
    for replicated, loads in ((False, True), (True, True), (True, False)):
        training = OnDeepSpeed(case, replicated)
        for number in range(5, 8):
            training.step(number)  # somewhere else
        if loads:
            training.engine.load_checkpoint(str(folder / "ours"), tag="first")
        losses.append([training.step(1), training.step(2)])
        training.close()
    failed = []
    if files[0] != files[1] or not any("expert_7" in name for name, _ in files[0]):
        failed.append("other files are saved with replicas")
    wanted, *others, elsewhere = (torch.tensor(each) for each in losses)
    if not all(torch.allclose(each, wanted, rtol=1e-6, atol=0) for each in others):
        failed.append("training goes on otherwise")
    if torch.allclose(elsewhere, wanted, rtol=1e-5, atol=0):
        failed.append("training goes on alike from another state")
    return {"files": files[0], "continued": losses, "failed": failed}
