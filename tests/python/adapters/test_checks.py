"""Checks of frameworks at set-up."""

from __future__ import annotations

import gc
import importlib.metadata
import importlib.util
import logging
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankPool, raised
from torch.distributed import HashStore, ProcessGroup

import ultraep_comm as uec
from ultraep_comm.adapters.checks import (
    agree,
    check_experts,
    check_signature,
    check_signatures,
    check_unchanged,
    is_alone,
    warn_idle,
)
from ultraep_comm.adapters.holders import walk
from ultraep_comm.errors import UnsupportedError
from ultraep_comm.nn import Replication


@pytest.mark.parametrize(
    ("installed", "is_tried"),
    [
        ("5.23", True),
        ("5.23.1+cpu", True),
        ("5.230", False),
        ("5.24.0.dev0", False),
    ],
)
def test_other_versions_are_a_warning(
    monkeypatch: pytest.MonkeyPatch, installed: str, is_tried: bool
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: installed)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        check_signatures("transformers", "5.23", {})
    assert (found == []) == is_tried
    if not is_tried:
        assert f"version 5.23; {installed} is installed" in str(found[0].message)


def test_a_missing_framework_is_named() -> None:
    with pytest.raises(UnsupportedError, match=r"needs no-such-framework 1\.0;"):
        check_signatures("no-such-framework", "1.0", {})


def test_another_distribution_may_have_a_framework(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "framework_cpu-0.32.0.dist-info").mkdir()
    for name, text in {
        "METADATA": "Metadata-Version: 2.1\nName: framework-cpu\nVersion: 0.32.0\n",
        "top_level.txt": "framework\n",
    }.items():
        (tmp_path / "framework_cpu-0.32.0.dist-info" / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    check_signatures("framework", "0.32", {})
    with pytest.warns(UserWarning, match=r"version 0\.33; 0\.32\.0 is installed"):
        check_signatures("framework", "0.33", {})


def test_another_signature_is_an_error() -> None:
    path = "ultraep_comm.adapters.checks:is_alone"
    with pytest.warns(UserWarning, match="tried with version 0.0"):
        assert check_signatures("pytest", "0.0", {path: "process_group"}) == {path: is_alone}
    says = r"is_alone takes \['process_group', 'framework', 'setting'\]; the adapter .*\['group'\]"
    with pytest.raises(UnsupportedError, match=says):
        check_signature(path, "group")


def test_one_rank_has_nothing_to_replicate(caplog: pytest.LogCaptureFixture) -> None:
    warn_idle.cache_clear()
    assert not is_alone(ProcessGroup(HashStore(), 0, 2), "Framework", "ep above 1")
    for _ in range(2):  # layers
        assert is_alone(ProcessGroup(HashStore(), 0, 1), "Framework", "ep above 1")
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith("Framework: no expert is replicated; set ep above 1")


def experts(**weights: torch.Tensor) -> Any:
    module = torch.nn.Module()
    for name, value in weights.items():
        module.register_parameter(name, torch.nn.Parameter(value, requires_grad=False))
    module.register_parameter("no_bias", None)
    return module


def with_buffer(module: Any) -> None:
    module.register_buffer("w_scale", torch.ones(2), persistent=False)


def with_norm(module: Any) -> None:
    module.norm = torch.nn.LayerNorm(2, bias=False)


def with_attribute(module: Any) -> None:
    module.packed_scale = torch.ones(2)


def with_wrapper(module: Any) -> None:
    class Quantized(torch.Tensor):
        pass

    module.w = torch.nn.Parameter(torch.ones(2, 3).as_subclass(Quantized))


WEIGHTS = {"w": torch.ones(2, 3), "w_bias": torch.ones(2)}
BYTES = torch.ones(2, 4, dtype=torch.uint8)
FP8 = {"w": torch.ones(2, 3, dtype=torch.float8_e4m3fn)}
REPLICABLE = {
    "plain": WEIGHTS,
    "FP8": FP8 | {"w_scale_inv": torch.ones(2, 1)},
    "NVFP4": {
        "w": BYTES,
        "w_scale": torch.ones(2, 1).to(torch.float8_e4m3fn),
        "w_scale_2": torch.ones(2),
    },
    "MXFP4": {"w_blocks": BYTES, "w_scales": BYTES},
    "zero points": {"w": BYTES, "w_scale": torch.ones(2), "w_zero_point": BYTES},
    "a mask": {"w": torch.ones(2, 3), "w_mask": torch.ones(2, 3, dtype=torch.bool)},
}


@pytest.mark.parametrize("weights", REPLICABLE.values(), ids=REPLICABLE)
def test_experts_in_rows_of_parameters_can_be_replicated(weights: dict[str, torch.Tensor]) -> None:
    check_experts(experts(**weights), 2, "")


@pytest.mark.parametrize(
    ("weights", "change", "what"),
    [
        ({"w_blocks": BYTES}, None, "parameter w_blocks of torch.uint8 without w_blocks_scale"),
        (WEIGHTS, with_buffer, "buffer w_scale"),
        (WEIGHTS, with_norm, r"parameter norm\.weight, of a module inside"),
        (WEIGHTS, with_attribute, "tensor packed_scale"),
        (WEIGHTS, with_wrapper, "parameter w, a Quantized"),
        (WEIGHTS | {"w_scale": torch.ones(8, 1)}, None, r"parameter w_scale of shape \(8, 1\)"),
        (FP8, None, "parameter w of torch.float8_e4m3fn without w_scale"),
        ({}, None, "it has nothing"),
    ],
)
def test_what_replicas_would_lack_is_named(weights: Any, change: Any, what: str) -> None:
    module = experts(**weights)
    if change is not None:
        change(module)
    with pytest.raises(UnsupportedError, match=f"{what}.*each of a rank's 2 experts.*; go round"):
        check_experts(module, 2, "go round")


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = torch.nn.Linear(2, 2)
        self.experts.register_forward_hook(lambda *_: self.train(self.training) and None)


def test_a_layer_whose_hooks_refer_to_it_is_freed() -> None:
    expert = {"w": ((2,), torch.float32)}
    (group,) = uec.testing.new_loopback_groups(1, num_experts=2, slots_per_rank=1, expert=expert)
    layer = Layer()
    layer.replicas = Replication(group)
    check_unchanged(layer.replicas, layer.experts)
    alive = weakref.ref(layer)
    del layer
    gc.collect()
    assert alive() is None
    group.close()


def agree_on(rank: int, group: Any, layers: list[list[Any]]) -> str:
    return str(raised(lambda: agree(group, lambda facts: facts, layers[rank])))


@pytest.mark.parametrize(
    ("layers", "says"),
    [
        ([[1, 2], [1, 2], [1]], "rank 2 has 1 MoE layers"),
        ([[{"a": 1, "b": 2}], [{"b": 2, "a": 1}], [{"a": 1, "b": 2}]], "None"),
    ],
    ids=["another number", "another order"],
)
def test_layers_are_compared_alike_on_all_ranks(
    ranks: RankPool, layers: list[list[Any]], says: str
) -> None:
    assert all(says in text for text in ranks.run(3, agree_on, layers))


def test_what_slots_hold_has_one_order() -> None:
    names = [f"part_{n}" for n in range(12)]
    kind = type("Slotted", (), {"__slots__": names})
    value = kind()
    for name in names:
        setattr(value, name, 1)
    assert [path for path, _ in walk([value], {}) if path] == ["0." + name for name in names]
