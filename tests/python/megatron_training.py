"""Tiny models of megatron-core, trained as it is and with replicas, on CPUs over gloo.

torchrun --nproc-per-node 4 tests/python/megatron_training.py RESULTS.json [CASE...]

Rank 0 writes, for each case, the losses of both ways, the largest differences, and the plans.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from new_tensors import NewTensors
from torch.utils._pytree import keystr, tree_flatten_with_path
from trained_alike import full, run_cases, worst

STEPS, MICROBATCHES, LAYERS, E, S, VOCABULARY, LENGTH = 3, 2, 2, 8, 2, 64, 16
ADAM = {"optimizer": "adam", "lr": 0.01, "weight_decay": 0.01, "clip_grad": 0.0, "adam_eps": 1e-3}

CASES: dict[str, dict[str, Any]] = {
    "alltoall": {},
    "allgather": {"config": {"moe_token_dispatcher_type": "allgather"}},
    "flex": {"config": {"moe_token_dispatcher_type": "flex", "moe_router_dtype": "fp32"}},
    "two ranks, twice": {"ep": 2},
    "overlapped reduction": {"ep": 2, "ddp": {"overlap_grad_reduce": True}},
    "distributed optimizer": {"ep": 2, "ddp": {"use_distributed_optimizer": True}},
    "weights gathered late": {
        "ep": 2,
        "ddp": {
            "use_distributed_optimizer": True,
            "overlap_grad_reduce": True,
            "overlap_param_gather": True,
        },
    },
    "recomputed": {"config": {"recompute_granularity": "selective", "recompute_modules": ["moe"]}},
    "recomputed whole": {
        "config": {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    },
    "bf16": {"ep": 2, "config": {"bf16": True, "params_dtype": torch.bfloat16}},
    "biases": {"config": {"add_bias_linear": True}},
    "shared experts": {"config": {"moe_shared_expert_intermediate_size": 48}},
    "shared experts, overlapped": {
        "config": {"moe_shared_expert_intermediate_size": 48, "moe_shared_expert_overlap": True}
    },
    "dropped tokens": {
        "config": {
            "moe_expert_capacity_factor": 1.0,
            "moe_router_load_balancing_type": "aux_loss",
            "moe_aux_loss_coeff": 0.1,
        }
    },
    # The router chooses experts of the first two ranks only.
    "ranks that would get no tokens": {"skewed": True},
    "ranks that get no tokens": {"skewed": True, "replicate": {"min_tokens": 1_000_000}},
    "a pipeline's order": {"pipelined": True},
    "wrapped before": {"ep": 2, "wrap_first": True},
}


def _config(case: dict[str, Any], ep: int) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

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
    }
    return TransformerConfig(**options | case.get("config", {}))


def moe_layers(model: torch.nn.Module) -> list[Any]:
    from megatron.core.transformer.moe.moe_layer import MoELayer

    return [m for m in model.modules() if isinstance(m, MoELayer)]


def build(case: dict[str, Any], ep: int) -> Any:
    """Return a model whose experts all differ, of which the router prefers some."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    config = _config(case, ep)
    spec = get_gpt_layer_local_spec(num_experts=E, moe_grouped_gemm=False)
    torch.manual_seed(0)
    model = GPTModel(config, spec, vocab_size=VOCABULARY, max_sequence_length=LENGTH)
    if config.bf16:
        model.bfloat16()
    with torch.no_grad():
        for number, layer in enumerate(moe_layers(model)):
            for index, expert in zip(
                layer.local_expert_indices, layer.experts.local_experts, strict=True
            ):
                draw = torch.Generator().manual_seed(1000 * number + index)
                for p in expert.parameters():
                    p.copy_(torch.randn(p.shape, generator=draw) * 0.2)
            draw = torch.Generator().manual_seed(999 + number)
            router = torch.randn(layer.router.weight.shape, generator=draw) * 0.3
            router[:2] *= 4
            if case.get("skewed"):  # of a vector's products with w, -w, v, -v the best two are >= 0
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


