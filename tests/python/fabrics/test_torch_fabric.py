"""Groups over torch's symmetric memory without a GPU: shared files stand in for the memory."""

from __future__ import annotations

import gc
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from emulated_device import EmulatedDevice
from fake_device import PLAN, E, FakeDevice, FakeNvshmem, S, new_group
from fake_memory import FABRIC, POSIX, FakeMemory
from ranks import (
    MIXED,
    RankPool,
    clear_slots,
    fan_out_plan,
    fill_weights,
    make_weights,
    random_plan,
    run_python,
    wrong_bytes,
)

import ultraep_comm as uec
from ultraep_comm import errors
from ultraep_comm.engines.cuda import kernels, make
from ultraep_comm.fabrics import torch_memory
from ultraep_comm.fabrics.torch_memory import SymmetricMemory
from ultraep_comm.group.group import session_of
from ultraep_comm.system import read_version

NO_GPU = not torch.cuda.is_available()
NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


def _new_group(process_group: Any, memory: Any, device: Any = None, **options: Any) -> uec.Group:
    options = {"engine": "cuda", **options}
    return new_group(process_group, device, memory=memory, **options)


# ---- real kernels, real bytes --------------------------------------------------------------------


def _every_mode(rank: int, process_group: Any, folder: Path, library: Path) -> None:
    """In each call some ranks are in the background, and have other numbers of blocks."""
    device, memory = EmulatedDevice(library), FakeMemory(folder, offset=640)
    device.num_sms = 2 + rank
    num_ranks = dist.get_world_size(process_group)
    options = {"expert": MIXED, "timeout": 60.0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "BACKGROUND_NUM_SMS", 1)
        group = _new_group(process_group, memory, device, fabric="torch", **options)
    assert group.topology.domain.tolist() == [0] * num_ranks
    weights, epoch = group.empty_weights(), 0
    plans = [fan_out_plan(num_ranks, E, S), random_plan(3, num_ranks, E, S)]
    for mode in ("push", "pull", "direct", "auto"):
        for plan in plans:
            epoch += 1
            fill_weights(group, weights, epoch)
            clear_slots(group)
            async_op = (rank + epoch) % 2 == 0
            work = uec.replicate_experts(weights, plan, group=group, mode=mode, async_op=async_op)
            assert (work is not None) == async_op
            device.synchronize()
            assert wrong_bytes(group, plan, epoch) == 0, (rank, mode)
    load = uec.gather_load(torch.tensor([[rank, 0]]), group=group)
    assert load.sum(dim=1).tolist() == [2] * num_ranks
    group.close()


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_kernels_run_between_processes(
    ranks: RankPool, emulated_library: Path, tmp_path: Path, num_ranks: int
) -> None:
    ranks.run(num_ranks, _every_mode, tmp_path, emulated_library, timeout=300)


def _the_last_rank_never_calls(rank: int, process_group: Any, folder: Path, library: Path) -> Any:
    device, memory = EmulatedDevice(library), FakeMemory(folder, offset=640)
    options = {"expert": MIXED, "num_sms": 2, "timeout": 1.0 + rank, "fabric": "torch"}
    group = _new_group(process_group, memory, device, **options)
    last = dist.get_world_size(process_group) - 1
    error = None
    if rank != last:
        plan = fan_out_plan(last + 1, E, S)
        work = uec.replicate_experts(make_weights(group), plan, group=group, async_op=True)
        device.synchronize()
        error = work.exception()
    health = group.health()
    dist.barrier(process_group)
    group.close()
    return error, health


def test_the_rank_that_a_chain_of_waits_ends_at_is_named(
    ranks: RankPool, emulated_library: Path, tmp_path: Path
) -> None:
    """The others' hosts find it, and what every rank said, in their own memory."""
    scene = (3, _the_last_rank_never_calls, tmp_path, emulated_library)
    *failed, (_, fine) = ranks.run(*scene, timeout=100)
    assert fine.peers is None
    for error, health in failed:
        assert isinstance(error, (errors.TransferTimeoutError, errors.TransferAbortedError))
        assert error.root == 2
        assert health.peers == error.states
        states = [state.state for state in error.states]
        assert all("in call 1, failed: " in state for state in states[:2])
        assert states[2] == "not yet in call 1 (not seen in a call yet)"


