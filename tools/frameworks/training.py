"""Training without and with replicas: what the programs of frameworks that train share."""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from studies.watch import Stopwatch, watching

Tensors = dict[str, torch.Tensor]
STEPS, SLOTS = 3, 2
GROUP = {"slots_per_rank": SLOTS, "engine": "host", "timeout": 60.0}


@dataclass(frozen=True)
class Limits:
    """How far training with replicas may be from training without.

    Attributes:
        loss: relative.
        first: of gradients before the first update, relative to a tensor's largest value.
        gradients: of all gradients.
        left: of what training leaves: parameters, the optimizer's state.
        imbalance: with replicas.
    """

    loss: float = 1e-6
    first: float = 2e-5
    gradients: float = 2e-5
    left: float = 2e-5
    imbalance: float = 1.05


# bf16 rounds what instances sum apart: 2 ** -8 of a value, a few times.
ROUNDED = Limits(loss=1e-4, first=0.03, gradients=0.03, left=0.03)


class Training(ABC):
    """A model in its framework, ready for a first step."""

    microbatches = 1
    in_pipeline = False  # all forward passes of a step come before the backward passes
    parameters: Mapping[str, torch.nn.Parameter]
    model: Any
    optimizer: Any

    @abstractmethod
    def forward(self, step: int, microbatch: int) -> torch.Tensor:
        """Return the loss of a microbatch."""

    @abstractmethod
    def backward(self, loss: torch.Tensor, microbatch: int) -> None:
        """Add the gradients of a microbatch."""

    @abstractmethod
    def replicated(self) -> dict[str, tuple[Any, Any]]:
        """Return the last plan and the group of each layer with replicas."""

    def gradients(self) -> Tensors:
        """Return whole gradients, once those of all microbatches are there."""
        found = self.model.named_parameters()
        return {name: full(p.grad) for name, p in found if p.grad is not None}

    def update(self) -> None:
        """Let the optimizer take a step, and clear gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    @abstractmethod
    def left(self) -> dict[str, Tensors]:
        """Return what training leaves: tensors are whole, in fp32."""

    def close(self) -> None:  # noqa: B027
        """Free what the process would otherwise keep."""


@dataclass
class Run:
    """What became of a training."""

    losses: list[float] = field(default_factory=list)
    gradients: list[Tensors] = field(default_factory=list)
    left: dict[str, Tensors] = field(default_factory=dict)
    imbalance: list[tuple[str, float, float, int]] = field(default_factory=list)
    arrivals: set[int] = field(default_factory=set)  # gradients that each parameter got
    share: float = 0.0  # of the time of passes that is spent in our calls, but for the first step


def train(training: Training) -> Run:
    """Train for some steps."""
    with watching() as watch:
        return _train(training, watch)


def _train(training: Training, watch: Stopwatch) -> Run:
    run, parameters = Run(), training.parameters
    arrivals = {name: 0 for name, p in parameters.items() if p.requires_grad}

    def count(name: str) -> Callable[[torch.Tensor], None]:
        def hook(_: torch.Tensor) -> None:
            arrivals[name] += 1

        return hook

    hooks = [parameters[name].register_post_accumulate_grad_hook(count(name)) for name in arrivals]
    passes = [(is_back, m) for m in range(training.microbatches) for is_back in (False, True)]
    if training.in_pipeline:
        passes.sort()
    ours, took = 0, 0
    for step in range(STEPS):
        losses: list[torch.Tensor] = []
        watch.take()
        start = time.perf_counter_ns()
        for is_back, microbatch in passes:
            if is_back:
                training.backward(losses[microbatch], microbatch)
                continue
            losses.append(training.forward(step, microbatch))
            for name, (plan, _) in training.replicated().items():
                figures = plan.imbalance_before, plan.imbalance, plan.num_replicas
                run.imbalance.append((name, *figures))
        if step > 0:
            ours, took = ours + sum(watch.take()), took + time.perf_counter_ns() - start
        for _, group in training.replicated().values():
            group.assert_idle()
        run.gradients.append(training.gradients())
        training.update()
        mean = torch.stack([loss.detach().float() for loss in losses]).mean()
        dist.all_reduce(mean)
        run.losses.append(mean.item() / dist.get_world_size())
    for hook in hooks:
        hook.remove()
    run.left, run.arrivals, run.share = training.left(), set(arrivals.values()), ours / took
    training.close()
    return run


def compare(
    make: Callable[[bool], Training],
    limits: Limits,
    *,
    few: bool = False,
    plans: bool = True,
    follows: bool = True,
    exact: Callable[[], Training] | None = None,
) -> dict[str, Any]:
    """Train without and with replicas; return figures, and what is wrong under ``failed``.

    Args:
        make: given whether experts have replicas, returns a training.
        limits: of differences.
        few: tokens are too few for replicas.
        plans: there are layers with replicas.
        follows: differences are those of another run with replicas whose routers choose as those
            of the first run do. Otherwise rounding may send a token to another expert.
        exact: returns the training in fp32 without replicas, from which both may be as far.
    """
    with choosing(None) if follows else contextlib.nullcontext([]) as choices:
        plain = train(make(False))
    ours = followed = train(make(True))
    found: dict[str, Any] = {"losses": [plain.losses, ours.losses], "imbalance": ours.imbalance}
    found["share"] = ours.share
    if follows:
        with choosing(choices) as others:
            followed = train(make(True))
        found["rerouted"] = rerouted(others, choices)
    pairs = zip(followed.gradients, plain.gradients, strict=True)
    found["gradients"] = [worst(*pair) for pair in pairs]
    found["left"] = {of: worst(followed.left[of], plain.left[of]) for of in plain.left}
    found["arrivals"] = [sorted(run.arrivals) for run in (plain, ours)]
    if exact is not None:
        first = train(exact()).gradients[0]
        found["from_fp32"] = [worst(run.gradients[0], first) for run in (plain, ours)]
    found["failed"] = list(failures(found, limits, few=few, plans=plans))
    return found


def failures(found: Mapping[str, Any], limits: Limits, *, few: bool, plans: bool) -> Iterator[str]:
    """Yield what is wrong."""
    plain, ours = found["losses"]
    for value, wanted in zip(ours, plain, strict=True):
        if not abs(value - wanted) <= limits.loss * abs(wanted):
            yield f"a loss is {value}; expected {wanted}"
    first, *others = found["gradients"]
    differences = {"first gradients": (first, limits.first)}
    differences |= {"gradients": (max(others), limits.gradients)}
    differences |= {of: (value, limits.left) for of, value in found["left"].items()}
    for of, (value, limit) in differences.items():
        if not value < limit:
            yield f"{of} are {value:.2g} apart; expected less than {limit:g}"
    if "from_fp32" in found and not found["from_fp32"][1] < 1.25 * found["from_fp32"][0]:
        plain, ours = found["from_fp32"]
        yield f"gradients are {ours:.2g} from fp32; expected less than {1.25 * plain:.2g}"
    if found["arrivals"][0] != found["arrivals"][1]:
        yield f"parameters got {found['arrivals'][1]} gradients; expected {found['arrivals'][0]}"
    rows = [figures for _, *figures in found["imbalance"]]
    if bool(rows) != plans:
        yield f"{len(rows)} plans; expected {'some' if plans else 'none'}"
    for before, after, replicas in rows:
        if few and (replicas or after != before):
            yield f"{replicas} replicas, imbalance {before:.2f} to {after:.2f}; expected none"
        if not few and not after < limits.imbalance:
            yield f"imbalance {before:.2f} to {after:.2f}; expected below {limits.imbalance}"
    if rows and not few and not (max(before for before, *_ in rows) > 1.15 and rows[0][2]):
        yield "the load was even from the start, so that nothing was tried"


def full(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a whole tensor, in fp32."""
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().float().clone()


def moments(optimizer: Any, names: Mapping[torch.Tensor, str]) -> Tensors:
    """Return an optimizer's state for each parameter, by name."""
    return {
        f"{names[p]}.{key}": full(value)
        for p, values in optimizer.state.items()
        for key, value in values.items()
        if torch.is_tensor(value) and value.dim()
    }


def worst(found: Tensors, wanted: Tensors) -> float:
    """Return the largest difference of any tensor on any rank, relative to its largest value.

    Values that are less than a thousandth of all tensors' largest count as that: gradients that
    are zero but for rounding.
    """
    assert list(found) == list(wanted)
    largest = {name: float(one.abs().max()) for name, one in wanted.items() if one.numel()}
    least = max(largest.values()) / 1000
    apart = torch.zeros(())
    for name, scale in largest.items():
        assert found[name].shape == wanted[name].shape
        difference = (found[name] - wanted[name]).abs().max() / max(scale, least)
        apart = torch.maximum(apart, difference.float())
    dist.all_reduce(apart, dist.ReduceOp.MAX)
    return apart.item()


@contextlib.contextmanager
def choosing(given: list[torch.Tensor] | None) -> Iterator[list[torch.Tensor]]:
    """Record what routers choose, or let them choose what was recorded."""
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
