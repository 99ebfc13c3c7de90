"""The file of a recorder: one rank's calls, with the plans that they were made by.

An ``.npz`` file of plain arrays. N calls, oldest first; G ranks, S slots, E experts:

| array                        | what                                                         |
|------------------------------|--------------------------------------------------------------|
| ``magic``, ``version``       | ``"ultraep_comm recording"``, 1                              |
| ``rank``                     | whose calls these are                                        |
| ``epoch_ns``                 | to be added to times, for nanoseconds since 1970             |
| ``num_calls``                | calls made while it recorded, of which the last N are here   |
| ``home [E]``, ``domain [G]`` | the group's constants                                        |
| ``calls [N]`` of ``CALL``    | what was called, when, and what is known of its plan         |
| ``slot_expert [N, G, S]``    | -1 where the plan is not known                               |
| ``slot_quota [N, G, S]``     | 0 where quotas are not known                                 |
| ``home_quota [N, E]``        | likewise                                                     |
| ``load [N, G, E]``           | 0 where the load is not known; no rows if loads were left out |
"""

from __future__ import annotations

import itertools
import struct
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from enum import IntFlag
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from ultraep_comm.errors import RecordingError
from ultraep_comm.files import write_whole
from ultraep_comm.schedule import MODES

MAGIC = "ultraep_comm recording"
VERSION = 1
OPERATIONS = ("gather_load", "gather_and_plan", "replicate_experts", "reduce_expert_grads")


class Known(IntFlag):
    """What a recording knows of a call's plan."""

    PLACEMENT = 1
    QUOTAS = 2
    LOAD = 4


