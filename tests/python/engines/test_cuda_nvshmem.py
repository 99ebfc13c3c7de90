"""Groups over a stand-in for NVSHMEM: what ranks agree on, and what they refuse."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from fake_device import EXPERT, PLAN, E, FakeDevice, FakeNvshmem, S, new_group
from ranks import RankPool, make_weights

import ultraep_comm as uec
from ultraep_comm import Segment, _core, errors
from ultraep_comm.driver import Links
from ultraep_comm.engines.cuda import make, reach
from ultraep_comm.engines.cuda.kernels import DEFAULT_NUM_SMS
from ultraep_comm.group import create
from ultraep_comm.group.group import session_of
from ultraep_comm.plan.topology import check_domains, find_domains


def test_domains_follow_from_load_store_access() -> None:
    assert find_domains([[1, 1, 0], [1, 1, 0], [0, 0, 1]]).tolist() == [0, 0, 1]
    assert find_domains([[1, 0, 1], [0, 1, 0], [1, 0, 1]]).tolist() == [0, 1, 0]
    assert find_domains(np.eye(3, dtype=int).tolist()).tolist() == [0, 1, 2]
    with pytest.raises(errors.UnsupportedError, match="by their load/store access: rank 1 has"):
        find_domains([[1, 1, 0], [1, 1, 1], [0, 1, 1]])
    with pytest.raises(errors.UnsupportedError, match="rank 0 has no load/store access to rank 1"):
        check_domains(np.array([0, 0], np.int32), [[1, 0], [1, 1]])
    check_domains(np.array([0, 1], np.int32), [[1, 0], [0, 1]])


def _nvshmem_groups(rank: int, process_group: Any) -> Any:
    device, runtime = FakeDevice(), FakeNvshmem()
    group = new_group(process_group, device, nvshmem=runtime)
    assert session_of(group).engine is not None  # plans and reroutes of its own device
    uids = runtime.uids
    other = new_group(process_group, device, nvshmem=runtime, engine="cuda")  # beside the first
    uec.replicate_experts(make_weights(group), PLAN, group=group)
    launches = device.launches()
    load = device.empty((2, E), torch.int32).zero_()
    planned = uec.plan_replicas(load, group=group)
    assert device.launches()[-1] == "ultraep_plan"
    assert device.is_on_device(planned.slot_expert)
    group.close()
    kept = len(runtime.freed)
    other.close()
    third = new_group(process_group, device, nvshmem=runtime, fabric="nvshmem")
    freed = len(runtime.freed)
    third.close()
    assert not runtime.registered  # no kernel of these groups calls NVSHMEM
    assert device.synchronized == 0  # other groups' kernels may be waiting for peers
    return {
        "uids": [uid == bytes(range(128)) for uid in uids],
        "launches": launches[-1],
        "domain": group.topology.domain.tolist(),
        "freed": (kept, freed),
        "made": len(runtime.made),
    }


def test_nvshmem_is_shared_by_all_groups_and_never_finalised(ranks: RankPool) -> None:
    for result in ranks.run(2, _nvshmem_groups):
        assert result["uids"] == [True]
        assert result["launches"] == "ultraep_replicate"
        assert result["domain"] == [0, 0]
        # Nothing is freed by close(); the next group frees what every rank has closed.
        assert result["freed"] == (0, 4)
        assert result["made"] == 2


def test_loads_over_the_process_group_name_who_left() -> None:
    class Broken:
        rank = 0

        def gather(self, counts: torch.Tensor) -> torch.Tensor:
            raise errors.BootstrapError("rank 0: rank 3 failed", failed_rank=3)

    with pytest.raises(errors.PeerGoneError, match="rank 3") as caught:
        make._exchange_counts(Broken(), torch.zeros(4))  # type: ignore[arg-type]
    assert caught.value.peer == 3


def _far_groups(rank: int, process_group: Any) -> Any:
    pairs = [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]]
    runtime = FakeNvshmem(pes=(3 - rank, 4), reaches=pairs[rank][::-1])
    device = FakeDevice()
    apart = new_group(process_group, device, nvshmem=runtime)
    crossing = uec.Plan.from_slots([[3, -1], [-1, -1], [0, -1], [-1, -1]], num_experts=E)
    with pytest.raises(errors.InvalidPlanError, match="another domain"):
        uec.replicate_experts(make_weights(apart), crossing, group=apart)
    apart.close()
    # Kernels reach no rank of the other domain: the process group exchanges loads.
    apart = new_group(process_group, device, nvshmem=runtime)
    ids = torch.tensor([[rank, 3]])
    here = device.empty(ids.shape, ids.dtype).copy_(ids)
    for given in (ids, here):
        load = uec.gather_load(given, group=apart)
        assert load.tolist() == [[int(e == r) + int(e == 3) for e in range(E)] for r in range(4)]
        assert device.is_on_device(load) == (given is here)
    assert uec.gather_and_plan(ids, group=apart).load is not None
    apart.close()
    with pytest.raises(errors.UnsupportedError, match="the gradients of replicas are loaded by"):
        new_group(
            process_group, device, nvshmem=runtime, allow_cross_domain=True, grads=torch.float32
        )
    apart = new_group(process_group, device, nvshmem=runtime, grads=torch.float32)
    inside = uec.Plan.from_slots([[-1, -1], [0, -1], [-1, -1], [-1, -1]], num_experts=E)
    main_grads = {
        n: torch.zeros(apart.num_local_experts, *s.shape[1:]) for n, s in apart.slot_grads.items()
    }
    uec.reduce_expert_grads(main_grads, inside, group=apart)
    assert device.launches()[-1] == "ultraep_reduce"
    apart.close()
    assert not runtime.registered
    group = new_group(process_group, device, nvshmem=runtime, allow_cross_domain=True)
    assert runtime.registered == [1]
    with pytest.raises(errors.UnsupportedError, match="push"):
        group.empty_weights()
    uec.replicate_experts(make_weights(group), crossing, group=group)
    launches = device.launches()
    group.close()
    with pytest.raises(errors.UnsupportedError, match="rank 0 has no load/store access to rank 2"):
        new_group(process_group, device, nvshmem=runtime, domains=[0, 0, 0, 0])
    return launches[-1], group.topology.domain.tolist(), runtime.uids


def test_plans_across_domains_use_puts(ranks: RankPool) -> None:
    for launch, domain, uids in ranks.run(4, _far_groups):
        assert launch == "ultraep_replicate_far"
        assert domain == [0, 0, 1, 1]
        assert uids == []  # other code had initialised it


LINKS = Links(pci="0000:1b:00.0", links=(True,) * 18)
FAN_OUT = uec.Plan.from_slots([[-1, -1], [0, -1], [0, -1], [0, -1]], num_experts=E)


def _mode_by_links(
    rank: int, process_group: Any, capability: tuple[int, int], links: Links | None
) -> str:
    """Rank 0 has these links, the others none that NVML knows of."""
    own = links if rank == 0 else replace(LINKS, links=())
    device = FakeDevice(compute_capability=capability, known_links=own)
    large = {"w": Segment((1_800_000,), torch.uint8)}
    with new_group(process_group, device, nvshmem=FakeNvshmem(), expert=large) as group:
        work = uec.replicate_experts(make_weights(group), FAN_OUT, group=group, async_op=True)
        assert work is not None
        work.wait()
        return work.mode


@pytest.mark.parametrize(
    ("capability", "links", "mode"),
    [
        ((10, 0), None, "direct"),  # NVML does not answer
        ((10, 0), replace(LINKS, links=(True, False) * 9), "push"),
        ((10, 0), replace(LINKS, links=()), "push"),
        ((9, 0), LINKS, "push"),
    ],
)
def test_auto_goes_by_the_links_of_rank_0(
    ranks: RankPool, capability: tuple[int, int], links: Links | None, mode: str
) -> None:
    """A home's three copies of 1.8 MB: a hop more is worth it where links are slow."""
    assert ranks.run(4, _mode_by_links, capability, links) == [mode] * 4


