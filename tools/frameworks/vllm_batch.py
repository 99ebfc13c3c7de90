"""Replicas for each batch in vLLM's own layers, on four processes.

vLLM makes its MoE layers, loads their weights, registers them with its EPLB, routes, dispatches
and combines; only the kernel of the experts is a loop here. Outputs are compared with experts that
are all in one process.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.multiprocessing
from torch import Tensor

from frameworks.table import Case
from frameworks.vllm_tests import stand_in

G, E, K, H, INNER, S, LAYERS, BATCHES = 4, 16, 4, 64, 32, 2, 3, 4
TOKENS, FEW = 64, 8  # of a rank's batch, and of the last batch
PADDING = (0, 16, 0, 0)  # of these, for each batch
MIN_TOKENS = 160  # routed, K for each token, on all ranks
BLOCK = 32  # of FP8, by which a scale holds
NAMES = ("gate_proj", "up_proj", "down_proj")


def draw(*seed: int) -> torch.Generator:
    """Return random numbers that are the same on every rank."""
    return torch.Generator().manual_seed(sum(n * 1000**i for i, n in enumerate(seed)))


def make_weights(layer: int, version: int, blocks: bool) -> dict[str, Tensor]:
    """Return a checkpoint of one layer's experts."""
    numbers = draw(layer, version)
    shapes = dict(zip(NAMES, ((INNER, H), (INNER, H), (H, INNER)), strict=True))
    made = {}
    for e in range(E):
        for name, (rows, columns) in shapes.items():
            weight = torch.randn((rows, columns), generator=numbers) / 8
            made[f"{e}.{name}.weight"] = weight
            if blocks:
                scale = torch.rand((rows // BLOCK, columns // BLOCK), generator=numbers) + 0.5
                made[f"{e}.{name}.weight_scale_inv"] = scale
                made[f"{e}.{name}.weight"] = weight.to(torch.float8_e4m3fn)
    return made


def read(weight: Tensor, scale: Tensor | None) -> Tensor:
    """Return a weight that may be in FP8, with a scale for each block."""
    if scale is None:
        return weight
    spread = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return weight.to(torch.float32) * spread


def compute(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Run one expert."""
    return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


def route(hidden_states: Tensor, gating_output: Tensor, topk: int, **_: Any) -> tuple[Any, Any]:
    """Choose experts, as vLLM asks a model's own function to."""
    weights, ids = gating_output.softmax(-1).topk(topk, -1)
    return weights, ids.to(torch.int32)


def run_dense(x: Tensor, logits: Tensor, weights: dict[str, Tensor]) -> Tensor:
    """Return a layer's output, of experts in one process."""
    chosen, output = route(x, logits, K), torch.zeros_like(x)
    for e in range(E):
        rows, place = (chosen[1] == e).nonzero(as_tuple=True)
        names = [f"{e}.{name}.weight" for name in NAMES]
        own = [read(weights[name], weights.get(f"{name}_scale_inv")) for name in names]
        output.index_add_(0, rows, compute(x[rows], *own) * chosen[0][rows, place, None])
    return output


def make_kernel(experts: Any) -> Any:
    """Return vLLM's modular kernel around a loop over a rank's rows, and tokens of each row."""
    from vllm.model_executor.layers.fused_moe import modular_kernel as mk
    from vllm.model_executor.layers.fused_moe.all2all_utils import maybe_make_prepare_finalize
    from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP

    class Loop(mk.FusedMoEExpertsModular):
        tokens = 0  # this rank computes
        expects_unquantized_inputs = True

        @staticmethod
        def activation_format() -> Any:
            return mk.FusedMoEActivationFormat.Standard

        def workspace_shapes(self, M: int, N: int, K: int, *_: Any) -> Any:
            return (0,), (0,), (M, K)

        def finalize_weight_and_reduce_impl(self) -> Any:
            return TopKWeightAndReduceNoOP()

        def apply(self, output: Tensor, hidden_states: Tensor, **given: Any) -> None:
            output.zero_()
            local = given["expert_map"][given["topk_ids"].long()]
            self.tokens = int((local >= 0).sum())
            for row in range(len(given["w1"])):
                rows, place = (local == row).nonzero(as_tuple=True)
                scales = (self.w1_scale, self.w2_scale)
                gate_up, down = (
                    read(weight[row], None if scale is None else scale[row])
                    for weight, scale in zip((given["w1"], given["w2"]), scales, strict=True)
                )
                part = compute(hidden_states[rows], *gate_up.chunk(2), down)
                output.index_add_(0, rows, part * given["topk_weights"][rows, place, None])

    for name in Loop.__abstractmethods__:  # what vLLM's choice of a kernel asks
        setattr(Loop, name, staticmethod(lambda *_: True))
    Loop.__abstractmethods__ = frozenset()
    method = experts.quant_method
    config = method.get_fused_moe_quant_config(experts)
    loop = Loop(experts.moe_config, config)
    prepare = maybe_make_prepare_finalize(
        experts.moe_config, config, None, allow_new_interface=True
    )
    method.moe_quant_config = config
    method.moe_kernel = mk.FusedMoEKernel(prepare, loop)
    return loop


def make_model(blocks: bool) -> tuple[Any, list[Any]]:
    """Return what vLLM's EPLB takes for a model, and the kernels of its layers."""
    from vllm.model_executor.layers.fused_moe import FusedMoEFactory
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
    from vllm.model_executor.models.interfaces import MixtureOfExperts

    class Model(torch.nn.Module, MixtureOfExperts):  # type: ignore[misc]
        pass

    quantised = Fp8Config(
        is_checkpoint_fp8_serialized=True,
        activation_scheme="dynamic",
        weight_block_size=[BLOCK, BLOCK],
    )
    layers = [
        FusedMoEFactory(
            num_experts=E,
            top_k=K,
            hidden_size=H,
            intermediate_size=INNER,
            prefix=f"layers.{n}.mlp.experts",
            params_dtype=torch.float32,
            quant_config=quantised if blocks else None,
            custom_routing_function=route,
            enable_eplb=True,
            num_redundant_experts=G * S,
        )
        for n in range(LAYERS)
    ]
    model = Model()
    model.layers = torch.nn.ModuleList(layers)
    model.moe_layers = layers
    model.num_moe_layers, model.num_expert_groups, model.num_shared_experts = LAYERS, 1, 0
    model.num_logical_experts = model.num_routed_experts = E
    model.num_redundant_experts, model.num_physical_experts = G * S, E + G * S
    model.num_local_physical_experts = (E + G * S) // G
    record_metadata_for_reloading(model)
    for n, layer in enumerate(layers):
        list(layer.load_weights(make_weights(n, 0, blocks).items()))
    return model, [make_kernel(layer.routed_experts) for layer in layers]


def run_batches(model: Any, kernels: list[Any], state: Any, given: Any) -> Iterator[dict[str, Any]]:
    """Run layers and batches, and yield what is found."""
    import torch.distributed as dist
    from vllm.distributed.eplb.eplb_state import EplbState
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    config, model_config, rank, case = given
    blocks = case.given.get("blocks", False)
    versions = dict.fromkeys(range(LAYERS), 0)
    for batch in range(BATCHES):
        count = FEW if batch == BATCHES - 1 else TOKENS
        real = count - PADDING[batch]
        if batch == 2 and not blocks:  # whose repacking has no kernel here
            initialize_layerwise_reload(model)
            for n, layer in enumerate(model.moe_layers):
                versions[n] = 1
                list(layer.load_weights(make_weights(n, 1, blocks).items()))
            finalize_layerwise_reload(model, model_config)
        for n, layer in enumerate(model.moe_layers):
            numbers = draw(n, batch, 7 + rank if case.given.get("own") else 7)
            x = torch.randn((count, H), generator=numbers)
            logits = torch.randn((count, E), generator=numbers) - torch.arange(E) * 0.35
            logits[real:] = logits[real:].flip(-1)  # padding would make other experts hot
            state.prepare_forward(model_config, real)
            before = {k: v[: E // G].clone() for k, v in layer.routed_experts.state_dict().items()}
            with torch.inference_mode(), set_forward_context(None, config, num_tokens=count):
                output = layer(x.clone(), logits)
            dense = run_dense(x, logits, make_weights(n, versions[n], blocks))
            tokens = torch.zeros(G, dtype=torch.int64)
            tokens[rank] = kernels[n].tokens
            dist.all_reduce(tokens)
            after = layer.routed_experts.state_dict()
            plan = layer.routed_experts.replica_plan
            yield {
                "batch": batch,
                "layer": n,
                "tokens": real,
                "padding": count - real,
                "imbalance_before": plan.imbalance_before,
                "imbalance": plan.imbalance,
                "replicas": plan.num_replicas,
                "largest_error": float((output - dense).abs().max()),
                "largest_output": float(dense.abs().max()),
                "tokens_computed": tokens.tolist(),
                "mains_unchanged": all(
                    bool((after[k][: E // G] == v).all()) for k, v in before.items()
                ),
                "slots_copied": layer.routed_experts.replicas.are_copied,
            }
            state.step()
    (maps,) = (kept.physical_to_logical_map for kept in state.model_states.values())
    expected = torch.tensor(EplbState.build_initial_global_physical_to_logical_map(E, G * S))
    assert (maps == expected).all(), "vLLM's EPLB has moved experts"


def run_rank(rank: int, case: Case, port: int, folder: str) -> None:
    """Run one rank, with tensor parallelism or with data parallelism and an all-to-all."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed.eplb.eplb_state import EplbState
    from vllm.distributed.parallel_state import (
        ensure_model_parallel_initialized,
        init_distributed_environment,
    )

    config = VllmConfig(additional_config={"ultraep": {"target": 1.0, "min_tokens": MIN_TOKENS}})
    parallel = config.parallel_config
    parallel.enable_expert_parallel = parallel.enable_eplb = True
    parallel.eplb_config.num_redundant_experts = G * S
    parallel.eplb_config.communicator = "torch_gloo"
    parallel.eplb_config.step_interval = 2  # it would rearrange after every other layer
    parallel.all2all_backend = "allgather_reducescatter"
    shares = not case.given.get("own")
    if shares:
        parallel.tensor_parallel_size = G
    else:
        parallel.data_parallel_size, parallel.data_parallel_rank = G, rank
        parallel.data_parallel_master_port = port
    with set_current_vllm_config(config):
        init_distributed_environment(
            world_size=G if shares else 1,
            rank=rank if shares else 0,
            distributed_init_method=f"tcp://127.0.0.1:{port}",
            local_rank=rank,
            backend="gloo",
        )
        ensure_model_parallel_initialized(G if shares else 1, 1)
        model, kernels = make_model(case.given.get("blocks", False))
        model_config: Any = SimpleNamespace(model="layers", compute_hash=lambda: "layers")
        state = EplbState(parallel, torch.device("cpu"))
        state.add_model(model, model_config)
        found = list(run_batches(model, kernels, state, (config, model_config, rank, case)))
        Path(folder, f"{rank}.json").write_text(json.dumps(found))
        torch.distributed.barrier()


def stand_in_for_gatherv() -> None:
    """Give vLLM's communicator of CPUs what its all-to-all uses, for batches of one size."""
    import torch.distributed as dist
    from vllm.distributed.device_communicators.base_device_communicator import (
        DeviceCommunicatorBase,
    )

    def all_gatherv(self: Any, given: Any, dim: int = 0, sizes: Any = None) -> Any:
        if isinstance(given, list):
            return [all_gatherv(self, tensor, dim, sizes) for tensor in given]
        parts = [torch.empty_like(given) for _ in sizes]
        dist.all_gather(parts, given, group=self.cpu_group)
        return torch.cat(parts, dim)

    def reduce_scatterv(self: Any, given: Tensor, dim: int = 0, sizes: Any = None) -> Tensor:
        dist.all_reduce(given, group=self.cpu_group)
        return given.split(sizes, dim)[self.rank_in_group]

    DeviceCommunicatorBase.all_gatherv = all_gatherv
    DeviceCommunicatorBase.reduce_scatterv = reduce_scatterv


def run(case: Case, folder: Path) -> dict[str, Any]:
    """Run batches, and return what became of each layer of each."""
    os.environ.update(ULTRAEP_VLLM="batch", VLLM_TARGET_DEVICE="cpu", OMP_NUM_THREADS="1")
    stand_in()
    stand_in_for_gatherv()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.start_processes(  # forked: vLLM is imported once
        run_rank, (case, port, str(folder)), nprocs=G, start_method="fork"
    )
    every = [json.loads(Path(folder, f"{r}.json").read_text()) for r in range(G)]
    failed = []
    for first, *others in zip(*every, strict=True):
        for name in ("largest_error", "largest_output"):
            first[name] = max(first[name], *(rank[name] for rank in others))
        first["mains_unchanged"] &= all(rank["mains_unchanged"] for rank in others)
        failed += failures(first, G if case.given.get("own") else 1)
    return {"min_tokens": MIN_TOKENS, "batches": every[0], "failed": failed}


def failures(found: dict[str, Any], ranks: int) -> Iterator[str]:
    """Yield what is wrong with a layer's batch: outputs, main weights, or the balance."""
    place = f"batch {found['batch']}, layer {found['layer']}"
    before, after = found["imbalance_before"], found["imbalance"]
    if found["tokens"] * K * ranks < MIN_TOKENS and found["replicas"]:
        yield f"{place}: {found['replicas']} replicas; expected none for so few tokens"
    if found["tokens"] * K * ranks >= MIN_TOKENS and not after < 1.01 < before:
        yield f"{place}: imbalance {before:.2f} to {after:.2f}; expected below 1.01"
    if not found["largest_error"] < 1e-5:
        yield f"{place}: outputs are {found['largest_error']:.1e} apart from a dense layer's"
    if not found["mains_unchanged"]:
        yield f"{place}: main weights have changed"
