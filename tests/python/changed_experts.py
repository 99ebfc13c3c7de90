"""Changes of a grouped experts' module after it had replicas, which every adapter has to notice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from ranks import raised
from torch.nn.utils import parametrize


class Doubled(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def hook(_module: Any, _given: Any, output: torch.Tensor) -> torch.Tensor:
    return 2 * output


def subclass(experts: torch.nn.Module) -> None:
    experts.__class__ = type("Other", (type(experts),), {})


def add_row(experts: Any) -> None:
    experts.extra = torch.nn.Parameter(torch.ones(len(experts.w1)))


# The change, and what the error names.
CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "parametrised": (lambda e: parametrize.register_parametrization(e, "w1", Doubled()), "class"),
    "lora": (lambda e: e.add_module("lora", torch.nn.Linear(2, 2)), "lora.class"),
    "class": (subclass, "class"),
    "parameter": (add_row, "parameters"),
    "setting": (lambda e: setattr(e, "alpha", 2.0), "alpha"),
    "hook": (lambda e: e.register_forward_hook(hook), "forward_hooks"),
    "patched": (lambda e: setattr(e, "forward", lambda *given: given[0]), "forward"),
}


def change_after(rank: int, change: str, experts: Any, step: Callable[[], Any]) -> str:
    """Change rank 1's experts between two steps, and return what the second one raises."""
    with torch.no_grad():
        step()
        experts.eval()
        step()
        if rank == 1:
            CHANGES[change][0](experts)
        error = raised(step)
    return f"{type(error).__name__}: {error}"


def check(change: str, every: list[str]) -> None:
    own = every[1]
    assert own.startswith("UnsupportedError: rank 1: the experts of layer 0 were changed after"), (
        own
    )
    assert f"they have {CHANGES[change][1]}: " in own
    for rank in (0, *range(2, len(every))):
        assert "rank 1" in every[rank], every[rank]
        assert "TimeoutError" not in every[rank]
