"""A soak: transfers and reductions by random plans, with changing payload, every byte checked."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import numpy as np
import torch
from actor import Actor
from ranks import (
    clear_slots,
    expert_bytes,
    fill_weights,
    random_plan,
    raw,
    slot_memory,
    wrong_bytes,
)
from scene import ALL, Expect, Scene, everybody, start

import ultraep_comm as uec
from ultraep_comm import Segment

E, S = 10, 3  # uneven: home ranks have 3, 3, 2 and 2 experts
# A tensor much longer than a tile, one of odd size, and one of a few bytes.
EXPERT = {
    "w": Segment((96, 130), torch.bfloat16),
    "odd": Segment((10_007,), torch.uint8),
    "scale": Segment((3,), torch.uint8),
}
GRAD = {"w": ((70, 33), torch.float32), "b": ((5,), torch.float32)}
MODES = ("auto", "push", "pull", "direct")


class Soak:
    """One rank's transfers. All ranks draw the same plans, modes and loads from the seed."""

    def __init__(self, actor: Actor, seed: int) -> None:
        self.rank, self.seed, self.size = actor.rank, seed, actor.size
        options: dict[str, Any] = {"num_experts": E, "timeout": 60.0, "tile_bytes": 4096}
        self.group = uec.new_group(
            actor.world, slots_per_rank=S, expert=EXPERT, num_sms=2, **options
        )
        self.reducing = uec.new_group(
            actor.world, slots_per_rank=S, expert=GRAD, grads=torch.float32, num_sms=1, **options
        )
        self.local_experts = self.group.topology.local_experts(self.rank).tolist()
        self.weights = self.group.empty_weights()
        self.checked = 0

    def close(self) -> None:
        self.group.close()
        self.reducing.close()

    # ---- transfers ------------------------------------------------------------------------

    def transfer(self, epoch: int) -> int:
        """Refill the main weights, make a call, and return the number of wrong bytes."""
        draw = np.random.default_rng((self.seed, epoch))
        fill = float(draw.choice([0.2, 0.7, 1.0]))
        plan = random_plan(self.seed + epoch, self.size, E, S, fill=fill)
        names = [n for n in EXPERT if draw.random() < 0.7] or None
        mode, apart = str(draw.choice(MODES)), bool(draw.random() < 0.5)
        fill_weights(self.group, self.weights, epoch)
        clear_slots(self.group)
        work = uec.replicate_experts(
            self.weights, plan, group=self.group, async_op=apart, mode=mode, segments=names
        )
        if work is not None:
            work.wait()
        self.checked += slot_memory(self.group).numel()
        wrong = wrong_bytes(self.group, plan, epoch, names=names)
        for index, (name, segment) in enumerate(EXPERT.items()):
            for own, expert in zip(self.weights[name], self.local_experts, strict=True):
                wanted = expert_bytes(epoch, expert, index, segment)
                wrong += int((raw(own, segment) != wanted).sum())
        return wrong

    # ---- reductions and loads -------------------------------------------------------------

    def _numbers(self, epoch: int, what: int, rank: int, name: str, count: int) -> torch.Tensor:
        """Fill gradients with integers, so that their sum does not depend on the order."""
        shape, _ = GRAD[name]
        draw = np.random.default_rng((self.seed, epoch, what, rank, len(name)))
        return torch.from_numpy(draw.integers(-9, 10, (count, *shape)).astype(np.float32))

    def reduce(self, epoch: int) -> int:
        """Reduce gradients, and return the number of wrong values."""
        group = self.reducing
        plan = random_plan(self.seed - epoch, self.size, E, S)
        mode = str(np.random.default_rng((self.seed, epoch, 7)).choice(["auto", "pull", "direct"]))
        grads = {n: self._numbers(epoch, 0, self.rank, n, len(self.local_experts)) for n in GRAD}
        for name, slots in group.slot_grads.items():
            slots.copy_(self._numbers(epoch, 1, self.rank, name, S))
        uec.reduce_expert_grads(grads, plan, group=group, mode=mode)
        wrong = 0
        for name in GRAD:
            main_grads = self._numbers(epoch, 0, self.rank, name, len(self.local_experts))
            for rank, row in enumerate(plan.slot_expert.tolist()):
                theirs = self._numbers(epoch, 1, rank, name, S)
                for slot, expert in enumerate(row):
                    if expert in self.local_experts:
                        main_grads[self.local_experts.index(expert)] += theirs[slot]
            wrong += int((grads[name] != main_grads).sum())
            left = self._numbers(epoch, 1, self.rank, name, S)
            for slot, expert in enumerate(plan.slot_expert[self.rank].tolist()):
                if expert >= 0:
                    left[slot] = 0.0
            wrong += int((group.slot_grads[name] != left).sum())
        return wrong

    def load(self, epoch: int) -> int:
        """Exchange loads, and return the number of wrong entries."""

        def routed(rank: int) -> torch.Tensor:
            draw = np.random.default_rng((self.seed, epoch, 3, rank))
            return torch.from_numpy(draw.integers(-1, E, (1 + epoch % 17, 2)))

        table = uec.gather_load(routed(self.rank), group=self.group)
        expected = torch.stack(
            [torch.bincount(routed(r).flatten() + 1, minlength=E + 1)[1:] for r in range(self.size)]
        )
        return int((table != expected).sum())


def soak(actor: Actor, *, transfers: int, seed: int) -> None:
    """Make the transfers; a reduction follows every fifth, an exchange of loads every seventh."""
    actor.together()
    own = Soak(actor, seed)

    def run() -> None:
        for epoch in range(1, transfers + 1):
            wrong = own.transfer(epoch)
            wrong += own.reduce(epoch) if epoch % 5 == 0 else 0
            wrong += own.load(epoch) if epoch % 7 == 0 else 0
            if wrong:
                raise AssertionError(f"seed {seed}, transfer {epoch}: {wrong} bytes are wrong")

    began = time.monotonic()
    actor.attempt("soak", run)
    if actor.report.events[-1].kind != "ok":
        own.group.abort()
        own.reducing.abort()
    own.close()
    actor.report.figures = {
        "transfers": transfers,
        "bytes_checked": own.checked,
        "seconds": time.monotonic() - began,
    }


def soak_scene(transfers: int, seed: int) -> Scene:
    """Return the soak as a scene without a fault, with all the usual checks."""
    seconds = 60.0 + 0.2 * transfers
    return Scene(
        name=f"{transfers} transfers by random plans",
        item="soak",
        part=partial(soak, transfers=transfers, seed=seed),
        cues=(start(),),
        expect={"soak": everybody(ALL, Expect(within=seconds))},
        seconds=seconds,
        limit=60.0,
    )