CALL = np.dtype(
    [
        ("operation", np.int32),  # of OPERATIONS
        ("mode", np.int32),  # of MODES; -1: none, or chosen on the device
        ("epoch", np.int64),
        ("layer", np.int64),  # of the handle that was given; -1: a plan, or none
        ("microbatch", np.int64),  # likewise
        ("begin_ns", np.int64),  # the caller entered the call; the rank's monotonic clock
        ("end_ns", np.int64),  # the rank's part was finished; -1: not known
        ("expert_bytes", np.int64),  # that the call moves for each replica
        ("known", np.int32),  # of the plan: Known
    ]
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Recording:
    """One rank's calls; the module's text describes the arrays.

    Attributes:
        source: where it comes from, for messages.
        rank: whose calls these are.
        epoch_ns: added to times of ``calls`` it gives nanoseconds since 1970.
        num_calls: calls that were made while it recorded, of which the last N are here.
        home: int32 ``[E]``.
        domain: int32 ``[G]``.
        calls: ``[N]`` of :data:`CALL`, oldest first.
        slot_expert: int32 ``[N, G, S]``.
        slot_quota: int32 ``[N, G, S]``.
        home_quota: int32 ``[N, E]``.
        load: int32 ``[N, G, E]``, or ``[0, G, E]``: loads were not recorded.
    """

    source: str
    rank: int
    epoch_ns: int
    num_calls: int
    home: NDArray[np.int32]
    domain: NDArray[np.int32]
    calls: NDArray[np.void]
    slot_expert: NDArray[np.int32]
    slot_quota: NDArray[np.int32]
    home_quota: NDArray[np.int32]
    load: NDArray[np.int32]

    @property
    def num_ranks(self) -> int:
        """Return G."""
        return len(self.domain)

    @property
    def num_experts(self) -> int:
        """Return E."""
        return len(self.home)

    @property
    def slots_per_rank(self) -> int:
        """Return S."""
        return int(self.slot_expert.shape[2])

    def bytes_of_rank(self) -> NDArray[np.int64]:
        """Return, of each call ``[N]``, the bytes of the replicas in this rank's slots.

        A transfer brings them, a reduction takes them away. -1 where the plan is not known; 0 for
        calls without a plan.
        """
        filled = (self.slot_expert[:, self.rank] >= 0).sum(axis=1)
        known = self.calls["known"] & Known.PLACEMENT > 0
        moved: NDArray[np.int64] = np.where(known, filled * self.calls["expert_bytes"], -1)
        return np.where(_has_plan(self.calls), moved, 0)


def _has_plan(calls: NDArray[np.void]) -> NDArray[np.bool_]:
    return np.isin(calls["operation"], [OPERATIONS.index(o) for o in OPERATIONS[2:]])


# ---- writing ------------------------------------------------------------------------------------


def save_recording(recording: Recording, path: Path) -> None:
    """Write a recording; the same bytes for the same recording.

    Raises:
        OSError: the file cannot be written. There is none then, or the one of before.
    """
    arrays: dict[str, Any] = {"magic": MAGIC, "version": VERSION}
    arrays |= {f.name: getattr(recording, f.name) for f in fields(recording) if f.name != "source"}

    def write(file: BinaryIO) -> None:
        np.savez_compressed(file, **arrays)

    write_whole(path, write)


# ---- reading ------------------------------------------------------------------------------------


def load_recording(path: Path) -> Recording:
    """Read a recording, and check all of it.

    Raises:
        RecordingError: it is something else, damaged, or of another version; names the file.
        OSError: it cannot be read.
    """
    try:
        archive = np.load(path, allow_pickle=False)
        if isinstance(archive, np.ndarray):
            raise RecordingError(f"{path} is a single array; expected a recording, an .npz file")
        with archive:
            arrays = {name: archive[name] for name in archive.files}
    except RecordingError:
        raise
    except (
        ValueError,
        EOFError,
        KeyError,
        RuntimeError,  # a zip file that says it is encrypted, or compressed otherwise
        OverflowError,
        MemoryError,
        struct.error,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        raise RecordingError(
            f"{path} is no recording, or a damaged one: {error}; expected what recorder.dump()"
            " writes"
        ) from error
    return _checked(path, arrays)


class _Checker:
    """The arrays of a file, and what to say of one that is not as expected."""

    def __init__(self, path: Path, arrays: dict[str, Any]) -> None:
        self._path = path
        self._arrays = arrays

    def fail(self, text: str) -> RecordingError:
        return RecordingError(f"{self._path} is no recording of version {VERSION}: {text}")

    def array(self, name: str, dtype: np.dtype[Any], shape: Sequence[int | None]) -> NDArray[Any]:
        """Return an array of this dtype and shape; None: any length."""
        if name not in self._arrays:
            raise self.fail(f"it has no array {name!r}")
        array: NDArray[Any] = self._arrays[name]
        same = len(array.shape) == len(shape) and all(
            b is None or a == b for a, b in zip(array.shape, shape, strict=True)
        )
        if array.dtype != dtype or not same:
            wanted = ["any" if length is None else length for length in shape]
            raise self.fail(
                f"{name} has dtype {array.dtype} and shape {array.shape}; expected {dtype},"
                f" {wanted}"
            )
        return array

    def integer(self, name: str) -> int:
        return int(self.array(name, np.dtype(np.int64), ()))

    def within(self, name: str, array: NDArray[Any], low: int, high: int) -> None:
        """Raise unless all values are in ``[low, high)``."""
        if array.size and not (low <= array.min() and array.max() < high):
            raise self.fail(
                f"{name} has values from {array.min()} to {array.max()}; expected [{low}, {high})"
            )


def _checked(path: Path, arrays: dict[str, Any]) -> Recording:
    check = _Checker(path, arrays)
    magic = arrays.get("magic")
    if magic is None or magic.dtype.kind != "U" or magic.shape != () or magic.item() != MAGIC:
        raise RecordingError(
            f"{path} has the arrays {sorted(arrays)}, and no magic word {MAGIC!r}; expected what"
            " recorder.dump() writes"
        )
    version = check.integer("version")
    if version != VERSION:
        raise RecordingError(
            f"{path} is a recording of version {version}; expected version {VERSION}. Read it with"
            " the ultraep_comm that wrote it"
        )
    i32 = np.dtype(np.int32)
    home, domain = check.array("home", i32, [None]), check.array("domain", i32, [None])
    num_ranks, num_experts = len(domain), len(home)
    calls = check.array("calls", CALL, [None])
    slot_expert = check.array("slot_expert", i32, [len(calls), num_ranks, None])
    load = check.array("load", i32, [None, num_ranks, num_experts])
    if len(load) not in (0, len(calls)):
        raise check.fail(f"load has {len(load)} rows; expected {len(calls)}, or none")
    recording = Recording(
        source=str(path),
        rank=check.integer("rank"),
        epoch_ns=check.integer("epoch_ns"),
        num_calls=check.integer("num_calls"),
        home=home,
        domain=domain,
        calls=calls,
        slot_expert=slot_expert,
        slot_quota=check.array("slot_quota", i32, slot_expert.shape),
        home_quota=check.array("home_quota", i32, [len(calls), num_experts]),
        load=load,
    )
    _check_values(check, recording)
    return recording


def _check_values(check: _Checker, recording: Recording) -> None:
    r, calls = recording, recording.calls
    top = 2**31
    check.within("rank", np.array(r.rank), 0, r.num_ranks)
    check.within("home", r.home, 0, r.num_ranks)
    check.within("slot_expert", r.slot_expert, -1, r.num_experts)
    for name in ("slot_quota", "home_quota", "load"):
        check.within(name, getattr(r, name), 0, top)
    check.within("calls['operation']", calls["operation"], 0, len(OPERATIONS))
    check.within("calls['mode']", calls["mode"], -1, len(MODES))
    check.within("calls['known']", calls["known"], 0, 1 << len(Known))
    check.within("calls['layer']", calls["layer"], -1, top)
    check.within("calls['microbatch']", calls["microbatch"], -1, 1 << 32)
    check.within("calls['expert_bytes']", calls["expert_bytes"], 0, 1 << 62)
    if r.num_calls < len(calls):
        raise check.fail(f"num_calls is {r.num_calls}; expected at least {len(calls)}")
    if (np.diff(calls["epoch"]) <= 0).any():
        raise check.fail("calls['epoch'] does not grow from call to call")
    ended = calls["end_ns"] != -1
    if (calls["end_ns"] < calls["begin_ns"])[ended].any():
        raise check.fail("calls['end_ns'] has a call that ends before it begins")


# ---- several ranks ------------------------------------------------------------------------------


def load_recordings(paths: Iterable[Path]) -> list[Recording]:
    """Read the files of one group's ranks, and check that they belong together.

    Args:
        paths: files; a folder stands for all files ``*.npz`` in it.

    Returns:
        A recording of each rank that has a file, by rank.

    Raises:
        RecordingError: as :func:`load_recording`; a rank has two files; or the files are of
            different groups or runs. Names the file.
        OSError: a file cannot be read.
    """
    files: list[Path] = []
    for path in paths:
        files += sorted(path.glob("*.npz")) if path.is_dir() else [path]
        if path.is_dir() and not files:
            raise RecordingError(f"{path} has no *.npz files; expected recordings")
    if not files:
        raise RecordingError("no file was named; expected recordings of one group's ranks")
    recordings = sorted((load_recording(file) for file in files), key=lambda r: r.rank)
    first = recordings[0]
    for previous, other in itertools.pairwise(recordings):
        if other.rank == previous.rank:
            raise RecordingError(
                f"{previous.source} and {other.source} are both of rank {other.rank}; expected one"
                " group's files, one of each rank"
            )
        _check_same_run(first, other)
    return recordings


def _check_same_run(first: Recording, other: Recording) -> None:
    constants = ("num_ranks", "num_experts", "slots_per_rank")
    found, expected = ([getattr(r, name) for name in constants] for r in (other, first))
    if found != expected or not (
        np.array_equal(first.home, other.home) and np.array_equal(first.domain, other.domain)
    ):
        raise RecordingError(
            f"{other.source} is of a group with ranks, experts and slots {found}, {first.source} of"
            f" one with {expected}, or with other homes or domains; expected files of one group"
        )
    _, ours, theirs = np.intersect1d(
        first.calls["epoch"], other.calls["epoch"], assume_unique=True, return_indices=True
    )
    one, two = first.calls[ours], other.calls[theirs]
    known = (one["known"] & two["known"] & Known.PLACEMENT) > 0
    differ = (one["operation"] != two["operation"]) | (
        known & (first.slot_expert[ours] != other.slot_expert[theirs]).any(axis=(1, 2))
    )
    if differ.any():
        raise RecordingError(
            f"call {one['epoch'][differ][0]} is not the same in {first.source} and {other.source};"
            " expected files of one run"
        )
