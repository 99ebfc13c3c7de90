"""What processes of an expert-parallel group do with megatron-core: train with and without replicas."""

from __future__ import annotations

import traceback
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

STEPS, MICROBATCHES, LAYERS, E, S, VOCABULARY, LENGTH = 3, 2, 2, 8, 2, 64, 16
ADAM = {"optimizer": "adam", "lr": 0.01, "weight_decay": 0.01, "clip_grad": 0.0, "adam_eps": 1e-3}

CASES: dict[str, dict[str, Any]] = {
    "alltoall": {},
    "allgather": {"config": {"moe_token_dispatcher_type": "allgather"}},
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
    "a rank without tokens": {"empty": 2},
    "wrapped before": {"ep": 2, "wrap_first": True},
}


class Layers(torch.nn.Module):
    """MoE layers without anything between them, which also take no tokens."""

    def __init__(self, config: Any, spec: Any) -> None:
        super().__init__()
        from megatron.core.transformer.spec_utils import build_module

        self.config = config
        mlp = spec.submodules.mlp
        self.layers = torch.nn.ModuleList(
            build_module(mlp, config=config) for _ in range(LAYERS)
        )
        for i, layer in enumerate(self.layers):
            layer.set_layer_number(i + 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)[0]
        return x


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
    if "empty" in case:
        model: Any = Layers(config, spec)
    else:
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
            layer.router.weight.copy_(router)
    return model


def forward(model: Any, case: dict[str, Any], rank: int, step: int, microbatch: int) -> Any:
    """Return the loss of a microbatch, which has as many tokens on every rank that has any."""
    draw = torch.Generator().manual_seed(10_000 + 100 * step + 10 * microbatch + rank)
    if "empty" in case:
        length = 0 if rank == case["empty"] else LENGTH
        x = torch.randn((length, 2, 32), generator=draw).requires_grad_()
        return (model(x) - x.roll(1, -1)).square().sum() / (LENGTH * 2 * 32)
    ids = torch.randint(VOCABULARY, (2, LENGTH), generator=draw)
    position = torch.arange(LENGTH).expand(2, LENGTH)
    mask = torch.ones(LENGTH, LENGTH).triu(1).bool()[None, None]
    return model(ids, position, mask, labels=ids.roll(-1, 1)).float().mean()


def train(case: dict[str, Any], with_replicas: bool) -> dict[str, Any]:
    """Return what training leaves: losses, gradients, weights and the optimizer's state."""
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
        layers = replicate(wrapped or model, S, engine="host", timeout=60.0)
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
        for microbatch in range(MICROBATCHES):
            is_last = microbatch == MICROBATCHES - 1
            with nullcontext() if is_last else wrapped.no_sync():
                loss = forward(wrapped, case, rank, step, microbatch)
                for layer in layers:
                    plan = layer.replica_plan
                    found["plans"].append(
                        (plan.imbalance_before, plan.imbalance, plan.num_replicas)
                    )
                loss.backward()
            total += loss.detach()
        wrapped.finish_grad_sync()
        found["main_grads"].append({n: p.main_grad.clone() for n, p in model.named_parameters()})
        dist.all_reduce(total)
        found["losses"].append(float(total))
        assert optimizer.step()[0]
    if options.get("overlap_param_gather"):
        wrapped.disable_forward_pre_hook()  # gathers what is under way
    for layer in layers:
        layer.replicas.calls.group.assert_idle()
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
    from megatron.core import parallel_state, tensor_parallel

    ep = case.get("ep", dist.get_world_size())
    parallel_state.initialize_model_parallel(expert_model_parallel_size=ep)
    tensor_parallel.random.model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    try:
        plain, replicated = train(case, False), train(case, True)
    finally:
        parallel_state.destroy_model_parallel()
    return {
        "losses": (plain["losses"], replicated["losses"]),
        "plans": replicated["plans"],
        "arrivals": {len(a) for n, a in replicated["arrived"].items() if "experts." in n},
        "worst": sorted(((max(difference(a, b) for a, b in zip(plain["arrived"][n][:2], replicated["arrived"][n][:2])), float(plain["arrived"][n][0].abs().max()), n) for n in plain["arrived"]), reverse=True)[:4],
        "differences": {
            name: difference(plain[name], replicated[name])
            for name in ("losses", "arrived", "main_grads", "weights", "optimizer")
        },
    }


def serve(rank: int, world: int, store: str, pipe: Any) -> None:
    """Answer cases' names with (rank's result or None, its error or None)."""
    from ranks import settle

    settle()
    import faulthandler, sys
    faulthandler.dump_traceback_later(60, repeat=True, file=open(f"/tmp/t/stack{rank}", "w"))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    import megatron_cpu

    megatron_cpu.install()
    while (name := pipe.recv()) is not None:
        try:
            run = globals().get(name)
            pipe.send((run() if run else compare(CASES[name]), None))
        except BaseException:
            pipe.send((None, traceback.format_exc()))
