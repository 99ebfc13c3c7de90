"""What may hang or crash, each in a process of its own: ``python -m ultraep_comm.doctor.probes``.

A probe prints each finding at once, as a line of JSON, so that it is known even if the probe never
ends.
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

from ultraep_comm.driver import read_cuda, read_nvml

Fields = Iterator[dict[str, Any]]
HEAP_PROBE_BYTES = 1 << 20


# ---- in a child ---------------------------------------------------------------------------------


def probe_torch() -> Fields:
    """Import torch, and find what ``auto`` may choose."""
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
    from ultraep_comm.engines.cuda.make import probe_backends

    found: list[dict[str, str]] = []
    for c in probe_backends("auto", "auto"):
        found.append({"engine": c.engine, "fabric": c.fabric, "missing": c.reason})
        yield {"candidates": found}


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
    """Check the cubins, and that there is one for each compute capability."""
    from ultraep_comm.engines.cuda.kernels import check_info, cubin_folder, find_cubin, read_info
    from ultraep_comm.errors import UnsupportedError

    folder = cubin_folder()
    yield {"folder": str(folder)}
    cubins = []
    for path in sorted(folder.glob("ultraep_comm-sm_*.cubin")):
        cubin: dict[str, Any] = {"name": path.name}
        cubins.append(cubin)
        fails = "error"
        try:
            info = read_info(path)
            cubin |= {"cuda": (info.cuda_major, info.cuda_minor), "nvshmem": info.nvshmem}
            major = cuda_major or info.cuda_major
            check_info(info, cuda_major=major)
            fails = "nvshmem_error"
            version = (nvshmem[0], nvshmem[1]) if nvshmem else None
            check_info(info, cuda_major=major, nvshmem=version)
        except (UnsupportedError, OSError) as error:
            cubin[fails] = str(error)
    missing = []
    for major, minor in capabilities:
        try:
            find_cubin((major, minor))
        except UnsupportedError:
            missing.append((major, minor))
    yield {"cubins": cubins, "missing": missing}


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
        os.dup2(2, 1)  # keep what libraries print out of the answer
        try:
            for fields in PROBES[name](**json.loads(arguments)):
                print(json.dumps(fields), file=out, flush=True)
        except Exception as error:
            text = f"raised {type(error).__name__}: {error}"
            print(json.dumps({"error": text}), file=out, flush=True)
    os._exit(0)  # skip libraries' exit handlers, which may crash


# ---- in the doctor's process --------------------------------------------------------------------


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
            out = stack.enter_context(tempfile.TemporaryFile())
            errors = stack.enter_context(tempfile.TemporaryFile())
            child = subprocess.Popen(
                [sys.executable, "-m", __name__, name, json.dumps(arguments)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=errors,
                start_new_session=True,
            )
            stack.callback(_end, child)
            children[name] = child, out, errors
        end = time.monotonic() + limit
        return {name: _answer(*child, limit, end) for name, child in children.items()}


def _answer(
    child: subprocess.Popen[bytes], out: IO[bytes], errors: IO[bytes], limit: float, end: float
) -> dict[str, Any]:
    error = ""
    try:
        status = child.wait(max(end - time.monotonic(), 0))
    except subprocess.TimeoutExpired:
        error = f"did not end within {limit:g} s"
    else:
        if status < 0:
            error = f"was ended by {signal.Signals(-status).name}"
        elif status > 0:
            error = f"ended with status {status}"
    printed = _lines(errors) if error else []
    found = {"error": "; it printed: ".join([error, *printed[-1:]])} if error else {}
    for line in _lines(out):
        with contextlib.suppress(ValueError):  # the last line may be cut off
            found |= json.loads(line)
    return found


def _lines(file: IO[bytes]) -> list[str]:
    file.seek(0)
    return [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kill a child, without waiting long: one that is stuck in the driver cannot be killed."""
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