def train(case: dict[str, Any], with_replicas: bool) -> dict[str, Any]:
    """Return losses, gradients, and what training leaves: weights, the optimizer's state."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    from ultraep_comm.adapters.megatron import replicate

    rank, ep = dist.get_rank(), parallel_state.get_expert_model_parallel_world_size()
    found: dict[str, Any] = {"losses": [], "plans": [], "arrived": {}, "main_grads": []}
    model = build(case, ep)
    options: dict[str, Any] = {"grad_reduce_in_fp32": True, **case.get("ddp", {})}

    def wrap() -> Any:
        return DistributedDataParallel(
            model.config, DistributedDataParallelConfig(**options), model
        )

    wrapped = wrap() if case.get("wrap_first") else None
    layers: list[Any] = []
    if with_replicas:
        before = {n: v.clone() for n, v in tensors(model).items()}
        shards = sharded(model)
        layers = replicate(
            wrapped or model, S, engine="host", timeout=60.0, **case.get("replicate", {})
        )
        assert len(layers) == LAYERS
        after = tensors(model)
        assert list(after) == list(before)
        assert all(torch.equal(after[n], before[n]) for n in before)
        assert sharded(model) == shards
    wrapped = wrapped or wrap()
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            **ADAM,
            bf16=model.config.bf16,
            params_dtype=model.config.params_dtype,
            use_distributed_optimizer=options.get("use_distributed_optimizer", False),
            overlap_param_gather=options.get("overlap_param_gather", False),
        ),
        [wrapped],
    )
    for name, p in model.named_parameters():
        arrived = found["arrived"][name] = []
        p.register_hook(lambda grad, to=arrived: to.append(grad.float()))
    for step in range(STEPS):
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        total = torch.zeros(())
        passes = [(kind, m) for m in range(MICROBATCHES) for kind in ("forward", "backward")]
        if case.get("pipelined"):  # stages of a pipeline begin with several forward passes
            passes.sort(key=lambda one: one[0] == "backward")
        losses: list[Any] = []
        for kind, microbatch in passes:
            if kind == "backward":
                is_last = microbatch == MICROBATCHES - 1
                with nullcontext() if is_last else wrapped.no_sync():
                    losses[microbatch].backward()
                continue
            losses.append(forward(wrapped, case, rank, step, microbatch))
            total += losses[-1].detach()
            for layer in layers:
                plan = layer.replica_plan
                found["plans"].append((plan.imbalance_before, plan.imbalance, plan.num_replicas))
        wrapped.finish_grad_sync()
        found["main_grads"].append({n: p.main_grad.clone() for n, p in model.named_parameters()})
        dist.all_reduce(total)
        found["losses"].append(float(total))
        assert optimizer.step()[0]
    if options.get("overlap_param_gather"):
        wrapped.disable_forward_pre_hook()  # gathers what is under way
    for layer in layers:
        layer.replicas.group.assert_idle()
    found["weights"] = {n: v.clone() for n, v in tensors(model).items()}
    found["optimizer"] = moments(optimizer)
    return found


def tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {n: v for n, v in model.state_dict().items() if isinstance(v, torch.Tensor)}


def sharded(model: Any) -> Any:
    """Return where a distributed checkpoint has what, of models that can tell."""
    if not hasattr(model, "sharded_state_dict"):
        return None
    return {
        name: (s.key, getattr(s, "global_offset", None), s.replica_id)
        for name, s in model.sharded_state_dict().items()
        if hasattr(s, "replica_id")
    }


def moments(optimizer: Any) -> dict[str, torch.Tensor]:
    """Return an optimizer's state, by the path of nested dictionaries and lists."""
    flat, _ = tree_flatten_with_path(
        [o.optimizer.state_dict() for o in optimizer.chained_optimizers]
    )
    return {keystr(path): full(v) for path, v in flat if torch.is_tensor(v) and v.dim()}


def compare(case: dict[str, Any]) -> dict[str, Any]:
    """Train with and without replicas; return the differences and some figures."""
    with parallel(case.get("ep", dist.get_world_size())):
        plain, replicated = train(case, False), train(case, True)

    def first(run: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Return gradients before the optimizer has spread what rounding makes different."""
        return {n: torch.stack(arrived[:MICROBATCHES]) for n, arrived in run["arrived"].items()}

    pairs = zip(replicated["main_grads"], plain["main_grads"], strict=True)
    return {
        "losses": [plain["losses"], replicated["losses"]],
        "plans": replicated["plans"],
        "arrivals": sorted({len(a) for n, a in replicated["arrived"].items() if "experts." in n}),
        "first_gradients": worst(first(replicated), first(plain)),
        "main_grads": [worst(*pair) for pair in pairs],
        "weights": worst(replicated["weights"], plain["weights"]),
        "optimizer": worst(replicated["optimizer"], plain["optimizer"]),
    }


@contextmanager
def parallel(ep: int) -> Iterator[None]:
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(expert_model_parallel_size=ep)
    tensor_parallel.random.model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()


def allocations() -> dict[str, int]:
    """Return the largest tensor that a forward pass creates, and the size of a stack of weights."""
    from ultraep_comm.adapters.megatron import replicate

    case = {"config": {"ffn_hidden_size": 512, "moe_ffn_hidden_size": 512}}
    with parallel(dist.get_world_size()):
        model = build(case, dist.get_world_size())
        layers = replicate(model, S, engine="host", timeout=60.0)
        weights = [e.linear_fc2.weight for e in layers[0].experts.local_experts]
        hidden = torch.randn((4, 2, 32), generator=torch.Generator().manual_seed(dist.get_rank()))
        found = {"stack": sum(p.numel() for p in weights)}
        with NewTensors() as seen:
            output, _ = layers[0](hidden.requires_grad_())
        found["largest"] = seen.largest
        assert layers[0].replica_plan.num_replicas
        with NewTensors() as seen:  # the measurement itself
            torch.stack(weights)
        found["control"] = seen.largest
        output.sum().backward()
        layers[0].replicas.group.assert_idle()
    return found


def main(path: str, names: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))
    from studies.layer import megatron_cpu

    megatron_cpu.install()
    cases: dict[str, Any] = {name: partial(compare, case) for name, case in CASES.items()}
    run_cases(path, names, cases | {"allocations": allocations}, shows=False)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