# ---- the fabric ----------------------------------------------------------------------------------


def memory_is_zeroed_and_addresses_are_the_peers(
    rank: int, process_group: Any, folder: Path
) -> None:
    memory, device = FakeMemory(folder, offset=128 * rank), FakeDevice()
    device.synchronize_stream = lambda: memory.log.append("synchronize")  # type: ignore[method-assign]
    group = _new_group(process_group, memory, device)
    region = session_of(group).engine.memory[0]
    assert memory.log == ["allocate", "synchronize", "handle_types", "rendezvous"]
    assert int(region.local.count_nonzero()) == 0
    # The other rank reads what a rank writes, at its own address of that memory.
    assert region.bases[rank] == region.local.data_ptr()
    region.local[-64:] = rank + 1
    dist.barrier(process_group)
    seen = device.view(region.bases[1 - rank], region.local.numel())
    assert seen[-65:].tolist() == [0] + [2 - rank] * 64
    dist.barrier(process_group)
    assert session_of(group).engine.can_pull
    group.close()


def memory_lives_as_long_as_its_group(rank: int, process_group: Any, folder: Path) -> None:
    memory, device = FakeMemory(folder), FakeDevice()
    group = _new_group(process_group, memory, device)
    other = _new_group(process_group, memory, device, allow_cross_domain=True)  # beside the first
    weights = group.empty_weights()
    uec.replicate_experts(weights, PLAN, group=group, mode="pull")
    assert device.launches()[-1] == "ultraep_replicate"  # not the one for far peers
    alive = [handle() is not None for handle in memory.handles]
    slot = group.slots["w"]
    group.close()
    del group, weights
    gc.collect()
    kept = [handle() is not None for handle in memory.handles]
    slot.fill_(1)  # stays mapped as long as it is referenced
    other.close()
    assert (alive, kept) == ([True] * 3, [False, True, False])


def given_domains_are_kept(rank: int, process_group: Any, folder: Path) -> Any:
    group = _new_group(process_group, FakeMemory(folder), domains=[0, 1])
    crossing = uec.Plan.from_slots([[3, -1], [-1, -1]], num_experts=E)
    with pytest.raises(errors.InvalidPlanError, match="another domain"):
        uec.replicate_experts(make_weights(group), crossing, group=group)
    group.close()


# ---- errors reach every rank ---------------------------------------------------------------------


def _refused(
    process_group: Any, memory: FakeMemory, error: type[Exception], part: str, **options: Any
) -> Exception:
    with pytest.raises(error, match=part) as caught:
        _new_group(process_group, memory, **{"fabric": "torch", **options})
    return caught.value


def a_rank_beyond_reach_ends_the_group_everywhere(
    rank: int, process_group: Any, folder: Path
) -> None:
    memory = FakeMemory(folder, unreachable=(2,) if rank == 1 else ())
    error = _refused(
        process_group, memory, errors.UnsupportedError, "rank 1 has no load/store access to rank 2"
    )
    assert "use fabric='nvshmem', with allow_cross_domain=True" in str(error)


