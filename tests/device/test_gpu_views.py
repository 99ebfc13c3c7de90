"""Copies from memory of a peer, as the benchmark makes them."""

from __future__ import annotations

import pytest
import torch
from gpu import give_up, need_gpus

from ultraep_comm.bench.clock import Gpu

SIZE = 100_003

pytestmark = pytest.mark.gpu


def test_a_view_of_its_own_memory(gpu: torch.device) -> None:
    memory = torch.zeros(SIZE, dtype=torch.uint8, device=gpu)
    view = Gpu().view(memory.data_ptr() + 5, SIZE - 5)
    assert (view.device, view.data_ptr()) == (gpu, memory.data_ptr() + 5)
    memory.fill_(7)
    assert bool((view == 7).all())


def test_copies_from_another_gpu_are_fresh(gpu: torch.device) -> None:
    """A tensor from `__cuda_array_interface__` must be a view, not a copy."""
    need_gpus(2)
    peer = torch.device("cuda", (gpu.index + 1) % torch.cuda.device_count())
    if not torch.cuda.can_device_access_peer(gpu, peer):
        give_up(f"{gpu} cannot access the memory of {peer}")
    memory = torch.zeros(SIZE, dtype=torch.uint8, device=peer)
    target = torch.empty(SIZE, dtype=torch.uint8, device=gpu)
    target.copy_(memory)  # torch gives the devices access to each other
    view = Gpu().view(memory.data_ptr(), SIZE)
    assert (view.device, view.data_ptr()) == (gpu, memory.data_ptr())
    for value in (3, 4):
        memory.fill_(value)
        torch.cuda.synchronize(peer)
        target.copy_(view, non_blocking=True)
        torch.cuda.synchronize(gpu)
        assert bool((target == value).all())
