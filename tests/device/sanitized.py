"""A short run over all modes and all kernels for compute-sanitizer.

PYTHONPATH=tests/python python tests/device/sanitized.py ENGINE [PART] [few]

PART is one of `PARTS`, by default all, or of `CONTROLS`, in which a tool has something to find, or
has not. `few`: of everything one case, as a tool may take a thousand times as long.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from loopback_ranks import Ranks, at_odd_offsets, critical_path
from rank_grads import RankGrads
from ranks import close_all, loopback, random_plan

import ultraep_comm as uec

MODES = ["push", "pull", "direct"]
FEW = "few" in sys.argv


def run_one_call(engine: str) -> int:
    """The smallest: a tool that takes a hundred times as long gets through it."""
    with Ranks(engine, 2, {"w": 5_001}, num_experts=2, num_sms=1, timeout=300) as ranks:
        ranks.replicate(ranks.shared(), ranks.plan([[1, -1], [0, -1]]), mode="push")
    return 1


def run_modes(engine: str) -> int:
    """Return the number of calls; each has been compared byte by byte."""
    calls = 0
    for num_ranks, tile_bytes in ((3, 16384), (4, 32768))[: 1 if FEW else 2]:
        sizes = {"w13": 70_001, "w2": 32_768, "bias": 5}
        with Ranks(
            engine, num_ranks, sizes, num_experts=7, num_sms=2, tile_bytes=tile_bytes, timeout=300
        ) as ranks:
            shared = ranks.shared()
            odd = [at_odd_offsets(group, 1, 3) for group in ranks.groups]
            for plan in ranks.plans(range(1 if FEW else 2)):
                for mode in MODES:
                    ranks.replicate(shared, plan, mode=mode)
                ranks.replicate(odd, plan, mode="push")
                calls += len(MODES) + 1
    return calls


def run_stages(engine: str) -> int:
    """From ids to slots and physical ids where the ids are, and plans there in every mode."""
    calls, num_experts, draw = 0, 7, torch.Generator().manual_seed(1)
    sizes = {"w13": 70_001, "w2": 32_768, "bias": 5}
    with Ranks(engine, 3, sizes, num_experts=num_experts, num_sms=2, timeout=300) as ranks:
        weights, there = ranks.shared(), ranks.groups[0].device
        tables = [group.bind(own) for group, own in zip(ranks.groups, weights, strict=True)]
        for dtype in (torch.int32, torch.int64)[: 1 if FEW else 2]:
            ids = torch.randint(-1, num_experts, (3, 300, 3), generator=draw, dtype=dtype)
            ids[:, :150, 0] = 2
            own = ids.to(there)

            def path(r: int, own: torch.Tensor = own) -> Any:
                return critical_path(ranks.groups[r], own[r], tables[r], async_op=False)

            ranks.fill(weights)
            ranks.check_path(ids, loopback(3, path))
            calls += 4
        routing = torch.rand((3, 150, num_experts), generator=draw) < 0.4
        load = routing.sum(dim=1)
        here, plan = (
            uec.plan_replicas(own, group=ranks.groups[0]) for own in (load, load.to(there))
        )
        for r, group in enumerate(ranks.groups):
            probs = torch.rand(routing[r].shape, generator=draw)
            given = uec.reroute_map(routing[r].to(there), probs.to(there), plan, group=group)
            for a, b in zip(
                given, uec.reroute_map(routing[r], probs, here, group=group), strict=True
            ):
                assert a is not None
                assert b is not None
                assert torch.equal(a.cpu(), b)
        for made in ranks.plans(range(1 if FEW else 2)):
            moved = uec.Plan(slot_expert=made.slot_expert.to(there), home=made.home.to(there))
            for mode in MODES[: 1 if FEW else 3]:
                ranks.fill(weights)
                ranks.call(tables, moved, mode=mode)
                assert ranks.wrong(made) == [0] * 3, (made.slot_expert, mode)
                calls += 1
    return calls


def run_reductions(engine: str) -> int:
    """Return the number of reductions; each has been compared bit by bit."""
    calls = 0
    expert = {"w": uec.Segment((65, 128), torch.bfloat16), "b": uec.Segment((7,), torch.float32)}
    for dtype in (torch.float32, torch.bfloat16)[: 1 if FEW else 2]:
        groups = uec.testing.new_loopback_groups(
            4,
            num_experts=6,
            slots_per_rank=2,
            expert=expert,
            grads={"w": dtype, "b": torch.float32},
            engine=engine,
            num_sms=2,
            timeout=300,
        )
        grads = RankGrads(groups, dict.fromkeys(expert, dtype))
        for mode in ("pull", "direct"):
            for seed in range(2):
                grads.reduce(random_plan(seed, 4, 6, 2), seed, mode=mode)
                calls += 1
        close_all(groups)
    return calls


def read_out_of_bounds() -> int:
    """Sum more bytes than were allocated."""
    from ultraep_comm.engines.cuda.device import find_device

    device = find_device()
    memory = torch.zeros(64, dtype=torch.uint8, device=device.torch_device)
    return int(device.view(memory.data_ptr(), 1 << 16).sum() >= 0)


HAND_OVER = r"""
extern "C" __global__ void ultraep_hand_over(bool late, unsigned* out) {
  __shared__ unsigned long long barrier;
  __shared__ unsigned words[32];
  const unsigned at = __cvta_generic_to_shared(&barrier), lane = threadIdx.x % 32;
  if (threadIdx.x == 0) asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(at) : "memory");
  __syncthreads();
  if (threadIdx.x < 32) {
    if (!late) words[lane] = lane;
    __syncwarp();
    if (lane == 0)
      asm volatile("{.reg .b64 s; mbarrier.arrive.shared.b64 s, [%0];}" ::"r"(at) : "memory");
    if (late) words[lane] = lane;
  } else {
    for (unsigned done = 0; done == 0;)
      asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], 0;"
                   " selp.u32 %0, 1, 0, p;}" : "=r"(done) : "r"(at) : "memory");
    out[lane] = words[lane];
  }
}
"""


def hand_over(*, late: bool) -> int:
    """Let a warp hand words to another; `late`: behind the arrival that says they are there."""
    import ctypes

    from cuda.bindings import driver, nvrtc

    def checked(result: tuple[object, ...]) -> object:
        assert int(result[0]) == 0, result  # type: ignore[call-overload]
        return result[1] if len(result) > 1 else None

    out = torch.zeros(32, dtype=torch.int32, device="cuda")
    major, minor = torch.cuda.get_device_capability()
    program = checked(nvrtc.nvrtcCreateProgram(HAND_OVER.encode(), b"hand_over.cu", 0, [], []))
    flags = [f"--gpu-architecture=sm_{major}{minor}".encode()]
    checked(nvrtc.nvrtcCompileProgram(program, len(flags), flags))
    cubin = b" " * checked(nvrtc.nvrtcGetCUBINSize(program))  # type: ignore[operator]
    checked(nvrtc.nvrtcGetCUBIN(program, cubin))
    module = checked(driver.cuModuleLoadData(cubin))
    kernel = checked(driver.cuModuleGetFunction(module, b"ultraep_hand_over"))
    arguments = ((late, out.data_ptr()), (ctypes.c_bool, ctypes.c_void_p))
    checked(driver.cuLaunchKernel(kernel, 1, 1, 1, 64, 1, 1, 0, 0, arguments, 0))
    torch.cuda.synchronize()
    return 1


PARTS = {
    "one_call": run_one_call,
    "reductions": run_reductions,
    "stages": run_stages,
    "modes": run_modes,
}
CONTROLS = {
    "out_of_bounds": lambda _: read_out_of_bounds(),
    "in_time": lambda _: hand_over(late=False),
    "late": lambda _: hand_over(late=True),
}

if __name__ == "__main__":
    chosen, parts = sys.argv[2:3] or list(PARTS), PARTS | CONTROLS
    print(f"{sum(parts[part](sys.argv[1]) for part in chosen)} calls, every byte right")
