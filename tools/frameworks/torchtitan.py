"""torchtitan's debug model of deepseek_v3, trained as it is and with replicas.

torchtitan itself is changed in three places, for CPUs: see ``on_cpus``. In cases in fp32 its
experts, which compute in bf16, do not round.
"""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask

from frameworks.table import Case
from frameworks.training import (
    GROUP,
    STEPS,
    Limits,
    Tensors,
    Training,
    compare,
    full,
)

torch._utils._get_available_device_type = lambda: "cpu"  # before torchtitan asks for it

from torchtitan.config import ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.config.override import OverrideConfig, apply_overrides  # noqa: E402
from torchtitan.distributed import ParallelDims, activation_checkpoint  # noqa: E402
from torchtitan.distributed import utils as titan  # noqa: E402
from torchtitan.models.common import attention  # noqa: E402
from torchtitan.models.deepseek_v3 import model_registry  # noqa: E402
from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel  # noqa: E402

from ultraep_comm.adapters import torchtitan as adapter  # noqa: E402

NAME = "ultraep_comm.adapters.torchtitan.replicate"
BATCH, LENGTH = 2, 64
BF16 = Limits(loss=1e-3, first=0.1, gradients=0.1, left=0.02, imbalance=1.5)


def on_cpus() -> None:
    """Let attention run without a GPU: inductor's flex attention for CPUs has no backward pass."""

    def attend(
        q: Any, k: Any, v: Any, scale: Any = None, enable_gqa: bool = False, **_: Any
    ) -> Any:
        out = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa
        )
        return out, None

    attention.FlexAttention._compiled_flex_attn = staticmethod(attend)
    attention._compiled_create_block_mask = create_block_mask


class OnTorchtitan(Training):
    """The debug model and its optimizer."""

    def __init__(self, case: Case, folder: Path, replicated: bool) -> None:
        """Build the model, of which one expert is hot."""
        config = deepseek_v3_debugmodel()
        config.model_spec = model_registry("debugmodel", attn_backend="flex")
        config.parallelism = ParallelismConfig(
            expert_parallel_degree=case.given.get("ep", 4), spmd_backend="partial_dtensor"
        )
        config.training = TrainingConfig(
            local_batch_size=BATCH,
            seq_len=LENGTH,
            steps=STEPS,
            mixed_precision_param="float32" if case.exact else "bfloat16",
            mixed_precision_reduce="float32",
        )
        kind = case.given.get("checkpointing")
        config.activation_checkpoint = kind and getattr(activation_checkpoint, kind).Config()
        dims = ParallelDims.from_config(config.parallelism, dist.get_world_size())
        dims.build_mesh()
        titan.set_spmd_backend(config.parallelism.spmd_backend)
        config.model_spec.model.update_from_config(config=config)
        if replicated:
            options = {**GROUP, **case.given.get("options", {})}
            config.override = OverrideConfig(imports=[(NAME, options)])
            assert apply_overrides(config.override, config)
        with torch.device("meta"):
            model = config.model_spec.model.build()
        model.verify_module_protocol()
        self.model = config.model_spec.parallelize_fn(
            model,
            parallel_dims=dims,
            training=config.training,
            parallelism=config.parallelism,
            compile_config=config.compile,
            ac_config=config.activation_checkpoint,
            dump_folder=str(folder),
        )
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo has no other
        self.model.to_empty(device="cpu")
        torch.manual_seed(0)
        with torch.no_grad():
            self.model.init_weights(buffer_device=None)
            for name, value in self.model.named_buffers():
                if name.endswith("expert_bias_E"):
                    value[1] += 0.02
        self.model.train()
        self.parameters = dict(self.model.named_parameters())
        self.context = titan.get_spmd_context(parallel_dims=dims, spmd_typechecking=False)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.tokens = torch.Generator().manual_seed(5 + dist.get_rank())

    def forward(self, step: int, microbatch: int) -> torch.Tensor:
        """Return the loss of the next batch."""
        ids = torch.randint(0, 2048, (BATCH, LENGTH), generator=self.tokens)
        positions = torch.arange(LENGTH).expand(BATCH, LENGTH)
        with self.context():
            masks = self.model.get_attention_masks(positions=positions)
            logits = self.model(ids, positions=positions, attention_masks=masks)
            logits = logits.to_local() if hasattr(logits, "to_local") else logits
            wanted = ids.roll(-1, 1).flatten()
            return functional.cross_entropy(logits.flatten(0, 1).float(), wanted)

    def backward(self, loss: torch.Tensor, microbatch: int) -> None:
        """Add gradients."""
        with self.context():
            loss.backward()

    def replicated(self) -> dict[str, tuple[Any, Any]]:
        """Return the plan and the group of each layer."""
        layers = adapter.layers(self.model).items()
        return {n.split(".")[1]: (layer.plan, layer.group) for n, layer in layers if layer.group}

    def left(self) -> dict[str, Tensors]:
        """Return the model's state."""
        return {"parameters": {n: full(value) for n, value in self.model.state_dict().items()}}


def run(case: Case, folder: Path) -> dict[str, Any]:
    """Compare training."""
    on_cpus()
    # Lets experts compute in the dtype of their inputs.
    exact = mock.patch.object(torch.Tensor, "bfloat16", lambda self: self)
    with exact if case.exact else contextlib.nullcontext():
        return compare(
            partial(OnTorchtitan, case, folder),
            Limits(imbalance=1.5) if case.exact else BF16,
            few=case.few,
            plans=case.given.get("ep") != 1,
        )