def what_fails_on_one_rank_ends_the_group_everywhere(
    rank: int, process_group: Any, folder: Path
) -> None:
    bootstrap, unsupported = errors.BootstrapError, errors.UnsupportedError
    cases: list[tuple[str, Exception, type[Exception], str]] = [
        ("allocate", torch.OutOfMemoryError("full"), errors.OutOfSharedMemoryError, "fewer slots"),
        (
            "allocate",
            RuntimeError("CUDA driver error: out of memory\nmore"),
            errors.OutOfSharedMemoryError,
            r"out of memory\. Use",
        ),
        ("allocate", ValueError("odd"), unsupported, "odd. Check whether"),
        ("handle_types", errors.DeviceError("broken"), errors.DeviceError, "broken"),
        ("rendezvous", dist.DistStoreError("timeout"), bootstrap, "Has a rank left"),
        ("rendezvous", RuntimeError("overlapping devices"), unsupported, "CUDA_VISIBLE_DEVICES"),
        ("rendezvous", RuntimeError("cannot import"), unsupported, "use fabric='nvshmem'"),
        ("allocate", TypeError("another argument"), TypeError, "another argument"),
        ("rendezvous", AttributeError("no such handle"), AttributeError, "no such handle"),
    ]
    for number, (where, error, own, part) in enumerate(cases):
        part_of_it = folder / str(number)
        part_of_it.mkdir(exist_ok=True)
        memory = FakeMemory(part_of_it)

        def fail(step: str, where: str = where, error: Exception = error) -> None:
            if step == where and rank == 1:
                raise error

        memory.on_step = fail
        _refused(
            process_group,
            memory,
            own if rank == 1 else bootstrap,
            part if rank == 1 else "rank 1 failed",
        )


def ranks_that_torch_could_not_connect_are_told_so_before(
    rank: int, process_group: Any, folder: Path
) -> None:
    def attempt(number: int, kind: int, machine: str) -> uec.Group:
        part = folder / str(number)
        part.mkdir(exist_ok=True)
        memory = FakeMemory(part, types=kind)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(make, "machine_id", lambda: machine)
            return _new_group(process_group, memory, fabric="torch")

    # One NVLink rack: torch exports fabric handles on every machine.
    attempt(0, FABRIC, f"machine {rank}").close()
    with pytest.raises(errors.UnsupportedError, match="2 machines, and the memory of rank 1"):
        attempt(1, FABRIC if rank == 0 else POSIX, f"machine {rank}")
    with pytest.raises(errors.UnsupportedError, match="rank 0 shares its memory by handle type 8"):
        attempt(2, FABRIC if rank == 0 else POSIX, "one machine")


def groups_that_overlap_do_not_hang(rank: int, process_group: Any, folder: Path) -> None:
    """Ranks 0 and 1 have met alone before."""
    for counts_in_process in (True, False):
        part = folder / str(counts_in_process)
        part.mkdir(exist_ok=True)
        memory = FakeMemory(part, counts_in_process=counts_in_process)
        memory.met = 2 if rank < 2 else 1
        if counts_in_process:
            _refused(process_group, memory, errors.UnsupportedError, "rank 0 has made 2 rendezvous")
            assert "rendezvous" not in memory.log
        else:
            _new_group(process_group, memory).close()


# ---- which fabric --------------------------------------------------------------------------------


