"""Tiny models in DeepSpeed's AutoEP, trained as it is and with replicas, on CPUs over gloo.

torchrun --standalone --nproc-per-node 4 tests/python/deepspeed_training.py RESULTS.json [CASE...]

Rank 0 writes, for each case, the losses of both ways, the largest differences, and the imbalance
before and after. DeepSpeed itself is unchanged, but for an operation that it would compile.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from trained_alike import choosing, full, rerouted, run_cases, worst

os.environ["DS_ACCELERATOR"] = "cpu"  # before DeepSpeed asks for it

import deepspeed
import transformers as tf
from deepspeed.utils import (
    groups,
    safe_get_full_fp32_param,
    safe_get_full_grad,
)
from tiny_models import make_model

from ultraep_comm.adapters.deepspeed import replicate

STEPS, BATCH, LENGTH = 3, 4, 16
# By AutoEP's preset: the size of experts, and what is not as in all tiny models.
MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    "qwen3_moe": (48, {"norm_topk_prob": True}),
    "mixtral": (64, {}),
    "deepseek_v3": (48, {"first_k_dense_replace": 0}),
}


@dataclass(frozen=True)
class Case:
    model: str = "qwen3_moe"
    ep: int = 4
    stage: int = 1
    microbatches: int = 1
    checkpointing: dict[str, Any] | None = None
    exact: bool = True
    zero: dict[str, Any] = field(default_factory=dict)
    autoep: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


RECOMPUTED = {"use_reentrant": False}
CASES = {
    "EP4, ZeRO-1": Case(),
    "EP4, ZeRO-2": Case(stage=2),
    "EP2 x DP2, ZeRO-1": Case(ep=2),
    "EP2 x DP2, ZeRO-2": Case(ep=2, stage=2),
    "EP4, ZeRO-1, 2 microbatches": Case(microbatches=2),
    "EP2 x DP2, ZeRO-2, 2 microbatches": Case(ep=2, stage=2, microbatches=2),
    "EP4, ZeRO-2, recomputed": Case(stage=2, checkpointing=RECOMPUTED),
    "EP2 x DP2, ZeRO-1, recomputed, reentrant": Case(ep=2, checkpointing={"use_reentrant": True}),
    "EP2 x DP2, ZeRO-2, overlapped": Case(
        ep=2, stage=2, zero={"overlap_comm": True, "reduce_bucket_size": 2000}
    ),
    "EP4, ZeRO-1, expert by expert": Case(autoep={"use_grouped_mm": False}),
    "EP4, ZeRO-1, scores before experts": Case(autoep={"score_apply": "pre"}),
    "mixtral, EP4, ZeRO-2": Case("mixtral", stage=2),
    "deepseek_v3, EP2 x DP2, ZeRO-1": Case("deepseek_v3", ep=2),
    "EP4, ZeRO-1, bf16": Case(exact=False),
    "EP2 x DP2, ZeRO-2, bf16, 2 microbatches": Case(ep=2, stage=2, microbatches=2, exact=False),
    "EP2 x DP2, ZeRO-2, experts' ranks apart": Case(
        ep=2, stage=2, config={"use_data_before_expert_parallelism": True}
    ),
    "EP4, no ZeRO": Case(stage=0),
    "EP4, ZeRO-1, no replicas for few tokens": Case(options={"min_tokens": 10_000}),
    "EP1, ZeRO-1": Case(ep=1),
}


def make(case: Case, replicated: bool) -> tuple[Any, list[Any]]:
    """Return the engine and its layers with replicas. The model's routers prefer one expert."""
    for of in ("EXPERT_PARALLEL_GROUP", "EXPERT_DATA_PARALLEL_GROUP"):
        for known in (f"_{of}", f"_{of}_RANKS"):
            getattr(groups, known).clear()  # as in a process of its own
    inner, more = MODELS[case.model]
    model = make_model(case.model, inner, **more)
    if case.checkpointing is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=case.checkpointing)
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": BATCH,
            "gradient_accumulation_steps": case.microbatches,
            "zero_optimization": {"stage": case.stage, **case.zero},
            "zero_allow_untested_optimizer": True,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
            "bf16": {"enabled": not case.exact},
            "expert_parallel": {
                "enabled": True,
                "autoep_size": case.ep,
                "preset_model": case.model,
                **case.autoep,
            },
            **case.config,
        },
    )
    options = {"slots_per_rank": 2, "engine": "host", "timeout": 60.0, **case.options}
    return engine, replicate(engine, **options) if replicated else []


@dataclass
class Run:
    """What a run leaves: tensors are whole, in fp32."""

    losses: list[float]
    grads: list[dict[str, torch.Tensor]]
    parameters: dict[str, torch.Tensor]
    optimizer: dict[str, torch.Tensor]
    state: dict[str, torch.Tensor]
    logits: torch.Tensor
    arrivals: set[int]
    imbalance: list[tuple[int, float, float, int]]
    choices: list[torch.Tensor]  # of this rank's routers


