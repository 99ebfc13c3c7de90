"""Inputs from the bytes of a fuzzer: valid files and command lines, with mistakes in them."""

from __future__ import annotations

import copy
import io
import json
import zipfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ultraep_comm.calibration import MAX_FIGURE, MeasuredCosts, device_name, make_calibration
from ultraep_comm.recording.file import CALL, MAGIC, VERSION

Item = TypeVar("Item")
RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"


class Bytes:
    """Choices that bytes make; after the last byte all of them are the first."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def draw(self, low: int, high: int) -> int:
        """Return an integer from ``low`` to ``high``, of as many bytes as that takes."""
        count = ((high - low).bit_length() + 7) // 8
        taken = self._data[self._at : self._at + count]
        self._at += count
        return low + int.from_bytes(taken, "big") % (high - low + 1)

    def pick(self, items: Sequence[Item]) -> Item:
        return items[self.draw(0, len(items) - 1)]

    def flag(self) -> bool:
        return self.draw(0, 1) == 1

    def rest(self) -> bytes:
        taken, self._at = self._data[self._at :], len(self._data)
        return taken


# ---- damage -------------------------------------------------------------------------------------


def damage(data: bytes, b: Bytes) -> bytes:
    """Cut a file off, change bytes of it, or put some in."""
    changed = bytearray(data)
    for _ in range(b.draw(0, 3)):
        at = b.draw(0, max(len(changed) - 1, 0))
        match b.draw(0, 3):
            case 0:
                del changed[at:]
            case 1:
                changed[at : at + 1] = bytes([b.draw(0, 255)])
            case 2:
                changed[at:at] = b.pick([b"\xff\xfe", b"\x00", b"[" * 100_000, b"PK\x05\x06", b"{"])
            case _:
                del changed[at : at + b.draw(0, 40)]
    return bytes(changed)


# ---- JSON ---------------------------------------------------------------------------------------

_VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 3, 0.0, -0.5, 1.5, 1e-300, 1e308, 10**30, 2**63, 2**31),
    *(10**400, -(10**400), float("nan"), float("inf"), float("-inf")),
    *("", "x", "links", "replicate", "\ud800", "\x00", "a\nb", "x" * 300, "1e5", "\u202e"),
    *(
        [],
        {},
        [[]],
        {"": 0},
        [None],
        [0, 1],
        [1.5, "x"],
        {"a": {"b": []}},
        [[[[[]]]]],
        "$x_{",
        "$$",
    ),
]


def _places(node: Any) -> list[tuple[Any, Any]]:
    """Return every place of a document: a container, and an index or key."""
    found: list[tuple[Any, Any]] = []
    keys = list(node) if isinstance(node, dict) else range(len(node))
    for key in keys:
        found.append((node, key))
        if isinstance(node[key], dict | list):
            found += _places(node[key])
    return found


def json_file(document: Any, b: Bytes) -> bytes:
    """Return a document's file, with other values, without some, and with damaged bytes."""
    document = copy.deepcopy(document)
    for _ in range(b.draw(0, 4)):
        places = _places(document) if isinstance(document, dict | list) else []
        if not places:
            break
        container, key = places[b.draw(0, len(places) - 1)]
        match b.draw(0, 3):
            case 0:
                del container[key]
            case 1 if isinstance(container, list):
                container.append(container[key])
            case _:
                container[key] = copy.deepcopy(b.pick(_VALUES))
    return damage(json.dumps(document).encode(), b)


def calibration_document() -> dict[str, Any]:
    costs = {
        name: MeasuredCosts(
            device=str(device_name("host")) if name == "host" else "some GPU",
            ranks=2,
            store_gbps=10.0,
            load_gbps=5.5,
            flag_us=0.1,
            hop_us=1.0,
            parallel=2,
            call_us=MAX_FIGURE,
        )
        for name in ("host", "cuda")
    }
    return make_calibration(costs)


@cache
def result_documents() -> list[dict[str, Any]]:
    """Return short documents of the benchmark, of all kinds that are shown or drawn."""
    names = ("replicate_4ranks_16M", "replicate_sweep_4ranks", "links_4ranks")
    found = []
    for name in (*names, "model_links", "model_fan_out"):
        document = json.loads((RESULTS / f"{name}.json").read_text())
        if name.startswith("model"):
            document["records"] = document["records"][:3]
        for bulky in ("machine", "topology", "commit"):
            document.pop(bulky, None)
        found.append(document)
    return found


