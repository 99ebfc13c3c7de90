"""What programs that train a model with and without replicas compare."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from doc_blocks import markdown

from ultraep_comm.bench.machine import find_commit


def table(document: Mapping[str, Any]) -> str:
    """Return training without and with replicas as a table in Markdown."""
    head = ["case", "losses", "with replicas", "gradients apart", "experts' apart"]
    head += ["rerouted", "imbalance before", "after", "replicas"]
    rows = []
    for name, found in document.items():
        if "losses" not in found:
            continue
        losses = [", ".join(f"{loss:.7f}" for loss in run) for run in found["losses"]]
        worst = [f"{max(found[of]):.1e}" for of in ("gradients", "expert_gradients")]
        _, *each = zip(*found["imbalance"], strict=True) if found["imbalance"] else [()] * 4
        spans = [f"{min(v):.2f} to {max(v):.2f}" if v else "-" for v in each[:2]]
        counts = f"{min(each[2])} to {max(each[2])}" if each[2] else "-"
        rows.append([name, *losses, *worst, str(found["rerouted"]), *spans, counts])
    return markdown(head, rows)


def full(tensor: torch.Tensor) -> torch.Tensor:
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().float().clone()


def apart(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> float:
    """Return the largest difference of any tensor, relative to its largest value.

    Values that are less than a thousandth of all tensors' largest count as that: gradients that
    are zero but for rounding.
    """
    assert list(found) == list(wanted)
    largest = {name: float(one.abs().max()) for name, one in wanted.items() if one.numel()}
    least = max(largest.values()) / 1000
    worst = 0.0
    for name, scale in largest.items():
        assert found[name].shape == wanted[name].shape
        difference = float((found[name] - wanted[name]).abs().max())
        worst = max(worst, difference / max(scale, least))
    return worst


def worst(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> float:
    """Return how far tensors are apart on any rank."""
    difference = torch.tensor(apart(found, wanted))
    dist.all_reduce(difference, dist.ReduceOp.MAX)
    return difference.item()


@contextlib.contextmanager
def choosing(given: list[torch.Tensor] | None) -> Iterator[list[torch.Tensor]]:
    """Record what routers choose, or let them choose what was recorded.

    Otherwise rounding may send a token to another expert, whose gradient is then another one.
    """
    found, topk = [], torch.topk

    def choose(*args: Any, **options: Any) -> Any:
        values, ids = topk(*args, **options)
        found.append(ids)
        if given is None:
            return values, ids
        assert given[len(found) - 1].shape == ids.shape
        return values, given[len(found) - 1]

    with mock.patch.object(torch, "topk", choose):
        yield found
    assert given is None or len(given) == len(found)


def rerouted(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> int:
    """Return how many tokens of all ranks would have gone to other experts, by rounding."""
    pairs = zip(found, wanted, strict=True)
    moved = sum((a.sort().values != b.sort().values).any(-1).sum() for a, b in pairs)
    count = torch.as_tensor(moved).clone()
    dist.all_reduce(count)
    return int(count)


def run_cases(
    path: str, names: Sequence[str], cases: Mapping[str, Callable[[], Any]], *, shows: bool = True
) -> None:
    """Run cases by name, by default all; rank 0 writes what they return, and prints a table."""
    results: dict[str, Any] = {"commit": find_commit()}
    for name in names or cases:
        results[name] = cases[name]()
        if dist.get_rank() == 0:
            print(name, json.dumps(results[name]), flush=True)
            Path(path).write_text(json.dumps(results))
    if shows and dist.get_rank() == 0:
        print(table(results))
    dist.barrier()
    dist.destroy_process_group()