def train(case: Case, replicated: bool, given: list[torch.Tensor] | None = None) -> Run:
    """Train a model, with the routing that is given, if any."""
    with choosing(given) as choices:
        engine, layers = make(case, replicated)
        parameters = dict(engine.module.named_parameters())
        arrivals = dict.fromkeys(parameters, 0)

        def count(name: str) -> Any:
            def hook(_: torch.Tensor) -> None:
                arrivals[name] += 1

            return hook

        hooks = [p.register_post_accumulate_grad_hook(count(n)) for n, p in parameters.items()]
        tokens = torch.Generator().manual_seed(7 + dist.get_rank())
        every = [
            torch.randint(3, 128, (BATCH, LENGTH), generator=tokens)
            for _ in range(case.microbatches)
        ]
        losses, grads, imbalance = [], [], []
        for _ in range(STEPS):
            mean = torch.zeros(())
            for ids in every:
                loss = engine(input_ids=ids, labels=ids).loss
                engine.backward(loss)
                mean += loss.detach().float() / case.microbatches
                for number, layer in enumerate(layers):
                    plan = layer.replica_plan
                    found = plan.imbalance_before, plan.imbalance, plan.num_replicas
                    imbalance.append((number, *found))
                    layer.replicas.group.assert_idle()
                if not engine.is_gradient_accumulation_boundary():
                    engine.step()
            grads.append(whole(parameters, gradient))
            engine.step()
            dist.all_reduce(mean)
            losses.append(mean.item() / dist.get_world_size())
        for hook in hooks:
            hook.remove()
        found_parameters = whole(parameters, master)
        moments = of_optimizer(engine.optimizer)
        state = {name: full(value) for name, value in engine.module_state_dict().items()}
        engine.eval()
        with torch.no_grad():
            logits = full(engine(input_ids=every[0]).logits)
        number = set(arrivals.values())
        end(engine, layers)
    return Run(losses, grads, found_parameters, moments, state, logits, number, imbalance, choices)


def whole(parameters: dict[str, Any], read: Any) -> dict[str, torch.Tensor]:
    """Return what DeepSpeed has of each parameter, from all of the ranks that share it."""
    return {name: full(read(value)) for name, value in parameters.items()}


def master(parameter: Any) -> torch.Tensor:
    found = safe_get_full_fp32_param(parameter)
    return parameter if found is None else found  # without ZeRO


def gradient(parameter: Any) -> torch.Tensor:
    found = safe_get_full_grad(parameter)
    return parameter.grad if found is None else found


def of_optimizer(optimizer: Any) -> dict[str, torch.Tensor]:
    """Return this rank's part of an optimizer's state."""
    states = getattr(optimizer, "optimizer", optimizer).state.values()
    every = [(i, key, value) for i, state in enumerate(states) for key, value in state.items()]
    return {f"{i}.{key}": full(value) for i, key, value in every if torch.is_tensor(value)}


def end(engine: Any, layers: list[Any]) -> None:
    for group in {id(layer.replicas.group): layer.replicas.group for layer in layers}.values():
        group.close()
    engine.destroy()


def compare(case: Case) -> dict[str, Any]:
    plain, ours = (train(case, replicated) for replicated in (False, True))
    followed = train(case, True, plain.choices)
    pairs = list(zip(followed.grads, plain.grads, strict=True))
    return {
        "losses": [plain.losses, ours.losses],
        "gradients": [worst(a, b) for a, b in pairs],
        "expert_gradients": [worst(of_experts(a), of_experts(b)) for a, b in pairs],
        "rerouted": rerouted(followed.choices, plain.choices),
        "parameters": worst(followed.parameters, plain.parameters),
        "optimizer": worst(followed.optimizer, plain.optimizer),
        "state": worst(followed.state, plain.state),
        "logits": worst({"": followed.logits}, {"": plain.logits}),
        "arrivals": [sorted(run.arrivals) for run in (plain, ours)],
        "imbalance": ours.imbalance,
    }


def of_experts(grads: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {n: g for n, g in grads.items() if ".experts." in n}


def step(engine: Any, number: int) -> float:
    tokens = torch.Generator().manual_seed(100 * number + dist.get_rank())
    ids = torch.randint(3, 128, (BATCH, LENGTH), generator=tokens)
    loss = engine(input_ids=ids, labels=ids).loss
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def checkpoints() -> dict[str, Any]:
    """Return what is saved with and without replicas, and how training goes on.

    From the state itself, both ways; from that of the run with replicas, loaded without and with
    them; and from another one.
    """
    case = Case(ep=2, stage=2)
    folder = Path(tempfile.gettempdir()) / f"deepspeed_{os.environ['TORCHELASTIC_RUN_ID']}"
    files, losses = [], []
    for way, replicated in (("plain", False), ("ours", True)):
        engine, layers = make(case, replicated)
        step(engine, 0)
        engine.save_checkpoint(str(folder / way), tag="first")
        dist.barrier()
        found = sorted(p for p in (folder / way).rglob("*") if p.is_file())
        files.append([[str(p.relative_to(folder / way)), p.stat().st_size] for p in found])
        losses.append([step(engine, 1), step(engine, 2)])
        end(engine, layers)
    for replicated, loads in ((False, True), (True, True), (True, False)):
        engine, layers = make(case, replicated)
        for number in range(5, 8):
            step(engine, number)  # somewhere else
        if loads:
            engine.load_checkpoint(str(folder / "ours"), tag="first")
        losses.append([step(engine, 1), step(engine, 2)])
        end(engine, layers)
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    return {"files": files, "continued": losses}


def versions() -> dict[str, str]:
    names = ("deepspeed", "transformers", "torch", "ultraep_comm")
    return {name: importlib.metadata.version(name) for name in names}


OTHERS = {
    "checkpoints": checkpoints,
    "versions": versions,
}


def main(path: str, names: list[str]) -> None:
    torch.set_num_threads(1)
    tf.logging.set_verbosity_error()
    backend = sys.modules["deepspeed.comm.torch"]  # deepspeed.comm has torch itself by that name
    backend.build_shm_op = lambda: None  # type: ignore[attr-defined]  # minutes of a compiler
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    run_cases(path, names, {n: partial(compare, case) for n, case in CASES.items()} | OTHERS)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
