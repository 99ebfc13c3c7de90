#!/usr/bin/env python3
"""Launches the kernels of probes.cu and says what came of them, a JSON object a line.

python tools/gpu_probes/probes.py KERNELS device              # the GPU; status 3: none
python tools/gpu_probes/probes.py KERNELS PROBE ...           # status 1: one is wrong
python tools/gpu_probes/probes.py --machine LIB KERNELS ...   # on the machine of tests/ptx

KERNELS is a cubin, or PTX. Nothing but Python and the driver is needed.
"""

from __future__ import annotations

import argparse
import ctypes as c
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

SMALL, TILE = 4096, 32768
WORDS = 64  # of the results: wrong, ended, values


@dataclass(frozen=True)
class Probe:
    """How a kernel is launched."""

    blocks: int = 1  # 0: one for each multiprocessor
    threads: int = 1
    shared: int = 0
    rounds: int = 1
    few: int = 1  # of rounds, on the machine
    kernel: str = ""
    values: int = 0  # further ones than cycles and their number


CHECKS = {
    "check_warp": Probe(threads=32),
    "check_loads": Probe(threads=32),
    "check_clock": Probe(),
    "check_in_block": Probe(threads=128, shared=256),
    "check_atomics": Probe(blocks=8, threads=64),
    "check_claims": Probe(blocks=8, threads=32, rounds=4096, few=64),
    "check_message_device": Probe(blocks=2, threads=32, rounds=1000, few=8),
    "check_message_system": Probe(blocks=2, threads=32, rounds=1000, few=8),
    "check_message_fenced": Probe(blocks=2, threads=32, rounds=1000, few=8),
    "check_message_host": Probe(blocks=2, threads=32, rounds=200, few=8),
    "check_fence_system": Probe(blocks=2, rounds=2000, few=16),
    "check_bulk_load": Probe(threads=128, shared=TILE + 8),
    "check_bulk_store": Probe(threads=128, shared=TILE),
    "check_buffer_reuse": Probe(threads=64, shared=SMALL, rounds=64, few=3),
    "check_mbarrier_phases": Probe(threads=64, shared=2 * SMALL + 32, rounds=64, few=6),
    "check_relay": Probe(blocks=2, threads=64, shared=TILE + 8),
}
CHAIN = Probe(rounds=4096, few=64)
COPY = Probe(shared=4 * TILE + 32, rounds=512, few=32, kernel="measure_bulk_copy")
MEASURES = {
    "measure_clock": Probe(rounds=20_000_000, few=20_000),
    "measure_alu": CHAIN,
    "measure_branch": CHAIN,
    "measure_shuffle": Probe(threads=32, rounds=4096, few=64),
    "measure_barrier": Probe(threads=256, rounds=4096, few=64),
    "measure_shared": Probe(shared=16, rounds=4096, few=64),
    "measure_l1": CHAIN,
    "measure_l2": Probe(rounds=1024, few=16, values=32),
    "measure_dram": Probe(rounds=4096, few=64),
    "measure_host": Probe(rounds=512, few=32),
    "measure_acquire_device": CHAIN,
    "measure_acquire_system": CHAIN,
    "measure_release_device": CHAIN,
    "measure_release_system": CHAIN,
    "measure_fence_device": CHAIN,
    "measure_fence_system": CHAIN,
    "measure_store_fence_device": CHAIN,
    "measure_store_fence_system": CHAIN,
    "measure_atomic_rate": Probe(blocks=0, rounds=4096, few=256),
    "measure_atomic_trip": CHAIN,
    "measure_compare_swap_trip": CHAIN,
    "measure_bulk_first": Probe(shared=TILE + 8, rounds=512, few=16),
    "measure_bulk_copy": COPY,
    "measure_all_copy": Probe(**vars(COPY) | {"blocks": 0, "rounds": 128, "few": 4}),
    "measure_cluster": Probe(blocks=2, shared=16, rounds=4096, few=64),
}
HOST_ONLY = ("launch", "device_copy")  # of a GPU: what no kernel measures
DRAM_BYTES = 4096 * (131072 + 128)