RACK = replace(LINKS, fabric_state="completed", clique="one rack")
OTHER = replace(RACK, clique="another rack")
SINGLE = replace(RACK, clique="")  # of one machine
WAITING = replace(LINKS, fabric_state="in progress")


@pytest.mark.parametrize(
    ("links", "warns"),
    [
        ([RACK] * 4, "ranks 0-3 are in one NVLink clique but in 2 domains. Repl"),
        ([RACK, OTHER] * 2, "ranks 0, 2 are in one NVLink clique but in 2 domains; r"),
        ([RACK] * 2 + [WAITING] * 2, "the GPU of ranks 2-3 is not registered"),
        ([RACK] * 2 + [OTHER] * 2, ""),
        ([SINGLE] * 4, ""),
        ([None] * 4, ""),
    ],
)
def test_a_rack_is_not_lost_in_silence(
    caplog: pytest.LogCaptureFixture, links: list[Links | None], warns: str
) -> None:
    reach._warn.cache_clear()
    for domain in ([0, 0, 1, 1], [0, 0, 1, 1], [0, 0, 0, 0]):
        reach.warn_of_split_cliques(list(map(reach.clique_number, links)), np.array(domain))
    assert len(caplog.messages) == bool(warns)
    for text in caplog.messages:
        assert warns in text
        assert "systemctl status nvidia-imex" in text


