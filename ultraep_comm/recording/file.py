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
| ``moves [N, G, S]``          | slots that the call writes to or, of a reduction, reads;     |
|                              | older files lack it: all filled ones                         |
| ``slot_quota [N, G, S]``     | 0 where quotas are not known                                 |
| ``home_quota [N, E]``        | likewise                                                     |
| ``load [N, G, E]``           | 0 where not known; no rows if loads were not recorded        |
"""

from __future__ import annotations

import itertools
import math
import os
import stat
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from enum import IntFlag
from pathlib import Path
from types import TracebackType
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


CALL = np.dtype(
    [
        ("operation", np.int32),  # index into OPERATIONS
        ("mode", np.int32),  # a Mode; -1: none, or chosen on the device
        ("epoch", np.int64),
        ("layer", np.int64),  # of the handle; -1: the call took a plan, or none
        ("microbatch", np.int64),  # likewise
        ("begin_ns", np.int64),  # when the caller entered the call; the rank's monotonic clock
        ("end_ns", np.int64),  # when the rank's part finished; -1: not known, or it failed
        ("expert_bytes", np.int64),  # bytes that the call moves for each replica
        ("known", np.int32),  # Known flags of the plan
    ]
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Recording:
    """One rank's calls; the module's docstring describes the arrays.

    Attributes:
        source: the file or rank, for messages.
        run: names one group of one run.
        rank: the rank that made the calls.
        machine: ranks with the same one share a monotonic clock.
        epoch_ns: added to times of ``calls``, gives nanoseconds since 1970.
        num_calls: calls made while recording; ``calls`` has the last N of them.
        failed_epoch: the first call that failed, which may not be in ``calls``; 0: none.
        home: int32 ``[E]``.
        domain: int32 ``[G]``.
        calls: ``[N]`` of :data:`CALL`, oldest first.
        slot_expert: int32 ``[N, G, S]``.
        moves: bool ``[N, G, S]``, the slots that a call writes to or, of a reduction, reads.
        slot_quota: int32 ``[N, G, S]``.
        home_quota: int32 ``[N, E]``.
        load: int32 ``[N, G, E]``, or ``[0, G, E]``: loads were not recorded.
    """

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
        return np.where(_has_plan(self.calls), moved, 0)


def _has_plan(calls: NDArray[np.void]) -> NDArray[np.bool_]:
    return np.isin(calls["operation"], [OPERATIONS.index(o) for o in OPERATIONS[2:]])


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


def load_recording(path: Path, *, loads: bool = True) -> Recording:
    """Read a recording and check every value.

    Args:
        path: the file.
        loads: read ``load`` too, which is most of the file; else it has no rows.

    Raises:
        RecordingError: not a recording, damaged, or of another version; the text names the file.
        OSError: the file cannot be read.
    """
    try:
        with ArrayFile(path) as file:
            return _read(_Checker(path, file), loads)
    except ArrayFileError as error:
        raise RecordingError(
            f"{path} is not a recording, or is damaged: {error}; expected a file written"
            " by recorder.dump()"
        ) from error


class _Checker:
    """Reads the arrays of a file and raises RecordingError for unexpected ones."""

    def __init__(self, path: Path, file: ArrayFile) -> None:
        self.path = path
        self._file = file

    def fail(self, text: str) -> RecordingError:
        return RecordingError(f"{self.path} is not a recording of version {VERSION}: {text}")

    def magic(self) -> None:
        """Raise unless the file has the magic string and this version."""
        if "magic" not in self._file.names or self.text("magic") != MAGIC:
            raise RecordingError(
                f"{self.path} has the arrays {sorted(self._file.names)[:20]}, and no magic string"
                f" {MAGIC!r}; expected a file written by recorder.dump()"
            )
        version = self.integer("version")
        if version != VERSION:
            raise RecordingError(
                f"{self.path} is a recording of version {version}; expected version {VERSION}."
                " Read it with the ultraep_comm that wrote it"
            )

    def has(self, name: str) -> bool:
        return name in self._file.names

    def shape(self, name: str, dtype: np.dtype[Any], shape: Sequence[int | None]) -> list[int]:
        """Check an array's dtype and shape (None: any length) and return the shape, unread."""
        if name not in self._file.names:
            raise self.fail(f"it has no array {name!r}")
        found, lengths = self._file.header(name)
        same = len(lengths) == len(shape) and all(
            b is None or a == b for a, b in zip(lengths, shape, strict=True)
        )
        if found != dtype or not same:
            wanted = ["any" if length is None else length for length in shape]
            raise self.fail(
                f"{name} has dtype {found} and shape {lengths}; expected {dtype}, {wanted}"
            )
        return list(lengths)

    def array(self, name: str, dtype: np.dtype[Any], shape: Sequence[int | None]) -> NDArray[Any]:
        """Return an array of this dtype and shape; None: any length."""
        self.shape(name, dtype, shape)
        return self._file.read(name)

    def integer(self, name: str) -> int:
        return int(self.array(name, np.dtype(np.int64), ()))

    def text(self, name: str) -> str:
        if name not in self._file.names:
            raise self.fail(f"it has no array {name!r}")
        dtype, shape = self._file.header(name)
        if dtype.kind != "U" or shape != () or dtype.itemsize > 4 * MAX_TEXT:
            raise self.fail(
                f"{name} has dtype {dtype} and shape {shape}; expected a string of at most"
                f" {MAX_TEXT} characters"
            )
        return str(self._file.read(name))

    def within(self, name: str, array: NDArray[Any], low: int, high: int) -> None:
        """Raise unless all values are in ``[low, high)``."""
        if array.size and not (low <= array.min() and array.max() < high):
            raise self.fail(
                f"{name} has values from {array.min()} to {array.max()}; expected [{low}, {high})"
            )


