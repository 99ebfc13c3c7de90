"""Tiny models of transformers, trained by its own expert parallelism and with replicas."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import transformers as tf
from new_tensors import NewTensors
from transformers.distributed import DistributedConfig

from frameworks.table import Case
from frameworks.tiny_models import make_model
from frameworks.training import GROUP, ROUNDED, Limits, Tensors, Training, compare, full, moments
from ultraep_comm.adapters import transformers as adapter

INNER = 32
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MORE = {"deepseek_v3": {"first_k_dense_replace": 1}}  # not as in all tiny models


def load(folder: Path, case: Case, way: str) -> Any:
    """Return a model on this rank, with its experts replicated or not."""
    given = case.given
    kind = given.get("model", "qwen3_moe")
    if dist.get_rank() == 0 and not (folder / kind).exists():
        made = make_model(kind, INNER, **IDS, **MORE.get(kind, {}))
        made.save_pretrained(folder / kind)
    dist.barrier()
    sizes = {"fsdp": 4, "tp": 1, "ep": 4} | given
    return tf.AutoModelForCausalLM.from_pretrained(
        folder / kind,
        dtype=torch.float32 if case.exact else torch.bfloat16,
        experts_implementation=given.get("experts", "grouped_mm"),
        distributed_config=DistributedConfig(
            fsdp_size=sizes["fsdp"],
            tp_size=sizes["tp"],
            ep_size=sizes["ep"],
            ep_implementation=way,
        ),
    )


class OnTransformers(Training):
    """A model of transformers and its optimizer."""

    def __init__(self, folder: Path, case: Case, replicated: bool) -> None:
        """Load the model; its routers prefer one expert."""
        given = case.given
        self.model = load(folder, case, adapter.NAME if replicated else "all_to_all")
        self.model.train()
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(given.get("trained", "") in name)
        self.parameters = dict(self.model.named_parameters())
        if checkpointing := given.get("checkpointing"):
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing)
        if given.get("compiled") and replicated:
            self.model.compile(backend="eager")
        seed = torch.Generator().manual_seed(7 + dist.get_rank() // given.get("tp", 1))
        self.ids = torch.randint(3, 128, given.get("batch", (4, 16)), generator=seed)
        rate, parameters = given.get("learning_rate", 0.1), self.model.parameters()
        self.optimizer = (
            torch.optim.AdamW(parameters, lr=rate)
            if given.get("optimizer") == "adamw"
            else torch.optim.SGD(parameters, lr=rate, momentum=0.9)
        )

    def forward(self, step: int, microbatch: int) -> torch.Tensor:
        """Return the loss of the one batch."""
        loss: torch.Tensor = self.model(input_ids=self.ids, labels=self.ids).loss
        return loss

    def backward(self, loss: torch.Tensor, microbatch: int) -> None:
        """Add gradients."""
        loss.backward()

    def replicated(self) -> dict[str, tuple[Any, Any]]:
        """Return the plan and the group of each layer."""
        layers = adapter.layers(self.model).items()
        return {name: (layer.plan, layer.group) for name, layer in layers if layer.plan}

    def left(self) -> dict[str, Tensors]:
        """Return the state of model and optimizer, and what the model computes now."""
        names: dict[torch.Tensor, str] = {p: n for n, p in self.model.named_parameters()}
        state = {name: full(value) for name, value in self.model.state_dict().items()}
        self.model.eval()
        with torch.no_grad():
            logits = full(self.model(input_ids=self.ids).logits)
        return {
            "parameters": state,
            "moments": moments(self.optimizer, names),
            "logits": {"": logits},
        }


def run(case: Case, folder: Path) -> dict[str, Any]:
    """Compare training, or find the largest tensor that a layer creates."""
    tf.logging.set_verbosity_error()
    tf.utils.logging.disable_progress_bar()
    adapter.configure(**GROUP, **case.given.get("options", {}))
    if case.given.get("watches"):
        return find_largest(folder, case)
    in_fp32 = replace(case, exact=True)
    return compare(
        lambda replicated: OnTransformers(folder, case, replicated),
        Limits() if case.exact else ROUNDED,
        few=case.few,
        follows=False,
        exact=None if case.exact else lambda: OnTransformers(folder, in_fp32, False),
    )


def find_largest(folder: Path, case: Case) -> dict[str, Any]:
    """Return the largest tensor that a layer creates, and the size of the smallest main weight."""
    model = load(folder, case, adapter.NAME)
    ids = torch.arange(4)[None] + 3
    model(input_ids=ids, labels=ids).loss.backward()  # creates the group
    found, call = NewTensors(), adapter.UltraEP.__call__

    def watch(self: Any, *tensors: torch.Tensor) -> Any:
        with found:
            return call(self, *tensors)

    with mock.patch.object(adapter.UltraEP, "__call__", watch):
        model(input_ids=ids, labels=ids).loss.backward()
    main = min(p.to_local().numel() for n, p in model.named_parameters() if "experts" in n)
    replicas = next(iter(adapter.layers(model).values())).plan.num_replicas
    failed = [] if 0 < found.largest < main and replicas else ["a main weight was copied"]
    return {"largest": found.largest, "main": main, "replicas": replicas, "failed": failed}