@pytest.mark.parametrize(
    ("versions", "warns"),
    [
        ([(3, 4)] * 4, ""),
        ([(3, 6)] * 4, "the library is 3.6, the kernels were built with 3.4. IBGDA"),
        ([(3, 4)] * 3 + [(3, 6)], "is 3.6, the .* 3.4; otherwise on ranks 0-2. IBGDA"),
    ],
)
def test_versions_of_nvshmem_that_are_unsafe_over_the_network(
    caplog: pytest.LogCaptureFixture, versions: list[tuple[int, int]], warns: str
) -> None:
    reach._warn.cache_clear()
    for _ in range(2):
        reach.warn_of_versions([(version, (3, 4)) for version in versions])
    assert len(caplog.messages) == bool(warns)
    assert all(re.search(warns, text) for text in caplog.messages)


def _on_trays(rank: int, process_group: Any, together: bool, options: Any) -> list[tuple[str, str]]:
    """Return level and text of what a rank logs on making the same group twice."""
    trays = [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]]
    runtime = FakeNvshmem(reaches=None if together else trays[rank], library_version=(3, 6))
    options = {"engine": "cuda", **options}  # "auto" says what it takes, too
    heard: list[logging.LogRecord] = []
    handler, logger = logging.Handler(), logging.getLogger("ultraep_comm")
    create._say_domains.cache_clear()
    reach._warn.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handler, "emit", heard.append)
        patch.setattr(logger, "handlers", [handler])
        patch.setattr(logger, "isEnabledFor", lambda _: True)
        for _ in range(2):
            new_group(
                process_group, FakeDevice(known_links=RACK), nvshmem=runtime, **options
            ).close()
    return [(record.levelname, record.getMessage()) for record in heard]


ONE = "4 ranks in 1 domain; domain 0: ranks 0-3"
TWO = "4 ranks in 2 domains; domain 0: ranks 0-1; domain 1: ranks 2-3"


@pytest.mark.parametrize(
    ("together", "options", "warns"),
    [
        (True, {}, []),
        (False, {}, ["in one NVLink clique"]),
        (False, {"domains": [0, 0, 1, 1]}, []),  # as asked for
        (False, {"allow_cross_domain": True}, ["in one NVLink clique", "the library is 3.6"]),
    ],
)
def test_one_rank_says_once_which_domains_there_are(
    ranks: RankPool, together: bool, options: Any, warns: list[str]
) -> None:
    first, *others = ranks.run(4, _on_trays, together, options)
    assert others == [[]] * 3
    *warnings, said = first
    assert said == ("INFO", ONE if together else TWO)
    for (level, text), expected in zip(warnings, warns, strict=True):
        assert level == "WARNING"
        assert expected in text


