"""A short run over all modes for compute-sanitizer.

PYTHONPATH=tests/python python tests/device/sanitized.py ENGINE [CONTROL]

With CONTROL=out-of-bounds it reads beyond an allocation instead, which memcheck has to report.
"""

from __future__ import annotations

import sys

import torch
from loopback_ranks import Ranks

MODES = ["push", "pull", "direct"]


def run(engine: str) -> int:
    """Return the number of calls; each has been compared byte by byte."""
    calls = 0
    for num_ranks, tile_bytes in ((3, 16384), (4, 32768)):
        sizes = {"w13": 70_001, "w2": 32_768, "bias": 5}
        with Ranks(
            engine, num_ranks, sizes, num_experts=7, num_sms=2, tile_bytes=tile_bytes, timeout=300
        ) as ranks:
            shared = ranks.shared()
            odd = [rank.at_odd_offsets(1, 3) for rank in ranks.ranks]
            for plan in ranks.plans(range(2)):
                for mode in MODES:
                    ranks.replicate(shared, plan, mode=mode)
                ranks.replicate(odd, plan, mode="push")
                calls += len(MODES) + 1
    return calls


def read_out_of_bounds() -> None:
    """Sum more bytes than were allocated."""
    from ultraep_comm.cuda.device import find_device

    device = find_device()
    memory = torch.zeros(64, dtype=torch.uint8, device=device.torch_device)
    print(int(device.view(memory.data_ptr(), 1 << 16).sum()))


if __name__ == "__main__":
    if sys.argv[2:] == ["out-of-bounds"]:
        read_out_of_bounds()
    else:
        print(f"{run(sys.argv[1])} calls, every byte right")