def all_ranks_take_the_first_fabric_that_all_have(
    rank: int, process_group: Any, folder: Path
) -> None:
    def nothing(name: str) -> Exception:
        return errors.UnsupportedError(f"no {name} on rank {rank}")

    def kind(group: uec.Group) -> str:
        with group:
            return type(session_of(group).engine.fabric).__name__

    memory, nvshmem = FakeMemory(folder), FakeNvshmem()
    options: dict[str, Any] = {"nvshmem": nvshmem}
    for engine in ("cuda", "auto"):
        assert kind(_new_group(process_group, memory, **options, engine=engine)) == "NvshmemFabric"
    assert kind(_new_group(process_group, memory, **options, fabric="torch")) == "TorchFabric"
    # One rank without NVSHMEM makes all ranks use torch.
    options["nvshmem"] = nothing("NVSHMEM") if rank == 1 else FakeNvshmem()
    for engine in ("cuda", "auto"):
        assert kind(_new_group(process_group, memory, **options, engine=engine)) == "TorchFabric"
    if rank == 0:
        assert not options["nvshmem"].is_initialized()
    asked = {**options, "fabric": "nvshmem"}
    error = errors.UnsupportedError if rank == 1 else errors.BootstrapError
    with pytest.raises(error, match="no NVSHMEM on rank 1"):
        _new_group(process_group, memory, **asked)
    # NVSHMEM that other code initialised over other ranks is not used either.
    foreign: dict[str, Any] = {"nvshmem": FakeNvshmem(pes=(4 + rank, 8))}
    for engine in ("cuda", "auto"):
        assert kind(_new_group(process_group, memory, **foreign, engine=engine)) == "TorchFabric"
    with pytest.raises(errors.UnsupportedError, match=r"which are PEs \[4, 5\] of 8"):
        _new_group(process_group, memory, **foreign, fabric="nvshmem")
    for engine in ("cuda", "auto"):
        both = r"PEs \[4, 5\] of 8.*no symmetric memory"
        with pytest.raises(errors.UnsupportedError, match=both):
            _new_group(process_group, nothing("symmetric memory"), **foreign, engine=engine)
    # No fabric that all ranks have: the error gives both reasons.
    lacking = nothing("symmetric memory") if rank == 0 else memory
    both = r"fabric nvshmem: rank 1: no NVSHMEM.*fabric torch: rank 0: no symmetric memory"
    with pytest.raises(errors.UnsupportedError, match=both):
        _new_group(process_group, lacking, **options)
    assert kind(_new_group(process_group, lacking, **options, engine="auto")) == "ShmFabric"
    for asked in ({"fabric": "torch"}, {"fabric": "torch", "engine": "auto"}):
        error = errors.UnsupportedError if rank == 0 else errors.BootstrapError
        with pytest.raises(error, match="no symmetric memory on rank 0"):
            _new_group(process_group, lacking, **options, **asked)
    # A reason that two ranks share is given once.
    gone = errors.UnsupportedError("no GPU")
    with pytest.raises(errors.UnsupportedError, match=r"^no GPU$"):
        _new_group(process_group, gone, nvshmem=gone)
    with pytest.raises(
        errors.BootstrapError, match=r"fabric='torch', and rank 0 with fabric='auto'"
    ):
        _new_group(process_group, memory, fabric=("auto", "torch")[rank])


