"""Tiny models of megatron-core, trained as it is and with replicas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig
from new_tensors import NewTensors
from torch.utils._pytree import keystr, tree_flatten_with_path

from frameworks import megatron_cpu
from frameworks.table import Case
from frameworks.training import GROUP, Limits, Tensors, Training, compare, full
from ultraep_comm.adapters.megatron import replicate

megatron_cpu.install()
LAYERS, E, VOCABULARY, LENGTH = 2, 8, 64, 16
ADAM = {"optimizer": "adam", "lr": 0.01, "weight_decay": 0.01, "clip_grad": 0.0, "adam_eps": 1e-3}
EXACT = Limits(first=2e-6, gradients=2e-3, left=2e-3)  # Adam spreads what rounding makes different
ROUNDED = Limits(loss=1e-3, first=2e-2, gradients=1.0, left=1.0)


def _config(given: Mapping[str, Any], ep: int, exact: bool) -> Any:
    options: dict[str, Any] = {
        "num_layers": LAYERS,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "ffn_hidden_size": 40,
        "moe_ffn_hidden_size": 40,
        "num_moe_experts": E,
        "moe_router_topk": 2,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "none",
        "expert_model_parallel_size": ep,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "use_cpu_initialization": True,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bf16": not exact,
        "params_dtype": torch.float32 if exact else torch.bfloat16,
    }
    return TransformerConfig(**options | given.get("config", {}))


def build(given: Mapping[str, Any], ep: int, *, exact: bool = True) -> Any:
    """Return a model whose experts all differ, of which the router prefers some."""
    config = _config(given, ep, exact)
    spec = get_gpt_layer_local_spec(num_experts=E, moe_grouped_gemm=False)
    torch.manual_seed(0)
    model = GPTModel(config, spec, vocab_size=VOCABULARY, max_sequence_length=LENGTH)
    if config.bf16:
        model.bfloat16()
    with torch.no_grad():
        for number, layer in enumerate(m for m in model.modules() if isinstance(m, MoELayer)):
            for index, expert in zip(
                layer.local_expert_indices, layer.experts.local_experts, strict=True
            ):
                draw = torch.Generator().manual_seed(1000 * number + index)
                for p in expert.parameters():
                    p.copy_(torch.randn(p.shape, generator=draw) * 0.2)
            draw = torch.Generator().manual_seed(999 + number)
            router = torch.randn(layer.router.weight.shape, generator=draw) * 0.3
            router[:2] *= 4
            if given.get(
                "skewed"
            ):  # of a vector's products with w, -w, v, -v the best two are >= 0
                router[1::2] = -router[::2]
                router[4:] = 0
            layer.router.weight.copy_(router)
    return model


def forward(model: Any, case: dict[str, Any], rank: int, step: int, microbatch: int) -> Any:
    """Return the loss of a microbatch."""
    draw = torch.Generator().manual_seed(10_000 + 100 * step + 10 * microbatch + rank)
    ids = torch.randint(VOCABULARY, (2, LENGTH), generator=draw)
    position = torch.arange(LENGTH).expand(2, LENGTH)
    mask = torch.ones(LENGTH, LENGTH).triu(1).bool()[None, None]
    return model(ids, position, mask, labels=ids.roll(-1, 1)).float().mean()


class OnMegatron(Training):
    """A model of megatron-core in its data parallelism, and its optimizer."""

    microbatches = 2

    def __init__(self, case: Case, ep: int, replicated: bool) -> None:
        """Build the model; replicas change neither its state nor where a checkpoint has what."""
        self.given = case.given
        self.in_pipeline = case.given.get("pipelined", False)
        self.options = {"grad_reduce_in_fp32": True, **case.given.get("ddp", {})}
        self.model = build(case.given, ep, exact=case.exact)
        self.parameters = dict(self.model.named_parameters())
        wrapped = self.wrap() if case.given.get("wrap_first") else None
        self.layers: list[Any] = []
        if replicated:
            before, shards = state(self.model), sharded(self.model)
            options = {**GROUP, **case.given.get("options", {})}
            self.layers = replicate(wrapped or self.model, **options)
            assert len(self.layers) == LAYERS
            after = state(self.model)
            assert list(after) == list(before)
            assert all(torch.equal(after[n], before[n]) for n in before)
            assert sharded(self.model) == shards
        self.wrapped = wrapped or self.wrap()
        config = self.model.config
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                **ADAM,
                bf16=config.bf16,
                params_dtype=config.params_dtype,
                use_distributed_optimizer=self.options.get("use_distributed_optimizer", False),
                overlap_param_gather=self.options.get("overlap_param_gather", False),
            ),
            [self.wrapped],
        )
        self.clear()

    def wrap(self) -> Any:
        """Return the model in Megatron's data parallelism."""
        config = DistributedDataParallelConfig(**self.options)
        return DistributedDataParallel(self.model.config, config, self.model)

    def clear(self) -> None:
        """Forget the gradients."""
        self.wrapped.zero_grad_buffer()
        self.optimizer.zero_grad()

    def forward(self, step: int, microbatch: int) -> torch.Tensor:
        """Return the loss of a microbatch."""
        seed = 10_000 + 100 * step + 10 * microbatch + dist.get_rank()
        draw = torch.Generator().manual_seed(seed)
        ids = torch.randint(VOCABULARY, (2, LENGTH), generator=draw)
        position = torch.arange(LENGTH).expand(2, LENGTH)
        mask = torch.ones(LENGTH, LENGTH).triu(1).bool()[None, None]
        losses = self.wrapped(ids, position, mask, labels=ids.roll(-1, 1))
        return losses.float().mean()  # type: ignore[no-any-return]

    def backward(self, loss: torch.Tensor, microbatch: int) -> None:
        """Add gradients; those of the last microbatch begin the reduction."""
        is_last = microbatch == self.microbatches - 1
        with nullcontext() if is_last else self.wrapped.no_sync():
            loss.backward()

    def replicated(self) -> dict[str, tuple[Any, Any]]:
        """Return the plan and the group of each layer."""
        layers = enumerate(self.layers)
        return {str(n): (layer.replica_plan, layer.replicas.group) for n, layer in layers}

    def gradients(self) -> Tensors:
        """Return main gradients, reduced."""
        self.wrapped.finish_grad_sync()
        return {name: full(p.main_grad) for name, p in self.model.named_parameters()}

    def update(self) -> None:
        """Take a step."""
        assert self.optimizer.step()[0]
        self.clear()

    def left(self) -> dict[str, Tensors]:
        """Return the state of model and optimizer."""
        if self.options.get("overlap_param_gather"):
            self.wrapped.disable_forward_pre_hook()  # gathers what is under way
        flat, _ = tree_flatten_with_path(
            [o.optimizer.state_dict() for o in self.optimizer.chained_optimizers]
        )
        found = {keystr(path): v for path, v in flat if torch.is_tensor(v) and v.dim()}
        return {
            "parameters": {n: full(v) for n, v in state(self.model).items()},
            "moments": {path: full(value) for path, value in found.items()},
        }


