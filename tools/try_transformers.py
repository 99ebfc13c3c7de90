#!/usr/bin/env python3
"""transformers' own tests of expert parallelism, with replicas by ultraep_comm, on a CPU.

    python tools/try_transformers.py FOLDER [--json FILE]

FOLDER is the unpacked source distribution of transformers, for its tests; docs/frameworks.md has
the rest. The distribution has no classes of models that use these tests, nor what starts their
ranks: both are here. The implementation "auto", which the tests take, is replaced by the adapter's.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
import unittest
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

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
_REPLICAS = "TRY_TRANSFORMERS_REPLICAS"  # names a file with a line for every plan


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


def run(source: Path, folder: Path) -> dict[str, Any]:
    """Run the tests in an empty folder, and return the result."""
    package = folder / "tests"
    package.mkdir()
    (package / "__init__.py").touch()
    for name in TESTS:
        shutil.copy(source / "tests" / name, package)
    (package / "distributed_testing_utils.py").write_text(
        "from try_transformers import run_distributed as run_distributed\n"
    )
    (package / "test_models.py").write_text(
        "import try_transformers\n\n"
        "from .test_expert_parallel_mixin import ExpertParallelTesterMixin as EP\n"
        "from .test_tensor_parallel_mixin import TensorParallelTesterMixin as TP\n\n"
        "globals().update(try_transformers.make_cases(EP, TP))\ndel EP, TP\n"
    )
    replicas, report = folder / "replicas", folder / "report.xml"
    replicas.touch()
    environment = {
        "PYTHONPATH": os.pathsep.join([str(folder), str(Path(__file__).resolve().parent)]),
        "OMP_NUM_THREADS": "1",
        _REPLICAS: str(replicas),
    }
    command = [sys.executable, "-m", "pytest", "-q", f"--junit-xml={report}"]
    command += ["-p", "no:cacheprovider", "-k", "test_ep_", "tests/test_models.py"]
    subprocess.run(command, cwd=folder, env=os.environ | environment, check=False)
    tests: dict[str, Counter[str]] = {name: Counter() for name in MODELS}
    for case in ElementTree.parse(report).iter("testcase"):
        outcome = next((child.tag for child in case if not child.tag.startswith("sys")), "passed")
        tests[case.attrib["classname"].rsplit("Test", maxsplit=1)[-1]][outcome] += 1
    plans = [int(line) for line in replicas.read_text().split()]
    names = ("transformers", "torch", "ultraep_comm")
    return {
        "versions": {name: importlib.metadata.version(name) for name in names},
        "tests": tests,
        "plans": len(plans),
        "replicas": sum(plans),
    }


def main() -> int:
    """Run the tests, print the result, and return 0 if all passed and there were replicas."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", type=Path, metavar="FOLDER")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = run(options.source.resolve(), Path(folder))
    print(", ".join(f"{name} {version}" for name, version in result["versions"].items()))
    for name, counts in result["tests"].items():
        print(f"{name}: " + ", ".join(f"{n} {outcome}" for outcome, n in sorted(counts.items())))
    print(f"{result['replicas']} replicas, of {result['plans']} plans")
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    failed = any(set(counts) != {"passed"} for counts in result["tests"].values())
    return int(failed or not result["replicas"])


if __name__ == "__main__":
    sys.exit(main())
