"""Constants of the cost model: measured, from a file that `bench calibrate` writes, or published.

Every rank uses those that rank 0 sends in `new_group`, so that all choose the same modes.
"""

from __future__ import annotations

import platform
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from ultraep_comm import env
from ultraep_comm.driver import Links
from ultraep_comm.errors import InvalidArgumentError
from ultraep_comm.system import read_json

KIND = "ultraep_comm.calibration"
FORMAT = 2  # changes with the fields
ENGINES = ("host", "cuda", "loopback", "c10d")  # loopback: all ranks on one GPU
Constants = tuple[int, int, int, int, int]

_MIN_GBPS = 1e-3
MAX_FIGURE = 1e6  # upper bound of every figure, in microseconds or 10^9 bytes per second
_PS = 1e12

# Published rates of an NVLink one way, in 10^9 bytes per second, by the major compute capability:
# what NCCL assumes of NVLink 4, and of NVLink 5 the 710 that a rank of an NVL72 rack sends.
NVLINKS = 18  # per GPU on a board with NVSwitches
NVLINK_GBPS = {9: 20.6, 10: 710 / NVLINKS}
PCIE_GBPS = 50.0  # of the 64 that PCIe 5 has nominally


def link_gbps(capability: tuple[int, int], links: Links | None) -> float:
    """Return the rate of a GPU's links one way, in 10^9 bytes per second: published, not measured.

    Args:
        capability: the GPU's compute capability; a later one than those known is taken for 10.0.
        links: what NVML knows of it; None: as many NVLinks as on a board with NVSwitches.
    """
    active = NVLINKS if links is None else sum(links.links)
    return active * NVLINK_GBPS.get(capability[0], NVLINK_GBPS[10]) or PCIE_GBPS


def describe_links(links: Links | None) -> str:
    """Return by what :func:`link_gbps` found a rate."""
    if links is None:
        return f"{NVLINKS} NVLinks, assumed since NVML does not answer"
    return f"{sum(links.links)} active NVLinks" if any(links.links) else "PCIe 5: no active NVLinks"


@dataclass(frozen=True, kw_only=True)
class MeasuredCosts:
    """Measured costs of one engine.

    Attributes:
        device: the device they were measured on.
        ranks: the number of ranks that took part.
        store_gbps: one rank storing cached bytes to a peer, in 10^9 bytes per second.
        load_gbps: one rank loading an uncached source, in 10^9 bytes per second.
        flag_us: cost of one more flag group.
        hop_us: half of a flag's round trip to a peer.
        parallel: bandwidth of all ranks together over that of one rank alone.
        call_us: time of a call that moves nothing.
    """

    device: str
    ranks: int
    store_gbps: float
    load_gbps: float
    flag_us: float
    hop_us: float
    parallel: float
    call_us: float

    def constants(self, num_ranks: int, *, scales: bool) -> Constants:
        """Return the fields of `CostModel` for a group of ``num_ranks``.

        ``scales``: each rank has its own links, so that bandwidth grows with their number.
        """
        parallel = self.parallel * num_ranks / self.ranks if scales else self.parallel
        return (
            round(1024 / self.store_gbps / 1e9 * _PS),
            round(1024 / self.load_gbps / 1e9 * _PS),
            round(self.flag_us * 1e-6 * _PS),
            round(self.hop_us * 1e-6 * _PS),
            max(100, round(100 * parallel)),
        )


def choose_constants(
    costs: Mapping[str, MeasuredCosts], engine: str, num_ranks: int, built_in: Constants
) -> Constants:
    """Return the cost model's constants for one of ``ENGINES``: measured, else the built-in."""
    found = costs.get(engine)
    if found is None:
        return built_in
    # On separate machines each rank has a link of its own.
    apart = engine == "c10d" and found.parallel > 0.9 * found.ranks
    return found.constants(num_ranks, scales=engine == "cuda" or apart)


def from_environment(engine: str) -> dict[str, MeasuredCosts]:
    """Return the costs in the file of ULTRAEP_CALIBRATION; empty if the variable is unset.

    ``engine`` is `new_group`'s argument: of "host" or "c10d", other entries are not checked.

    Raises:
        InvalidArgumentError: see :func:`read_calibration`.
    """
    path = env.calibration()
    if path is None:
        return {}
    return read_calibration(path, used=(engine,) if engine in ("host", "c10d") else ENGINES)


def read_calibration(path: Path, *, used: Sequence[str] = ENGINES) -> dict[str, MeasuredCosts]:
    """Return the costs in a file, by engine; check that those ``used`` were measured here.

    Raises:
        InvalidArgumentError: the file cannot be read, is truncated or not a calibration, has a
            figure out of range, or comes from another machine. Names the file.
    """
    try:
        document = read_json(path)
    except OSError as error:
        raise _error(path, f"cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise _error(path, f"is damaged: it is not JSON ({error})") from None
    if not isinstance(document, dict) or document.get("kind") != KIND:
        raise _error(path, f"is not a calibration: its kind is not {KIND!r}")
    if document.get("format") != FORMAT:
        raise _error(path, f"has format {reprlib.repr(document.get('format'))}; expected {FORMAT}")
    entries = document.get("engines")
    if not isinstance(entries, dict) or not set(entries) <= set(ENGINES):
        raise _error(path, f"has an invalid 'engines'; expected figures for {list(ENGINES)}")
    costs = {name: _read_costs(path, name, entry) for name, entry in entries.items()}
    for name, found in costs.items():
        here = device_name(name) if name in used else None
        if here is not None and found.device != here:
            raise _error(
                path, f"was measured on {reprlib.repr(found.device)}, but this is {here!r}"
            )
    return costs


def make_calibration(costs: Mapping[str, MeasuredCosts]) -> dict[str, Any]:
    """Return the document that :func:`read_calibration` reads."""
    return {
        "kind": KIND,
        "format": FORMAT,
        "engines": {name: asdict(found) for name, found in costs.items()},
    }


def device_name(engine: str) -> str | None:
    """Return the name of the device that an engine runs on here; None if there is no GPU."""
    if engine in ("host", "c10d"):
        return f"{cpu_name()} ({platform.machine()})"
    if not torch.cuda.is_available():
        return None
    name: str = torch.cuda.get_device_name()
    return name


def cpu_name() -> str:
    """Return the model name of this machine's processor, or its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor()


def _read_costs(path: Path, engine: str, entry: object) -> MeasuredCosts:
    names = [item.name for item in fields(MeasuredCosts)]
    if not isinstance(entry, dict) or set(entry) != set(names):
        raise _error(path, f"has other fields for {engine!r} than {names}")
    if not isinstance(entry["device"], str):
        raise _error(path, f"has a device for {engine!r} that is not a string")
    lowest = {"ranks": 1, "parallel": 1, "store_gbps": _MIN_GBPS, "load_gbps": _MIN_GBPS}
    for name in names[1:]:
        value = entry[name]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not lowest.get(name, 0) <= value <= MAX_FIGURE:
            raise _error(
                path,
                f"has {name} = {reprlib.repr(value)} for {engine!r}; expected"
                f" {lowest.get(name, 0):g} to {MAX_FIGURE:g}",
            )
    if entry["ranks"] != int(entry["ranks"]):
        raise _error(path, f"has {reprlib.repr(entry['ranks'])} ranks for {engine!r}")
    return MeasuredCosts(**entry)


def _error(path: Path, what: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"calibration {path} {what}; write a new one with python -m ultraep_comm.bench calibrate"
        f" --output {path}, or unset ULTRAEP_CALIBRATION"
    )
