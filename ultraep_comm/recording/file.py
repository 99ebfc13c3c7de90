"""The file of a recorder: one rank's calls, with their plans.

An ``.npz`` file of plain arrays. N calls, oldest first; G ranks, S slots, E experts:

| array                        | what                                                         |
|------------------------------|--------------------------------------------------------------|
| ``magic``, ``version``       | ``"ultraep_comm recording"``, 1                              |
| ``run``                      | a string that names one group of one run                     |
| ``rank``                     | the rank that made the calls                                 |
| ``machine``                  | a string; ranks with the same one share a monotonic clock    |
| ``epoch_ns``                 | added to times, gives nanoseconds since 1970                 |
| ``num_calls``                | calls made while recording; the last N of them are here      |
| ``failed_epoch``             | the first call that failed, which may not be here; 0: none   |
| ``home [E]``, ``domain [G]`` | the group's constants                                        |
| ``calls [N]`` of ``CALL``    | each call: operation, times, what is known of its plan       |
| ``slot_expert [N, G, S]``    | -1 where the plan is not known                               |
| ``moves [N, G, S]``          | slots that the call writes to or, of a reduction, reads      |
| ``slot_quota [N, G, S]``     | 0 where quotas are not known                                 |
| ``home_quota [N, E]``        | likewise                                                     |
| ``load [N, G, E]``           | 0 where not known; no rows if loads were not recorded        |
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from enum import IntFlag
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from ultraep_comm.errors import RecordingError, UltraEPError
from ultraep_comm.plan.schedule import MODES
from ultraep_comm.system import write_whole

MAGIC = "ultraep_comm recording"
VERSION = 1
MAX_TEXT = 128  # characters of run and machine
OPERATIONS = ("gather_load", "gather_and_plan", "replicate_experts", "reduce_expert_grads")


class Known(IntFlag):
    """What a recording knows of a call's plan."""

    PLACEMENT = 1
    QUOTAS = 2
    LOAD = 4


_EVER = 1 << 62  # nanoseconds: 146 years
# The dtype of each field of a call, and the range of its values.
_CALL = {
    "operation": (np.int32, 0, len(OPERATIONS)),  # index into OPERATIONS
    "mode": (np.int32, -1, len(MODES)),  # a Mode; -1: none, or chosen on the device
    "epoch": (np.int64, 1, _EVER),
    "layer": (np.int64, -1, 1 << 31),  # of the handle; -1: the call took a plan, or none
    "microbatch": (np.int64, -1, 1 << 32),  # likewise
    "begin_ns": (np.int64, 0, _EVER),  # the caller entered the call; the rank's monotonic clock
    "end_ns": (np.int64, -1, _EVER),  # the rank's part finished; -1: not known, or it failed
    "expert_bytes": (np.int64, 0, 1 << 48),  # bytes that the call moves for each replica
    "known": (np.int32, 0, 1 << len(Known)),  # Known flags of the plan
}
CALL = np.dtype([(name, dtype) for name, (dtype, _, _) in _CALL.items()])


@dataclass(frozen=True, kw_only=True, eq=False)
class Recording:
    """One rank's calls: the arrays of the file; ``source`` is the file or rank, for messages."""

    source: str
    run: str
    rank: int
    machine: str
    epoch_ns: int
    num_calls: int
    failed_epoch: int
    home: NDArray[np.int32]
    domain: NDArray[np.int32]
    calls: NDArray[np.void]
    slot_expert: NDArray[np.int32]
    moves: NDArray[np.bool_]
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
        """Return the bytes that each call ``[N]`` moves into or out of this rank's slots.

        -1 where the plan is not known; 0 for calls without a plan.
        """
        moves = self.moves[:, self.rank].sum(axis=1)
        known = self.calls["known"] & Known.PLACEMENT > 0
        moved: NDArray[np.int64] = np.where(known, moves * self.calls["expert_bytes"], -1)
        has_plan = self.calls["operation"] >= OPERATIONS.index("replicate_experts")
        return np.where(has_plan, moved, 0)


# ---- writing ------------------------------------------------------------------------------------


def save_recording(recording: Recording, path: Path) -> None:
    """Write a recording; equal recordings give equal bytes.

    Raises:
        OSError: the file cannot be written. An existing file is left as it was.
    """
    arrays: dict[str, Any] = {"magic": MAGIC, "version": VERSION}
    arrays |= {f.name: getattr(recording, f.name) for f in fields(recording) if f.name != "source"}

    def write(file: BinaryIO) -> None:
        np.savez_compressed(file, **arrays)

    write_whole(path, write)


# ---- reading ------------------------------------------------------------------------------------

