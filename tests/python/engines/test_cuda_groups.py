"""Groups of the CUDA engine without a GPU: what is launched, in which order, and every error."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from fake_device import EXPERT, PLAN, E, FakeDevice, S
from ranks import RankPool, close_all, make_weights, run_python, start_all

import ultraep_comm as uec
from ultraep_comm import errors
from ultraep_comm.engines.cuda import device as device_module
from ultraep_comm.engines.cuda import kernels as kernels_module
from ultraep_comm.engines.cuda.kernels import choose_background_sms, choose_num_sms
from ultraep_comm.model import MACHINES

NO_GPU = not torch.cuda.is_available()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    fake = FakeDevice()
    monkeypatch.setattr(device_module, "find_device", lambda: fake)
    monkeypatch.setattr(kernels_module, "load_kernels", lambda device, nvshmem: fake.kernels)
    return fake


def _groups(num_ranks: int = 2, **options: Any) -> list[uec.Group]:
    options = {"num_experts": E, "slots_per_rank": S, "expert": EXPERT, "timeout": 20.0, **options}
    return uec.testing.new_loopback_groups(num_ranks, engine="cuda", **options)


def _call_all(groups: list[uec.Group]) -> list[uec.Work]:
    return start_all(groups, [make_weights(group) for group in groups], PLAN)


# ---- without a GPU -----------------------------------------------------------------------------


@pytest.mark.skipif(not NO_GPU, reason="there is a GPU here")
def test_without_a_gpu_the_error_says_so_and_nvshmem_is_left_alone() -> None:
    with pytest.raises(errors.UnsupportedError, match="use the host engine"):
        _groups()
    code = """
import sys, torch.distributed as dist, ultraep_comm as uec
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
options = dict(num_experts=2, slots_per_rank=1, expert={"w": ((8,), __import__("torch").uint8)})
for asked in ({"engine": "cuda"}, {"fabric": "nvshmem"}):
    try:
        uec.new_group(**options, **asked)
    except uec.errors.UnsupportedError:
        continue
    raise SystemExit(f"{asked} made a group")
group = uec.new_group(**options)
assert str(group.device) == "cpu"
group.close()
dist.destroy_process_group()
raise SystemExit("nvshmem was imported" if "nvshmem" in sys.modules else 0)
"""
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not NO_GPU, reason="there is a GPU here")
def test_auto_falls_back_to_the_host_engine() -> None:
    (group,) = uec.testing.new_loopback_groups(
        1, num_experts=E, slots_per_rank=S, expert=EXPERT, engine="auto"
    )
    uec.replicate_experts(
        make_weights(group), uec.Plan.from_slots([[-1, -1]], num_experts=E), group=group
    )
    group.close()


@pytest.mark.parametrize(
    "options, error, part",
    [
        ({"engine": "gpu"}, errors.InvalidArgumentError, "engine is 'gpu'"),
        ({"fabric": "tcp"}, errors.InvalidArgumentError, "fabric is 'tcp'"),
        ({"engine": "cuda", "fabric": "shm"}, errors.UnsupportedError, "fabric='nvshmem'"),
        ({"engine": "host", "fabric": "nvshmem"}, errors.UnsupportedError, "fabric='shm'"),
        ({"engine": "host", "fabric": "torch"}, errors.UnsupportedError, "fabric='torch'"),
        ({"fabric": "loopback"}, errors.UnsupportedError, "new_loopback_groups"),
    ],
)
def test_engines_and_fabrics_that_do_not_go_together(
    ranks: RankPool, options: dict[str, str], error: type[Exception], part: str
) -> None:
    ranks.run(1, _refused, options, error, part)


def _refused(
    rank: int, process_group: Any, options: dict[str, str], error: type[Exception], part: str
) -> None:
    with pytest.raises(error, match=part):
        uec.new_group(process_group, num_experts=E, slots_per_rank=S, expert=EXPERT, **options)


# ---- what a call does ---------------------------------------------------------------------------


def test_weights_live_until_the_device_has_finished(device: FakeDevice) -> None:
    groups = _groups()
    device.complete = False
    weights = [make_weights(group) for group in groups]
    alive = weakref.ref(weights[0]["w"])
    for group, tensors in zip(groups, weights, strict=True):
        uec.replicate_experts(tensors, PLAN, group=group, async_op=True)
    del weights, tensors
    gc.collect()
    assert alive() is not None
    device.complete = True
    device.pending.clear()
    _call_all(groups)
    gc.collect()
    assert alive() is None
    close_all(groups)


# ---- what a group refuses -----------------------------------------------------------------------


def test_tile_sizes(device: FakeDevice) -> None:
    with pytest.raises(errors.InvalidArgumentError, match=r"\[16384, 32768\]"):
        _groups(tile_bytes=65536)
    close_all(_groups(tile_bytes=16384))
    assert device.kernels.shared_bytes["ultraep_replicate"] > 192 << 10
    device.max_shared_bytes = 99 << 10  # of sm_120: one worker to a block, and no tiles of 32 KiB
    device.kernels.shared_bytes.clear()
    close_all(_groups())
    assert device.kernels.shared_bytes["ultraep_replicate"] <= 99 << 10
    with pytest.raises(errors.UnsupportedError, match="tiles of 32768, but this device has 101376"):
        _groups(tile_bytes=32768)
    device.max_shared_bytes = 48 << 10
    with pytest.raises(errors.UnsupportedError, match="slots_per_rank"):
        _groups()


def test_all_blocks_of_a_launch_have_to_fit(device: FakeDevice) -> None:
    device.num_sms = 8
    groups = _groups()
    _call_all(groups)
    assert device.grids == [(4, 2)]
    close_all(groups)
    with pytest.raises(errors.InvalidArgumentError, match="num_sms is 5 for each of 2 ranks"):
        _groups(num_sms=5)
    with pytest.raises(errors.InvalidArgumentError, match="fewer ranks"):
        _groups(9)
    with pytest.raises(errors.UnsupportedError, match=r"65 ranks .* at most 64"):
        _groups(65, num_experts=65)


@pytest.mark.parametrize(("num_sms", "blocks"), [(None, (64, 24)), (40, (40, 40))])
def test_a_call_in_the_background_has_fewer_blocks_unless_told(
    device: FakeDevice, num_sms: int | None, blocks: tuple[int, int]
) -> None:
    (group,) = groups = _groups(1, num_sms=num_sms)
    plan = uec.Plan.from_slots([[-1, -1]], num_experts=E)
    for async_op in (False, True):
        uec.replicate_experts(make_weights(group), plan, group=group, async_op=async_op)
    assert device.grids == [(count, 1) for count in blocks]
    close_all(groups)


def test_blocks_that_the_device_does_not_hold_are_refused(device: FakeDevice) -> None:
    """By what the driver says of the kernels, before anything is allocated."""
    device.num_sms, device.blocks_per_sm = 8, {"ultraep_replicate": 0}
    with pytest.raises(errors.InvalidArgumentError, match=r"num_sms is 4 .* at most 0: pass that"):
        _groups()
    assert not device.memory
    device.blocks_per_sm = {"ultraep_replicate": 2, "ultraep_reduce": 1}
    close_all(_groups(num_sms=4, grads=torch.float32))


def test_nothing_waits_for_the_whole_device(device: FakeDevice) -> None:
    """Another group's kernels may be waiting there for peers that are not here."""
    groups = _groups()
    for group in groups:
        group.bind(make_weights(group))
    close_all(groups)
    assert device.synchronized == 0