# ---- arrays -------------------------------------------------------------------------------------


def recording_arrays() -> dict[str, Any]:
    """Return the arrays of a recording of two calls, of two ranks with three experts."""
    calls = np.zeros(2, CALL)
    calls["operation"], calls["epoch"], calls["known"] = 2, [1, 2], 7
    calls["end_ns"], calls["expert_bytes"] = 5, 64
    calls["layer"], calls["microbatch"] = -1, -1
    i32 = np.int32
    return {
        "magic": np.array(MAGIC),
        "version": np.array(VERSION),
        "run": np.array("run"),
        "rank": np.array(0),
        "machine": np.array("machine"),
        "epoch_ns": np.array(0),
        "num_calls": np.array(2),
        "failed_epoch": np.array(0),
        "home": np.array([0, 0, 1], i32),
        "domain": np.zeros(2, i32),
        "calls": calls,
        "slot_expert": np.array([[[-1], [0]], [[2], [1]]], i32),
        "slot_quota": np.array([[[0], [3]], [[2], [1]]], i32),
        "home_quota": np.array([[3, 2, 1], [1, 1, 1]], i32),
        "load": np.array([[[6, 1, 1], [0, 1, 0]], [[1, 1, 1], [0, 1, 2]]], i32),
        "moves": np.array([[[False], [True]], [[True], [True]]]),
    }


def trace_arrays(b: Bytes) -> dict[str, Any]:
    """Return the arrays of a trace of either kind: two steps of two layers of two ranks."""
    if b.flag():
        return {"counts_src": np.arange(2 * 2 * 2 * 4, dtype=np.int64).reshape(2, 2, 2, 4)}
    ids = np.arange(8 * 2 * 2, dtype=np.int32).reshape(8, 2, 2) % 5 - 1
    return {"topk": ids, **({"n_experts": np.array(4)} if b.flag() else {})}


_DTYPES = [
    *("<i4", "<i8", ">i4", "<u8", "|u1", "|b1", "<f8", "<c16", "<U3", "<U200", "|S2", "<M8[ns]"),
    *("|O", "|V0", "<U0", "(2,3)<i4", "<i4,<i4", "i4,(2,)u1", "|V7"),
]
_LENGTHS = [0, 1, 2, 3, 4, 8, 2**31, 10**12, 2**62, 2**64, 10**30, -1]
_NUMBERS = [0, 1, -1, -2, 2, 3, 4, 127, 2**31 - 1, -(2**31), 2**31, 2**62, -(2**63), 2**63 - 1]


def _write_array(header: str, payload: bytes, b: Bytes) -> bytes:
    version = b.pick([1, 1, 1, 1, 2, 2, 3, 0, 9])
    length = len(header) + b.pick([0, 0, 0, 0, 1, -1, 60_000])
    size = 2 if version < 2 else 4
    said = max(0, length).to_bytes(size, "little")
    return b"\x93NUMPY" + bytes([version, 0]) + said + header.encode() + payload


def _change_array(array: Any, b: Bytes) -> Any:
    """Return an array, another one in its place, or the bytes of a file of its kind."""
    array = np.array(array)
    match b.draw(0, 6):
        case 0:
            dtype = b.pick(["i1", "i4", "i8", "u8", ">i4", "f8", "U3"])
            return array.astype(dtype) if array.dtype.kind in "iu" else array
        case 1:
            changed = np.expand_dims(array, b.draw(0, array.ndim))
            return changed if b.flag() else np.asfortranarray(changed)
        case 2:
            return array[: b.draw(0, 2)] if array.ndim else np.repeat(array, b.draw(0, 3))
        case 3 if array.dtype.kind in "iu" and array.size:
            value = b.pick(_NUMBERS)
            wide = array.astype(np.uint64 if value >= 0 and b.flag() else np.int64)
            wide.flat[b.draw(0, array.size - 1)] = value
            return wide.astype(array.dtype) if b.flag() else wide
        case 4 if array.dtype.names and array.size:
            array[b.pick(array.dtype.names)][b.draw(0, array.size - 1)] = b.pick(
                [n for n in _NUMBERS if -(2**31) <= n < 2**31]
            )
            return array
        case 5:
            shape = tuple(b.pick(_LENGTHS) for _ in range(b.draw(0, 5)))
            payload = array.tobytes() if b.flag() else b"\xff" * b.draw(0, 64)
            descr = b.pick(_DTYPES)
            order = b.pick(["False", "True", "3"])
            said = f"{{'descr': {descr!r}, 'fortran_order': {order}, 'shape': {shape!r}, }}\n"
            said = b.pick([said, said, said, said[:-3], "(" * 3000, said.replace("'", '"')])
            return _write_array(said, payload, b)
        case _:
            text = b.pick([b"", b"x", "\U0001f600".encode("utf-32-le"), b"\xff\xff\xff\x7f" * 3])
            return _write_array(
                f"{{'descr': '<U{len(text) // 4}', 'fortran_order': False, 'shape': (), }}\n",
                text,
                b,
            )