_I32, _I64 = np.dtype(np.int32), np.dtype(np.int64)
# The dtype, the axes and the range of each array. L is N, or 0 where loads were not recorded.
_FORMS: dict[str, tuple[np.dtype[Any], str, tuple[int, int | str] | None]] = {
    "home": (_I32, "E", (0, "G")),
    "domain": (_I32, "G", (0, "G")),
    "rank": (_I64, "", (0, "G")),
    "epoch_ns": (_I64, "", (-_EVER, _EVER)),
    "num_calls": (_I64, "", (0, _EVER)),
    "failed_epoch": (_I64, "", (0, _EVER)),
    "calls": (CALL, "N", None),
    "slot_expert": (_I32, "NGS", (-1, "E")),
    "moves": (np.dtype(np.bool_), "NGS", None),
    "slot_quota": (_I32, "NGS", (0, 1 << 31)),
    "home_quota": (_I32, "NE", (0, 1 << 31)),
    "load": (_I32, "LGE", (0, 1 << 31)),
}
_TEXTS = ("run", "machine")


def load_recording(path: Path, *, loads: bool = True) -> Recording:
    """Read a recording and check every value.

    Args:
        path: the file.
        loads: read ``load`` too, which is most of the file; else it has no rows.

    Raises:
        RecordingError: not a recording, damaged, or of another version; the text names the file.
        OSError: the file cannot be read.
    """
    names = {"magic", "version", *_TEXTS, *_FORMS} - (set() if loads else {"load"})
    arrays = read_arrays(path, names, RecordingError, "a recording written by recorder.dump()")
    if str(arrays.get("magic")) != MAGIC:
        raise RecordingError(
            f"{path} has no magic string {MAGIC!r}; expected a file written by recorder.dump()"
        )
    version = str(arrays.get("version"))
    if version != str(VERSION):
        raise RecordingError(
            f"{path} is a recording of version {version[:_TEXT]}; expected version {VERSION}. Read"
            " it with the ultraep_comm that wrote it"
        )
    try:
        if not loads and {"domain", "home"} <= arrays.keys():
            arrays["load"] = np.empty((0, arrays["domain"].size, arrays["home"].size), np.int32)
        _check_forms(arrays)
        values: dict[str, Any] = {name: arrays[name] for name in (*_TEXTS, *_FORMS)}
        values |= {name: value.item() for name, value in values.items() if value.ndim == 0}
        recording = Recording(source=str(path), **values)
        _check_values(recording)
    except ValueError as error:
        raise RecordingError(f"{path} is not a recording of version {VERSION}: {error}") from error
    return recording


def _check_forms(arrays: Mapping[str, NDArray[Any]]) -> None:
    """Raise ValueError for a missing array, or one of another dtype, shape or range."""
    lengths: dict[str, int] = {}
    for name in (*_TEXTS, *_FORMS):
        if name not in arrays:
            raise ValueError(f"it has no array {name!r}")
        found = arrays[name]
        if name in _TEXTS:
            if found.dtype.kind != "U" or found.shape != () or found.itemsize > 4 * MAX_TEXT:
                raise ValueError(
                    f"{name} has dtype {found.dtype} and shape {found.shape}; expected a string of"
                    f" at most {MAX_TEXT} characters"
                )
            continue
        dtype, axes, _ = _FORMS[name]
        shape = [lengths.get(axis, length) for axis, length in zip(axes, found.shape, strict=False)]
        if found.dtype != dtype or found.ndim != len(axes) or list(found.shape) != shape:
            raise ValueError(
                f"{name} has dtype {found.dtype} and shape {list(found.shape)}; expected {dtype},"
                f" [{', '.join(str(lengths.get(axis, 'any')) for axis in axes)}]"
            )
        lengths.update(zip(axes, found.shape, strict=True))
    if lengths["L"] not in (0, lengths["N"]):
        raise ValueError(f"load has {lengths['L']} rows; expected {lengths['N']}, or none")
    for name, (_, _, limits) in _FORMS.items():
        if limits is not None:
            low, high = limits
            _check_range(name, arrays[name], low, lengths[high] if isinstance(high, str) else high)
    for name, (_, low, high) in _CALL.items():
        _check_range(f"calls[{name!r}]", arrays["calls"][name], low, high)