def state(model: torch.nn.Module) -> Tensors:
    """Return a copy of a model's state."""
    found = model.state_dict().items()
    return {n: v.clone() for n, v in found if isinstance(v, torch.Tensor)}


def sharded(model: Any) -> Any:
    """Return where a distributed checkpoint has what, of models that can tell."""
    if not hasattr(model, "sharded_state_dict"):
        return None
    return {
        name: (s.key, getattr(s, "global_offset", None), s.replica_id)
        for name, s in model.sharded_state_dict().items()
        if hasattr(s, "replica_id")
    }


@contextmanager
def parallel(ep: int) -> Iterator[None]:
    """Create Megatron's process groups, and delete them."""
    parallel_state.initialize_model_parallel(expert_model_parallel_size=ep)
    tensor_parallel.random.model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()


def run(case: Case, folder: Path) -> dict[str, Any]:
    """Compare training, or find the largest tensor that a layer creates."""
    ep = case.given.get("ep", dist.get_world_size())
    with parallel(ep):
        if case.given.get("watches"):
            return find_largest(ep)
        return compare(
            lambda replicated: OnMegatron(case, ep, replicated),
            EXACT if case.exact else ROUNDED,
            few=case.few,
            follows=False,
        )


def find_largest(ep: int) -> dict[str, Any]:
    """Return the largest tensor of a forward pass, and the size of a layer's stacked weights."""
    config = {"config": {"ffn_hidden_size": 512, "moe_ffn_hidden_size": 512}}
    (layer, *_) = replicate(build(config, ep), **GROUP)
    stack = sum(e.linear_fc2.weight.numel() for e in layer.experts.local_experts)
    hidden = torch.randn((4, 2, 32), generator=torch.Generator().manual_seed(dist.get_rank()))
    with NewTensors() as seen:
        output, _ = layer(hidden.requires_grad_())
    output.sum().backward()
    layer.replicas.group.assert_idle()
    failed = [] if seen.largest < stack / 2 else ["main weights were copied"]
    if not layer.replica_plan.num_replicas:
        failed.append("no replicas, so that nothing was tried")
    return {"largest": seen.largest, "stack": stack, "failed": failed}
