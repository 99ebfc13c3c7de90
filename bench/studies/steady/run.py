"""The figures of ``steady``. bench/METRICS.md defines them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from studies.steady import SteadySettings
from ultraep_comm.bench.payload import Payload
from ultraep_comm.bench.report import Record, Report
from ultraep_comm.bench.table import Column
from ultraep_comm.calls.plan import plan_replicas
from ultraep_comm.calls.prefetch import prefetch_experts
from ultraep_comm.calls.replicate import replicate_experts
from ultraep_comm.group.group import Group
from ultraep_comm.plan.bounds import find_transfer_bound
from ultraep_comm.plan.forecast import LoadForecast
from ultraep_comm.plan.plan import Plan
from ultraep_comm.testing import new_loopback_groups
from ultraep_comm.weights.segments import Segment

WAYS = ("empty", "residents", "prefetch")
_WRONG = 1  # exit status
_NAME = "w"


@dataclass
class Seen:
    """What happened on one way, by step and layer; the first step is not counted.

    Attributes:
        moves: slots written between router and dispatch.
        bound: T* of these moves, sent by homes, in experts.
        prefetched: slots written before that.
        imbalance: of the exact plans.
        plan_us, transfer_us: of the exact plan and its transfer.
        missed: share of the tokens that the forecast had elsewhere.
        wrong: bytes that were not as they should be.
    """

    moves: list[list[int]] = field(default_factory=list)
    bound: list[float] = field(default_factory=list)
    prefetched: list[int] = field(default_factory=list)
    imbalance: list[float] = field(default_factory=list)
    plan_us: list[float] = field(default_factory=list)
    transfer_us: list[float] = field(default_factory=list)
    missed: list[float] = field(default_factory=list)
    wrong: int = 0


class Way:
    """Groups of one way, with the weights of all layers."""

    def __init__(self, name: str, slots: int, settings: SteadySettings, payload: Payload) -> None:
        """Create the groups; weights are the payload of the epoch of their layer."""
        self.name, self.seen = name, Seen()
        self._settings, self._payload = settings, payload
        self.groups = new_loopback_groups(
            settings.num_ranks,
            num_experts=settings.experts,
            slots_per_rank=slots,
            expert={_NAME: Segment((settings.expert_bytes,), torch.uint8)},
            banks=settings.layers if name == "residents" else 1,
        )
        self._weights = [
            [self._make(group, layer) for group in self.groups] for layer in range(settings.layers)
        ]
        self._forecasts = [LoadForecast(settings.forecast) for _ in range(settings.layers)]

    def _make(self, group: Group, layer: int) -> dict[str, torch.Tensor]:
        weights = torch.empty(
            (group.num_local_experts, self._settings.expert_bytes), dtype=torch.uint8
        )
        for row, expert in zip(
            weights.numpy(), group.topology.local_experts(group.rank), strict=True
        ):
            self._payload.fill(row, epoch=layer, expert=int(expert), segment=_NAME)
        return {_NAME: weights}

    def step(self, layer: int, load: torch.Tensor, counts: bool) -> None:
        """Plan and transfer one layer of one step; with ``counts`` its figures are kept."""
        groups, seen = self.groups, self.seen
        bank = layer % len(groups[0].banks)
        prefetched, missed = 0, float("nan")
        forecast = self._forecasts[layer]
        if self.name == "prefetch":
            for group in groups:  # what the bank holds is another layer's
                group.banks[0].invalidate()
            before = self._stored()
            works = [
                prefetch_experts(
                    self._weights[layer][g.rank],
                    forecast,
                    bank=0,
                    group=g,
                    target=self._settings.target,
                    async_op=True,
                )
                for g in groups
            ]
            for work in works:
                if work is not None:
                    work.synchronize()
            prefetched = self._stored() - before
            expected = forecast.predict()
            if expected is not None:
                total = load.sum(dim=0, dtype=torch.int64)
                off = (expected - total).abs().sum() / (2 * total.sum())
                missed = float(off)
            forecast.update(load)
        start = time.perf_counter()
        reuse, target = self.name != "empty", self._settings.target
        plan = plan_replicas(load, group=groups[0], bank=bank, reuse=reuse, target=target)
        planned = time.perf_counter()
        before = self._stored()
        begun = time.perf_counter()
        works = [
            replicate_experts(self._weights[layer][g.rank], plan, group=g, async_op=True)
            for g in groups
        ]
        for work in works:
            assert work is not None
            work.synchronize()
        ended = time.perf_counter()
        moves = self._stored() - before
        seen.wrong += self._count_wrong(plan, layer, bank)
        if moves != plan.num_slots_to_fill:
            seen.wrong += 1
        if not counts:
            return
        if layer == 0:
            seen.moves.append([])
        seen.moves[-1].append(moves)
        seen.prefetched.append(prefetched)
        seen.bound.append(_bound(plan))
        seen.imbalance.append(plan.imbalance)
        seen.plan_us.append((planned - start) * 1e6)
        seen.transfer_us.append((ended - begun) * 1e6)
        seen.missed.append(missed)

    def _stored(self) -> int:
        stored = sum(group.health().bytes_stored or 0 for group in self.groups)
        return stored // self._settings.expert_bytes

    def _count_wrong(self, plan: Plan, layer: int, bank: int) -> int:
        """Return how many bytes of filled slots are not those of their experts."""
        wrong = 0
        for group in self.groups:
            rows = group.banks[bank].slots[_NAME].numpy()
            for row, expert in zip(rows, plan.slot_expert[group.rank].tolist(), strict=True):
                if expert >= 0:
                    wrong += self._payload.count_wrong(
                        row, epoch=layer, expert=expert, segment=_NAME
                    )
        return wrong

    def record(self, slots: int) -> Record:
        """Return the record of all counted steps."""
        settings, seen = self._settings, self.seen
        moves = np.array(seen.moves)
        empty_steps = float((moves == 0).mean())
        return {
            "op": "steady",
            "way": self.name,
            "ranks": settings.num_ranks,
            "experts": settings.experts,
            "slots": slots,
            "banks": len(self.groups[0].banks),
            "slot_bytes": self.groups[0].memory().slots,
            "moves": float(moves.mean()),
            "moved_bytes": float(moves.mean()) * settings.expert_bytes,
            "prefetched": float(np.mean(seen.prefetched)),
            "transfer_bound": float(np.mean(seen.bound)),
            "nothing_moves": empty_steps,
            "imbalance": {"mean": float(np.mean(seen.imbalance)), "worst": max(seen.imbalance)},
            "plan_us": float(np.median(seen.plan_us)),
            "transfer_us": float(np.median(seen.transfer_us)),
            "forecast_missed": float(np.nanmean(seen.missed)) if self.name == "prefetch" else None,
            "wrong": int(seen.wrong),
            "moves_by_step": moves.tolist(),
        }

    def close(self) -> None:
        """Close the groups."""
        for group in self.groups:
            group.close()


def _bound(plan: Plan) -> float:
    moved = plan.slot_expert
    if plan.slots_to_fill is not None:
        moved = torch.where(plan.slots_to_fill, moved, -1)
    return float(find_transfer_bound(moved.numpy(), plan.home.numpy())[0])


def make_loads(settings: SteadySettings) -> Iterator[list[torch.Tensor]]:
    """Yield a step's loads int32 ``[G, E]``, one for each layer.

    Without a trace, a layer's logits are normal and drift: rho z + sqrt(1 - rho^2) n; its tokens
    are drawn from their softmax.
    """
    if settings.trace is not None:
        for step in range(settings.steps):
            yield [
                torch.from_numpy(
                    settings.trace.load(
                        num_ranks=settings.num_ranks,
                        step=step,
                        layer=layer,
                        tokens_per_rank=settings.tokens,
                    )
                )
                for layer in range(settings.layers)
            ]
        return
    rng = np.random.default_rng(settings.seed)
    logits = rng.standard_normal((settings.layers, settings.experts))
    for _ in range(settings.steps):
        loads = []
        for row in logits:
            share = np.exp(row - row.max())
            drawn = rng.multinomial(
                settings.tokens * settings.topk, share / share.sum(), settings.num_ranks
            )
            loads.append(torch.from_numpy(drawn.astype(np.int32)))
        yield loads
        noise = rng.standard_normal(logits.shape)
        logits = settings.rho * logits + np.sqrt(1 - settings.rho**2) * noise


def run(settings: SteadySettings, report: Report) -> int:
    """Print the figures; return the exit status."""
    source = settings.trace.place if settings.trace is not None else f"drift, rho {settings.rho:g}"
    report.header(
        "steady",
        [
            f"ranks {settings.num_ranks}, experts {settings.experts} of {settings.expert_bytes}"
            f" bytes, {settings.layers} layers, {settings.steps} steps, the first not counted;"
            f" target {settings.target:g}; {source}",
            "empty: slots are wiped; residents: a bank for each layer; prefetch: one bank, filled"
            f" for the forecast ({settings.forecast}) before the load is known",
            "ways take turns, all ranks in one process; every byte is checked after every call",
        ],
    )
    payload = Payload(settings.seed, {_NAME: settings.expert_bytes})
    records: list[dict[str, Any]] = []
    total = len(settings.slots) * settings.steps
    for s, slots in enumerate(settings.slots):
        ways = [Way(name, slots, settings, payload) for name in WAYS]
        for step, loads in enumerate(make_loads(settings)):
            report.progress(s * settings.steps + step, total, f"slots {slots}, step {step}")
            for layer, load in enumerate(loads):
                turn = (step + layer) % len(ways)
                for way in ways[turn:] + ways[:turn]:
                    way.step(layer, load, counts=step > 0)
        records += [way.record(slots) for way in ways]
        for way in ways:
            way.close()
    report.progress(total, total)
    report.columns(_COLUMNS)
    report.add(records, gated=False)
    status = report.finish()
    return _WRONG if any(record["wrong"] for record in records) else status


_COLUMNS = (
    Column("slots", "", "slots"),
    Column("way", "", "way"),
    Column("banks", "", "banks"),
    Column("slots", "B/rank", "slot_bytes"),
    Column("moves", "/layer", "moves", ".2f"),
    Column("fetched", "before", "prefetched", ".2f"),
    Column("T*", "experts", "transfer_bound", ".2f"),
    Column("nothing", "moves", "nothing_moves", ".0%"),
    Column("imbal", "mean", "imbalance.mean", ".4f"),
    Column("imbal", "worst", "imbalance.worst", ".4f"),
    Column("plan", "us", "plan_us", ".1f"),
    Column("transfer", "us", "transfer_us", ".1f"),
    Column("forecast", "missed", "forecast_missed", ".1%"),
    Column("wrong", "", "wrong"),
)
