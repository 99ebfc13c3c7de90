"""Train a small language model with MoE layers, with and without replicated experts.

    python examples/moe/train.py                                # four processes on this machine
    torchrun --nproc-per-node 4 examples/moe/train.py           # the same

It compares both step by step from the same parameters, trains both independently, counts the rows
that each rank computes, and prints a table. Exit status: 1 if a claim of the table does not hold,
2 for errors.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.distributed as dist
from batches import Batches
from claims import Results
from model import Model, Place, Shape
from picture import NO_MATPLOTLIB, can_draw, draw_loads
from placement import AtHome, Replicated, replicate_layers
from screen import HAS_RICH, NO_RICH, phase, print_table
from torch.multiprocessing.spawn import ProcessExitedException, start_processes
from training import Trainer, compare, train

import ultraep_comm as uec
from ultraep_comm.bench.machine import find_commit

CLAIM_FAILED, ERROR = 1, 2


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; bad values end the program with status 2."""
    parser = argparse.ArgumentParser(
        description="Train a small MoE language model with and without replicated experts.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    number = partial(parser.add_argument, type=int)
    number("--ranks", default=4, help="processes; torchrun's if it started this")
    number("--steps", default=200, help="of each free run")
    number("--compare-steps", default=50, help="steps computed both ways")
    number("--seed", default=0, help="of parameters and batches; one run uses the next seed")
    number("--tokens", default=512, help="per rank and step")
    number("--context", default=64, help="tokens that see each other")
    number("--layers", default=2, help="pairs of attention and MoE")
    number("--experts", default=16, help="per layer")
    number("--slots", default=2, help="per rank")
    number("--top-k", default=2, help="experts per token")
    number("--hidden", default=96, help="width of the model, a multiple of 4")
    number("--inner", default=192, help="width of an expert")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--quick", action="store_true", help="20 steps, 5 of them compared")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results there")
    parser.add_argument("--picture", type=Path, metavar="PATH", help="draw the ranks' loads there")
    if parser.parse_args(arguments).quick:
        parser.set_defaults(steps=20, compare_steps=5)
    options = parser.parse_args(arguments)
    if under_torchrun():
        options.ranks = int(os.environ["WORLD_SIZE"])
    for name, least in (("slots", 0), ("seed", 0)):
        if getattr(options, name) < least:
            parser.error(f"--{name} {getattr(options, name)}: expected at least {least}")
    for name, value in vars(options).items():
        if type(value) is int and name not in ("slots", "seed") and value < 1:
            parser.error(f"--{name.replace('_', '-')} {value}: expected at least 1")
    if options.top_k < 2:  # a single probability is always 1, without gradient
        parser.error(f"--top-k {options.top_k}: expected at least 2, or the router does not learn")
    if options.tokens % options.context:
        parser.error(f"--tokens {options.tokens}: expected a multiple of --context")
    if options.hidden % Shape.heads:
        parser.error(f"--hidden {options.hidden}: expected a multiple of {Shape.heads}")
    if not max(options.ranks, options.top_k) <= options.experts:
        parser.error(f"--experts {options.experts}: expected at least --ranks and --top-k")
    if options.picture and not can_draw():
        parser.error(NO_MATPLOTLIB)
    return options


def run_experiments(rank: int, options: argparse.Namespace) -> int:
    """Run all experiments on one rank; return the exit status, which is 0 except on rank 0."""
    started = time.monotonic()
    torch.set_num_threads(1)
    shape = Shape(
        num_experts=options.experts,
        topk=options.top_k,
        num_layers=options.layers,
        hidden=options.hidden,
        inner=options.inner,
        context=options.context,
    )
    first, second = options.seed, options.seed + 1
    with uec.new_group(
        num_experts=options.experts,
        slots_per_rank=options.slots,
        expert=shape.expert(),
        grads=torch.float32,
        banks=options.layers,
        engine="host",
    ) as group:
        local_experts = group.topology.local_experts(rank).tolist()
        plain: Place = partial(AtHome, group=group)
        replicated: Place = partial(Replicated, layers=replicate_layers(group))

        def trainer(seed: int) -> Trainer:
            batches = Batches(
                rank=rank,
                num_ranks=options.ranks,
                batch=options.tokens // options.context,
                context=options.context,
                seed=seed,
            )
            model = Model(shape, local_experts, seed)
            return Trainer(model, batches, group, options.learning_rate)

        steps, shown = options.steps, rank == 0
        with phase("both ways, step by step", options.compare_steps, shown=shown) as show:
            comparison = compare(trainer(first), plain, replicated, options.compare_steps, show)
        runs = []
        for title, place, seed in (
            ("plain", plain, first),
            ("plain, another seed", plain, second),
            ("with replicas", replicated, first),
        ):
            with phase(title, steps, shown=shown) as show:
                runs.append(train(trainer(seed), place, steps, show))
    if rank != 0:
        return 0
    results = Results(comparison=comparison, plain=runs[0], other_seed=runs[1], replicated=runs[2])
    return report(results, options, time.monotonic() - started)


def report(results: Results, options: argparse.Namespace, seconds: float) -> int:
    """Print the closing table and write the requested files; return the exit status."""
    claims = results.claims()
    title = (
        f"{options.ranks} ranks, {options.layers} layers of {options.experts} experts, top"
        f" {options.top_k}, {options.slots} slots, {options.tokens} tokens per rank;"
        f" {options.compare_steps} steps compared, {options.steps} trained, {seconds:.0f} s"
    )
    print_table(title, claims)
    if options.json:
        written = {"commit": find_commit(), "seconds": seconds, "ranks": options.ranks}
        options.json.write_text(json.dumps(written | results.to_json()))
    if options.picture:
        draw_loads(results.replicated, options.picture)
    return 0 if all(claim.holds for claim in claims) else CLAIM_FAILED


def run_rank(rank: int, store: str, options: argparse.Namespace) -> None:
    """Run one rank, in a process that this program has started."""
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=options.ranks
    )
    status = run_experiments(rank, options)
    dist.barrier()  # a process that exits with an error terminates the others
    dist.destroy_process_group()
    sys.exit(status)


def under_torchrun() -> bool:
    """Return whether torchrun, or a similar launcher, has started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; return its exit status."""
    options = parse(arguments)
    if not HAS_RICH and os.environ.get("RANK", "0") == "0":
        print(NO_RICH, file=sys.stderr)
    try:
        if under_torchrun():
            dist.init_process_group("gloo")
            status = run_experiments(dist.get_rank(), options)
            dist.barrier()
            dist.destroy_process_group()
            return status
        with tempfile.TemporaryDirectory() as folder:
            store = str(Path(folder) / "store")
            # Ranks are forked from one process that has imported everything, including what
            # torch's optimizers import on first use.
            get_context("forkserver").set_forkserver_preload(
                ["torch", "torch._dynamo", "ultraep_comm"]
            )
            start_processes(
                run_rank, (store, options), nprocs=options.ranks, start_method="forkserver"
            )
    except ProcessExitedException as error:
        if error.exit_code == CLAIM_FAILED:
            return CLAIM_FAILED
        print(error, file=sys.stderr)
        return ERROR
    except Exception:
        traceback.print_exc()
        return ERROR
    return 0


if __name__ == "__main__":
    sys.exit(main())