@pytest.mark.parametrize(
    ("on_device", "num_ranks", "blocks"),
    [(132, 1, 64), (132, 2, 64), (132, 3, 44), (132, 8, 16), (46, 1, 46), (1, 1, 1)],
)
def test_blocks_of_a_rank_by_default(on_device: int, num_ranks: int, blocks: int) -> None:
    device = FakeDevice(num_sms=on_device)
    assert choose_num_sms(None, device, num_ranks) == blocks
    assert choose_background_sms(None, blocks) == min(blocks, 24)
    assert MACHINES["nvl72"].num_sms == choose_num_sms(None, FakeDevice(), 1)  # as predicted


def test_a_driver_error_is_typed_and_ends_the_group(device: FakeDevice) -> None:
    groups = _groups()
    weights = [make_weights(group) for group in groups]
    work = uec.replicate_experts(weights[0], PLAN, group=groups[0], async_op=True)
    assert work is not None
    device.launch_result = 719
    with pytest.raises(errors.DeviceError, match=r"cuLaunchCooperativeKernel .*\(719\)"):
        uec.replicate_experts(weights[1], PLAN, group=groups[1])
    device.launch_result = 0
    with pytest.raises(errors.GroupClosedError) as closed:
        uec.replicate_experts(weights[1], PLAN, group=groups[1])
    assert isinstance(closed.value.__cause__, errors.DeviceError)
    with pytest.raises(errors.TransferAbortedError, match="rank 1 failed first"):
        work.wait()  # for a launch that never comes
    close_all(groups)


# ---- health --------------------------------------------------------------------------------------


def test_health_says_what_the_host_knows_and_asks_nothing_of_the_device(
    device: FakeDevice,
) -> None:
    groups = _groups()
    for work in _call_all(groups):
        work.synchronize()
    steps = len(device.log)
    health = groups[0].health()
    assert len(device.log) == steps
    assert (health.state, health.epoch, health.calls["replicate"]) == ("open", 1, 1)
    assert (health.completed, health.bytes_stored, health.waits, health.peers) == (None,) * 4
    assert "1 replicate" in str(health)
    close_all(groups)


@pytest.mark.parametrize("engine", ["cuda", "auto"])
def test_check_mode_is_for_the_host_engine(device: FakeDevice, engine: str) -> None:
    with pytest.raises(errors.UnsupportedError, match="engine='host'"):
        uec.testing.new_loopback_groups(
            2, num_experts=E, slots_per_rank=S, expert=EXPERT, engine=engine, check=True
        )
