"""transformers' own tests of expert parallelism, with the adapter in place of ``"auto"``.

They are in its source distribution, and need parameterized. It has no classes of models that use
these tests, nor what starts their ranks: both are here.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import unittest
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from frameworks.own_tests import failures, run_tests
from frameworks.table import Case

TESTS = ("test_expert_parallel_mixin.py", "test_tensor_parallel_mixin.py")
MODELS = {"Qwen3Moe": {"head_dim": 8}, "Qwen2Moe": {}, "Olmoe": {}, "Glm4Moe": {"head_dim": 8}}
_TINY = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_REPLICAS = "ULTRAEP_TESTS_REPLICAS"  # names a file with a line for every plan


def make_cases(*mixins: Any) -> dict[str, Any]:
    """Return a test case of each model, of the given mixins."""
    import transformers

    cases = {}
    for name, own in MODELS.items():
        config = getattr(transformers, f"{name}Config")
        tester = SimpleNamespace(
            get_config=lambda config=config, own=own: config(**_TINY | own),
            causal_lm_class=getattr(transformers, f"{name}ForCausalLM"),
        )
        parts = {"model_tester": tester, "__module__": f"tests.{name}"}
        cases[f"Test{name}"] = type(f"Test{name}", (*mixins, unittest.TestCase), parts)
    return cases


def run_distributed(world_size: int) -> Callable[[Any], Any]:
    """Stand in for the helper of that name: run a function on forked ranks, over gloo."""
    from torch import multiprocessing

    def of(function: Any) -> Any:
        def run(*arguments: Any) -> None:
            with tempfile.TemporaryDirectory() as folder:
                given = (world_size, f"{folder}/store", function, arguments)
                multiprocessing.start_processes(_serve, given, world_size, start_method="fork")

        return run

    return of


def _serve(rank: int, world_size: int, store: str, function: Any, arguments: Any) -> None:
    import torch
    import torch.distributed as dist
    from transformers.distributed.expert_parallel import EPImplementationInterface

    from ultraep_comm.adapters import transformers as adapter

    class Noted(adapter.UltraEP):
        def __call__(self, *given: Any) -> Any:
            output = super().__call__(*given)
            if rank == 0 and self.plan is not None:
                with Path(os.environ[_REPLICAS]).open("a") as file:
                    file.write(f"{self.plan.num_replicas}\n")
            return output

    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size}
    os.environ.update({name: str(value) for name, value in ranks.items()})
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    adapter.configure(slots_per_rank=2, engine="host")
    EPImplementationInterface.register("auto", Noted)
    function(rank, *arguments)
    dist.barrier()
    dist.destroy_process_group()


def run(case: Case, source: Path, folder: Path) -> dict[str, Any]:
    """Run the tests in an empty folder."""
    package = folder / "tests"
    package.mkdir()
    (package / "__init__.py").touch()
    for name in TESTS:
        shutil.copy(source / "tests" / name, package)
    (package / "distributed_testing_utils.py").write_text(
        "from frameworks.transformers_tests import run_distributed as run_distributed\n"
    )
    (package / "test_models.py").write_text(
        "from frameworks import transformers_tests\n\n"
        "from .test_expert_parallel_mixin import ExpertParallelTesterMixin as EP\n"
        "from .test_tensor_parallel_mixin import TensorParallelTesterMixin as TP\n\n"
        "globals().update(transformers_tests.make_cases(EP, TP))\ndel EP, TP\n"
    )
    replicas = folder / "replicas"
    replicas.touch()
    environment = {_REPLICAS: str(replicas)}
    tests = run_tests(folder, ["tests/test_models.py"], "test_ep_", environment)
    plans = [int(line) for line in replicas.read_text().split()]
    found = {"tests": tests, "plans": len(plans), "replicas": sum(plans)}
    return found | {"failed": failures(tests, sum(plans))}