def npz_file(arrays: dict[str, Any], b: Bytes) -> bytes:
    """Return a file of arrays: some changed, missing or there twice, and damaged bytes."""
    members: list[tuple[str, Any]] = list(arrays.items())
    for _ in range(b.draw(0, 3)):
        at = b.draw(0, len(members) - 1)
        name, array = members[at]
        match b.draw(0, 5):
            case 0 if len(members) > 1:
                del members[at]
            case 1:
                members.append((name, array))
            case 2:
                members[at] = (name, np.array([object], object))
            case _ if not isinstance(array, bytes):
                members[at] = (name, _change_array(array, b))
    packed = b.pick([zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED, zipfile.ZIP_BZIP2])
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", packed) as out:
        written: set[str] = set()
        for name, array in members:
            content = array
            if not isinstance(array, bytes):
                one = io.BytesIO()
                np.save(one, array, allow_pickle=True)
                content = one.getvalue()
            info = zipfile.ZipInfo(f"{name}.npy", (1980, 1, 1, 0, 0, 0))
            info.compress_type = packed
            if info.filename not in written:  # the library warns of names that are there twice
                out.writestr(info, content)
            written.add(info.filename)
    return damage(file.getvalue(), b)


# ---- command lines ------------------------------------------------------------------------------

NUMBERS = [
    *(
        "0",
        "1",
        "2",
        "3",
        "4",
        "8",
        "-1",
        "+2",
        "007",
        "1.5",
        "1e30",
        "1e400",
        "nan",
        "inf",
        "-inf",
    ),
    *("", " ", "x", "9" * 30, "9" * 5000, "2147483648", "4294967296", "18446744073709551616"),
    *("\u0663", "\u00b2", "1_000", "0x10", "1,2", "2,2", ",", "1,,2", "4,8,16", "1e-5"),
]
SIZES = [
    *("64K", "1M", "4096", "16", "1", "0", "3G", "262144G", "262145G", "1KiB", "5x", "K", "KK"),
    *("w=64K", "w13=2K,w2=1K", "a=1,a=2", "=5", "a=", "\udcff=4", "a=-1", "99999999", *NUMBERS),
]
PLAN_SIZES = ["8/32/1", "2/4/1,4/8/1", "1/1/1", "2/4/9", "4/4", "a/b/c", "0/1/1", "", "/", *NUMBERS]
WORDS = [
    *("host", "cuda", "auto", "shm", "loopback", "torch", "nvshmem", "push", "pull", "direct"),
    *("all", "float32", "bfloat16", "min", "median", "nvl72", "hgx8", "trace", "zipf1.0", "p50"),
    *("p50,max", "max,max", "lognormal", "zipf0.6,adversarial", *NUMBERS),
]


def command_line(
    b: Bytes, commands: dict[str, dict[str, Sequence[str]]], positional: Sequence[str]
) -> list[str]:
    """Return arguments of one of some commands: options with fitting and other values."""
    command = b.pick([*commands, *commands, "", "other", "--help"])
    options = commands.get(command, {})
    arguments = [command]
    names = list(options)
    everything = [value for values in options.values() for value in values]
    for _ in range(b.pick([0, 1, 1, 1, 2, 2, 3, 6])):
        if not names or b.draw(0, 9) == 9:
            arguments.append(b.pick(positional))
            continue
        name = b.pick(names)
        arguments.append(name)
        values = options[name] if b.draw(0, 7) else everything
        if values:
            arguments.append(b.pick(values))
    return arguments