def _unlike_devices(rank: int, process_group: Any) -> list[int]:
    apart = [[1, 0], [0, 1]]
    device, runtime = FakeDevice(num_sms=132 if rank else 40), FakeNvshmem(reaches=apart[rank])
    asked, malloc = list[int](), runtime.malloc

    def asked_for(num_bytes: int) -> int:
        asked.append(num_bytes)
        return malloc(num_bytes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "malloc", asked_for)
        new_group(process_group, device, nvshmem=runtime, allow_cross_domain=True).close()
    return asked


def test_symmetric_memory_is_as_large_on_every_rank(ranks: RankPool) -> None:
    """A rank with fewer blocks than others allocates as much: NVSHMEM requires it."""
    one, other = ranks.run(2, _unlike_devices)
    assert one == other
    assert _core.cuda_staging_bytes(64, 32 << 10) in one


def _refuse(*_: Any) -> int:
    raise errors.DeviceError("the device is out of order")


def _nvshmem_errors(rank: int, process_group: Any) -> None:
    def refused(error: type[Exception], part: str, **runtime: Any) -> FakeNvshmem:
        fake = FakeNvshmem(**runtime)
        with pytest.raises(error, match=part):
            new_group(process_group, nvshmem=fake)
        return fake

    unsupported, bootstrap = errors.UnsupportedError, errors.BootstrapError
    refused(unsupported, r"PEs \[4, 5\] of 8", pes=(4 + rank, 8))
    mixed = {"pes": (0, 1)} if rank == 0 else {}
    refused(bootstrap, "initialised on rank 0 but not on rank 1", **mixed)
    if rank == 1:
        refused(errors.OutOfSharedMemoryError, "NVSHMEM_SYMMETRIC_SIZE", room=4096)
    else:
        refused(bootstrap, "rank 1 failed")

    broken = FakeNvshmem(init_error=ValueError("no transport") if rank == 0 else None)
    with pytest.raises(bootstrap, match="no transport"):
        new_group(process_group, nvshmem=broken)

    small = FakeDevice(max_shared_bytes=(200 if rank == 0 else 20) << 10)
    with pytest.raises(bootstrap if rank == 0 else unsupported, match="shared memory"):
        new_group(process_group, small, nvshmem=FakeNvshmem())
    # A refusal of one rank's device, at any step, keeps no other rank waiting.
    for step in ("handle", "pinned"):
        device = FakeDevice()
        if rank == 1:
            owner = device.kernels if step == "handle" else device
            setattr(owner, step, _refuse)
        with pytest.raises(errors.DeviceError if rank == 1 else bootstrap, match="the device is"):
            new_group(process_group, device, nvshmem=FakeNvshmem())