def _read(check: _Checker, loads: bool) -> Recording:
    check.magic()
    i32 = np.dtype(np.int32)
    home, domain = check.array("home", i32, [None]), check.array("domain", i32, [None])
    num_ranks, num_experts = len(domain), len(home)
    calls = check.array("calls", CALL, [None])
    slot_expert = check.array("slot_expert", i32, [len(calls), num_ranks, None])
    moves = slot_expert >= 0
    if check.has("moves"):
        moves = check.array("moves", np.dtype(np.bool_), slot_expert.shape)
    rows = check.shape("load", i32, [None, num_ranks, num_experts])[0]
    if rows not in (0, len(calls)):
        raise check.fail(f"load has {rows} rows; expected {len(calls)}, or none")
    if loads:
        load = check.array("load", i32, [rows, num_ranks, num_experts])
    else:
        load = np.empty((0, num_ranks, num_experts), np.int32)
    recording = Recording(
        source=str(check.path),
        run=check.text("run"),
        rank=check.integer("rank"),
        machine=check.text("machine"),
        epoch_ns=check.integer("epoch_ns"),
        num_calls=check.integer("num_calls"),
        failed_epoch=check.integer("failed_epoch"),
        home=home,
        domain=domain,
        calls=calls,
        slot_expert=slot_expert,
        moves=moves,
        slot_quota=check.array("slot_quota", i32, slot_expert.shape),
        home_quota=check.array("home_quota", i32, [len(calls), num_experts]),
        load=load,
    )
    _check_values(check, recording)
    return recording


def _check_values(check: _Checker, recording: Recording) -> None:
    r, calls = recording, recording.calls
    top, ever = 2**31, 1 << 62  # nanoseconds: 146 years
    check.within("rank", np.array(r.rank), 0, r.num_ranks)
    check.within("epoch_ns", np.array(r.epoch_ns), -ever, ever)
    check.within("failed_epoch", np.array(r.failed_epoch), 0, ever)
    check.within("home", r.home, 0, r.num_ranks)
    check.within("domain", r.domain, 0, r.num_ranks)
    check.within("slot_expert", r.slot_expert, -1, r.num_experts)
    for name in ("slot_quota", "home_quota", "load"):
        check.within(name, getattr(r, name), 0, top)
    check.within("calls['operation']", calls["operation"], 0, len(OPERATIONS))
    check.within("calls['mode']", calls["mode"], -1, len(MODES))
    check.within("calls['known']", calls["known"], 0, 1 << len(Known))
    check.within("calls['epoch']", calls["epoch"], 1, ever)
    check.within("calls['layer']", calls["layer"], -1, top)
    check.within("calls['microbatch']", calls["microbatch"], -1, 1 << 32)
    check.within("calls['begin_ns']", calls["begin_ns"], 0, ever)
    check.within("calls['end_ns']", calls["end_ns"], -1, ever)
    check.within("calls['expert_bytes']", calls["expert_bytes"], 0, 1 << 48)
    if r.num_calls < len(calls):
        raise check.fail(f"num_calls is {r.num_calls}; expected at least {len(calls)}")
    if (np.diff(calls["epoch"]) <= 0).any():
        raise check.fail("calls['epoch'] does not grow from call to call")
    ended = calls["end_ns"] != -1
    if (calls["end_ns"] < calls["begin_ns"])[ended].any():
        raise check.fail("calls['end_ns'] has a call that ends before it begins")
    if (r.slot_quota[r.slot_expert < 0] != 0).any():
        raise check.fail("slot_quota has tokens for an empty slot")
    if r.moves[r.slot_expert < 0].any():
        raise check.fail("moves has an empty slot")
    unknown = (calls["known"] & Known.PLACEMENT) == 0
    if (r.slot_expert[unknown] >= 0).any() or (calls["known"][unknown] != 0).any():
        raise check.fail("slot_expert has replicas in a call whose plan is not known")


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


