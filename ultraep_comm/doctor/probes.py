"""What may hang or crash, asked in processes of their own: ``python -m ultraep_comm.doctor.probes``.

A probe yields the fields that it has found as it finds them, so that they are known even if it never
ends. Each is a line of JSON.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from ultraep_comm.doctor.driver import read_cuda, read_nvml

Fields = Iterator[dict[str, Any]]
HEAP_PROBE_BYTES = 1 << 20


# ---- in a child ---------------------------------------------------------------------------------


def probe_torch() -> Fields:
    """Import torch, and look for all that ``auto`` may take."""
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        return
    yield {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "folder": str(Path(torch.__file__).parent),
    }
    from ultraep_comm.engines.cuda.make import find_ways

    ways: list[dict[str, str]] = []
    for way in find_ways("auto", "auto"):
        ways.append({"engine": way.engine, "fabric": way.fabric, "missing": way.reason})
        yield {"ways": ways}


def probe_nvshmem() -> Fields:
    """Load NVSHMEM's host library."""
    from ultraep_comm.fabrics.nvshmem_library import LIBRARY, find_library

    wheel = find_library()
    if wheel is not None:
        yield {"path": str(wheel)}
    try:
        library = ctypes.CDLL(LIBRARY if wheel is None else str(wheel))
    except OSError:
        if wheel is None:
            return
        raise
    version = [ctypes.c_int() for _ in range(3)]
    library.nvshmemx_vendor_get_version_info(*map(ctypes.byref, version))
    mapped = [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()]
    path = next((name for name in mapped if Path(name).name.startswith("libnvshmem_host")), "")
    yield {"version": [number.value for number in version], "path": path}


def probe_kernels(
    capabilities: list[list[int]], cuda_major: int | None, nvshmem: list[int] | None
) -> Fields:
    """Look at the cubins, and for one for each compute capability."""
    from ultraep_comm import _core
    from ultraep_comm.engines.cuda.kernels import check_info, cubin_folder, find_cubin, read_info
    from ultraep_comm.errors import UnsupportedError

    folder = cubin_folder()
    yield {"folder": str(folder)}
    cubins = []
    for path in sorted(folder.glob("ultraep_comm-sm_*.cubin")):
        cubin: dict[str, Any] = {"name": path.name}
        cubins.append(cubin)
        try:
            info = read_info(path)
            cubin |= {"cuda": (info.cuda_major, info.cuda_minor), "nvshmem": info.nvshmem}
            major = info.cuda_major if cuda_major is None else cuda_major
            check_info(info, cuda_major=major, layout=_core.cuda_layout())
        except (UnsupportedError, OSError) as error:
            cubin["error"] = str(error)
            continue
        try:
            version = None if nvshmem is None else (nvshmem[0], nvshmem[1])
            check_info(info, cuda_major=major, layout=_core.cuda_layout(), nvshmem=version)
        except UnsupportedError as error:
            cubin["nvshmem_error"] = str(error)
    yield {"cubins": cubins}
    missing = []
    for major, minor in capabilities:
        try:
            find_cubin((major, minor))
        except UnsupportedError:
            missing.append((major, minor))
    yield {"missing": missing}


def probe_heap() -> Fields:
    """Initialise NVSHMEM for this process alone, and allocate."""
    from ultraep_comm.engines.cuda.make import find_nvshmem_device

    device, runtime, _ = find_nvshmem_device()
    runtime.init(device.torch_device.index or 0, runtime.unique_id(), 0, 1)
    yield {"allocates": runtime.malloc(HEAP_PROBE_BYTES) != 0}


PROBES: dict[str, Callable[..., Fields]] = {
    "driver": read_cuda,
    "nvml": read_nvml,
    "torch": probe_torch,
    "nvshmem": probe_nvshmem,
    "kernels": probe_kernels,
    "heap": probe_heap,
}


def main(name: str, arguments: str) -> None:
    """Run a probe and print what it finds."""
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)  # libraries print too
        try:
            for fields in PROBES[name](**json.loads(arguments)):
                print(json.dumps(fields), file=out, flush=True)
        except Exception as error:
            text = f"raised {type(error).__name__}: {error}"
            print(json.dumps({"error": text}), file=out, flush=True)
    os._exit(0)  # how libraries come to their end is not the question


# ---- in the doctor's process --------------------------------------------------------------------


class _Child:
    """A probe in a process of its own."""

    def __init__(self, name: str, arguments: Mapping[str, Any]) -> None:
        self._out: IO[bytes] = tempfile.TemporaryFile()
        self._errors: IO[bytes] = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, name, json.dumps(arguments)],
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=self._errors,
            start_new_session=True,
        )

    def answer(self, limit: float, end: float) -> dict[str, Any]:
        """Return the fields that it found until ``end``; ``error`` if it hung or died."""
        error = ""
        try:
            status = self._process.wait(max(end - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            error = f"did not end within {limit:g} s"
        else:
            if status < 0:
                error = f"was ended by {signal.Signals(-status).name}"
            elif status > 0:
                error = f"ended with status {status}"
        if error:
            said = self._lines(self._errors)
            error += f"; its last words: {said[-1].strip()[:200]}" if said else ""
        found: dict[str, Any] = {"error": error} if error else {}
        for line in self._lines(self._out):
            if line.endswith("\n"):  # else it was ended while it wrote
                found |= json.loads(line)
        return found

    def end(self) -> None:
        """Kill it, without waiting long: a process that is stuck in the driver cannot be killed."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1)
        self._out.close()
        self._errors.close()

    @staticmethod
    def _lines(file: IO[bytes]) -> list[str]:
        file.seek(0)
        return file.read().decode(errors="replace").splitlines(keepends=True)


def ask(questions: Mapping[str, Mapping[str, Any]], limit: float) -> dict[str, dict[str, Any]]:
    """Run probes at the same time.

    Args:
        questions: the names of probes, with their arguments.
        limit: seconds, after which a probe is killed.

    Returns:
        The fields that each has found, and ``error``: how it failed, if it did.
    """
    with contextlib.ExitStack() as stack:
        children = {}
        for name, arguments in questions.items():
            children[name] = _Child(name, arguments)
            stack.callback(children[name].end)
        end = time.monotonic() + limit
        return {name: child.answer(limit, end) for name, child in children.items()}


if __name__ == "__main__":
    main(*sys.argv[1:])
