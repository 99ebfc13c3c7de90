"""The table of cases: each framework's programs, and what they are given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

FULL, SELECTIVE = "FullAC", "SelectiveAC"  # torchtitan's recomputation


@dataclass(frozen=True)
class Case:
    """What one run is given.

    Attributes:
        is_quick: the first tier of tests runs it.
        few: tokens are too few for replicas.
        exact: fp32; otherwise bf16.
        source: it needs the framework's unpacked source distribution, for its tests.
        given: the program's own settings.
    """

    is_quick: bool = False
    few: bool = False
    exact: bool = True
    source: bool = False
    given: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Program:
    """A module beside this one, whose ``run(case, folder)`` returns what a case has found.

    Attributes:
        module: its name.
        cases: by name.
        num_ranks: processes that run each case, over gloo; 1 if the program starts its own.
    """

    module: str
    cases: Mapping[str, Case]
    num_ranks: int = 4


def case(
    quick: bool = False,
    *,
    few: bool = False,
    exact: bool = True,
    source: bool = False,
    **given: Any,
) -> Case:
    """Return a case with the program's own settings by name."""
    return Case(quick, few, exact, source, given)


FEW = {"min_tokens": 10_000}
RECOMPUTED, REENTRANT = {"use_reentrant": False}, {"use_reentrant": True}
OPTIMIZER = {"use_distributed_optimizer": True}