_CHUNK = 1 << 24
_TEXT = 200  # characters
# Errors of the standard library and NumPy for damaged zip files and array headers.
_DAMAGE = (
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    OSError,  # an invalid bz2 stream, or an offset before the start of the file
    RuntimeError,  # a zip file marked as encrypted, or with an unknown compression
    TypeError,
    ValueError,
    struct.error,
    tokenize.TokenError,
    zipfile.BadZipFile,
    zlib.error,
)


class ArrayFileError(UltraEPError, ValueError):
    """A file has no readable plain arrays. The text does not name the file."""


@dataclass(frozen=True, kw_only=True)
class _Header:
    """An array's header, checked against the size of its data."""

    shape: tuple[int, ...]
    fortran_order: bool
    dtype: np.dtype[Any]


class ArrayFile:
    """An open ``.npz`` file. A context manager.

    Attributes:
        names: of all members, without ``.npy``.
    """

    def __init__(self, path: Path) -> None:
        """Open a file.

        Raises:
            ArrayFileError: not an ``.npz`` file, or larger than half of the memory when unpacked.
            OSError: the file cannot be read.
        """
        self._file: BinaryIO = path.open("rb")
        try:
            # zipfile would read a device such as /dev/zero until memory is full.
            if not stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
                raise ArrayFileError("it is not a regular file; expected an .npz file")
            if self._file.read(6) == b"\x93NUMPY":
                raise ArrayFileError("it is a single array; expected an .npz file")
            self._zip = zipfile.ZipFile(self._file)
            members = self._zip.infolist()
            total, most = sum(info.file_size for info in members), physical_bytes() // 2
            if total > most:
                raise ArrayFileError(
                    f"its arrays take {total} bytes; expected at most {most}, half of this"
                    " machine's memory"
                )
        except ArrayFileError:
            self._file.close()
            raise
        except _DAMAGE as error:
            self._file.close()
            raise ArrayFileError(f"it is not an .npz file: {_brief(error)}") from error
        self.names = [info.filename.removesuffix(".npy") for info in members]

    def header(self, name: str) -> tuple[np.dtype[Any], tuple[int, ...]]:
        """Return the dtype and shape of an array without reading it.

        Raises:
            ArrayFileError: it is damaged, not a plain array, or its size differs from its header.
        """
        try:
            with self._zip.open(f"{name}.npy") as member:
                header = _read_header(member, self._zip.getinfo(f"{name}.npy").file_size)
        except _DAMAGE as error:
            raise _unreadable(name, error) from error
        return header.dtype, header.shape

    def read(self, name: str) -> NDArray[Any]:
        """Return an array.

        Raises:
            ArrayFileError: as :meth:`header`.
        """
        try:
            with self._zip.open(f"{name}.npy") as opened:
                member: Any = opened  # its type lacks readinto
                header = _read_header(member, self._zip.getinfo(f"{name}.npy").file_size)
                flat = np.empty(math.prod(header.shape), header.dtype)
                # Reading the last byte checks the member's checksum.
                data = flat.view(np.uint8).data if flat.nbytes else memoryview(b"")
                at = 0
                while at < len(data):
                    count = member.readinto(data[at : at + _CHUNK])
                    if not count:
                        raise EOFError("it ends too early")
                    at += count
            return flat.reshape(header.shape, order="F" if header.fortran_order else "C")
        except _DAMAGE as error:
            raise _unreadable(name, error) from error

    def __enter__(self) -> ArrayFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._zip.close()
        self._file.close()


def physical_bytes() -> int:
    """Return the machine's memory in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _unreadable(name: str, error: Exception) -> ArrayFileError:
    if isinstance(error, ArrayFileError):
        return ArrayFileError(f"{name!r} {error}")
    return ArrayFileError(f"{name!r} is damaged: {_brief(error)}")


def _brief(error: Exception) -> str:
    """Return an error's text, truncated, as it may quote a file's bytes."""
    text = str(error)
    return text if len(text) <= _TEXT else f"{text[:_TEXT]}..."


def _read_header(member: Any, num_bytes: int) -> _Header:
    version = np.lib.format.read_magic(member)
    if version not in ((1, 0), (2, 0)):
        raise ArrayFileError(f"has a header of version {version}; expected 1.0 or 2.0")
    read = np.lib.format.read_array_header_1_0
    if version == (2, 0):
        read = np.lib.format.read_array_header_2_0
    shape, fortran_order, dtype = read(member)
    if dtype.hasobject or dtype.subdtype is not None:
        raise ArrayFileError(
            f"has dtype {dtype}; expected plain values, no Python objects and no arrays"
        )
    expected, found = math.prod(shape) * dtype.itemsize, num_bytes - member.tell()
    if any(length < 0 for length in shape) or expected != found:
        raise ArrayFileError(
            f"has {found} bytes; expected {expected} by its header, {dtype} {list(shape)}"
        )
    return _Header(shape=shape, fortran_order=fortran_order, dtype=dtype)