def _limits(rank: int, process_group: Any) -> None:
    """What a device cannot do is said before slots are allocated."""

    def refused(device: FakeDevice, part: str, **options: Any) -> FakeNvshmem:
        runtime = FakeNvshmem()
        kind = errors.InvalidArgumentError if rank == 1 else errors.BootstrapError
        with pytest.raises(kind, match=part):
            new_group(process_group, device, nvshmem=runtime, **options)
        return runtime

    small = FakeDevice(num_sms=8 if rank == 1 else 132)
    text = "num_sms is 16 for each of 1 ranks on this device, which has 8 multiproc.*at most 8"
    assert not refused(small, text, num_sms=16).made
    full = FakeDevice(num_sms=40)
    full.blocks_per_sm = {"ultraep_reduce": 0} if rank == 1 else {}
    text = "num_sms is 40 .* holds 0 blocks of these kernels"
    runtime = refused(full, text, grads=torch.float32)
    assert len(runtime.made) == 1  # without load/store access there is no choice of kernels

    mixed = FakeDevice(compute_capability=(9 + rank, 0))
    runtime = FakeNvshmem()
    text = f"GPU of rank {1 - rank} has compute capability {10 - rank}.0, this rank's {9 + rank}.0"
    with pytest.raises(errors.UnsupportedError, match=text):
        new_group(process_group, mixed, nvshmem=runtime)
    assert not runtime.made

    runtime = FakeNvshmem(room=5 << 20)  # both ranks alike
    large = {"w": Segment((1 << 20,), torch.uint8)}
    first = new_group(process_group, nvshmem=runtime, expert=large)
    with pytest.raises(
        errors.OutOfSharedMemoryError, match="NVSHMEM_SYMMETRIC_SIZE to at least 6M"
    ):
        new_group(process_group, nvshmem=runtime, expert=large, slots_per_rank=3)
    first.close()


def test_eight_groups_of_64_ranks_fit_in_the_default_heap() -> None:
    """With experts of 37.75 MB: beside its slots a group needs little."""
    tile_bytes, segments = 32 << 10, [25_165_824, 12_582_912]
    config = _core.EngineConfig(
        rank=0,
        num_experts=256,
        slots_per_rank=S,
        home=[e // 4 for e in range(256)],
        domain=[0] * 64,
        allow_cross_domain=False,
        segment_bytes=segments,
        grad_bytes=[],
        grad_type=[],
        tile_bytes=tile_bytes,
        cost=make.cost_constants(64, 710.0),
        call_timeout=1.0,
        wait_timeout=1.0,
    )
    group = _core.EngineLayout(config).total_bytes
    assert group - S * sum(segments) < 1 << 18
    others = make.PROBE_BYTES + _core.cuda_staging_bytes(DEFAULT_NUM_SMS, tile_bytes)
    assert 8 * (group + others) < 1 << 30


def _finalised(rank: int, process_group: Any) -> None:
    """An NVSHMEM that was finalised is initialised again."""
    runtime = FakeNvshmem()
    new_group(process_group, nvshmem=runtime).close()
    runtime.initialized = False
    runtime.made.clear()
    new_group(process_group, nvshmem=runtime).close()
    assert len(runtime.uids) == 2
    assert not runtime.freed  # which has been, with everything else


@pytest.mark.parametrize(
    "of", [_limits, _finalised, _nvshmem_errors], ids=["limits", "finalised", "errors"]
)
def test_both_ranks_learn_of_it(ranks: RankPool, of: Callable[[int, Any], None]) -> None:
    ranks.run(2, of)


def _one_rank_without_gpu(rank: int, process_group: Any) -> Any:
    def find() -> Any:
        if rank == 1:
            raise errors.UnsupportedError("no GPU on this rank")
        device = FakeDevice()
        return device, FakeNvshmem(), device.kernels

    options: dict[str, Any] = {"num_experts": E, "slots_per_rank": S, "expert": EXPERT}
    kind = errors.BootstrapError if rank == 0 else errors.UnsupportedError
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(make, "find_nvshmem_device", find)
        patch.setattr(make, "find_torch_device", find)
        with pytest.raises(kind, match="no GPU on this rank"):
            uec.new_group(process_group, engine="cuda", **options)
        with uec.new_group(process_group, **options) as group:
            found = type(session_of(group).engine).__module__
        with pytest.raises(
            errors.BootstrapError, match=r"engine='cuda', and rank 0 with engine='host'"
        ):
            uec.new_group(process_group, engine=("host", "cuda")[rank], **options)
    return found


def test_auto_takes_the_host_engine_unless_every_rank_has_a_gpu(ranks: RankPool) -> None:
    assert ranks.run(2, _one_rank_without_gpu) == ["ultraep_comm.engines.host"] * 2
