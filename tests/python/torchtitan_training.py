"""torchtitan's debug model of deepseek_v3, trained as it is and with replicas, on CPUs over gloo.

torchrun --nproc-per-node 4 tests/python/torchtitan_training.py RESULTS.json [CASE...]

Rank 0 writes, for each case, the losses and gradient norms of both ways, the largest differences,
and the imbalance before and after. torchtitan itself is changed in three places, for CPUs: see
``on_cpus``. In cases in fp32 its experts, which compute in bf16, do not round.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask
from trained_alike import apart, choosing, full, rerouted, run_cases

torch._utils._get_available_device_type = lambda: "cpu"  # before torchtitan asks for it

from torchtitan.config import ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.config.override import OverrideConfig, apply_overrides  # noqa: E402
from torchtitan.distributed import ParallelDims  # noqa: E402
from torchtitan.distributed import utils as titan  # noqa: E402
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC  # noqa: E402
from torchtitan.models.common import attention  # noqa: E402
from torchtitan.models.deepseek_v3 import model_registry  # noqa: E402
from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel  # noqa: E402

NAME = "ultraep_comm.adapters.torchtitan.replicate"
STEPS, BATCH, LENGTH = 3, 2, 64


@dataclass(frozen=True)
class Case:
    ep: int = 4
    checkpointing: Any = None
    exact: bool = True
    options: dict[str, Any] = field(default_factory=dict)


CASES = {
    "EP4": Case(),
    "EP4, full recomputation": Case(checkpointing=FullAC.Config),
    "EP4, selective recomputation": Case(checkpointing=SelectiveAC.Config),
    "EP2 x FSDP": Case(ep=2),
    "EP2 x FSDP, full recomputation": Case(ep=2, checkpointing=FullAC.Config),
    "EP2 x FSDP, selective recomputation": Case(ep=2, checkpointing=SelectiveAC.Config),
    "EP4, bf16": Case(exact=False),
    "EP4, no replicas for few tokens": Case(options={"min_tokens": 10_000}),
    "EP1": Case(ep=1),
}


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


def make(case: Case, replicated: bool) -> tuple[Any, Any]:
    """Return the model, and the context of its steps."""
    config = deepseek_v3_debugmodel()
    config.model_spec = model_registry("debugmodel", attn_backend="flex")
    config.parallelism = ParallelismConfig(
        expert_parallel_degree=case.ep, spmd_backend="partial_dtensor"
    )
    config.training = TrainingConfig(
        local_batch_size=BATCH,
        seq_len=LENGTH,
        steps=STEPS,
        mixed_precision_param="float32" if case.exact else "bfloat16",
        mixed_precision_reduce="float32",
    )
    config.activation_checkpoint = case.checkpointing and case.checkpointing()
    dims = ParallelDims.from_config(config.parallelism, dist.get_world_size())
    dims.build_mesh()
    titan.set_spmd_backend(config.parallelism.spmd_backend)
    config.model_spec.model.update_from_config(config=config)
    if replicated:
        options = {"slots_per_rank": 2, "timeout": 60.0, "engine": "host", **case.options}
        config.override = OverrideConfig(imports=[(NAME, options)])
        assert apply_overrides(config.override, config)
    with torch.device("meta"):
        model = config.model_spec.model.build()
    model.verify_module_protocol()
    folder = tempfile.mkdtemp()
    model = config.model_spec.parallelize_fn(
        model,
        parallel_dims=dims,
        training=config.training,
        parallelism=config.parallelism,
        compile_config=config.compile,
        ac_config=config.activation_checkpoint,
        dump_folder=folder,
    )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
        for name, value in model.named_buffers():
            if name.endswith("expert_bias_E"):
                value[1] += 0.02  # one expert is hot
    return model.train(), titan.get_spmd_context(parallel_dims=dims, spmd_typechecking=False)


def step(model: Any, context: Any, tokens: torch.Generator) -> float:
    """Return the mean loss; gradients stay with the parameters."""
    ids = torch.randint(0, 2048, (BATCH, LENGTH), generator=tokens)
    positions = torch.arange(LENGTH).expand(BATCH, LENGTH)
    with context():
        masks = model.get_attention_masks(positions=positions)
        logits = model(ids, positions=positions, attention_masks=masks)
        logits = logits.to_local() if hasattr(logits, "to_local") else logits
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), ids.roll(-1, 1).flatten())
        loss.backward()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


@dataclass
class Run:
    """What a run leaves: tensors are whole, in fp32."""

    losses: list[float]
    norms: list[float]
    grads: list[dict[str, torch.Tensor]]
    state: dict[str, torch.Tensor]
    imbalance: list[tuple[str, float, float, int]]
    starts: list[list[torch.Tensor]]  # this rank's part of the parameters before each step
    choices: list[torch.Tensor]  # of this rank's routers


def train(case: Case, replicated: bool, follow: Run | None = None) -> Run:
    """Train a model; to ``follow`` a run is to start each step with its parameters and its routing.

    Otherwise rounding may send a token to another expert, whose gradient is then another one.
    """
    with choosing(follow and follow.choices) as choices:
        return train_with(choices, case, replicated, follow)


def train_with(
    choices: list[torch.Tensor], case: Case, replicated: bool, follow: Run | None
) -> Run:
    model, context = make(case, replicated)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    tokens = torch.Generator().manual_seed(5 + dist.get_rank())
    losses, norms, grads, imbalance, starts = [], [], [], [], []
    for number in range(STEPS):
        own = [p.detach().to_local() for p in model.parameters()]
        if follow is not None:
            for part, start in zip(own, follow.starts[number], strict=True):
                part.copy_(start)
        starts.append([part.clone() for part in own])
        losses.append(step(model, context, tokens))
        every = {n: full(p.grad) for n, p in model.named_parameters() if p.grad is not None}
        grads.append(every)
        norms.append(float(sum(g.double().square().sum() for g in every.values()) ** 0.5))
        for name, layer in replicas(model).items():
            if layer.group is not None:
                layer.group.assert_idle()
                plan, index = layer.plan, name.split(".")[1]
                rounded = plan.imbalance_before, plan.imbalance, plan.num_replicas
                imbalance.append((index, *rounded))
        optimizer.step()
        optimizer.zero_grad()
    state = {name: full(value) for name, value in model.state_dict().items()}
    return Run(losses, norms, grads, state, imbalance, starts, choices)


def replicas(model: Any) -> dict[str, Any]:
    from ultraep_comm.adapters import torchtitan as adapter

    return adapter.layers(model)


def of_experts(grads: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {n: g for n, g in grads.items() if "inner_experts" in n}
    assert found
    return found


def without_rounding() -> Any:
    """Let experts compute in the dtype of their inputs."""
    return mock.patch.object(torch.Tensor, "bfloat16", lambda self: self)


def compare(case: Case) -> dict[str, Any]:
    with without_rounding() if case.exact else contextlib.nullcontext():
        plain, ours = (train(case, replicated) for replicated in (False, True))
        followed = train(case, True, follow=plain)
        pairs = list(zip(followed.grads, plain.grads, strict=True))
        return {
            "losses": [plain.losses, ours.losses],
            "norms": [plain.norms, ours.norms],
            "gradients": [apart(a, b) for a, b in pairs],
            "expert_gradients": [apart(of_experts(a), of_experts(b)) for a, b in pairs],
            "rerouted": rerouted(followed.choices, plain.choices),
            "state": apart(ours.state, plain.state),
            "imbalance": ours.imbalance,
        }


def main(path: str, names: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    on_cpus()
    run_cases(path, names, {name: partial(compare, case) for name, case in CASES.items()})


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