TRANSFORMERS = {
    "qwen3": case(True),
    "gptoss": case(True, model="gptoss", experts="eager"),
    "mixtral, two copies of an expert": case(model="mixtral", ep=2, experts="batched_mm"),
    "dsv3": case(model="deepseek_v3"),
    "shared batches": case(True, fsdp=2, tp=2),
    "recomputed": case(True, checkpointing=RECOMPUTED),
    "recomputed, reentrant": case(model="gptoss", checkpointing=REENTRANT),
    "adamw": case(optimizer="adamw", experts="eager", learning_rate=1e-3),
    "compiled": case(compiled=True),
    "bf16": case(exact=False),
    "routers alone": case(trained="mlp.gate."),
    "no replicas for few tokens": case(few=True, options=FEW),
    # Two tokens in a group of four: half of the ranks have none.
    "ranks without tokens": case(fsdp=1, tp=4, batch=(1, 2), learning_rate=0.01),
    "new tensors": case(True, watches=True),
}
MEGATRON = {
    "alltoall": case(),
    "allgather": case(config={"moe_token_dispatcher_type": "allgather"}),
    "flex": case(config={"moe_token_dispatcher_type": "flex", "moe_router_dtype": "fp32"}),
    "two ranks, twice": case(ep=2),
    "overlapped reduction": case(ep=2, ddp={"overlap_grad_reduce": True}),
    "distributed optimizer": case(ep=2, ddp=OPTIMIZER),
    "weights gathered late": case(
        True, ep=2, ddp={**OPTIMIZER, "overlap_grad_reduce": True, "overlap_param_gather": True}
    ),
    "recomputed": case(
        True, config={"recompute_granularity": "selective", "recompute_modules": ["moe"]}
    ),
    "recomputed whole": case(
        config={
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    ),
    "bf16": case(True, exact=False, ep=2),
    "biases": case(True, config={"add_bias_linear": True}),
    "shared experts": case(config={"moe_shared_expert_intermediate_size": 48}),
    "shared experts, overlapped": case(
        config={"moe_shared_expert_intermediate_size": 48, "moe_shared_expert_overlap": True}
    ),
    "dropped tokens": case(
        config={
            "moe_expert_capacity_factor": 1.0,
            "moe_router_load_balancing_type": "aux_loss",
            "moe_aux_loss_coeff": 0.1,
        }
    ),
    # The router chooses experts of the first two ranks only.
    "ranks that would get no tokens": case(True, skewed=True),
    "ranks that get no tokens": case(skewed=True, few=True, options=FEW),
    "a pipeline's order": case(pipelined=True),
    "wrapped before": case(ep=2, wrap_first=True),
    "new tensors": case(True, watches=True),
}
DEEPSPEED = {
    "EP4, ZeRO-1": case(True),
    "EP4, ZeRO-2": case(stage=2),
    "EP2 x DP2, ZeRO-1": case(ep=2),
    "EP2 x DP2, ZeRO-2": case(ep=2, stage=2),
    "EP4, ZeRO-1, 2 microbatches": case(microbatches=2),
    "EP2 x DP2, ZeRO-2, 2 microbatches": case(True, ep=2, stage=2, microbatches=2),
    "EP4, ZeRO-2, recomputed": case(True, stage=2, checkpointing=RECOMPUTED),
    "EP2 x DP2, ZeRO-1, recomputed, reentrant": case(ep=2, checkpointing=REENTRANT),
    "EP2 x DP2, ZeRO-2, overlapped": case(
        ep=2, stage=2, zero={"overlap_comm": True, "reduce_bucket_size": 2000}
    ),
    "EP4, ZeRO-1, expert by expert": case(autoep={"use_grouped_mm": False}),
    "EP4, ZeRO-1, scores before experts": case(autoep={"score_apply": "pre"}),
    "mixtral, EP4, ZeRO-2": case(model="mixtral", stage=2),
    "deepseek_v3, EP2 x DP2, ZeRO-1": case(model="deepseek_v3", ep=2),
    "EP4, ZeRO-1, bf16": case(exact=False),
    "EP2 x DP2, ZeRO-2, bf16, 2 microbatches": case(exact=False, ep=2, stage=2, microbatches=2),
    "EP2 x DP2, ZeRO-2, experts' ranks apart": case(
        ep=2, stage=2, config={"use_data_before_expert_parallelism": True}
    ),
    "EP4, no ZeRO": case(stage=0),
    "EP4, ZeRO-1, no replicas for few tokens": case(few=True, options=FEW),
    "EP1, ZeRO-1": case(ep=1),
    "checkpoints": case(True, ep=2, stage=2, saves=True),
}
TORCHTITAN = {
    "EP4": case(True),
    "EP4, full recomputation": case(checkpointing=FULL),
    "EP4, selective recomputation": case(checkpointing=SELECTIVE),
    "EP2 x FSDP": case(ep=2),
    "EP2 x FSDP, full recomputation": case(True, ep=2, checkpointing=FULL),
    "EP2 x FSDP, selective recomputation": case(ep=2, checkpointing=SELECTIVE),
    "EP4, bf16": case(exact=False),
    "EP4, no replicas for few tokens": case(few=True, options=FEW),
    "EP1": case(ep=1),
}
VLLM_BATCH = {
    "tensor parallel": case(True),
    "data parallel, all-to-all": case(True, own=True),
    "tensor parallel, FP8": case(True, blocks=True),
}
SGLANG = {"eplb": case(True, updates=10), "batch": case(True, batches=20)}
OWN_TESTS = {"its own tests": case(source=True)}


def _fake(of: str) -> Program:
    return Program("fake", {"the tests' fake": case(True, of=of)}, 1)


# By the distribution: the first release that has what the adapter needs, and the programs.
FRAMEWORKS: dict[str, tuple[tuple[int, ...], list[Program]]] = {
    "transformers": (
        (5, 23),
        [
            _fake("transformers"),
            Program("transformers", TRANSFORMERS),
            Program("transformers_tests", OWN_TESTS, 1),
        ],
    ),
    "megatron-core": ((0, 16), [_fake("megatron"), Program("megatron", MEGATRON)]),
    "deepspeed": ((0, 19), [_fake("deepspeed"), Program("deepspeed", DEEPSPEED)]),
    "torchtitan": ((0, 3), [_fake("torchtitan"), Program("torchtitan", TORCHTITAN)]),
    "vllm": (
        (0, 33),
        [
            _fake("vllm"),
            Program("vllm_batch", VLLM_BATCH, 1),
            Program("vllm_tests", OWN_TESTS, 1),
        ],
    ),
    "sglang": ((0, 5), [_fake("sglang"), Program("sglang", SGLANG, 1)]),
}
