"""The device kernels as files: which cubin fits a device, and whether it fits this installation.

A cubin is named ``ultraep_comm-sm_90.cubin`` and says in its symbol ``ultraep_cubin_info`` what it
was built with. Reading that needs no GPU, no driver and no NVSHMEM.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ultraep_comm import env
from ultraep_comm.errors import UnsupportedError

INFO_SYMBOL = "ultraep_cubin_info"
INFO_MAGIC = 0x55455031
# Magic, CUDA major and minor, NVSHMEM major and minor, architecture, number of layout entries.
INFO_HEADER = struct.Struct("<7i")

BUILD_HINT = (
    "build them with ULTRAEP_CUDA=ON pip install, for other devices with"
    ' -C cmake.define.ULTRAEP_CUDA_ARCHS="90;100"; docs/building.md, "CUDA", says what it needs'
)


@dataclass(frozen=True, kw_only=True)
class CubinInfo:
    """What a cubin was built with.

    Attributes:
        path: the file.
        cuda_major: major version of the CUDA tool chain.
        cuda_minor: its minor version.
        nvshmem: (major, minor) of NVSHMEM's device library.
        arch: compute capability without the dot, as in sm_90.
        layout: sizes and offsets, in bytes, of the structs that kernels take as arguments.
    """

    path: Path
    cuda_major: int
    cuda_minor: int
    nvshmem: tuple[int, int]
    arch: int
    layout: tuple[int, ...]


def cubin_folder() -> Path:
    """Folder of the cubins: ``ULTRAEP_CUBINS``, else beside the compiled module.

    In an editable installation that is not where the Python sources are.
    """
    from ultraep_comm import _core

    return env.cubins() or Path(_core.__file__).parent / "cubins"


def find_cubin(compute_capability: tuple[int, int]) -> Path:
    """Return the cubin for a device.

    Args:
        compute_capability: of the device, for example (9, 0). A cubin runs on devices of its own
            major version, from its own minor version on; the highest that fits is taken.

    Raises:
        UnsupportedError: there is none for this device; says which there are.
    """
    folder = cubin_folder()
    cubins = {}
    for path in folder.glob("ultraep_comm-sm_*.cubin"):
        named = re.fullmatch(r"ultraep_comm-sm_(\d+)\.cubin", path.name)
        if named is not None:
            cubins[int(named[1])] = path
    major, minor = compute_capability
    fitting = [arch for arch in cubins if arch // 10 == major and arch % 10 <= minor]
    if fitting:
        return cubins[max(fitting)]
    found = ", ".join(f"sm_{arch}" for arch in sorted(cubins)) or "none"
    raise UnsupportedError(
        f"no device kernels for compute capability {major}.{minor} in {folder}, which has {found};"
        f" {BUILD_HINT}"
    )


def read_info(path: Path) -> CubinInfo:
    """Read what a cubin was built with.

    Raises:
        UnsupportedError: the file is no cubin of this library, or pyelftools is missing.
    """
    try:
        from elftools.common.exceptions import ELFError
        from elftools.elf.elffile import ELFFile
        from elftools.elf.sections import SymbolTableSection
    except ImportError:
        raise UnsupportedError(
            "reading device kernels needs pyelftools; install the extra cuda12 or cuda13,"
            " as in pip install 'ultraep_comm[cuda13]'"
        ) from None

    wrong = f"{path} is not a cubin of ultraep_comm"
    try:
        with path.open("rb") as file:
            elf = ELFFile(file)
            table = elf.get_section_by_name(".symtab")
            symbols = (
                table.get_symbol_by_name(INFO_SYMBOL)
                if isinstance(table, SymbolTableSection)
                else None
            )
            if not symbols:
                raise UnsupportedError(f"{wrong}: it has no {INFO_SYMBOL}; {BUILD_HINT}")
            begin, size = symbols[0]["st_value"], symbols[0]["st_size"]
            data = elf.get_section(symbols[0]["st_shndx"]).data()[begin : begin + size]
    except ELFError as error:
        raise UnsupportedError(f"{wrong}: {error}; {BUILD_HINT}") from error
    if len(data) < INFO_HEADER.size:
        raise UnsupportedError(f"{wrong}: {INFO_SYMBOL} has {len(data)} bytes; {BUILD_HINT}")
    header = INFO_HEADER.unpack_from(data)
    magic, cuda_major, cuda_minor, nvshmem_major, nvshmem_minor, arch, num_layout = header
    expected_bytes = INFO_HEADER.size + 4 * num_layout
    if magic != INFO_MAGIC or len(data) != expected_bytes:
        raise UnsupportedError(
            f"{wrong} of this version: {INFO_SYMBOL} begins with {magic:#x} and has {len(data)}"
            f" bytes, expected {INFO_MAGIC:#x} and {expected_bytes} bytes; {BUILD_HINT}"
        )
    return CubinInfo(
        path=path,
        cuda_major=cuda_major,
        cuda_minor=cuda_minor,
        nvshmem=(nvshmem_major, nvshmem_minor),
        arch=arch,
        layout=struct.unpack_from(f"<{num_layout}i", data, INFO_HEADER.size),
    )


def check_info(
    info: CubinInfo,
    *,
    cuda_major: int,
    layout: Sequence[int],
    nvshmem: tuple[int, int] | None = None,
) -> None:
    """Check that a cubin fits what it is about to be loaded with.

    Args:
        info: of the cubin.
        cuda_major: CUDA major version of the installed bindings and NVSHMEM.
        layout: sizes and offsets, in bytes, of the argument structs as the caller fills them in.
        nvshmem: (major, minor) of NVSHMEM's host library; None: the cubin is used without NVSHMEM.

    Raises:
        UnsupportedError: one of them does not fit; names both sides and what to install or build.
    """
    if info.cuda_major != cuda_major:
        raise UnsupportedError(
            f"{info.path} was built with CUDA {info.cuda_major}.{info.cuda_minor}, this"
            f" installation has CUDA {cuda_major}; install the extra cuda{info.cuda_major}, or"
            f" build the kernels with CUDA {cuda_major} (docs/building.md)"
        )
    if tuple(layout) != info.layout:
        raise UnsupportedError(
            f"{info.path} takes arguments laid out as {info.layout}, this version of ultraep_comm"
            f" passes {tuple(layout)}: the two are of different versions; {BUILD_HINT}"
        )
    if nvshmem is not None and (nvshmem[0] != info.nvshmem[0] or nvshmem < info.nvshmem):
        has, needs = (f"{version[0]}.{version[1]}" for version in (nvshmem, info.nvshmem))
        raise UnsupportedError(
            f"{info.path} was built with NVSHMEM {needs}, the library here is {has}; expected"
            f" {needs} or a later {info.nvshmem[0]}.x: install nvidia-nvshmem-cu{info.cuda_major}"
        )
