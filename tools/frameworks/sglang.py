"""SGLang's own code on four processes, with its experts moved by ultraep_comm.

``eplb``: layers are brought to random maps by SGLang's ``ExpertLocationUpdater``, and every row is
compared with what SGLang's own ``update_expert_weights_single_layer`` makes of a copy; its canary
is on. ``batch``: batches go through SGLang's TopK, its standard dispatcher and its FusedMoE, and
are compared with all experts computed in one place.

Stand-ins: torchvision, where it is missing; the kernel of the experts, because SGLang's for the CPU
does not know experts of other ranks; and a model's number of experts, in place of its config.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

import ultraep_comm as uec
from frameworks.table import Case

RANKS = 4
SIZES = ((2, 8), (5, 16), (20, 32), (64, 72), (256, 288))  # logical and physical experts
LAYERS = 10  # of each update
EXPERTS, SLOTS, TOPK, HIDDEN, INNER, TOKENS = 16, 2, 4, 32, 16, 512


def stand_in(name: str) -> Any:
    """Return a class in place of any that torchvision may have."""
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})


def import_sglang() -> None:
    """Import what is tried, with a stand-in for torchvision where that is missing."""
    if importlib.util.find_spec("torchvision") is None:
        # Before the stand-in is there, which transformers would take for the real one.
        importlib.import_module("transformers").AutoProcessor  # noqa: B018
        for name in ("", ".io", ".transforms", ".transforms.functional"):
            module: Any = ModuleType(f"torchvision{name}")
            module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
            module.__path__ = []
            module.__getattr__ = stand_in
            sys.modules[module.__name__] = module
    for name in (
        "eplb.expert_location_updater",
        "layers.moe.fused_moe_triton.layer",
        "model_executor.model_runner_components.moe_ep_setup",
        "plugins",
        "server_args",
    ):
        importlib.import_module(f"sglang.srt.{name}")


def start(rank: int, store: str, mode: str) -> None:
    """Make a process a rank of SGLang, with its plugins."""
    torch.set_num_threads(1)
    os.environ |= {"ULTRAEP_SGLANG": mode, "SGLANG_EXPERT_LOCATION_UPDATER_CANARY": "1"}
    state = importlib.import_module("sglang.srt.distributed.parallel_state")
    context = importlib.import_module("sglang.srt.runtime_context")
    graphs = importlib.import_module("sglang.srt.model_executor.cuda_graph_config")
    arguments = importlib.import_module("sglang.srt.server_args").ServerArgs(
        model_path="dummy",
        device="cpu",
        tp_size=RANKS,
        ep_size=RANKS,
        ep_num_redundant_experts=SLOTS * RANKS,
        ep_dispatch_algorithm="dynamic",
        cuda_graph_config=graphs.CudaGraphConfig(graphs.PhaseConfig(), graphs.PhaseConfig()),
    )
    context.publish(arguments, role="test", ranks=context.SpawnRanks(world_rank=rank))
    state.init_distributed_environment(
        world_size=RANKS,
        rank=rank,
        local_rank=rank,
        backend="gloo",
        distributed_init_method=f"file://{store}",
    )
    state.set_custom_all_reduce(False)
    state.initialize_model_parallel(backend="gloo")
    importlib.import_module("sglang.srt.plugins").load_plugins()


# ---- EPLB ----------------------------------------------------------------------------------


def random_map(generator: torch.Generator, experts: int, count: int) -> torch.Tensor:
    """Return the experts in all physical rows: each somewhere, others at random."""
    rest = torch.randint(experts, (count - experts,), generator=generator)
    found = torch.cat([torch.arange(experts), rest])
    return found[torch.randperm(count, generator=generator)]


def make_layer(own: torch.Tensor) -> list[torch.Tensor]:
    """Return a layer's tensors of several dtypes, each element of which tells its expert."""
    scale = own[:, None].float() + torch.arange(32)
    return [
        own.clone(),
        torch.stack([own * 10, own * 100], 1),
        scale.bfloat16(),
        scale[:, :5].to(torch.float8_e4m3fn),
        own.float(),
    ]


def locations(maps: list[torch.Tensor]) -> Any:
    """Return SGLang's metadata, of which the updater reads maps from rows to experts alone."""
    found = torch.stack(maps)
    kind = importlib.import_module("sglang.srt.eplb.expert_location").ExpertLocationMetadata
    shape = (len(maps), int(found.max()) + 1)
    return kind(
        physical_to_logical_map=found,
        physical_to_logical_map_cpu=found.clone(),
        logical_to_all_physical_map=torch.full((*shape, found.shape[1]), -1),
        logical_to_all_physical_map_cpu=torch.full((*shape, found.shape[1]), -1),
        logical_to_all_physical_map_num_valid=torch.zeros(shape),
        ep_size=RANKS,
        logical_to_rank_dispatch_physical_map=None,
    )


