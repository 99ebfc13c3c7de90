"""Which cubin fits a device, and what a cubin says about itself."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import ultraep_comm as uec
from ultraep_comm import _core
from ultraep_comm.engines.cuda.kernels import (
    INFO_MAGIC,
    CubinInfo,
    check_info,
    cubin_folder,
    find_cubin,
    read_info,
)
from ultraep_comm.errors import UnsupportedError

INFO = CubinInfo(
    path=Path("x.cubin"),
    version=_core.CUDA_KERNELS_VERSION,
    cuda_major=13,
    cuda_minor=0,
    nvshmem=(3, 4),
    arch=90,
    layout_hash=_core.CUDA_LAYOUT_HASH,
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty files with the names of cubins."""
    for name in ("sm_90", "sm_100", "sm_103", "sm_120", "sm_90.old"):
        (tmp_path / f"ultraep_comm-{name}.cubin").touch()
    monkeypatch.setenv("ULTRAEP_CUBINS", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    "compute_capability, arch",
    [((9, 0), 90), ((10, 0), 100), ((10, 1), 100), ((10, 3), 103), ((12, 1), 120)],
)
def test_the_highest_of_the_same_major_version_is_taken(
    folder: Path, compute_capability: tuple[int, int], arch: int
) -> None:
    assert find_cubin(compute_capability) == folder / f"ultraep_comm-sm_{arch}.cubin"


@pytest.mark.parametrize("compute_capability", [(8, 0), (11, 0), (13, 0)])
def test_no_cubin_for_a_device_says_which_there_are(
    folder: Path, compute_capability: tuple[int, int]
) -> None:
    with pytest.raises(UnsupportedError, match=r"sm_90, sm_100, sm_103, sm_120;.*ARCHS") as error:
        find_cubin(compute_capability)
    assert str(folder) in str(error.value)


def test_an_installation_without_cubins_says_how_to_build_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ULTRAEP_CUBINS", str(tmp_path / "nowhere"))
    with pytest.raises(UnsupportedError, match="none; build them with ULTRAEP_CUDA=ON"):
        find_cubin((9, 0))


def test_cubins_lie_beside_the_compiled_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ULTRAEP_CUBINS", raising=False)
    assert cubin_folder() == Path(_core.__file__).parent / "cubins"


def test_a_cubin_that_fits_passes() -> None:
    for nvshmem in (None, (3, 4), (3, 8)):
        check_info(INFO, cuda_major=13, nvshmem=nvshmem)


@pytest.mark.parametrize(
    "cubin, cuda_major, nvshmem, message",
    [
        ({}, 12, None, r"built with CUDA 13\.0, but this installation has CUDA 12; .*cuda13"),
        ({"layout_hash": 64}, 13, None, r"of layout 0x40, but .* passes 0x\w+: .*differ; build"),
        ({}, 13, (3, 3), r"built with NVSHMEM 3\.4, but the library here is 3\.3"),
        ({}, 13, (4, 0), r"expected 3\.4 or a later 3\.x"),
        (
            {"version": 211},
            13,
            None,
            rf"built for ultraep_comm 0\.2\.11, .* is {uec.__version__}: ",
        ),
    ],
)
def test_a_cubin_that_does_not_fit_is_refused(
    cubin: dict[str, Any], cuda_major: int, nvshmem: tuple[int, int] | None, message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message) as error:
        check_info(replace(INFO, **cubin), cuda_major=cuda_major, nvshmem=nvshmem)
    assert "x.cubin" in str(error.value)


def test_info_is_what_follows_the_mark(tmp_path: Path) -> None:
    made = tmp_path / "made.cubin"
    data = b"head" + struct.pack("<8i", INFO_MAGIC, 100, 12, 8, 3, 5, 90, 40)
    made.write_bytes(data + b"tail")
    assert read_info(made) == CubinInfo(
        path=made,
        version=100,
        cuda_major=12,
        cuda_minor=8,
        nvshmem=(3, 5),
        arch=90,
        layout_hash=40,
    )
    for num_bytes, text in ((0, "is not a"), (7, "is not a"), (20, "is cut"), (35, "is cut")):
        made.write_bytes(data[:num_bytes])
        with pytest.raises(UnsupportedError, match=f"made.cubin {text}.*; build them"):
            read_info(made)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("arch", [90, 100])
def test_built_cubins_say_what_they_are(cubins: Path, arch: int) -> None:
    path = cubins / f"ultraep_comm-sm_{arch}.cubin"
    assert path.read_bytes().count(struct.pack("<i", INFO_MAGIC)) == 1
    info = read_info(path)
    assert info.arch == arch
    assert info.version == _core.CUDA_KERNELS_VERSION
    assert info.cuda_major >= 12
    assert info.nvshmem >= (3, 4)
    check_info(info, cuda_major=info.cuda_major, nvshmem=info.nvshmem)
