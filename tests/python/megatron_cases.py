"""What four processes do with megatron-core: train models with and without replicas."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from new_tensors import NewTensors
from ranks import settle

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
    found["optimizer"] = leaves([o.optimizer.state_dict() for o in optimizer.chained_optimizers])
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


def leaves(value: Any, path: str = "") -> dict[str, torch.Tensor]:
    """Return the tensors of nested dictionaries and lists, by path."""
    if isinstance(value, torch.Tensor):
        return {path: value.detach().clone().float()}
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    return {k: v for name, each in items for k, v in leaves(each, f"{path}/{name}").items()}


def difference(one: Any, other: Any) -> float:
    """Return the largest difference of tensors, relative to the largest value of each."""
    if isinstance(one, dict):
        assert list(one) == list(other)
        return max((difference(one[n], other[n]) for n in one), default=0.0)
    if isinstance(one, list | tuple):
        assert len(one) == len(other), (len(one), len(other))
        return max((difference(a, b) for a, b in zip(one, other, strict=True)), default=0.0)
    one, other = torch.as_tensor(one).float(), torch.as_tensor(other).float()
    if not one.numel():
        return 0.0
    return float((one - other).abs().max() / one.abs().max().clamp(min=1e-6))


def compare(case: dict[str, Any]) -> dict[str, Any]:
    """Train with and without replicas; return the differences and some figures."""
    with parallel(case.get("ep", dist.get_world_size())):
        plain, replicated = train(case, False), train(case, True)
    return {
        "losses": (plain["losses"], replicated["losses"]),
        "plans": replicated["plans"],
        "arrivals": {len(a) for n, a in replicated["arrived"].items() if "experts." in n},
        "differences": {
            name: difference(plain[name], replicated[name])
            for name in ("losses", "main_grads", "weights", "optimizer")
        }
        | {
            # Before the optimizer has spread what rounding makes different.
            "first gradients": max(
                difference(arrived[:MICROBATCHES], replicated["arrived"][name][:MICROBATCHES])
                for name, arrived in plain["arrived"].items()
            )
        },
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
        mains = [e.linear_fc2.weight for e in layers[0].experts.local_experts]
        hidden = torch.randn((4, 2, 32), generator=torch.Generator().manual_seed(dist.get_rank()))
        found = {"stack": sum(p.numel() for p in mains)}
        with NewTensors() as seen:
            output, _ = layers[0](hidden.requires_grad_())
        found["pass"] = seen.largest
        assert layers[0].replica_plan.num_replicas
        with NewTensors() as seen:  # the measurement itself
            torch.stack(mains)
        found["control"] = seen.largest
        output.sum().backward()
        layers[0].replicas.group.assert_idle()
    return found


def serve(rank: int, world: int, store: str, pipe: Any) -> None:
    """Answer the names of cases and functions with (result or None, error or None)."""
    settle()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    from ultraep_comm.bench.commands.layer import megatron_cpu

    megatron_cpu.install()
    while (name := pipe.recv()) is not None:
        try:
            run = globals().get(name)
            pipe.send((run() if run else compare(CASES[name]), None))
        except BaseException:
            pipe.send((None, traceback.format_exc()))
