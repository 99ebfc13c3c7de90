"""Every link by itself, as every rank runs it. bench/METRICS.md says what the figures mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from ultraep_comm.bench.gate import exit_code
from ultraep_comm.bench.gpu import Meter, own_gpu
from ultraep_comm.bench.link_matrix import LinkTimes
from ultraep_comm.bench.link_ranks import (
    DeviceLinkRanks,
    HostLinkRanks,
    LinkRanks,
    count_wrong,
    link_plan,
)
from ultraep_comm.bench.link_report import (
    format_links_header,
    make_link_records,
    make_links_document,
    print_links,
)
from ultraep_comm.bench.link_rounds import Link, make_rounds
from ultraep_comm.bench.links_settings import SEGMENT, LinksSettings
from ultraep_comm.bench.outputs import write_outputs
from ultraep_comm.bench.payload import Payload
from ultraep_comm.bench.placement import gather_places
from ultraep_comm.bench.progress import show_progress
from ultraep_comm.errors import InvalidArgumentError


def run(settings: LinksSettings) -> int:
    """Measure every link; rank 0 prints. Collective, but in loopback.

    Returns:
        The exit status, 1: wrong bytes, 3: a link misses the gate.

    Raises:
        UltraEPError: the group could not be made, or a transfer failed.
    """
    payload = Payload(settings.seed, {SEGMENT: settings.link_bytes})
    if settings.engine == "host":
        torch.set_num_threads(1)
        return run_on(HostLinkRanks(settings, payload), settings, payload)
    return run_on_device(own_gpu(), settings, payload)


def run_on_device(meter: Meter, settings: LinksSettings, payload: Payload) -> int:
    """Measure on a device: see :func:`run`."""
    ranks = DeviceLinkRanks(meter, settings, payload)
    return run_on(ranks, settings, payload, device=meter.describe())


def run_on(
    ranks: LinkRanks,
    settings: LinksSettings,
    payload: Payload,
    *,
    device: Mapping[str, Any] | None = None,
) -> int:
    """Measure with the ranks of this process: see :func:`run`."""
    first = ranks.groups[0]
    speaks = ranks.loopback or first.rank == 0
    domains = first.topology.domain.tolist()
    rounds = make_rounds(domains, one_at_a_time=settings.one_at_a_time)
    if not rounds:
        raise InvalidArgumentError(f"the ranks' domains are {domains}; expected two ranks of one")
    places = gather_places(first, device=device, loopback=ranks.loopback)
    header = format_links_header(settings, places, len(rounds))
    if speaks:
        print(header, flush=True)
    found = measure_links(settings, ranks, payload, rounds, speaks=speaks)
    ranks.close()
    records = make_link_records(settings, found, places)
    if speaks:
        document = make_links_document(
            settings, found, records, places, device=device, header=header
        )
        print_links(document)
        write_outputs(document, json_path=settings.json, csv_path=settings.csv)
    return exit_code(settings.gate, records, int(found.wrong_bytes.sum()), speaks=speaks)


def measure_links(
    settings: LinksSettings,
    ranks: LinkRanks,
    payload: Payload,
    rounds: Sequence[Sequence[Link]],
    *,
    speaks: bool,
) -> LinkTimes:
    """Time every round, in every iteration after all the others. Collective, but in loopback."""
    plans = [link_plan(settings.num_ranks, links) for links in rounds]
    spans = np.zeros((2, len(rounds), settings.iters))
    wrong = np.zeros((len(rounds), settings.num_ranks), np.int64)
    shuffle = np.random.default_rng(settings.seed)
    total, epoch = (settings.warmup + settings.iters) * len(rounds), 0
    for i in range(-settings.warmup, settings.iters):
        for r in shuffle.permutation(len(rounds)):
            if speaks:
                show_progress(epoch, total, f"rounds of {len(rounds)} in an iteration")
            epoch += 1
            ranks.fill(plans[r], epoch)
            span = ranks.time_round(plans[r])
            if settings.check or i == settings.iters - 1:
                wrong[r] += count_wrong(ranks.groups, plans[r], payload, epoch)
            if i >= 0:
                spans[:, r, i] = span
    if speaks:
        show_progress(1, 1, "")
    if not ranks.loopback:
        dist.all_reduce(torch.from_numpy(wrong))
    everybody = _gather(spans, ranks, settings.num_ranks)
    return LinkTimes.make(rounds, everybody, wrong, one_clock=ranks.one_clock)


def _gather(spans: NDArray[np.float64], ranks: LinkRanks, num_ranks: int) -> NDArray[np.float64]:
    """Return all ranks' starts and ends ``[G, 2, rounds, iters]``."""
    if ranks.loopback:
        return np.broadcast_to(spans, (num_ranks, *spans.shape))
    gathered = [torch.empty(spans.shape, dtype=torch.float64) for _ in range(num_ranks)]
    dist.all_gather(gathered, torch.from_numpy(spans))
    found: NDArray[np.float64] = torch.stack(gathered).numpy()
    return found