def run_eplb(rank: int, updates: int) -> list[Any]:
    """Return, for each size, layers updated, experts that came by the library, and wrong rows."""
    replicate, received = uec.replicate_experts, 0

    def counted(weights: Any, plan: uec.Plan, **given: Any) -> None:
        nonlocal received
        received += int((plan.slot_expert[rank] >= 0).sum())
        replicate(weights, plan, **given)

    uec.replicate_experts = counted
    location = importlib.import_module("sglang.srt.eplb.expert_location")
    module = importlib.import_module("sglang.srt.eplb.expert_location_updater")
    own_update = module.update_expert_weights_single_layer.__wrapped__
    # The first update empties the accelerator's cache.
    torch.get_device_module = lambda: SimpleNamespace(empty_cache=lambda: None)
    updater, result = module.ExpertLocationUpdater(), []
    for experts, count in SIZES:
        generator = torch.Generator().manual_seed(count)
        local = count // RANKS
        mine = slice(rank * local, (rank + 1) * local)
        maps = [random_map(generator, experts, count) for _ in range(LAYERS)]
        layers = {i: make_layer(m[mine]) for i, m in enumerate(maps)}
        received = wrong = expected_moves = 0
        for _ in range(updates):
            new = [random_map(generator, experts, count) for _ in maps]
            expected = {i: [t.clone() for t in layer] for i, layer in layers.items()}
            for i, copies in expected.items():
                own_update(
                    routed_experts_weights=copies,
                    temp_buffers=[torch.empty_like(t) for t in copies],
                    old_physical_to_logical_map=maps[i].tolist(),
                    new_physical_to_logical_map=new[i].tolist(),
                    num_local_physical_experts=local,
                    num_gpu_per_node=RANKS,
                    rank=rank,
                )
                expected_moves += len(set(new[i][mine].tolist()) - set(maps[i][mine].tolist()))
            location.set_global_expert_location_metadata(locations(maps), allow_overwrite=True)
            missing = updater.update(layers, locations(new), list(layers), nnodes=1, rank=rank)
            assert missing == {}
            for i, copies in expected.items():
                for made, copy in zip(layers[i], copies, strict=True):
                    bytes_of = [t.contiguous().view(torch.uint8) for t in (made, copy)]
                    wrong += sum(not torch.equal(a, b) for a, b in zip(*bytes_of, strict=True))
                wrong += int((copies[0] != new[i][mine]).sum())
            maps = new
        assert received == expected_moves
        result.append((updates * LAYERS, received, wrong))
    return result


# ---- replicas for each batch ---------------------------------------------------------------


class Kernel:
    """Stands in for the experts' kernel: a rank's physical rows, and -1 for those elsewhere."""

    rows = 0

    @classmethod
    def apply(cls, layer: Any, dispatch_output: Any) -> Any:
        """Compute this rank's rows, and count them."""
        standard = importlib.import_module("sglang.srt.layers.moe.token_dispatcher.standard")
        x, topk = dispatch_output.hidden_states, dispatch_output.topk_output
        y, cls.rows = torch.zeros_like(x), 0
        for row in range(layer.num_local_experts):
            at, k = (topk.topk_ids == row).nonzero(as_tuple=True)
            cls.rows += len(at)
            out = compute(x[at], layer.w13_weight[row], layer.w2_weight[row])
            y.index_add_(0, at, out * topk.topk_weights[at, k, None])
        return standard.StandardCombineInput(hidden_states=y)


def compute(x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    """Return an expert's output."""
    gate, up = (x @ w13.T).chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up) @ w2.T


def load(layer: Any, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Load random weights by SGLang's loader, and return those of all experts."""
    w13 = torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=generator) / 6
    w2 = torch.randn(EXPERTS, HIDDEN, INNER, generator=generator) / 6
    for e in range(EXPERTS):
        gate, up = w13[e].chunk(2)
        layer.weight_loader(layer.w13_weight, gate, "w13_weight", "w1", e)
        layer.weight_loader(layer.w13_weight, up, "w13_weight", "w3", e)
        layer.weight_loader(layer.w2_weight, w2[e], "w2_weight", "w2", e)
    return w13, w2