class Machine:
    """The machine in software, with the kernels of $UEC_PTX."""

    arch, multiprocessors, fast = 90, 8, False

    class Launch(c.Structure):
        """PtxLaunch of tests/ptx/machine/api.h."""

        _fields_ = (
            ("kernel", c.c_char_p),
            ("blocks", c.c_uint32),
            ("ranks", c.c_uint32),
            ("threads", c.c_uint32),
            ("shared_bytes", c.c_int64),
            ("args", c.POINTER(c.c_void_p)),
            ("first_rank", c.c_int32),
            ("together", c.c_int32),
        )

    def __init__(self, library: str) -> None:
        self._library = c.CDLL(library)
        self._library.ptx_begin.restype = c.c_void_p
        self._kept: list[Any] = []

    def allocate(self, size: int, *, of_host: bool = False) -> int:
        """Return the address of zeroed memory."""
        self._kept.append(c.create_string_buffer(size + 128))
        at = (c.addressof(self._kept[-1]) + 127) // 128 * 128
        self._library.ptx_memory(c.c_void_p(at), c.c_int64(size), -1 if of_host else 0)
        return at

    def launch(self, kernel: str, blocks: int, threads: int, shared: int, args: Any) -> None:
        """Run a kernel to its end."""
        shape = (kernel.encode(), blocks, 1, threads, shared, args, 0, 1)
        grid = self._library.ptx_begin(c.byref(self.Launch(*shape)))
        while not self._library.ptx_advance(c.c_void_p(grid)):
            pass

    def read(self, at: int) -> list[int]:
        """Return the results' words."""
        return list((c.c_uint64 * WORDS).from_address(at))

    def empty_cache(self) -> None:
        """Nothing: the machine has none that is full."""

    def wake(self) -> None:
        """Nothing: the machine has one clock rate."""


