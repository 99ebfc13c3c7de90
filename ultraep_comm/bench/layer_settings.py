"""Arguments of ``layer``, and the settings that they make."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from ultraep_comm.bench.arguments import (
    DEFAULT_EXPERTS,
    DEFAULT_IMBALANCE,
    add_round_arguments,
    check_minima,
    count_ranks,
    default_imbalance,
)
from ultraep_comm.bench.gate import Gate, add_bound_argument, make_gate
from ultraep_comm.bench.launch import launched_ranks
from ultraep_comm.bench.outputs import add_output_arguments, check_outputs
from ultraep_comm.bench.skew import generate_load
from ultraep_comm.errors import InvalidArgumentError

DEFAULT_RANKS = 2
_SHARES_TOKENS = 1 << 24  # of a generated load: enough for its shares to be smooth
_MINIMA = {
    **{"ranks": 1, "experts": 1, "slots": 0, "tokens": 1, "topk": 1, "hidden": 1, "inner": 1},
    **{"iters": 1, "warmup": 0, "seed": 0},
}


@dataclass(frozen=True, kw_only=True)
class LayerSettings:
    """Checked arguments of ``layer``. Equal on every rank.

    Attributes:
        shares: float64 ``[E]``, how often each expert is taken; sums to 1.
        imbalance: of these shares, over the ranks.
        num_ranks: G.
        slots: replicas that a rank can hold.
        tokens: of each rank.
        topk: experts of a token.
        hidden, inner: H and I.
        iters: measured iterations.
        warmup: iterations before them.
        check: verify every iteration instead of the last one.
        json: where records go; None: nowhere.
        csv: where they go flat; None: nowhere.
        gate: what the layer with replicas has to reach.
        seed: of everything random.
    """

    shares: NDArray[np.float64]
    imbalance: float
    num_ranks: int
    slots: int
    tokens: int
    topk: int
    hidden: int
    inner: int
    iters: int
    warmup: int
    check: bool
    json: Path | None
    csv: Path | None
    gate: Gate = field(default_factory=Gate)
    seed: int
    engine: str = "host"
    fabric: str = "shm"

    @property
    def num_experts(self) -> int:
        """Return E."""
        return len(self.shares)

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """Return the shapes of one expert's tensors."""
        return {"w13": (2 * self.inner, self.hidden), "w2": (self.hidden, self.inner)}

    @property
    def expert(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return ``new_group``'s argument."""
        return {name: (shape, torch.float32) for name, shape in self.shapes.items()}

    def draw_ids(self, iteration: int, rank: int) -> torch.Tensor:
        """Return int64 ``[T, k]``, each drawn by itself; a token may get an expert twice."""
        rng = np.random.default_rng([self.seed, iteration, rank])
        ids = rng.choice(self.num_experts, size=(self.tokens, self.topk), p=self.shares)
        return torch.from_numpy(ids)

    def balanced_ids(self, rank: int) -> torch.Tensor:
        """Return int64 ``[T, k]`` that give every expert the same number of tokens, to within 1."""
        first = rank * self.tokens * self.topk
        ids = torch.arange(first, first + self.tokens * self.topk) % self.num_experts
        return ids.view(self.tokens, self.topk)


def add_layer_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``layer`` and its arguments."""
    parser = commands.add_parser(
        "layer",
        help="a whole MoE layer, forward and backward, with and without replicas",
        description="Time a MoE layer, forward and backward, on the CPU: with skewed routing as it"
        " is, with replicas, and with force-balanced routing, interleaved. The exit status is 1"
        " if any value is wrong, 3 if a limit is not met, 2 after other errors.",
    )
    add = parser.add_argument_group("the layer").add_argument
    add("--ranks", type=int, help=f"ranks to start, no more than cores (default {DEFAULT_RANKS})")
    add("--experts", type=int, default=DEFAULT_EXPERTS, help=f"(default {DEFAULT_EXPERTS})")
    add("--slots", type=int, default=2, help="replicas that a rank can hold (default 2)")
    add("--tokens", type=int, default=1024, help="tokens of each rank (default 1024)")
    add("--topk", type=int, default=4, help="experts of a token (default 4)")
    add("--hidden", type=int, default=256, help="width of a token (default 256)")
    add("--inner", type=int, default=512, help="width inside an expert (default 512)")
    add(
        "--imbalance",
        type=float,
        help=f"of the routing (default {DEFAULT_IMBALANCE:g}, or three quarters of fewer ranks)",
    )
    add = parser.add_argument_group("iterations").add_argument
    add_round_arguments(add)
    add("--seed", type=int, default=1, help="of routing, weights and tokens (default 1)")
    add = parser.add_argument_group("results and limits").add_argument
    add_output_arguments(add)
    add_bound_argument(add, "a step with replicas takes more than X times a balanced one")


def make_layer_settings(options: argparse.Namespace) -> LayerSettings:
    """Check the arguments of ``layer``.

    Raises:
        InvalidArgumentError: as its text says.
    """
    check_minima(options, _MINIMA)
    check_outputs(options)
    gate = make_gate(options)
    if options.ranks is None and launched_ranks() is None:
        options.ranks = DEFAULT_RANKS
    num_ranks = count_ranks(options)
    if options.experts < num_ranks:
        raise InvalidArgumentError(
            f"--experts is {options.experts}; expected at least one for each of {num_ranks} ranks"
        )
    imbalance = default_imbalance(num_ranks) if options.imbalance is None else options.imbalance
    load = generate_load(
        num_ranks=num_ranks,
        num_experts=options.experts,
        imbalance=imbalance,
        num_tokens=_SHARES_TOKENS,
        seed=options.seed,
    ).sum(axis=0)
    return LayerSettings(
        shares=load / load.sum(),
        imbalance=imbalance,
        num_ranks=num_ranks,
        slots=options.slots,
        tokens=options.tokens,
        topk=options.topk,
        hidden=options.hidden,
        inner=options.inner,
        iters=options.iters,
        warmup=options.warmup,
        check=bool(options.check),
        json=options.json,
        csv=options.csv,
        gate=gate,
        seed=options.seed,
    )