def make_model(rank: int) -> tuple[torch.nn.ModuleList, list[Any], list[Any]]:
    """Return a model of two layers as SGLang loads it, its routers, and all weights."""
    location = importlib.import_module("sglang.srt.eplb.expert_location")
    kind = location.ModelConfigForExpertLocation
    kind.from_model_config = staticmethod(lambda _: kind(num_layers=2, num_logical_experts=EXPERTS))
    location.set_global_expert_location_metadata(
        location.compute_initial_expert_location_metadata(model_config=None, moe_ep_rank=rank)
    )
    standard = importlib.import_module("sglang.srt.layers.moe.token_dispatcher.standard")
    standard.get_device = lambda: "cpu"  # SGLang's knows accelerators alone
    fused = importlib.import_module("sglang.srt.layers.moe.fused_moe_triton.layer").FusedMoE
    router = importlib.import_module("sglang.srt.layers.moe.topk").TopK
    model, routers, weights = torch.nn.ModuleList(), [], []
    generator = torch.Generator().manual_seed(3)
    for number in range(2):
        layer = fused(
            num_experts=EXPERTS + SLOTS * RANKS,
            hidden_size=HIDDEN,
            intermediate_size=INNER,
            layer_id=number,
            top_k=TOPK,
            params_dtype=torch.float32,
        )
        weights.append(load(layer, generator))
        layer.quant_method.apply = Kernel.apply
        model.append(layer)
        routers.append(router(top_k=TOPK, layer_id=number, renormalize=True))
    setup = importlib.import_module(
        "sglang.srt.model_executor.model_runner_components.moe_ep_setup"
    )
    setup.prepare_moe_topk(model=model, model_config=SimpleNamespace(hf_config=None))
    return model, routers, weights


@torch.inference_mode()
def run_batch(rank: int, batches: int) -> list[Any]:
    """Return batches, the largest difference, imbalances, and rows of the fullest rank."""
    model, routers, weights = make_model(rank)
    generator = torch.Generator().manual_seed(4)
    worst, before, after, replicas, fullest = 0.0, [], [], 0, []
    for batch in range(batches):
        if batch == batches // 2:
            weights = [load(layer, generator) for layer in model]
        for layer, router, (w13, w2) in zip(model, routers, weights, strict=True):
            x = torch.randn(TOKENS, HIDDEN, generator=generator)
            logits = torch.randn(TOKENS, EXPERTS, generator=generator) - 0.35 * torch.arange(
                EXPERTS
            )
            real = TOKENS - 100 * (batch % 2)  # every other batch is padded
            topk = router(x, logits, num_token_non_padded=torch.tensor(real))
            y = layer(x, topk)
            dist.all_reduce(y)
            chosen, ids = logits.softmax(-1).topk(TOPK)
            chosen /= chosen.sum(-1, keepdim=True)
            expected = torch.zeros_like(x)
            for e in range(EXPERTS):
                at, k = (ids[:real] == e).nonzero(as_tuple=True)
                expected.index_add_(0, at, compute(x[at], w13[e], w2[e]) * chosen[at, k, None])
            worst = max(worst, float((y - expected).abs().max()))
            plan = layer.ultraep.plan
            before.append(plan.imbalance_before)
            after.append(plan.imbalance)
            replicas += plan.num_replicas
            computed = torch.tensor([Kernel.rows])
            dist.all_reduce(computed, op=dist.ReduceOp.MAX)
            fullest.append(int(computed) * RANKS / (real * TOPK))
    return [len(before), worst, max(before), max(after), max(fullest), replicas]


# ---- processes -----------------------------------------------------------------------------


def work(rank: int, folder: str, mode: str, count: int) -> None:
    """Be a rank, and leave the result in a file."""
    start(rank, f"{folder}/{mode}-store", mode)
    result = {"eplb": run_eplb, "batch": run_batch}[mode](rank, count)
    Path(folder, f"{mode}-{rank}").write_text(json.dumps(result))
    dist.barrier()


def run_ranks(mode: str, count: int, folder: Path) -> list[Any]:
    """Return the results of all ranks, which are forked: imports take long."""
    torch.multiprocessing.start_processes(
        work, (str(folder), mode, count), nprocs=RANKS, start_method="fork"
    )
    return [json.loads(Path(folder, f"{mode}-{r}").read_text()) for r in range(RANKS)]


def run(case: Case, folder: Path) -> dict[str, Any]:
    """Run updates of SGLang's EPLB, or batches."""
    import_sglang()
    if "batches" in case.given:
        names = ("batches", "difference", "before", "after", "fullest_rank", "replicas")
        every = run_ranks("batch", case.given["batches"], folder)
        found = dict(zip(names, every[0], strict=True))
        found["difference"] = max(found[1] for found in every)
        wrong = {
            "outputs are not those of experts in one place": found["difference"] > 1e-4,
            "the fullest rank computes too much": found["fullest_rank"] > 1.05,
        }
        return found | {"failed": [text for text, is_wrong in wrong.items() if is_wrong]}
    sizes, failed = [], []
    every = zip(*run_ranks("eplb", case.given["updates"], folder), strict=True)
    for (experts, rows), ranks in zip(SIZES, every, strict=True):
        size = {"experts": experts, "rows": rows, "layers": ranks[0][0]}
        size["moved"], size["wrong_rows"] = (sum(found[i] for found in ranks) for i in (1, 2))
        sizes.append(size)
        if size["wrong_rows"] or not size["moved"]:
            failed.append(f"{experts} experts: {size['wrong_rows']} of {size['moved']} are wrong")
    return {"sizes": sizes, "failed": failed}
