"""The critical path's benchmark, as every process runs it. bench/METRICS.md defines figures."""

from __future__ import annotations

import dataclasses
import time

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from ultraep_comm.bench.critical_path_calls import Expected, Found, PathCalls, Variant
from ultraep_comm.bench.critical_path_report import (
    PathRow,
    PathRun,
    format_path_header,
    format_path_results,
    make_path_document,
    make_path_records,
)
from ultraep_comm.bench.critical_path_settings import PathSettings
from ultraep_comm.bench.device_transfers import RanksHere, count_wrong_slots, mark_slots
from ultraep_comm.bench.gate import exit_code
from ultraep_comm.bench.gpu import Meter, own_gpu
from ultraep_comm.bench.outputs import write_outputs
from ultraep_comm.bench.payload import Payload
from ultraep_comm.bench.placement import gather_places
from ultraep_comm.bench.progress import show_progress
from ultraep_comm.bench.routed_ids import draw_ids
from ultraep_comm.bench.skew import rank_imbalance
from ultraep_comm.schedule import transfer_bound

TILE_BYTES = 32 << 10


def run(settings: PathSettings) -> int:
    """Measure; rank 0 prints. Return the exit status, 1: a wrong plan, id or byte, 3: the gate.

    Raises:
        UltraEPError: there is no device, a group could not be made, or a call failed.
    """
    return run_on(own_gpu(), settings)


def run_on(meter: Meter, settings: PathSettings) -> int:
    """Measure on a device: see :func:`run`."""
    speaks = settings.loopback or dist.get_rank() == 0
    ranks = RanksHere(
        meter,
        np.empty((settings.num_ranks, settings.num_experts), np.int32),
        fabric=settings.fabric,
        slots=settings.slots,
        segments=settings.segments,
        tile_bytes=settings.tile_bytes or TILE_BYTES,
        num_sms=meter.num_sms(settings.num_sms, settings.num_ranks if settings.loopback else 1),
    )
    device = meter.describe()
    places = gather_places(ranks.groups[0], device=device, loopback=settings.loopback)
    if speaks:
        print(format_path_header(settings, device, places), flush=True)
    found = Measurement(meter, settings, ranks, speaks).run()
    found = dataclasses.replace(found, device=device)
    ranks.close()
    if speaks:
        print(format_path_results(settings, found), flush=True)
        document = make_path_document(settings, found, places)
        write_outputs(document, json_path=settings.json, csv_path=settings.csv)
    records = make_path_records(settings, found)
    return exit_code(settings.gate, records, int(found.wrong), speaks=speaks)


class Measurement:
    """Iterations over all variants, interleaved."""

    def __init__(
        self, meter: Meter, settings: PathSettings, ranks: RanksHere, speaks: bool
    ) -> None:
        """Make room for the figures."""
        self._meter, self._settings, self._ranks, self._speaks = meter, settings, ranks, speaks
        self._payload = Payload(settings.seed, settings.segments)
        self._calls = PathCalls(ranks, settings)
        self._took = 0.0  # by the host, in the last run
        self._found = Found()
        self._counts = (0, 0)
        self._epoch = 0

    def run(self) -> PathRun:
        """Measure. Collective."""
        s = self._settings
        self._expect(0)
        variants = self._calls.variants()
        times, host = np.zeros((2, len(variants), s.iters))
        wrong = np.zeros((2, len(variants)), np.int64)  # bytes, integers
        counts: list[set[tuple[int, int]]] = [set() for _ in variants]
        loads = np.zeros((4, s.iters))  # imbalance before and after, replicas, transfer bound
        shuffle = np.random.default_rng(s.seed)
        for turn in range(s.warmup + s.iters):
            i = turn - s.warmup
            if self._speaks:
                show_progress(turn, s.warmup + s.iters, "iterations")
            expected = self._expect(turn)
            for v in shuffle.permutation(len(variants)).tolist():
                took = self._time(variants[v], expected)
                wrong[:, v] += self._count_wrong(variants[v], expected, i)
                counts[v].add(variants[v].counts or self._counts)
                if i >= 0:
                    times[v, i], host[v, i] = took, self._took
            if i >= 0:
                loads[:, i] = _describe(expected)
        if self._speaks:
            show_progress(1, 1, "")
        own = times.mean(axis=1)
        rank_times = own[:, None] if s.loopback else _gather(own)
        if not s.loopback:
            for figures in (times, host):
                dist.all_reduce(torch.from_numpy(figures), op=dist.ReduceOp.MAX)
            dist.all_reduce(torch.from_numpy(wrong))
        rows = [
            PathRow(
                name=variant.name,
                times_us=times[v],
                rank_times_us=rank_times[v],
                host_us=host[v] if variant.is_async else None,
                kernels=max(counts[v])[0],
                copies=max(counts[v])[1],
                wrong_bytes=int(wrong[0, v]),
                wrong_values=int(wrong[1, v]),
            )
            for v, variant in enumerate(variants)
        ]
        return PathRun(
            rows=rows,
            before=loads[0],
            after=loads[1],
            replicas=loads[2],
            transfer=loads[3],
            copy_bytes=self._meter.big_bytes if s.loopback else 0,
        )

    def _expect(self, turn: int) -> Expected:
        """Draw fresh ids, and put them on the device."""
        expected = Expected.of(draw_ids(self._settings, turn), self._ranks.groups)
        self._calls.prepare(expected)
        self._meter.settle()
        return expected

    def _time(self, variant: Variant, expected: Expected) -> float:
        """Run a variant once, on bytes of its own; return the device's microseconds."""
        self._epoch += 1
        self._ranks.fill(expected.plan, self._payload, self._epoch)
        mark_slots(self._ranks.groups)
        ranks_here = len(self._ranks.groups)

        def run() -> None:
            before = self._calls.launch_counts()
            start = time.perf_counter_ns()
            self._found = variant.run()
            self._took = (time.perf_counter_ns() - start) / 1e3
            self._took /= 1 if variant.is_graph else ranks_here
            kernels, copies = np.subtract(self._calls.launch_counts(), before).tolist()
            self._counts = (kernels, copies)

        self._meter.settle()
        self._barrier()
        took = self._meter.time_us(run, 1, ranks_here, line_up=self._calls.line_up)
        self._meter.settle()
        self._barrier()  # nobody fills what another one still copies from
        return took

    def _count_wrong(self, variant: Variant, expected: Expected, i: int) -> tuple[int, int]:
        """Return wrong bytes and wrong integers."""
        if variant.copy is not None:
            return variant.copy.count_wrong(self._payload, self._epoch), 0
        wrong_bytes = 0
        if self._found.fills_slots and (self._settings.check or i == self._settings.iters - 1):
            wrong_bytes = count_wrong_slots(
                self._ranks.groups, expected.plan, self._payload, self._epoch
            )
        return wrong_bytes, self._found.count_wrong(expected)

    def _barrier(self) -> None:
        if not self._settings.loopback:
            dist.barrier()


def _gather(own: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return what all ranks have of each variant, ``[variants, G]``. Collective."""
    gathered = [torch.empty(len(own), dtype=torch.float64) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, torch.from_numpy(own))
    found: NDArray[np.float64] = torch.stack(gathered, dim=1).numpy()
    return found


def _describe(expected: Expected) -> NDArray[np.float64]:
    plan, load = expected.plan, expected.load.numpy().sum(axis=0, dtype=np.int64)
    bound = transfer_bound(plan.slot_expert, home=plan.home)
    before = rank_imbalance(load, plan.num_ranks)
    return np.array([before, plan.imbalance, plan.num_replicas, bound], np.float64)