class Gpu:
    """The first GPU, by the driver's own functions."""

    fast = True

    def __init__(self, kernels: str) -> None:
        try:
            self.driver = c.CDLL("libcuda.so.1")
            self.call("cuInit", 0)
        except (OSError, RuntimeError) as error:
            print(f"no GPU: {error}", file=sys.stderr)
            sys.exit(3)
        context = c.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", c.byref(context), 0)
        self.call("cuCtxSetCurrent", context)
        self.arch = 10 * self.attribute(75) + self.attribute(76)
        self.multiprocessors = self.attribute(16)
        self._module, self._scratch = c.c_void_p(), 0
        if kernels != "none":
            with open(kernels, "rb") as file:
                self.call("cuModuleLoadData", c.byref(self._module), file.read() + b"\0")

    def call(self, function: str, *args: Any) -> None:
        """Call the driver; raise RuntimeError with its name for an error."""
        status = getattr(self.driver, function)(*args)
        if status != 0:
            name = c.c_char_p()
            self.driver.cuGetErrorName(status, c.byref(name))
            raise RuntimeError(f"{function}: {(name.value or b'?').decode()} ({status})")

    def attribute(self, number: int) -> int:
        """Return an attribute of the device."""
        value = c.c_int()
        self.call("cuDeviceGetAttribute", c.byref(value), number, 0)
        return value.value

    def describe(self) -> dict[str, Any]:
        """Return what identifies the device and its driver."""
        name, version, count = c.create_string_buffer(128), c.c_int(), c.c_int()
        self.call("cuDeviceGetName", name, 128, 0)
        self.call("cuDriverGetVersion", c.byref(version))
        self.call("cuDeviceGetCount", c.byref(count))
        clocks = {"max_mhz": self.attribute(13) // 1000, "l2_bytes": self.attribute(38)}
        return {
            "name": name.value.decode(),
            "arch": self.arch,
            "driver_cuda": version.value,
            "multiprocessors": self.multiprocessors,
            "gpus": count.value,
            **clocks,
        }

    def allocate(self, size: int, *, of_host: bool = False) -> int:
        """Return the address of zeroed memory."""
        at = c.c_uint64()
        if of_host:
            self.call("cuMemHostAlloc", c.byref(at), c.c_size_t(size), 2)  # mapped
            c.memset(at.value, 0, size)
        else:
            self.call("cuMemAlloc_v2", c.byref(at), c.c_size_t(size))
            self.call("cuMemsetD8_v2", at, c.c_ubyte(0), c.c_size_t(size))
        return at.value

    def function(self, kernel: str, shared: int = 0) -> c.c_void_p:
        """Return a kernel that may have so much shared memory."""
        found = c.c_void_p()
        self.call("cuModuleGetFunction", c.byref(found), self._module, kernel.encode())
        self.call("cuFuncSetAttribute", found, 8, shared)
        return found

    def submit(self, function: Any, shape: tuple[int, ...], args: Any = None, *, how: str) -> None:
        """Launch without waiting."""
        extra = () if how == "cuLaunchCooperativeKernel" else (None,)
        blocks, threads, shared = shape
        self.call(how, function, blocks, 1, 1, threads, 1, 1, shared, None, args, *extra)

    def launch(self, kernel: str, blocks: int, threads: int, shared: int, args: Any) -> None:
        """Run a kernel to its end."""
        shape = (blocks, threads, shared)
        self.submit(self.function(kernel, shared), shape, args, how="cuLaunchKernel")
        self.call("cuCtxSynchronize")

    def read(self, at: int) -> list[int]:
        """Return the results' words."""
        words = (c.c_uint64 * WORDS)()
        self.call("cuMemcpyDtoH_v2", words, c.c_uint64(at), c.c_size_t(8 * WORDS))
        return list(words)

    def empty_cache(self) -> None:
        """Fill the second-level cache with what nobody reads."""
        size = max(4 * self.attribute(38), 1 << 26)
        self._scratch = self._scratch or self.allocate(size)
        self.call("cuMemsetD8_v2", c.c_uint64(self._scratch), c.c_ubyte(1), c.c_size_t(size))
        self.call("cuCtxSynchronize")

    def wake(self) -> None:
        """Keep the device busy until its clock rate has gone up."""
        end = time.monotonic() + 0.3
        while time.monotonic() < end:
            self.empty_cache()

    def elapsed_us(self, act: Callable[[], None]) -> float:
        """Return the time between two events around what `act` submits."""
        events = [c.c_void_p(), c.c_void_p()]
        for event in events:
            self.call("cuEventCreate", c.byref(event), 0)
        self.call("cuEventRecord", events[0], None)
        act()
        self.call("cuEventRecord", events[1], None)
        self.call("cuEventSynchronize", events[1])
        milliseconds = c.c_float()
        self.call("cuEventElapsedTime", c.byref(milliseconds), *events)
        return 1000.0 * milliseconds.value


def median(values: list[float]) -> float:
    """Return the middle value."""
    return sorted(values)[len(values) // 2]


def arguments(*values: int) -> tuple[Any, list[Any]]:
    """Return a kernel's arguments of 64 bits, and what they point to."""
    words = [c.c_uint64(value) for value in values]
    return (c.c_void_p * len(words))(*map(c.addressof, words)), words


def run(device: Gpu | Machine, name: str) -> dict[str, Any]:
    """Run a probe; return what it found."""
    probe = (CHECKS | MEASURES)[name]
    blocks = probe.blocks or device.multiprocessors
    rounds = probe.rounds if device.fast else probe.few
    size = max(1 << 20, 2 * blocks * rounds * TILE if "copy" in name else 0)
    if name == "measure_dram":
        size = DRAM_BYTES if device.fast else rounds * (131072 + 128)
    memory, host = device.allocate(size), device.allocate(1 << 16, of_host=True)
    warm, results = device.allocate(8 * WORDS), device.allocate(8 * WORDS)
    before, _words = arguments(warm, memory, host, rounds)
    args, _kept = arguments(results, memory, host, rounds)
    if name in MEASURES:
        device.wake()
    if name == "measure_dram":
        device.launch("prepare_dram", 1, 1, 0, before)
        device.empty_cache()
    elif name in MEASURES:  # code and data are brought to where they are used
        device.launch(probe.kernel or name, blocks, probe.threads, probe.shared, before)
    device.launch(probe.kernel or name, blocks, probe.threads, probe.shared, args)
    wrong, ended, *values = device.read(results)
    found = {"probe": name, "wrong": wrong, "ended": ended, "threads": blocks * probe.threads}
    if name in MEASURES:
        cycles, count = values[:2]
        found |= {"cycles": cycles, "count": count, "each": round(cycles / max(count, 1), 5)}
        if probe.values:
            found["values"] = sorted(values[2 : 2 + probe.values])
    return found


def launch_costs(gpu: Gpu) -> dict[str, Any]:
    """Return what a launch costs: the host, a queue that is full, and from call to end."""
    found: dict[str, Any] = {"probe": "launch", "wrong": 0}
    gpu.wake()
    args, _kept = arguments(gpu.allocate(8 * WORDS), 0, 0, 3_000_000)
    function, spin = gpu.function("empty"), gpu.function("measure_clock")
    for how, name in (("cuLaunchKernel", "plain"), ("cuLaunchCooperativeKernel", "cooperative")):
        host, trips = [], []

        def many(how: str = how, host: list[float] = host) -> None:
            for _ in range(200):
                begin = time.perf_counter_ns()
                gpu.submit(function, (gpu.multiprocessors, 128, 0), how=how)
                host.append((time.perf_counter_ns() - begin) / 1000)

        def behind(act: Callable[[], None] | None) -> float:  # 3 ms in which the host goes ahead
            def both() -> None:
                gpu.submit(spin, (1, 1, 0), args, how="cuLaunchKernel")
                if act:
                    act()

            return gpu.elapsed_us(both)

        gpu.elapsed_us(many)
        gaps = [(behind(many) - behind(None)) / 200 for _ in range(5)]
        for _ in range(200):
            begin = time.perf_counter_ns()
            gpu.submit(function, (gpu.multiprocessors, 128, 0), how=how)
            gpu.call("cuCtxSynchronize")
            trips.append((time.perf_counter_ns() - begin) / 1000)
        values = {"host_us": median(host), "queued_us": median(gaps), "to_end_us": median(trips)}
        found |= {f"{name}_{key}": round(value, 3) for key, value in values.items()}
    return found


def device_copy(gpu: Gpu) -> dict[str, Any]:
    """Return the rate of the driver's own copy within the device, read and written."""
    size = 1 << 30
    source, destination = gpu.allocate(size), gpu.allocate(size)

    def copy() -> None:
        pointers = c.c_uint64(destination), c.c_uint64(source)
        gpu.call("cuMemcpyDtoDAsync_v2", *pointers, c.c_size_t(size), None)

    gpu.wake()
    times = [gpu.elapsed_us(copy) for _ in range(20)]
    rate = 2 * size / median(times) / 1000
    return {"probe": "device_copy", "wrong": 0, "us": median(times), "gb_per_s": round(rate, 1)}


def clock(lines: list[dict[str, Any]]) -> dict[str, float]:
    """Return the constants of clock_a.env that one GPU can measure, from what the probes found."""
    found = {line["probe"]: line for line in lines if not line.get("wrong")}
    each = {name.removeprefix("measure_"): f["each"] for name, f in found.items() if "each" in f}
    straight = {
        "ALU": ("alu", 0.5),  # a step is two
        "SHUFFLE": ("shuffle", 1),
        "BARRIER": ("barrier", 1),
        "SHARED": ("shared", 1),
        "L1": ("l1", 1),
        "L2": ("l2", 1),
        "HOST": ("host", 1),
        "ATOMIC": ("atomic_rate", 1),
        "BULK": ("bulk_first", 1),
        "CLUSTER": ("cluster", 1),
    }
    constants = {name: each[of] * by for name, (of, by) in straight.items() if of in each}
    if "clock" in each:
        constants["MHZ"] = 1000 * each["clock"]
    if "branch" in each and "alu" in each:  # a step also adds and compares
        constants["BRANCH"] = each["branch"] - each["alu"]
    if "bulk_copy" in each:
        constants["BULK_BYTES"] = 1 / each["bulk_copy"]
    for scope in ("device", "system"):  # its store takes a trip before
        if f"store_fence_{scope}" in each and "l2" in each:
            constants[f"FENCE_{scope.upper()}"] = each[f"store_fence_{scope}"] - each["l2"]
    return constants


def main() -> int:
    """Run the probes that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machine", metavar="LIB", help="libptx_machine.so; KERNELS is $UEC_PTX")
    parser.add_argument("kernels")
    parser.add_argument("probes", nargs="+", choices=["device", *CHECKS, *MEASURES, *HOST_ONLY])
    options = parser.parse_args()
    device = Machine(options.machine) if options.machine else Gpu(options.kernels)
    failed = False
    for name in options.probes:
        if isinstance(device, Gpu) and name in ("device", *HOST_ONLY):
            makers = {"device": Gpu.describe, "launch": launch_costs, "device_copy": device_copy}
            found = makers[name](device)
        else:
            found = run(device, name)
        failed |= found.get("wrong", 0) != 0 or found.get("ended") != found.get("threads")
        print(json.dumps(found), flush=True)
    if options.machine:
        c.CDLL(None).exit(1 if failed else 0)  # the machine says what it found as it ends
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