def _check_values(r: Recording) -> None:
    """Raise ValueError for values that contradict each other."""
    calls = r.calls
    if r.num_calls < len(calls):
        raise ValueError(f"num_calls is {r.num_calls}; expected at least {len(calls)}")
    if (np.diff(calls["epoch"]) <= 0).any():
        raise ValueError("calls['epoch'] does not grow from call to call")
    ended = calls["end_ns"] != -1
    if (calls["end_ns"] < calls["begin_ns"])[ended].any():
        raise ValueError("calls['end_ns'] has a call that ends before it begins")
    if (r.slot_quota[r.slot_expert < 0] != 0).any():
        raise ValueError("slot_quota has tokens for an empty slot")
    if r.moves[r.slot_expert < 0].any():
        raise ValueError("moves has an empty slot")
    unknown = (calls["known"] & Known.PLACEMENT) == 0
    if (r.slot_expert[unknown] >= 0).any() or (calls["known"][unknown] != 0).any():
        raise ValueError("slot_expert has replicas in a call whose plan is not known")


def _check_range(name: str, array: NDArray[Any], low: int, high: int) -> None:
    if array.size and not (low <= array.min() and array.max() < high):
        raise ValueError(
            f"{name} has values from {array.min()} to {array.max()}; expected [{low}, {high})"
        )


_TEXT = 200  # characters of a file that an error quotes


def read_arrays(
    path: Path, names: Collection[str], error: type[UltraEPError], expected: str
) -> dict[str, NDArray[Any]]:
    """Return those of the named arrays that an ``.npz`` file has.

    Raises:
        UltraEPError: of type ``error``: the file has none of the arrays, or Python objects; is
            damaged; or takes more than half of the memory when unpacked. The text names the file
            and what was ``expected``.
        OSError: the file cannot be opened.
    """
    with path.open("rb") as file:
        try:
            # For other files NumPy's error suggests to load pickles.
            if file.read(2) != b"PK":
                raise ValueError("it is not an .npz file")
            file.seek(0)
            with np.load(file, allow_pickle=False) as archive:
                total = sum(member.file_size for member in archive.zip.infolist())
                max_bytes = physical_bytes() // 2
                if total > max_bytes:
                    raise ValueError(
                        f"its arrays take {total} bytes; expected at most {max_bytes}, half of this"
                        " machine's memory"
                    )
                # NumPy returns a member that is no array as bytes.
                found = {name: np.asarray(archive[name]) for name in names if name in archive}
                for array in found.values():
                    repr(array)  # raises here, not in an error's text, if a string is invalid
                if not found:
                    raise ValueError(f"it has the arrays {sorted(archive.files)[:20]}")
        except Exception as problem:  # damage raises a dozen types
            text = str(problem)[:_TEXT]
            raise error(f"{path} is not {expected}, or is damaged: {text}") from problem
    return found


def physical_bytes() -> int:
    """Return the machine's memory in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


# ---- several ranks ------------------------------------------------------------------------------


def load_recordings(paths: Iterable[Path], *, loads: bool = True) -> list[Recording]:
    """Read the files of one group's ranks and check that they belong together.

    Args:
        paths: files, or folders for all ``*.npz`` files in them.
        loads: as for :func:`load_recording`.

    Returns:
        One recording for each rank that has a file, in rank order.

    Raises:
        RecordingError: as :func:`load_recording`; a rank has two files; or the files are from
            different groups or runs. The text names the file.
        OSError: a file cannot be read.
    """
    files: list[Path] = []
    for path in paths:
        files += sorted(path.glob("*.npz")) if path.is_dir() else [path]
        if path.is_dir() and not files:
            raise RecordingError(f"{path} has no *.npz files; expected recordings")
    if not files:
        raise RecordingError("no files were given; expected recordings of one group's ranks")
    found = (load_recording(file, loads=loads) for file in files)
    recordings = sorted(found, key=lambda r: r.rank)
    first = recordings[0]
    for previous, other in itertools.pairwise(recordings):
        _check_same_run(first, other)
        if other.rank == previous.rank:
            raise RecordingError(
                f"{previous.source} and {other.source} are both of rank {other.rank}; expected one"
                " group's files, one of each rank"
            )
    return recordings


def _check_same_run(first: Recording, other: Recording) -> None:
    if other.run != first.run:
        raise RecordingError(
            f"{other.source} and {first.source} are from two groups or two runs; expected files of"
            " one group and one run"
        )
    constants = ("num_ranks", "num_experts", "slots_per_rank")
    found, expected = ([getattr(r, name) for name in constants] for r in (other, first))
    if found != expected or not (
        np.array_equal(first.home, other.home) and np.array_equal(first.domain, other.domain)
    ):
        raise RecordingError(
            f"{other.source} is from a group with ranks, experts and slots {found},"
            f" {first.source} from one with {expected}, or their homes or domains differ; expected"
            " files of one group"
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
            f"call {one['epoch'][differ][0]} differs between {first.source} and {other.source};"
            " expected files of one run"
        )
