"""Training steps, and the two experiments: plain against replicated, and free runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from batches import Batches
from model import Model, Place, Trace
from torch.nn import functional

import ultraep_comm as uec

ShowStep = Callable[[int, float], None]  # step, loss


@dataclass(frozen=True, kw_only=True)
class Pass:
    """The result of a forward and backward pass; gradients are in the parameters."""

    loss: float  # mean over the tokens of all ranks
    logits: torch.Tensor
    input_grad: torch.Tensor
    trace: Trace


class Trainer:
    """A model, its optimizer and its batches on this rank."""

    def __init__(
        self, model: Model, batches: Batches, group: uec.Group, learning_rate: float
    ) -> None:
        self.model, self._batches, self._group = model, batches, group
        experts = {id(p) for moe in model.moe for p in moe.experts.values()}
        self._dense = [p for p in model.parameters() if id(p) not in experts]
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
        self._invalidate()

    def run(self, step: int, place: Place, routing: Sequence[torch.Tensor] | None = None) -> Pass:
        """Compute the loss and all gradients of one step."""
        self._optimizer.zero_grad(set_to_none=False)
        text, targets = self._batches.draw(step)
        tokens = self.model.embed(text)
        tokens.retain_grad()
        trace = Trace()
        logits = self.model(tokens, place, trace, routing)
        num_tokens = len(targets) * self._group.num_ranks
        loss = functional.cross_entropy(logits, targets, reduction="sum") / num_tokens
        loss.backward()
        self._group.assert_idle()  # every saved plan has been reduced
        total = loss.detach().clone()
        self._add_up([total, *(p.grad for p in self._dense if p.grad is not None)])
        assert tokens.grad is not None
        return Pass(loss=float(total), logits=logits.detach(), input_grad=tokens.grad, trace=trace)

    def update(self) -> None:
        """Run the optimizer."""
        self._optimizer.step()
        self._invalidate()

    def _invalidate(self) -> None:
        """Let slots hold nothing: these are other weights."""
        for bank in self._group.banks:
            bank.invalidate()

    def grads(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield all parameters' gradients."""
        for name, parameter in self.model.named_parameters():
            assert parameter.grad is not None
            yield name, parameter.grad

    def loads(self, trace: Trace) -> torch.Tensor:
        """Return rows by rank ``[2, layers, G]``: with experts at home only, and as computed."""
        home = torch.from_numpy(self._group.topology.home).long()
        rows = torch.zeros(2, len(trace.rows), self._group.num_ranks)
        for layer, ids in enumerate(trace.topk_ids):
            rows[0, layer] = torch.bincount(home[ids.flatten()], minlength=rows.shape[2])
            rows[1, layer, self._group.rank] = trace.rows[layer]
        dist.all_reduce(rows)
        return rows

    @staticmethod
    def _add_up(tensors: Sequence[torch.Tensor]) -> None:
        """Sum over the ranks, in place."""
        flat = torch.cat([t.flatten() for t in tensors])
        dist.all_reduce(flat)
        for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))


@dataclass(kw_only=True)
class Comparison:
    """Largest differences ``norm(a - b) / norm(b)`` over steps and ranks, by name."""

    outputs: dict[str, float] = field(default_factory=dict)
    grads: dict[str, float] = field(default_factory=dict)

    @staticmethod
    def worst(differences: dict[str, float]) -> tuple[str, float]:
        """Return the name and value of the largest difference."""
        name = max(differences, key=lambda n: differences[n])
        return name, differences[name]


def compare(
    trainer: Trainer, plain: Place, replicated: Place, steps: int, show: ShowStep
) -> Comparison:
    """Compute each step both ways from the same parameters, with the same routing.

    The optimizer then uses the gradients of the replicated layers.
    """
    result = Comparison()
    for step in range(steps):
        expected = trainer.run(step, plain)
        expected_grads = {name: grad.clone() for name, grad in trainer.grads()}
        found = trainer.run(step, replicated, expected.trace.topk_ids)
        _note(result.outputs, "logits", found.logits, expected.logits)
        pairs = zip(found.trace.outputs, expected.trace.outputs, strict=True)
        for layer, (ours, theirs) in enumerate(pairs):
            _note(result.outputs, f"moe.{layer}", ours, theirs)
        _note(result.grads, "input", found.input_grad, expected.input_grad)
        for name, grad in trainer.grads():
            _note(result.grads, name, grad, expected_grads[name])
        trainer.update()
        show(step, found.loss)
    for differences in (result.outputs, result.grads):
        values = torch.tensor(list(differences.values()), dtype=torch.float64)
        dist.all_reduce(values, dist.ReduceOp.MAX)
        differences.update(zip(differences, values.tolist(), strict=True))
    return result


def _note(
    differences: dict[str, float], name: str, found: torch.Tensor, expected: torch.Tensor
) -> None:
    error = float((found.double() - expected.double()).norm())
    norm = float(expected.double().norm())
    relative = error / norm if norm else (math.inf if error else 0.0)
    # NaN counts as infinite: a maximum over ranks may drop it.
    relative = math.inf if math.isnan(relative) else relative
    differences[name] = max(relative, differences.get(name, 0.0))


@dataclass(kw_only=True)
class FreeRun:
    """Losses and rows by step, and the largest buffer."""

    losses: list[float] = field(default_factory=list)
    at_home: list[torch.Tensor] = field(default_factory=list)  # [layers, G] by step
    computed: list[torch.Tensor] = field(default_factory=list)  # likewise
    buffer_bytes: int = 0  # the largest over ranks, layers and steps

    def imbalance(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the largest rows of a rank over the mean, ``[steps, layers]``."""
        stacked = torch.stack(list(rows))
        return stacked.amax(2) / stacked.mean(2)


def train(trainer: Trainer, place: Place, steps: int, show: ShowStep) -> FreeRun:
    """Train for ``steps`` and return losses and loads."""
    result = FreeRun()
    buffer = 0
    for step in range(steps):
        done = trainer.run(step, place)
        trainer.update()
        at_home, computed = trainer.loads(done.trace)
        result.losses.append(done.loss)
        result.at_home.append(at_home)
        result.computed.append(computed)
        buffer = max(buffer, done.trace.buffer_bytes)
        show(step, done.loss)
    largest = torch.tensor(buffer)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    result.buffer_bytes = int(largest)
    return result