@pytest.mark.parametrize(
    ("num_ranks", "scene"),
    [
        (2, memory_is_zeroed_and_addresses_are_the_peers),
        (2, memory_lives_as_long_as_its_group),
        (2, given_domains_are_kept),
        (2, what_fails_on_one_rank_ends_the_group_everywhere),
        (2, ranks_that_torch_could_not_connect_are_told_so_before),
        (3, groups_that_overlap_do_not_hang),
        (2, all_ranks_take_the_first_fabric_that_all_have),
        (3, a_rank_beyond_reach_ends_the_group_everywhere),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_ranks_in_processes(ranks: RankPool, tmp_path: Path, num_ranks: int, scene: Any) -> None:
    ranks.run(num_ranks, scene, tmp_path)


# ---- torch itself --------------------------------------------------------------------------------


class FakeModule(types.ModuleType):
    """The part of torch.distributed._symmetric_memory that is used."""

    def __init__(self, backend: str | None) -> None:
        super().__init__("fake")
        self.backend = backend
        self.log: list[Any] = []
        self._SymmetricMemory = self

    def get_backend(self, device: torch.device) -> str | None:
        return self.backend

    def set_backend(self, name: str) -> None:
        if self.backend is not None:
            raise RuntimeError("not found\nand more")
        self.backend = name

    def empty_strided_p2p(self, *arguments: Any) -> torch.Tensor:
        self.log.append(arguments)
        return torch.empty(arguments[0], dtype=arguments[2])

    def rendezvous(self, tensor: torch.Tensor, group_name: str) -> Any:
        self.log.append(group_name)
        self.multicast = os.environ[NO_MULTICAST]
        return types.SimpleNamespace(buffer_ptrs=[16, 0]) if group_name == "5" else None


@pytest.mark.parametrize(("given", "found"), [(None, "1"), ("0", "0")])
def test_memory_is_not_bound_to_a_multicast_object(
    monkeypatch: pytest.MonkeyPatch, given: str | None, found: str
) -> None:
    """Unless the user says otherwise; other code's memory is not concerned."""
    monkeypatch.setenv(NO_MULTICAST, given or "")  # which puts back what was there
    if given is None:
        monkeypatch.delenv(NO_MULTICAST)
    module, group = FakeModule(None), types.SimpleNamespace(group_name="5")
    SymmetricMemory(module).rendezvous(torch.empty(1), group)  # type: ignore[arg-type]
    assert module.multicast == found
    assert os.environ.get(NO_MULTICAST) == given


def test_torch_is_asked_for_memory_of_its_own() -> None:
    device, group = torch.device("cuda", 3), types.SimpleNamespace(group_name="5")
    module = FakeModule(None)
    memory = SymmetricMemory(module)
    memory.prepare(device)
    assert module.backend == "CUDA"
    memory.prepare(device)
    tensor = memory.allocate(640, device)
    assert module.log == [((640,), (1,), torch.uint8, device)]
    pointers, handle = memory.rendezvous(tensor, group)  # type: ignore[arg-type]
    assert (pointers, memory.met) == ([16, 0], 1)
    assert handle is not None
    with pytest.raises(RuntimeError, match="does not know"):
        memory.rendezvous(tensor, types.SimpleNamespace(group_name="6"))  # type: ignore[arg-type]
    assert module.log[1:] == ["5", "6"]
    assert memory.counts_in_process == (read_version(torch.__version__) < (2, 14))
    assert [read_version(text) for text in ("2.13.0+cpu", "3")] == [(2, 13), (3, 0)]


def test_a_backend_that_somebody_chose_is_left_alone() -> None:
    module = FakeModule("NVSHMEM")
    with pytest.raises(errors.UnsupportedError, match=r"chosen 'NVSHMEM'.*TORCH_SYMMMEM"):
        SymmetricMemory(module).prepare(torch.device("cuda", 0))
    assert module.backend == "NVSHMEM"
    old = types.SimpleNamespace(_SymmetricMemory=None)  # before get_backend there was one backend
    SymmetricMemory(old).prepare(torch.device("cuda", 0))


@pytest.mark.skipif(torch.version.cuda is not None, reason="this build of torch has CUDA")
def test_a_cpu_build_of_torch_says_that_it_has_none() -> None:
    with pytest.raises(errors.UnsupportedError, match="install a CUDA build of torch"):
        torch_memory.find_memory().prepare(torch.device("cuda", 0))


def test_another_torch_without_what_is_needed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "torch.distributed._symmetric_memory"
    torch_memory.find_memory.cache_clear()
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(errors.UnsupportedError, match="has no symmetric memory"):
        torch_memory.find_memory()
    monkeypatch.undo()
    assert torch_memory.find_memory() is torch_memory.find_memory()


@pytest.mark.skipif(not NO_GPU, reason="there is a GPU here")
def test_symmetric_memory_is_not_imported_before_it_is_needed() -> None:
    code = """
import sys, torch.distributed as dist
before = set(sys.modules)
import ultraep_comm as uec
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
options = dict(num_experts=2, slots_per_rank=1, expert={"w": ((8,), __import__("torch").uint8)})
for asked in ({"engine": "cuda"}, {"fabric": "torch"}, {"engine": "cuda", "fabric": "torch"}):
    try:
        uec.new_group(**options, **asked)
    except uec.errors.UnsupportedError as error:
        assert "the host engine" in str(error), error
        continue
    raise SystemExit(f"{asked} made a group")
uec.new_group(**options).close()
dist.destroy_process_group()
added = set(sys.modules) - before
raise SystemExit("imported" if "torch.distributed._symmetric_memory" in added else 0)
"""
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr
